"""--evaluate-every: the losses of held-out sequences are those of the model alone, training does not change, and runs
are compared sequence by sequence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import ttest_rel

from binade.cli import main
from binade.collector.datasets.loading import open_dataset
from binade.collector.datasets.samples import SampleStream
from binade.collector.models.model import GPTModel
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import plan
from binade.data.difference import difference
from binade.data.held_out import read_held_out
from binade.data.runs import RunInfo, list_runs
from binade.data.verify import verify
from tests.collector.forked import run_forked
from tests.collector.test_resume import SMALL, run

pytestmark = pytest.mark.slow
EVALUATED = ("--evaluate-every", "2", "--evaluate-sequences", "5")
RECIPES = ("bf16", "te_delayed", "nvidia_nvfp4(without=keep)")  # the last one rounds stochastically


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
    planned = plan(RunConfig(layers=1, micro_batch_size=1, sequence_length=32, train_iters=4))
    dataset = open_dataset(planned.config.dataset, planned.config.tokenizer_name, planned.shape.vocab)
    stream = SampleStream(dataset.documents, 32, planned.config.seed)
    read = [stream.batch(1) for _ in range(10)]
    model = GPTModel(planned.shape)
    model.initialize(planned.config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    tokens, labels = read[0]
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        own = [float(F.cross_entropy(model(x).flatten(0, 1), y.flatten())) for x, y in read[5:]]
    assert found[0].losses == pytest.approx(own, rel=1e-5)


def test_a_killed_run_has_the_same_evaluations(root: Path, tmp_path: Path):
    line = (*SMALL, *EVALUATED, "--no-raw", "--quantization", RECIPES[1])
    assert run(tmp_path, *line, kill="after a checkpoint") < 0
    (killed,) = runs_of(tmp_path)
    assert run(tmp_path, "--resume", killed.run_id) == 0
    assert read_held_out(killed.directory) == read_held_out(runs_of(root)[1].directory)
    lines = (killed.directory / "held_out.jsonl").read_text().splitlines()
    assert len(lines) == 3 and not verify(tmp_path, (), print).damaged


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
    assert "Recipes: gap to bf16 on held-out sequences" in shown and "4 iterations (160 tokens" in shown


def test_what_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert run_forked(tmp_path, *SMALL, *EVALUATED, "--find-nan") == 2
    assert "--evaluate-every and --find-nan cannot be combined" in capfd.readouterr().err
