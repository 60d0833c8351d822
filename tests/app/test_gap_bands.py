"""Runs › Recipes, its view Loss: the bands of bf16 runs with 0, 1, 2 and 5 seeds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from binade.app.figure import Drawn
from binade.app.view import View
from binade.cli import main
from binade.data.catalog import Catalog
from binade.data.runs import IMPORT, RUN_FILE, RunWriter, write_run_file
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
    """The rows of the bands in a chart, from its specification as JSON."""
    spec = json.loads(json.dumps(drawn.get(figure).spec))
    return [row for rows in spec["datasets"].values() for row in rows if "band" in row and "range" in row]


def seed_band(seeds: int) -> float:
    deviation = np.std([np.mean(losses(seed)) for seed in range(seeds)], ddof=1)
    return float(stats.t.ppf(0.975, seeds - 1) * math.sqrt(2) * deviation)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seeds", [0, 1, 2, 5])
def test_the_page_says_what_so_many_seeds_tell(seeds: int, tmp_path: Path, visit: Visit):
    text = words(visit(make(tmp_path, seeds), "runs", view="recipes", of="cost"))
    assert ("No bf16 run saw the same data" in text) == (seeds == 0)
    assert ("No seed baseline: record bf16 runs with two seeds." in text) == (seeds == 1)
    assert ("No reordering baseline" in text) == (seeds > 0)
    assert ("Band of seeds (95% interval " in text) == (seeds > 1)
    assert ("Published gaps of other models" in text) == (seeds > 0)
    if seeds > 1:
        half = seed_band(seeds)
        place = "inside" if half > 0.9 else "outside"
        assert f"−{half:.4f} to +{half:.4f}, {seeds} seeds): " in text
        assert f"linear_mxfp4 {place}" in text or f"linear_mxfp4 and linear_mxfp8 {place}" in text


def check_no_band(root: Path) -> None:
    """Neither the page nor `binade compare` has a band, both say why."""
    reason = "Imported losses and instrumented runs do not count, since they do not state all settings."
    for text in (" ".join((*draw(root).sentences, draw(root).verdict)), printed(root)):
        words = " ".join(text.split())
        assert "Band of " not in words and words.count(reason) == 2 and words.count("baseline: record") == 2


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


def test_the_charts_show_the_bands_of_scipy(tmp_path: Path):
    drawn = draw(make(tmp_path, 5, repeated=True))
    half = float(stats.t.ppf(0.975, 1) * REORDERED)  # sqrt(2) times the deviation of two runs is their difference
    rows = {(row["label"], row["band"]): row for row in shaded(drawn, "costs")}
    assert {recipe for recipe, band in rows if band == "reordering"} == set(GAPS)
    row = rows["linear_mxfp8", "reordering"]
    assert (row["low"], row["high"]) == pytest.approx((-half, half)) and row["n"] == "2 runs"
    assert row["range"] == f"−{half:.4f} to +{half:.4f} nats" and row["source"].startswith("own bf16 runs")
    by_iteration = [row for row in shaded(drawn, "gaps") if row["band"] == "reordering"]
    assert [row["iteration"] for row in by_iteration] == [0, 1, 2]
    assert [row["high"] for row in by_iteration] == pytest.approx([half] * 3)
    assert "linear_mxfp8 inside" in drawn.verdict and drawn.verdict.count("Band of ") == 2
    assert drawn.sentences == ()


def test_a_comparison_with_another_run_has_no_bands(tmp_path: Path):
    make(tmp_path, 2)
    with Catalog.open(tmp_path) as opened:
        run = opened.runs().query("recipe == 'linear_mxfp4'")["run_id"].iloc[0]
    drawn = draw(tmp_path, LOSS.changed(against=run))
    assert not shaded(drawn, "costs") and not shaded(drawn, "gaps") and list(drawn.tables) == ["recipes", "costs"]
    assert "Band" not in drawn.verdict


@pytest.mark.thorough
def test_binade_compare_prints_the_same_sentences(tmp_path: Path):
    drawn = draw(make(tmp_path, 5, repeated=True))
    text = printed(tmp_path)
    bands = drawn.verdict[drawn.verdict.index("Band of seeds") : drawn.verdict.index("Leaves bf16’s band")]
    assert all(f"* Band of {sentence.strip()}" in text for sentence in bands.split("Band of ")[1:])


def test_runs_without_tensors_and_recipes_of_state_alone_are_compared(tmp_path):
    """That they round is known from their configuration alone."""
    (state := tmp_path / "state.toml").write_text('[state]\nmaster_weight = "bf16"\n')
    options = "--train-iters 2 --sequence-length 16 --no-save-tensors --backend torch"
    for recipe in ("bf16", "mxfp4", state):
        assert main(f"run --quantization {recipe} {options} --tensor-save-dir {tmp_path}/runs".split()) == 0
    drawn = draw(tmp_path / "runs")
    assert not drawn.problems and "state" in drawn.verdict + str(drawn.tables) and "mxfp4" in str(drawn.tables)
    assert set(gaps_of(tmp_path / "runs")) == {"mxfp4", "state"}
