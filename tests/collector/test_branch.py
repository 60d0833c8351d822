"""binade run --resume RUN --recipe A,B: branches of a checkpoint are bit-equal to runs that were not branched, leave
their run as it was, and are compared in pairs."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest

from binade.collector.cli.jobs import add_line
from binade.collector.cli.options import parse
from binade.collector.errors import ConfigError
from binade.collector.jobs.repeats import trained_with
from binade.data.compare.comparison import compare, with_one_seed
from binade.data.compare.difference import difference
from binade.data.compare.same_data import equal_weights
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import compared_with, losses_of, runs_with_references
from binade.data.run.directory import RunInfo, list_runs, read_run
from binade.data.run.losses import read_losses
from tests.collector.forked import run_forked

pytestmark = pytest.mark.slow
SMALL = (
    "--layers", "1", "--micro-batch-size", "1", "--sequence-length", "32", "--backend", "torch", "--scores", "",
    "--no-raw", "--control-iter", "0", "--tensors", "input,grad_output", "--checkpoint-every", "2",
)  # fmt: skip
STOCHASTIC = "nvidia_nvfp4(without=keep)"


def digest(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def runs_of(root: Path) -> list[RunInfo]:
    return list_runs(root)[0]


def losses(run: RunInfo, start: int = 0) -> list[tuple[int, float, str]]:
    return [
        (record["iteration"], record["loss"], record["data_sha256"])
        for record in read_losses(run.directory)
        if record["iteration"] >= start
    ]


@pytest.mark.parametrize("recipe", ["te_delayed", pytest.param(STOCHASTIC, marks=pytest.mark.thorough)])
def test_the_same_recipe_is_the_run_continued(tmp_path: Path, recipe: str):
    line = (*SMALL, "--quantization", recipe, "--train-iters", "4", "--warmup-iterations", "1")
    assert run_forked(tmp_path, *line) == 0
    (parent,) = runs_of(tmp_path)
    before = digest(parent.directory)
    assert run_forked(tmp_path, "--resume", parent.run_id, "--recipe", recipe) == 0
    assert digest(parent.directory) == before
    _, branch = runs_of(tmp_path)
    origin = {"run_id": parent.run_id, "iteration": 3, "recipes": [read_run(parent.directory).config["recipe"]]}
    assert branch.config["branch_of"] == origin
    assert losses(branch) == losses(parent, 3) and len(losses(branch)) == 1
    assert read_losses(branch.directory)[0]["first"]["data_sha256"] == read_losses(parent.directory)[0]["data_sha256"]
    found = difference(parent, branch)
    assert found.rows and found.first(None) is None and not found.only_b


@pytest.fixture(scope="module")
def branched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bf16 run of 4 iterations; two branches of its second checkpoint; and a branch of one of these."""
    root = tmp_path_factory.mktemp("branched")
    assert run_forked(root, *SMALL, "--train-iters", "4") == 0
    (parent,) = runs_of(root)
    line = ("--resume", parent.run_id, "--recipe", "bf16,mxfp4", "--train-iters", "6")
    assert run_forked(root, *line) == 0
    assert run_forked(root, "--resume", runs_of(root)[2].run_id, "--recipe", "hifp8", "--train-iters", "8") == 0
    return root


def test_branches_of_a_plain_run_equal_runs_with_a_warm_up(branched: Path, tmp_path: Path):
    line = (*SMALL, "--quantization", "mxfp4", "--warmup-iterations", "4", "--train-iters", "2")
    assert run_forked(tmp_path, *line) == 0
    (whole,) = runs_of(tmp_path)
    branch = runs_of(branched)[2]
    assert [(at - 4, loss, data) for at, loss, data in losses(branch)] == losses(whole)


