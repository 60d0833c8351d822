"""Real runs: the smallest useful one, what its log says, and that training under each format learns."""

from __future__ import annotations

import math
from datetime import datetime
from pathlib import Path

import pytest
import torch

from binade.cli import main
from binade.data.index.catalog import Catalog
from binade.data.run.directory import RunInfo, list_runs
from binade.data.run.losses import read_losses
from binade.data.words.filter import Filter
from tests.collector.forked import forked
from tests.conftest import RECIPES, MadeOnce, run_collector

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory):
    """(root, what the command printed) of `quick mxfp8` with Triton's kernels, of one layer and 32 tokens."""
    root = tmp_path_factory.mktemp("quick")
    options = ("--layers", "1", "--sequence-length", "32", "--backend", "triton")
    done = run_collector("quick", "mxfp8", *options, root=root)
    assert done.returncode == 0, done.stderr
    return root, done


class TestQuick:
    def test_every_file_loads_as_anyone_would(self, quick):
        files = list(quick[0].glob("*/tensors/mxfp8/*.pt"))
        assert len(files) == 35 == len(list(quick[0].rglob("*.pt")))
        for file in files:
            content = torch.load(file, weights_only=True, mmap=True)
            assert set(content) == {"tensor", "tensor_info", "metadata"}
            x = content["tensor"]
            assert x.is_contiguous() and x.device.type == "cpu" and bool(x.isfinite().all())
            assert x.untyped_storage().nbytes() == x.numel() * x.element_size()

    def test_the_catalog_returns_its_rows(self, quick):
        with Catalog.open(quick[0]) as catalog:
            rows = catalog.tensors(Filter(quant_type=["mxfp8"]))
            assert len(rows) == 35 and set(rows["recipe"]) == {"mxfp8"}
            assert catalog.tensors(Filter(quant_type=["bf16"])).empty

    def test_the_log_says_that_the_kernels_ran(self, quick):
        root, done = quick
        ((run,), _) = list_runs(root)
        log = (run.directory / "log.txt").read_text()
        (line,) = [line for line in log.splitlines() if " kernels: " in line]
        launches = int(line.split(" kernels: ")[1].removesuffix(" launches"))
        # 4 linears and 2 attention products, 6 operands each
        assert launches == 6 * 6
        assert line[9:] in done.stdout and run.config["backend"] in line
        assert run.config["backend"].startswith("triton ") and run.status.state == "done"

    def test_a_summary_is_printed(self, quick):
        ((run,), _) = list_runs(quick[0])
        last = quick[1].stdout.splitlines()[-1]
        assert last.startswith(f"{run.run_id}: loss ") and "35 tensors" in last
        assert all("no C++ compiler was found" in line for line in quick[1].stderr.splitlines())


def test_losses_say_how_long_a_step_took_and_what_was_recorded(collect):
    run = collect("--warmup-iterations", "1", "--control-iter", "2", "--capture-every", "2", "--no-raw")
    records = read_losses(run.directory)
    assert [(r["iteration"], r["recorded"]) for r in records] == [(-1, False), (0, True), (1, False), (2, True)]
    ends = [datetime.fromisoformat(run.config["started"]).timestamp(), *(r["time"] for r in records)]
    for record, before, after in zip(records, ends, ends[1:], strict=False):
        assert 0 < record["seconds"] <= after - before + 0.001
    with Catalog.open(run.directory.parent) as catalog:
        captured = catalog.tensors().groupby("iteration")["captured"].agg(["min", "max"])
    assert list(captured.index) == [0, 2]
    for iteration, row in captured.iterrows():  # the captures of an iteration lie within its step
        assert records[1 + iteration]["seconds"] >= (row["max"] - row["min"]).total_seconds()
    unrecorded = collect("--no-save-tensors")
    assert [r["recorded"] for r in read_losses(unrecorded.directory)] == [False]


@pytest.mark.thorough
def test_triton_and_torch_train_alike(quick, tmp_path):
    """The same command with the default backend: torch on a CPU, named in run.json and the log, and the same losses to
    the last bit. It never imports torch's compiler."""
    arguments = ("quick", "mxfp8", "--layers", "1", "--sequence-length", "32", "--no-raw")
    done = run_collector(*arguments, root=tmp_path, env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0, done.stderr
    losses = [[r["loss"] for r in read_losses(list_runs(root)[0][0].directory)] for root in (quick[0], tmp_path)]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    assert "quantized by torch" in done.stdout
    assert list_runs(tmp_path)[0][0].config["backend"] == "torch"
    assert "torch.optim" in done.stderr and "torch._dynamo" not in done.stderr


@pytest.fixture(scope="module")
def trained(made_once: MadeOnce) -> dict[str, RunInfo]:
    """A run of 20 iterations by recipe."""
    line = (
        "batch", "--quantization", ",".join(RECIPES), "--backend", "torch", "--training-config", "fast",
        "--sequence-length", "32", "--train-iters", "20", "--no-raw", "--tensors", "query", "--scores", "",
        "--tensor-save-dir",
    )  # fmt: skip

    def make(root: Path) -> None:
        assert forked(lambda: main((*line, str(root))), {}) == [0]

    root = made_once("trained by recipe", make)
    return {run.config["recipe"]: run for run in list_runs(root)[0]}


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_fall(trained, recipe):
    run = trained[recipe]
    losses = [record["loss"] for record in read_losses(run.directory)]
    assert len(losses) == 20 and abs(losses[0] - math.log(384)) < 0.5  # it starts by guessing
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5
    assert sum(losses[-5:]) / 5 < math.log(256) * 0.75
    assert (run.status.loss_first, run.status.loss_last) == (losses[0], losses[-1])


def test_the_collected_root_is_whole(collected):
    runs, refused = list_runs(collected)
    assert refused == [] and sorted(run.config["recipe"] for run in runs) == sorted(RECIPES)
    first = {read_losses(run.directory)[0]["loss"] for run in runs}
    assert len(first) == 1  # the same weights, the same data
    for run in runs:
        assert run.status.state == "done" and run.status.tensors == 140 and run.status.iteration == 1
        assert len(list(run.directory.rglob("*.pt"))) == 140
