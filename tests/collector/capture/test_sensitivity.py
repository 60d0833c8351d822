"""Second-order terms from sampled labels: their expectation is the exact Fisher information, computed with torch.func;
the pass changes nothing of the training; and predictions do not depend on how the loss is scaled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from binade.collector import Recorder, TrainerCallback, instrument
from binade.collector.capture.sensitivity import Sequences, sampled_gradient
from binade.data.catalog import Catalog
from binade.quant import fake_quantize
from tests.collector.small_model import batch, build

PLACE = ("layer_index", "module", "tensor_name")
SEQUENCES, LENGTH, VOCAB, HIDDEN = 3, 5, 7, 32


class Tiny(nn.Module):
    """A causal model of linear layers: each token sees the mean of those up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.mix, self.up = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        seen = self.mix(x).cumsum(1) / torch.arange(1, tokens.shape[1] + 1, dtype=x.dtype)[:, None]
        return self.lm_head(F.gelu(self.up(seen)))


def tiny() -> tuple[Tiny, Tensor]:
    torch.manual_seed(3)
    model = Tiny()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model, torch.randint(VOCAB, (SEQUENCES, LENGTH))


def changes(root: Path, fmt: str = "mxfp4", by: tuple[str, ...] = PLACE) -> pd.DataFrame:
    with Catalog.open(root) as catalog:
        return catalog.loss_changes(fmt, by)