def test_branches_are_compared_in_pairs(branched: Path):
    parent, plain, mxfp4, again = runs_of(branched)
    with Catalog.open(branched) as opened:
        table = runs_with_references(opened.runs(), opened.parts())
        found = losses_of(opened, table["run_id"])
    by_id = table.set_index("run_id")
    assert by_id.loc[mxfp4.run_id, "references"] == (plain.run_id, parent.run_id)
    assert by_id.loc[plain.run_id, "settings"] == by_id.loc[mxfp4.run_id, "settings"]
    assert by_id["settings"].nunique() == 3 and by_id["data"].nunique() == 3
    assert by_id["branched"].tolist() == [-math.inf, 4, 4, 6]
    assert by_id["label"].is_unique and "from iteration 4" in by_id.loc[plain.run_id, "label"]
    assert by_id.loc[again.run_id, "references"] == ()  # its weights are those of mxfp4
    compared = compare(table, found)
    (row,) = compared.costs.to_dict("records")
    own, other = ({at: loss for at, loss, _ in losses(run)} for run in (mxfp4, plain))
    first = own[4] - other[4]
    assert row["alone"] == pytest.approx(first, abs=1e-6) and row["measured"].iteration == 4
    assert row["last"] == own[5] - other[5] and row["iterations"] == 2 and row["added"] == row["last"] - first
    with Catalog.open(branched) as catalog:
        assert equal_weights(catalog, mxfp4.run_id, plain.run_id, 4, 4)
        assert not equal_weights(catalog, mxfp4.run_id, plain.run_id, 5, 4)
    assert with_one_seed(table) == []  # a branch is not repeated with other seeds
    against = compared_with(table, mxfp4.run_id)
    assert set(against.loc[against["quantized"], "run_id"]) == {parent.run_id, plain.run_id, again.run_id}


def test_branches_of_equal_runs_are_one_seed(tmp_path: Path):
    """The same run twice, and two branches of each: a repetition, from which no interval follows."""
    for _ in range(2):
        assert run_forked(tmp_path, *SMALL, "--train-iters", "2") == 0
        line = ("--resume", runs_of(tmp_path)[-1].run_id, "--recipe", "bf16,mxfp4", "--train-iters", "4")
        assert run_forked(tmp_path, *line) == 0
    with Catalog.open(tmp_path) as opened:
        table = runs_with_references(opened.runs(), opened.parts())
        (recipe,) = compare(table, losses_of(opened, table["run_id"])).recipes
    assert table["data"].nunique() == 3 and recipe.gap.n == 1
    assert recipe.runs == (runs_of(tmp_path)[-1].run_id,)


def test_what_cannot_be_branched(branched: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    parent, _, mxfp4, _ = runs_of(branched)

    def refused(*arguments: str) -> str:
        capfd.readouterr()
        assert run_forked(branched, "--resume", *arguments) == 2
        return capfd.readouterr().err.splitlines()[-1]

    count = len(runs_of(branched))
    assert "--seed is that of" in refused(parent.run_id, "--recipe", "mxfp4,mxfp8", "--seed", "3")
    assert "started with other options" in refused(parent.run_id, "--recipe", "mxfp4", "--seed", "3")
    assert "no document is held out" in refused(parent.run_id, "--recipe", "mxfp4,bf16", "--evaluate-every", "1")
    assert "unknown" in refused(parent.run_id, "--recipe", "mxfp9")
    with pytest.raises(ConfigError, match="takes no branches"):
        add_line(branched, ["run", "--resume", parent.run_id, "--recipe", "mxfp4"])
    with pytest.raises(ConfigError, match=f"branched off from {parent.run_id}"):
        trained_with(mxfp4.run_id, dict(mxfp4.config))
    assert len(runs_of(branched)) == count
    end = json.loads((branched / parent.run_id / "checkpoints" / "00000004" / "rank00.json").read_text())
    assert end["done"] == 4


def test_what_the_command_line_says(branched: Path, capfd: pytest.CaptureFixture[str]):
    parent = runs_of(branched)[0]
    assert run_forked(branched, "--resume", parent.run_id, "--recipe", "mxfp8", "--dry-run") == 0
    shown = capfd.readouterr().out
    assert f"branch of {parent.run_id} after 2 iterations; differs in --quantization mxfp8 (was bf16)" in shown
    line = ["run", "--resume", parent.run_id, "--recipe", "mxfp4", "--train-iters", "9"]
    (plan,) = parse(line).plans_in(branched)
    assert plan.branch is not None and plan.branch.done == 4
    assert plan.arguments == line
