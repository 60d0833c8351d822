"""Runs › Recipes, its view Loss: the band of bf16 runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from binade.app.draw.figure import Drawn
from binade.app.view.view import View
from binade.cli import main
from binade.data.index.catalog import Catalog
from binade.data.run.directory import IMPORT, RUN_FILE, write_run_file
from binade.data.run.run_writer import RunWriter
from tests.app.planted import normal, operand
from tests.app.test_pages import Visit, words
from tests.compared import gaps_of, printed
from tests.data.builder import make_run

pytestmark = pytest.mark.slow
LOSS = View("runs", {"view": ["recipes"], "of": ["cost"]})
GAPS = {"linear_mxfp8": 0.004, "linear_mxfp4": 0.9}
REORDERED = 0.01  # by which the repetition of seed 0 differs in its mean


def losses(seed: int) -> list[float]:
    return [5.0 - at + 0.05 * math.sin(seed + 1) + 0.001 * at * math.cos(seed) for at in range(3)]


def train(root: Path, recipe: str, seed: int, more: float = 0.0, **config: Any) -> RunWriter:
    made = [] if recipe == "bf16" else [[operand(normal(1, 32, 64), recipe=recipe)]]
    run = make_run(root, *made, recipe=recipe, seed=seed, **config)
    for iteration, loss in enumerate(losses(seed)):
        run.append_loss({"iteration": iteration, "loss": loss + more, "time": 0.0, "data_sha256": "0"})
    return run


def make(root: Path, seeds: int, repeated: bool = False) -> Path:
    for seed in range(max(seeds, 1)):
        if seed < seeds:
            train(root, "bf16", seed)
        for recipe, gap in GAPS.items():
            train(root, recipe, seed, gap)
    if repeated:
        train(root, "bf16", 0, REORDERED)
    return root


def draw(root: Path, view: View = LOSS) -> Drawn:
    with Catalog.open(root) as opened:
        return view.draw(opened)


def shaded(drawn: Drawn, figure: str) -> list[dict]:
    """The rows of the band in a chart, from its specification as JSON."""
    spec = json.loads(json.dumps(drawn.get(figure).spec))
    return [row for rows in spec["datasets"].values() for row in rows if "low" in row and "iteration" in row]


UNKNOWN = "Whether a recipe leaves bf16 is unknown: no two of your bf16 runs"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seeds", [0, 1, 5])
def test_the_page_says_what_so_many_seeds_tell(seeds: int, tmp_path: Path, visit: Visit):
    text = words(visit(make(tmp_path, seeds), "runs", view="recipes", of="cost"))
    assert ("No bf16 run saw the same data" in text) == (seeds == 0)
    assert (UNKNOWN in text) == (seeds > 0)


def check_no_band(root: Path) -> None:
    """Neither the page nor `binade compare` has a band, both say why."""
    reason = "Imported losses and instrumented runs do not count, since they do not state all settings."
    for text in (" ".join((*draw(root).sentences, draw(root).verdict)), printed(root)):
        words = " ".join(text.split())
        assert "Leaves bf16: linear" not in words and words.count(reason) == 1 == words.count(UNKNOWN)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("imported", [True, False], ids=["imported", "instrumented"])
def test_runs_with_unknown_settings_make_no_band(imported: bool, tmp_path: Path):
    for recipe, seed, more in (("bf16", 0, 0.0), ("bf16", 0, 0.2), ("bf16", 1, 0.0), ("linear_mxfp8", 0, 0.1)):
        run = train(tmp_path, recipe, seed, more, **({"kind": IMPORT} if imported else {}))
        config = json.loads((run.directory / RUN_FILE).read_text())
        del config["learning_rate"], config["micro_batch_size"]
        write_run_file(run.directory, config)
    check_no_band(tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("other", [{"dp": 2}, {"data": {"corpus_sha256": "0"}}], ids=["dp", "corpus"])
def test_runs_of_one_seed_with_other_settings_make_no_band(other: dict[str, Any], tmp_path: Path):
    train(tmp_path, "bf16", 0)
    train(tmp_path, "bf16", 0, 0.2, **other)
    train(tmp_path, "bf16", 1, 0.1, **other)
    train(tmp_path, "linear_mxfp8", 0, 0.1)
    check_no_band(tmp_path)


def test_the_chart_shows_the_band_of_scipy(tmp_path: Path):
    drawn = draw(make(tmp_path, 5, repeated=True))
    # Of two recipes and five seeds; sqrt(2) times the deviation of two runs is their difference.
    half = float(stats.t.ppf(1 - 0.025 / 2, 1) * REORDERED / math.sqrt(5))
    rows = shaded(drawn, "gaps")
    assert [row["iteration"] for row in rows] == [0, 1, 2]
    assert [row["high"] for row in rows] == pytest.approx([half] * 3) == [-row["low"] for row in rows]
    assert "Leaves bf16: linear_mxfp4 at iteration 0." in drawn.verdict
    assert "in bits alone: linear_mxfp8." in drawn.verdict and drawn.sentences == ()


def test_a_comparison_with_another_run_has_no_band(tmp_path: Path):
    make(tmp_path, 2, repeated=True)
    with Catalog.open(tmp_path) as opened:
        run = opened.runs().query("recipe == 'linear_mxfp4'")["run_id"].iloc[0]
    drawn = draw(tmp_path, LOSS.changed(against=run))
    assert not shaded(drawn, "gaps") and list(drawn.tables) == ["recipes"] and "eaves bf16" not in drawn.verdict


@pytest.mark.thorough
def test_binade_compare_prints_the_same_sentences(tmp_path: Path):
    drawn = draw(make(tmp_path, 5, repeated=True))
    text = printed(tmp_path)
    assert "* Leaves bf16: linear_mxfp4 at iteration 0." in text and "Leaves bf16: linear_mxfp4" in drawn.verdict


def test_runs_without_tensors_and_recipes_of_state_alone_are_compared(tmp_path):
    """That they round is known from their configuration alone."""
    (state := tmp_path / "state.toml").write_text('[state]\nmaster_weight = "bf16"\n')
    options = "--train-iters 2 --sequence-length 16 --no-save-tensors --backend torch"
    for recipe in ("bf16", "mxfp4", state):
        assert main(f"run --quantization {recipe} {options} --tensor-save-dir {tmp_path}/runs".split()) == 0
    drawn = draw(tmp_path / "runs")
    assert not drawn.problems and "state" in drawn.verdict + str(drawn.tables) and "mxfp4" in str(drawn.tables)
    assert set(gaps_of(tmp_path / "runs")) == {"mxfp4", "state"}
