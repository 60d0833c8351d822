"""--evaluate-every: the losses of held-out sequences are those of the model alone, training does not change, and runs
are compared sequence by sequence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import ttest_rel
from torch import Tensor

from binade.cli import main
from binade.collector.datasets.loading import Dataset, open_dataset
from binade.collector.errors import ConfigError
from binade.collector.models.model import GPTModel
from binade.collector.training.config import RunConfig
from binade.collector.training.held_out import hold_out, open_batches
from binade.collector.training.loop import open_stream
from binade.collector.training.plan import Plan, plan
from binade.data.compare.difference import difference
from binade.data.run.directory import RunInfo, list_runs
from binade.data.run.evaluations import read_held_out
from binade.data.run.experiment import read_results
from binade.data.run.verify import verify
from tests.collector.forked import run_forked
from tests.collector.test_resume import SMALL, run

pytestmark = pytest.mark.slow
EVALUATED = ("--evaluate-every", "2", "--evaluate-sequences", "5")
RECIPES = ("bf16", "te_delayed", "nvidia_nvfp4(without=keep)")  # the last one rounds stochastically


def opened(**options: Any) -> tuple[Plan, Dataset]:
    """A run with small batches that is evaluated, and its data."""
    given: dict[str, Any] = {"layers": 1, "micro_batch_size": 1, "train_iters": 4, "evaluate_every": 2}
    planned = plan(RunConfig(**given | options))
    return planned, open_dataset(planned.config.dataset, planned.config.tokenizer_name, planned.shape.vocab)


def as_bytes(ids: Tensor) -> bytes:
    return ids.numpy().astype("<i2").tobytes()


def runs_of(root: Path) -> list[RunInfo]:
    return list_runs(root)[0]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("evaluated")
    for recipe in RECIPES:
        assert run_forked(where, *SMALL, *EVALUATED, "--no-raw", "--quantization", recipe) == 0
    return where


@pytest.mark.parametrize("number", range(1, 3), ids=RECIPES[1:])
def test_training_does_not_change(root: Path, tmp_path: Path, number: int):
    assert run_forked(tmp_path, *SMALL, "--no-raw", "--quantization", RECIPES[number]) == 0
    (plain,), evaluated = runs_of(tmp_path), runs_of(root)[number]
    assert not read_held_out(plain.directory)
    found = difference(plain, evaluated)
    assert found.rows and found.first(None) is None and not (found.only_a or found.only_b)
    assert plain.status.loss_last == evaluated.status.loss_last


def test_the_losses_are_those_of_the_model_alone(root: Path):
    bf16 = runs_of(root)[0]
    found = read_held_out(bf16.directory)
    assert list(found) == [0, 2, 4]
    assert [each.tokens for each in found.values()] == [32, 96, 160]  # one iteration of warm-up
    assert len({each.data_sha256 for each in found.values()}) == 1
    planned, dataset = opened(sequence_length=32, evaluate_sequences=5)
    held = hold_out(planned, dataset)
    tokens, labels = open_stream(planned, held.rest(dataset)).batch(1)
    evaluated = held.batches(planned.config, 5, torch.device("cpu"))
    model = GPTModel(planned.shape)
    model.initialize(planned.config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        own = [float(F.cross_entropy(model(x).flatten(0, 1), y.flatten())) for x, y in evaluated]
    assert found[0].losses == pytest.approx(own, rel=1e-5)


def test_no_epoch_has_the_documents_that_are_held_out():
    """Checked in the text: every piece of 24 tokens that is evaluated is in none of three epochs of the training."""
    planned, dataset = opened(sequence_length=64, evaluate_sequences=40)
    held = hold_out(planned, dataset)
    batches = held.batches(planned.config, 40, torch.device("cpu"))
    evaluated = torch.cat([tokens.flatten() for tokens, _ in batches])
    assert len(evaluated) == 40 * 64
    stream, trained, read = open_stream(planned, held.rest(dataset)), b"", 0
    while stream.epoch < 3:
        trained += as_bytes(stream.batch(8)[0])
        read += 1
    pieces = [as_bytes(evaluated[start : start + 24]) for start in range(0, len(evaluated) - 24, 24)]
    assert read > 100 and not any(piece in trained for piece in pieces)
    without, every = opened(evaluate_every=0)[0], b""
    stream = open_stream(without, dataset)
    while not stream.epoch:
        every += as_bytes(stream.batch(8)[0])
    assert sum(piece not in every for piece in pieces) <= len(held.documents)  # those across two documents
    other = opened(sequence_length=64, evaluate_sequences=40, seed=7)[0]
    assert hold_out(other, dataset).documents == held.documents  # of each seed


def test_no_sequence_is_evaluated_twice():
    """`binade measure` takes the sequences after those that a run read, and says so if the data end before."""
    planned, dataset = opened(evaluate_every=0, sequence_length=256)
    cpu = torch.device("cpu")
    batches = open_batches(planned, dataset, 100, 60, cpu)
    rows = {tuple(row.tolist()) for tokens, _ in batches for row in tokens}
    assert len(rows) == 60
    stream = open_stream(planned, dataset)
    assert not rows & {tuple(row.tolist()) for row in torch.cat([stream.batch(1)[0] for _ in range(100)])}
    for skip, sequences in ((0, 200), (100, 90), (10_000, 1)):
        with pytest.raises(ConfigError, match=f"wikipedia has fewer than {sequences} sequences of 256 tokens"):
            open_batches(planned, dataset, skip, sequences, cpu)


def test_what_a_run_holds_out_is_measured(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """`binade measure RUN` evaluates the same sequences, on the weights of the last checkpoint."""
    shutil.copytree(root / runs_of(root)[0].run_id, tmp_path / "run")
    (bf16,) = runs_of(tmp_path)
    line = ("measure", "run", "--formats", "mxfp8", "--by", "part", "--tensor-save-dir", str(tmp_path))
    assert main([*line, "--sequences", "6"]) == 2
    assert "a run holds out 160 tokens, but 6 sequences of 32 have 192: evaluate at most 5" in capfd.readouterr().err
    assert main([*line, "--sequences", "5"]) == 0
    assert "5 sequences of 32 tokens that the run holds out" in capfd.readouterr().out
    (measured,) = (tmp_path / name for name in os.listdir(tmp_path) if "measure" in name)
    planned, dataset = opened(sequence_length=32, evaluate_sequences=5)
    model = GPTModel(planned.shape)
    saved = torch.load(bf16.directory / "checkpoints" / "00000004" / "rank00.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    with torch.no_grad():
        batches = hold_out(planned, dataset).batches(planned.config, 5, torch.device("cpu"))
        own = [float(F.cross_entropy(model(x).flatten(0, 1), y.flatten())) for x, y in batches]
    assert [loss for each in read_results(measured) if each.key.base is None for loss in each.losses] == pytest.approx(
        own, rel=1e-6
    )


def test_a_killed_run_has_the_same_evaluations(root: Path, tmp_path: Path):
    line = (*SMALL, *EVALUATED, "--no-raw", "--quantization", RECIPES[1])
    assert run(tmp_path, *line, kill="after a checkpoint") < 0
    (killed,) = runs_of(tmp_path)
    assert run(tmp_path, "--resume", killed.run_id) == 0
    assert read_held_out(killed.directory) == read_held_out(runs_of(root)[1].directory)
    assert [each.iteration for each in read_results(killed.directory) if each.key.base] == [0, 2, 4]
    assert not verify(tmp_path, (), print).damaged


def test_they_are_compared_sequence_by_sequence(root: Path, capsys: pytest.CaptureFixture[str]):
    bf16, delayed, _ = (read_held_out(each.directory)[4].losses for each in runs_of(root))
    expected = ttest_rel(delayed, bf16).confidence_interval(0.95)
    assert main(["compare", str(root), "--format", "csv"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    (row,) = [dict(zip(header.split(","), each.split(","), strict=False)) for each in rows if "te_delayed" in each]
    assert float(row["held_out_low"]) == pytest.approx(expected.low)
    assert float(row["held_out_high"]) == pytest.approx(expected.high)
    assert main(["compare", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "of one seed, which another seed may change" in " ".join(shown.split())
    assert "Recipes: gap to bf16 on held-out sequences" in shown and "4 iterations (160 tokens" in shown


def test_what_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert run_forked(tmp_path, *SMALL, *EVALUATED, "--find-nan") == 2
    assert "--evaluate-every and --find-nan cannot be combined" in capfd.readouterr().err
    documents = ({"text": text} for text in ("one", "two", "three " * 99))
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, documents)))
    assert run_forked(tmp_path, *SMALL, *EVALUATED, "--dataset", str(tmp_path / "few.jsonl")) == 2
    assert "has 3 documents, and more than half of them would be held out" in capfd.readouterr().err
    assert not runs_of(tmp_path)