def exact_fisher(model: Tiny, tokens: Tensor, values: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean over tokens of E[(∂ log p / ∂ values)²], in float64; `compute` gives logits from the values."""
    log_p = compute(values.double()).log_softmax(-1).flatten(0, 1)
    rows = jacrev(lambda x: compute(x).log_softmax(-1).flatten(0, 1))(values.double())
    p = log_p.exp().reshape(*log_p.shape, *[1] * values.dim())
    return (p * rows.square()).sum((0, 1)) / len(log_p)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_expectation_is_the_exact_fisher_information(tmp_path):
    model, tokens = tiny()
    options = {"scores": ("mxfp4",), "max_bytes": 0, "tensors": ("input", "weight")}
    with Recorder(tmp_path, **options) as recorder, instrument(model, "bf16", recorder):
        for draw in range(200):
            with recorder.at(0, draw):
                logits = model(tokens)
                recorder.sensitivity(logits)
                F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    found = changes(tmp_path)
    double = Tiny().double()
    double.load_state_dict(model.state_dict())
    with torch.no_grad():
        x = double.mix(double.embedding(tokens)).cumsum(1) / torch.arange(1, LENGTH + 1)[:, None]

    def after(inputs: Tensor) -> Tensor:
        return double.lm_head(F.gelu(double.up(inputs)))

    def of_weight(name: str) -> Callable[[Tensor], Tensor]:
        return lambda weight: functional_call(double, {f"{name}.weight": weight}, (tokens,))

    operands = {
        ("up", "input"): (x, after),
        ("up", "weight"): (model.up.weight.detach(), of_weight("up")),
        ("mix", "weight"): (model.mix.weight.detach(), of_weight("mix")),
    }
    for (module, name), (values, compute) in operands.items():
        fisher = exact_fisher(double, tokens, values, compute)
        error = fake_quantize(values.float(), "mxfp4").double() - values.double()
        expected = (fisher * error.square()).sum().item() / 2
        rows = found[(found["module"] == module) & (found["tensor_name"] == name)]["second"]
        assert len(rows) == 200 and rows.sem() < 0.08 * expected
        assert abs(rows.mean() - expected) < 3 * rows.sem(), (module, name, rows.mean(), expected)


def test_labels_are_drawn_from_the_softmax_and_masked_tokens_get_none():
    logits = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).repeat(5000, 1)[None]
    valid = torch.arange(20000)[None] % 4 != 3
    gradient = sampled_gradient(logits, 1, valid)[0]
    drawn = logits[0].softmax(-1) - gradient * 15000**0.5
    assert torch.equal(gradient[3::4], torch.zeros(5000, 5)) and torch.equal(
        gradient, sampled_gradient(logits, 1, valid)[0]
    )
    for row in range(3):
        share, p = drawn[row::4].mean(0), logits[0, row].softmax(-1)
        assert ((share - p).abs() < 4 * (p * (1 - p) / 5000).sqrt()).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_a_micro_batch_is_split_by_sequence(axis):
    sequences = Sequences.of(torch.zeros(3, 7, 11).transpose(0, axis), axis)
    assert sequences == Sequences(3, 7)
    x = torch.randn(3, 7, 4)
    for given in (x, x.transpose(0, 1)):
        assert all(torch.equal(part, one) for part, one in zip(sequences.split(given), x, strict=True))
    heads = torch.randn(6, 7, 4)
    assert torch.equal(torch.stack(sequences.split(heads)), heads.view(3, 2, 7, 4))
    assert sequences.split(torch.zeros(21, 4)) is None and Sequences(3, 3).split(torch.zeros(3, 3, 4)) is None


def trained(root: Path | None, recipe: str, sensitivity: bool) -> tuple[list[Tensor], Tensor]:
    """(losses, gradients and weights of three steps; torch's random state) of a model under a recipe."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(5)
    results: list[Tensor] = []
    with Recorder(root, scores=("mxfp4",), enabled=root is not None) as recorder, instrument(model, recipe, recorder):
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                tokens, labels = batch()
                logits = model(tokens)
                if sensitivity:
                    recorder.sensitivity(logits)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
                (loss / 2).backward()
                results.append(loss.detach())
            results += [p.grad.clone() for p in model.parameters()]
            optimizer.step()
    return [*results, *(p.detach() for p in model.parameters())], torch.get_rng_state()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("recipe", ["linear_mxfp4(rounding=stochastic)", "mxfp8", "linear_fp8_e4m3(history=4)", "bf16"])
def test_the_pass_changes_no_bit_of_training_and_no_row(tmp_path, recipe):
    (alone, state), (one, _), (other, after) = (
        trained(None, recipe, False),
        trained(tmp_path / "without", recipe, False),
        trained(tmp_path / "with", recipe, True),
    )
    assert torch.equal(state, after)
    for a, b, c in zip(alone, one, other, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    tables = []
    for name in ("without", "with"):
        with Catalog.open(tmp_path / name) as catalog:
            tables.append(catalog.tensors().drop(columns=["tensor_id", "run_id", "captured", "path", "sha256"]))
    pd.testing.assert_frame_equal(*tables)


def accumulated(root: Path, steps: int, scale: float, **options: object) -> pd.DataFrame:
    """Predictions for the same micro-batch as one of so many whose mean loss, times a factor, is trained on."""
    model = build()
    with Recorder(root, scores=("mxfp4",), max_bytes=0, micro_batches=1, **options) as recorder:
        with instrument(model, "bf16", recorder):
            for _ in range(steps):
                tokens, labels = batch()
                logits = model(tokens)
                recorder.sensitivity(logits)
                (F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * scale / steps).backward()
            recorder.step()
    return changes(root).drop(columns=["run_id", "tensor_id"])


@pytest.mark.slow
def test_predictions_do_not_depend_on_accumulation_or_scaling(tmp_path):
    calls = []

    def asked() -> float:
        calls.append(1)
        return 1024.0 / 4

    one = accumulated(tmp_path / "one", 1, 1.0, loss_scale=1.0)
    others = {
        "two": accumulated(tmp_path / "two", 2, 1.0),
        "four": accumulated(tmp_path / "four", 4, 1024.0),
        "asked": accumulated(tmp_path / "asked", 4, 1024.0, loss_scale=asked),
    }
    assert len(calls) == 1
    for name, other in others.items():
        for column in ("first", "second", "first_error", "second_error", "error"):
            scale = one[column].abs().max()
            assert (other[column] - one[column]).abs().max() < 1e-5 * scale, (name, column)


def test_a_total_has_the_standard_error_of_the_sums_of_each_sequence(tmp_path):
    accumulated(tmp_path, 1, 1.0)
    each, total = changes(tmp_path), changes(tmp_path, by=())
    sums = torch.from_numpy(np.stack(each["by_sequence"])).sum(0)
    assert total["by_sequence"][0] == pytest.approx(sums.tolist(), rel=1e-6)
    assert total["error"][0] == pytest.approx(float(sums.std() / len(sums) ** 0.5), rel=1e-6)
    assert total["first"][0] + total["second"][0] == pytest.approx(float(sums.mean()), rel=1e-6)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "autocast"])
def test_predictions_of_a_trainer_do_not_depend_on_accumulation(tmp_path, bf16):
    from transformers import Trainer, TrainingArguments

    from tests.collector.capture.test_hugging_face import VOCAB, llama

    tokens = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in tokens] * 4
    found = {}
    for steps in (1, 2, 4):
        root = tmp_path / str(steps)
        options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": steps, "max_steps": 1}
        options |= {"save_strategy": "no", "report_to": [], "use_cpu": True, "bf16": bf16, "disable_tqdm": True}
        arguments = TrainingArguments(tmp_path / "trainer", train_sampling_strategy="sequential", **options)
        with Recorder(root, scores=("mxfp4",), max_bytes=0, micro_batches=1) as recorder:
            callback = TrainerCallback("bf16", recorder)
            Trainer(llama("sdpa"), arguments, train_dataset=data, callbacks=[callback]).train()
        found[steps] = changes(root)
    for steps in (2, 4):
        for column in ("first", "second"):
            one, other = found[1][column], found[steps][column]
            assert one.notna().all() and (other - one).abs().max() < (2e-2 if bf16 else 1e-4) * one.abs().max()
