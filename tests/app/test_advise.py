"""Map › Advise and Runs › Predictions: what they draw, what they say of runs that trained, and what they queue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

from binade.app.figure import Drawn
from binade.app.questions.advise.question import ADVISE, devices
from binade.app.questions.predictions.question import PREDICTIONS
from binade.app.questions.question import Question
from binade.app.view import View
from binade.collector import jobs
from binade.collector.advice.advice import AdviceRequest, advise, placed
from binade.collector.advice.costs import OPERAND, costs
from binade.collector.jobs import store
from binade.collector.recipes.files import to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.training.targets import CONFIG
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.runs import RunNotes, change_notes
from tests.app import roots
from tests.app.test_pages import Visit, rerun, words
from tests.collector.test_jobs import end_all
from tests.data.builder import make_run

pytestmark = pytest.mark.slow
# The mean gap of each recipe over seeds, and its deviation.
GAPS = {
    "mine": (0.010, 0.001),
    "linear_nvfp4": (0.030, 0.001),
    "linear_hifp8": (0.02, 0.004),
    "linear_mxfp8": (0.004, 0.002),
}

NAMED = "the safe one, 8 bits"  # what a user calls the runs of linear_mxfp8


@pytest.fixture(scope="module")
def root(collected: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bf16 run that was collected, and runs of several seeds with the gaps of GAPS; mine is what is advised."""
    place = tmp_path_factory.mktemp("advised")
    (source,) = (
        run for run in roots.runs_of(collected) if json.loads((run / "run.json").read_text())["recipe"] == "bf16"
    )
    roots.copy_run(source, place / source.name)
    config = json.loads((source / "run.json").read_text())
    del config["run_id"]
    with Catalog.open(place) as catalog:
        mine = advise(costs(catalog, parts=("linear",)), AdviceRequest(6)).recipe("mine")
    made = {name: mine if name == "mine" else parse_recipe(name) for name in GAPS} | {"bf16": parse_recipe("bf16")}
    for seed in range(4):
        for name, recipe in made.items():
            mean, deviation = GAPS.get(name, (0.0, 0.0))
            gap = mean + deviation * (seed - 1.5)
            operand = {"quant_type": name, "format": "mxfp8", "recipe": name}
            tensors = [] if name == "bf16" else [[(torch.eye(32), operand)]]
            settings = config | {"recipe": name, "recipe_toml": to_toml(recipe), "seed": 70 + seed}
            run = make_run(place, *tensors, **settings)
            if name == "linear_mxfp8":
                change_notes(run.directory, RunNotes(NAMED, "#123456"), RunNotes())
            for iteration in range(2):
                run.append_loss({"iteration": iteration, "loss": 5.0 - iteration + gap * (1.5 if iteration else 0.5)})
    return place


@pytest.fixture
def opened(root: Path) -> Iterator[Catalog]:
    with Catalog.open(root) as catalog:
        yield catalog


def draw(question: Question, catalog: Catalog, where: Filter | None = None, budget: str = "6") -> Drawn:
    texts = {"view": [question.view]} | (
        {"budget": [budget], "by": ["site"], "parts": ["linear"]} if question is ADVISE else {}
    )
    return View(question.page, texts).filtered(where or Filter()).draw(catalog)


def test_what_trained_is_compared_with_what_was_predicted(opened):
    drawn = draw(PREDICTIONS, opened)
    table = drawn.tables["predictions"].set_index("recipe")
    assert set(table.index) == set(GAPS) and drawn.problems == ()
    assert table["name"].to_dict() == {name: name for name in GAPS} | {"linear_mxfp8": NAMED}
    found = costs(opened)
    for name, (mean, deviation) in GAPS.items():
        gaps = mean + deviation * (np.arange(4) - 1.5)
        low, high = scipy.stats.t.interval(0.95, 3, mean, scipy.stats.sem(gaps))
        row = table.loc[name]
        assert [row["gap"], row["first"], row["low"], row["high"]] == pytest.approx(
            [mean, mean / 2, low, high], abs=1e-5
        )
        assert row["seeds"] == 4
        if name != "mine":
            assert row["predicted"] == pytest.approx(placed(parse_recipe(name), found)[1])
    rho = scipy.stats.spearmanr(table["predicted"], table["gap"]).statistic
    assert f"measured gap is {rho:.2f}".replace("-", "−") in drawn.verdict


def test_the_interval_of_a_rank_correlation_covers_it():
    """Of normal pairs, whose ρ of ranks is 6/π·asin(ρ/2), about 95% of the intervals hold it."""
    random, held = np.random.default_rng(0), 0
    true = 6 / np.pi * np.arcsin(0.7 / 2)
    for _ in range(400):
        a, b = random.multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], 30).T
        found = evidence.correlation(a, b, "pairs")
        held += found.low <= true <= found.high
    assert 0.92 < held / 400 < 0.98


