"""The button of Recipes: what it queues, and where it says why it cannot."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from binade.app.questions.recipes.page import SEEDS
from binade.cli import main
from binade.collector import jobs
from binade.collector.cli.options import parse
from binade.collector.errors import ConfigError
from binade.collector.jobs import queue
from tests.app import roots
from tests.app.test_ladder import make_ladder
from tests.app.test_pages import Visit, rerun, words
from tests.collector.test_jobs import end_all
from tests.data.builder import make_run

pytestmark = pytest.mark.slow


def described(root: Path) -> dict[str, dict]:
    return {run.name: json.loads((run / "run.json").read_text()) for run in roots.runs_of(root)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("query", [{}, {"against": "mxfp4"}], ids=["loss", "compare"])
def test_a_click_queues_the_same_runs_with_further_seeds(visit: Visit, collected: Path, tmp_path: Path, query):
    root = roots.copy(collected, tmp_path / "runs")
    originals = [jobs.trained_with(run_id, config).config for run_id, config in described(root).items()]
    names = {str(config["recipe"]): run_id for run_id, config in described(root).items()}
    at = visit(root, "recipes", **{name: names[recipe] for name, recipe in query.items()})
    shown = next(code.value for code in at.code if "--tensor-save-dir" in code.value)
    expected = {replace(each, seed=each.seed + more) for each in originals for more in range(1, SEEDS)}
    if not query:  # no two bf16 runs differ in bits
        expected |= {replace(each, tp=2) for each in originals if each.recipe == "bf16"}
    assert {each for line in shown.splitlines() for each in parse(shlex.split(line)[1:]).runs} == expected
    try:
        at.button(key="repeat").click()
        rerun(at)
        assert len(at.success) == 1 and not at.error
        queued = [job.config for job in queue.read_jobs(root)]
        assert len(queued) == len(expected) and set(queued) == expected
        rerun(at)
        assert "The runs that are missing are queued." in words(at)
        assert not [button for button in at.button if button.key == "repeat"]
    finally:
        for job in reversed(queue.read_jobs(root)):
            jobs.cancel(root, job.id)
        end_all(root)


def test_where_runs_cannot_be_repeated_a_line_says_why(visit: Visit, tmp_path: Path):
    for recipe in ("bf16", "mxfp4"):
        operand = (torch.eye(32), {"format": "mxfp4", "recipe": recipe})
        run = make_run(tmp_path / "runs", *([[operand]] if recipe != "bf16" else []), recipe=recipe, seed=1)
        run.append_loss({"iteration": 0, "loss": 5.0, "time": 0.0})
    at = visit(tmp_path / "runs", "recipes")
    assert "There is no button that repeats these runs" in words(at) and "was not trained by binade run" in words(at)
    assert not [button for button in at.button if button.key == "repeat"]


def test_an_imported_run_leaves_the_button_for_the_others(visit: Visit, collected: Path, tmp_path: Path):
    root = roots.copy(collected, tmp_path / "runs")
    runs = described(root)
    like = next(run_id for run_id, config in runs.items() if config["recipe"] == "bf16")
    log = tmp_path / "megatron.csv"
    log.write_text("step,loss\n" + "".join(f"{step},{5 - step / 10}\n" for step in range(6)))
    assert main(["import", "--recipe=nvfp4", f"--like={like}", f"--tensor-save-dir={root}", str(log)]) == 0
    at = visit(root, "recipes")
    shown = next(code.value for code in at.code if "--tensor-save-dir" in code.value)
    queued = {each.recipe for line in shown.splitlines() for each in parse(shlex.split(line)[1:]).runs}
    assert queued == {config["recipe"] for config in runs.values()} and "no button" not in words(at)


@pytest.mark.thorough
def test_an_ablation_of_one_seed(visit: Visit, tmp_path: Path):
    make_ladder(tmp_path / "one", [0])
    assert "There is no button that repeats these runs" in words(visit(tmp_path / "one", "recipes", of="ladder"))
    make_ladder(tmp_path / "three", [0, 1, 2])
    assert "no button" not in words(visit(tmp_path / "three", "recipes", of="ladder"))


def test_changed_settings_are_not_repeated(collected: Path):
    """A recipe that means something else now, and options that this version does not have."""
    run_id, described_as = next(iter(described(collected).items()))
    config = described_as["run_config"]
    for changed, said in ((config | {"qk_quant": "mxfp4"}, "another meaning"), (config | {"layerz": 1}, "layerz")):
        with pytest.raises(ConfigError, match=said):
            jobs.trained_with(run_id, described_as | {"run_config": changed})
