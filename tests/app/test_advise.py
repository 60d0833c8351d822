"""Map › Advise: what it draws, what it says where nothing was measured, and what it queues."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from binade.app.figure import Drawn
from binade.app.view import View
from binade.collector import jobs
from binade.collector.jobs import queue
from binade.collector.recipes.files import read_recipe
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from tests.app import roots
from tests.app.test_pages import Visit, rerun, words
from tests.collector.test_jobs import end_all

pytestmark = pytest.mark.slow


@pytest.fixture
def opened(measured_root: Path) -> Iterator[Catalog]:
    with Catalog.open(measured_root) as catalog:
        yield catalog


def draw(catalog: Catalog, where: Filter | None = None, budget: str = "6", **texts: str) -> Drawn:
    params = {"view": ["advise"], "budget": [budget], "by": ["site"], "parts": ["linear"]}
    return (
        View("map", params | {name: [text] for name, text in texts.items()}).filtered(where or Filter()).draw(catalog)
    )


def test_advice_is_drawn(opened):
    drawn = draw(opened)
    frontier, operands = drawn.get("frontier").table, drawn.tables["operands"]
    assert {"advised", "uniform"} == set(frontier["kind"]) and drawn.problems == ()
    assert operands["width"].max() <= 16 and not operands["backward"].iloc[0]
    axes = {layer["encoding"]["x"]["field"] for layer in drawn.get("frontier").chart.to_dict()["layer"]}
    assert "Advised: nvfp4 alone, " in drawn.verdict
    assert set(operands.loc[~operands["backward"], "spec"]) == {"nvfp4"}  # what is advised
    assert axes == {"bits"} and "loss changes add up to" in drawn.verdict
    assert drawn.scope.counts == ((len(operands), "operand"),)
    texts = " ".join(map(str, drawn.items))
    assert "8 groups of forward operands in mxfp4, nvfp4, mxfp8, one at a time, on 4 sequences" in texts
    assert "All operands in nvfp4: measured together " in texts
    assert "4.50 bits" in draw(opened, budget="4.5").verdict


def test_where_nothing_can_be_advised_a_sentence_says_why(opened, collected, odd_root):
    run = opened.runs()["run_id"][opened.runs()["recipe"] == "bf16"].iloc[0]
    texts = " ".join(map(str, draw(opened, parts="all").items))
    assert re.search(r"Kept in bf16, because they were not measured: (pv, qk|qk, pv)", texts), texts
    with Catalog.open(collected) as catalog:
        (said,) = draw(catalog).problems
        assert f"No effect on the loss was measured for {run} by site: run binade measure {run} --by part,site" in said
    with Catalog.open(odd_root) as catalog:
        drawn = draw(catalog)
        assert len(drawn.problems) == 1 and not drawn.items and not drawn.verdict


def test_the_button_saves_the_recipe_and_queues_the_runs(visit: Visit, measured_root, tmp_path):
    root = roots.copy(measured_root, tmp_path / "runs")
    at = visit(root, "map", view="advise", budget="6")
    assert "measured loss changes add up to" in words(at)
    at.text_input(key="advise_name").set_value("mine")
    at.number_input(key="advise_seeds").set_value(2)
    at.number_input(key="advise_iterations").set_value(2)
    try:
        next(button for button in at.button if button.label == "Verify").click()
        rerun(at)
        assert [success.value for success in at.success] == [
            "6 runs are queued. When they are done, Runs › Recipes compares them."
        ]
        saved = root / ".recipes" / "mine.toml"
        recipe = read_recipe(saved, "mine")
        assert "nvfp4 alone" in words(at) and "nvfp4 alone" in recipe.about.title
        sites = [recipe.linear, *(part for _, part in recipe.modules)]
        assert {part.rounded_to(field) for part in sites for field in ("forward_a", "forward_b")} == {"nvfp4"}
        queued = [(job.config.recipe, job.config.train_iters, job.tags) for job in queue.read_jobs(root)]
        expected = ["bf16", "linear_nvfp4", str(saved)] * 2
        assert queued == [(recipe, 2, ("advice mine",)) for recipe in expected]
        next(button for button in at.button if button.label == "Verify").click()
        rerun(at)
        assert len(at.error) == 1 and "exists" in at.error[0].value
    finally:
        for job in reversed(queue.read_jobs(root)):
            jobs.cancel(root, job.id)
        end_all(root)