@pytest.mark.thorough
def test_advice_is_drawn_and_judged_by_the_runs_that_tested_it(opened):
    drawn = draw(ADVISE, opened)
    frontier, operands = drawn.get("frontier").table, drawn.tables["operands"]
    assert {"advised", "uniform"} <= set(frontier["kind"]) and drawn.problems == ()
    assert operands["width"].max() <= 16 and not operands["backward"].iloc[0]
    assert "Mean gap to bf16 in training: mine +0.0100 nats (95% interval " in drawn.verdict
    assert "; linear_nvfp4 +0.0300 nats (" in drawn.verdict
    assert "Lower loss than linear_nvfp4: mine −0.0200 nats (" in drawn.verdict
    # The choice minimizes the cost, which does not count first-order terms that lower the loss: the prediction does.
    found = costs(opened, Filter(), ("linear",))
    forward = found.table[found.table["gemm"] == "forward"]
    chosen = advise(found, AdviceRequest(6.0, by="site")).forward.merge(forward[[*OPERAND, "spec", "cost"]])
    assert chosen["cost"].sum() <= forward.loc[forward["spec"] == "nvfp4", "cost"].sum()
    measured = drawn.tables["advised_and_measured"].set_index("recipe")
    assert {"mine", "linear_nvfp4"} <= set(measured.index)
    wide = draw(ADVISE, opened, budget="4.5")
    assert "4.50 bits" in wide.verdict and ("Advised: " in wide.verdict or "not advised" in wide.verdict)


@pytest.mark.thorough
def test_with_a_device_the_loss_is_drawn_over_time(opened):
    texts = {"view": ["advise"], "device": ["B200"], "speedup": ["halfway"]}
    drawn = View("map", texts).draw(opened)
    figure = drawn.get("frontier")
    table = figure.table.set_index("name")
    assert table.loc["bf16", "share"] == 1 and "of bf16's time on NVIDIA B200 SXM" in drawn.verdict
    axes = {layer["encoding"]["x"]["field"] for layer in figure.chart.to_dict()["layer"] if "x" in layer["encoding"]}
    assert axes == {"ms"} and table["ms"].gt(0).all()
    impossible = View("map", texts | {"speedup": ["3"]}).draw(opened)  # a tiny model takes as long in any format
    assert len(impossible.problems) == 1 and "of bf16's time cannot be met" in impossible.problems[0]


def test_the_app_offers_published_devices_where_binade_toml_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv(CONFIG, str(tmp_path / "binade.toml"))
    (tmp_path / "binade.toml").write_text("[devices.mine")
    assert {"H100", "MI355X"} <= set(devices())


def test_where_nothing_can_be_advised_a_sentence_says_why(opened, odd_root):
    only = Filter(recipe=("mine",))
    drawn = draw(ADVISE, opened, only)
    assert drawn.problems == (
        "No operand of linear was scored: record a run with scores, for example with binade run --quantization bf16.",
    )
    with Catalog.open(odd_root) as catalog:
        for question in (ADVISE, PREDICTIONS):
            drawn = draw(question, catalog)
            assert len(drawn.problems) == 1 and not drawn.items and not drawn.verdict


@pytest.mark.thorough
def test_the_button_saves_the_recipe_and_queues_the_runs(visit: Visit, collected, tmp_path):
    root = roots.copy(collected, tmp_path / "runs")
    at = visit(root, "map", view="advise", budget="6")
    assert "per forward value for" in words(at)
    at.text_input(key="advise_name").set_value("mine")
    at.number_input(key="advise_seeds").set_value(2)
    at.number_input(key="advise_iterations").set_value(2)
    try:
        next(button for button in at.button if button.label == "Verify").click()
        rerun(at)
        assert [success.value for success in at.success] == [
            "6 runs are queued. When they are done, this page compares them."
        ]
        saved = root / ".recipes" / "mine.toml"
        queued = [(job.config.recipe, job.config.train_iters, job.tags) for job in store.read_jobs(root)]
        expected = ["bf16", "linear_nvfp4", str(saved)] * 2
        assert queued == [(recipe, 2, ("advice mine",)) for recipe in expected]
        next(button for button in at.button if button.label == "Verify").click()
        rerun(at)
        assert len(at.error) == 1 and "exists" in at.error[0].value
    finally:
        for job in reversed(store.read_jobs(root)):
            jobs.cancel(root, job.id)
        end_all(root)
