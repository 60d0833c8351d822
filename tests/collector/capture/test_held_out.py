"""Held-out evaluations in your own training: TrainerCallback and Recorder.evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector import Recorder, TrainerCallback, Watch, instrument
from binade.collector.capture.measure import RecorderError
from binade.collector.errors import ConfigError
from binade.data.run.directory import RunInfo, read_run
from binade.data.run.evaluations import read_held_out
from binade.data.run.losses import read_losses

pytestmark = pytest.mark.slow


def tokens(seed: int) -> Tensor:
    return torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))


HELD_OUT = [{"input_ids": tokens(100 + number)} for number in range(2)]


def losses_of(model: nn.Module) -> list[float]:
    """The loss of each held-out sequence, by torch and transformers alone."""
    model.eval()
    with torch.no_grad():
        rows = [row for batch in HELD_OUT for row in batch["input_ids"]]
        return [float(F.cross_entropy(model(input_ids=row[None]).logits[0, :-1], row[1:])) for row in rows]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, **sizes))


def trained(root: Path, recipe: str, **options: Any) -> tuple[RunInfo, nn.Module]:
    from transformers import Trainer, TrainingArguments

    model = llama()
    data = [{"input_ids": tokens(i)[0], "labels": tokens(i)[0]} for i in range(12)]
    arguments = TrainingArguments(
        str(root / "out"), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    with Recorder(root / "runs", iterations=1, scores=(), max_bytes=0) as recorder:
        callback = TrainerCallback(recipe, recorder, **options)
        Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    return read_run(recorder.writer.directory), model


def test_the_trainer_evaluates_each_sequence(tmp_path: Path):
    options = {"held_out": HELD_OUT, "evaluate_every": 2}
    run, model = trained(tmp_path, "bf16", **options)
    found = read_held_out(run.directory)
    assert list(found) == [0, 2, 3] and len({each.data_sha256 for each in found.values()}) == 1
    assert found[0].losses == pytest.approx(losses_of(llama()), rel=1e-5)
    assert found[3].losses == pytest.approx(losses_of(model), rel=1e-5)
    rounded, _ = trained(tmp_path, "mxfp8", **options)
    plain, _ = trained(tmp_path, "mxfp8")
    steps, other = read_losses(rounded.directory), read_losses(plain.directory)
    for name in ("iteration", "loss", "data_sha256", "weights_sha256"):
        assert [step[name] for step in steps] == [step[name] for step in other]
    assert rounded.status.tensors == plain.status.tensors
    same = llama()
    with Recorder(enabled=False) as recorder, instrument(same, "mxfp8", recorder):
        expected = losses_of(same)
    own = read_held_out(rounded.directory)[0]
    assert own.losses == pytest.approx(expected, rel=1e-5) and own.losses != found[0].losses
    assert own.data_sha256 == found[0].data_sha256


def test_what_is_refused(tmp_path: Path):
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch)

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    with pytest.raises(RecorderError, match="nothing is instrumented"):
        Recorder(tmp_path).evaluate(loss, [torch.ones(2, 16)])
    with Recorder(tmp_path, watch=Watch(find_nan=True)) as recorder, instrument(model, "mxfp8", recorder):
        with pytest.raises(RecorderError, match="find_nan"):
            recorder.evaluate(loss, [torch.ones(2, 16)])
    with Recorder(tmp_path) as recorder, instrument(model, "mxfp8", recorder):
        with pytest.raises(ConfigError, match="no held-out batches"):
            recorder.evaluate(loss, [])
        with pytest.raises(ConfigError, match="expected a tensor"):
            recorder.evaluate(lambda model, batch: model(batch)[None], [torch.ones(2, 16)])
        assert len(recorder.evaluate(loss, [torch.ones(2, 16)])) == 2
    assert list(read_held_out(recorder.writer.directory)) == [0]
    for options in ({"held_out": HELD_OUT}, {"evaluate_every": 2}):
        with pytest.raises(ConfigError, match="give both"):
            TrainerCallback("mxfp8", recorder, **options)
    with pytest.raises(ConfigError, match="kept by a Recorder"):
        TrainerCallback("mxfp8", held_out=HELD_OUT, evaluate_every=2)
