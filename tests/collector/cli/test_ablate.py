"""binade ablate: what it queues, what it prints instead, and what it refuses."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from binade.collector import jobs
from binade.collector.cli.options import parse
from binade.collector.jobs import queue
from tests.collector.cli.test_cli import one_line
from tests.collector.test_jobs import SMALL, end_all

LADDER = ["bf16", "te_nvfp4(without=dgrad+wgrad)", "te_nvfp4(without=wgrad)", "te_nvfp4"]
LADDER += [f"te_nvfp4(without={name})" for name in ("rounding", "rotation", "tiles")]
WRONG = {
    "no recipe": (),
    "two recipes": ("mxfp8", "mxfp4"),
    "an unknown recipe": ("mxfp9",),
    "no such file": ("nowhere/own.toml",),
    "nothing to turn off": ("FA_mxfp8",),
    "bf16": ("bf16",),
    "an unknown ingredient": ("te_nvfp4(without=salt)",),
    "an ingredient that it has not": ("te_nvfp4(without=keep)",),
    "an impossible spec": ("linear_mxfp8(block=7q)",),
    "seeds that are no numbers": ("mxfp8", "--seeds", "x"),
    "a list with no number": ("mxfp8", "--seeds", "1,x"),
    "no seeds": ("mxfp8", "--seeds", "0"),
    "an empty list": ("mxfp8", "--seeds", ","),
    "more seeds than anybody runs": ("mxfp8", "--seeds", "1234567"),
    "another recipe": ("mxfp8", "--quantization", "mxfp4"),
    "a format in place of the recipe's": ("mxfp8", "--linear-quant", "mxfp4"),
    "layers that the model has not": ("mxfp8", "--layers", "99"),
    "nodes of no cluster": ("mxfp8", "--nodes", "2"),
}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "runs"
    end_all(tmp_path / "runs")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line_and_exit_2(command, capsys, tmp_path, name):
    assert command("ablate", *WRONG[name]) == 2
    out, err = capsys.readouterr()
    assert one_line(err) and out == "" and list(tmp_path.iterdir()) == []


SEEDS = {
    "": [1234],
    "--seeds 2": [1234, 1235],
    "--seeds 2 --seed 7": [7, 8],
    "--seeds 9,5,9": [9, 5],
    "--seeds 5,": [5],
}


@pytest.mark.parametrize(("given", "seeds"), SEEDS.items(), ids=SEEDS)
def test_dry_run_prints_the_ladder_and_the_runs_of_each_seed(command, capsys, tmp_path, given, seeds):
    options = ("--layers", "1", "--skip-layers", "core", "--train-iters", "5", *given.split())
    assert command("ablate", "te_nvfp4", *options, "--dry-run") == 0
    out, err = capsys.readouterr()
    first, *lines = out.splitlines()
    assert err == "" and first.endswith(f": {7 * len(seeds)} runs") and list(tmp_path.iterdir()) == []
    assert [line.split("  ")[-1].strip() for line in lines[:7]] == LADDER
    runs = [run for line in lines[7:] for run in parse(shlex.split(line)[1:]).runs]
    assert [(run.seed, run.recipe) for run in runs] == [(seed, recipe) for seed in seeds for recipe in LADDER]
    assert {(run.layers, run.skip_layers) for run in runs} == {(1, "core")}


def test_what_keeps_the_rungs_from_differing_is_told(command, capsys):
    longer = ("--train-iters", "2", "--dry-run")
    assert command("ablate", "nvidia_nvfp4", "--layers", "1", *longer) == 2
    out, err = capsys.readouterr()
    assert one_line(err) and "keeps last in bf16, which is every layer" in err and not out
    for arguments in (("nvidia_nvfp4(without=keep)", "--layers", "1"), ("nvidia_nvfp4",)):
        assert command("ablate", *arguments, *longer) == 0
        assert capsys.readouterr().err == ""
    assert command("ablate", "te_nvfp4", "--dry-run") == 0
    err = capsys.readouterr().err
    assert one_line(err) and "one iteration" in err and "--train-iters" in err


@pytest.mark.slow
def test_the_runs_are_queued_seed_by_seed_with_a_tag(command, capsys, root):
    assert command("ablate", "te_nvfp4", *SMALL, "--seeds", "2") == 0
    out = capsys.readouterr().out
    queued = queue.read_jobs(root)
    assert [(job.config.seed, job.config.recipe) for job in queued] == [(s, r) for s in (1234, 1235) for r in LADDER]
    assert {job.tags for job in queued} == {("ablation te_nvfp4",)}
    assert queued[4].title == "te_nvfp4 · without rounding · seed 1234"
    assert out.splitlines() == [f"job {job.id} queued: {job.title}" for job in queued]
    one, *others = (job.config.arguments()[3:] for job in queued[:7])
    assert all(other == one for other in others) and "--layers" in one
    for job in reversed(queued):
        jobs.cancel(root, job.id)
