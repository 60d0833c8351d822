"""Addresses and pins that name a former part of a page open the Map with the color that has its numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from binade.app.measures.registry import MAP_MEASURES
from binade.app.sessions.session import Pin
from binade.app.view import aliases
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.run.evaluations import GradientTwin, Twin
from binade.data.words.filter import Filter
from tests.data.builder import make_run
from tests.data.experiments import add_evaluations

pytestmark = pytest.mark.slow
RECORDED = sorted(part for part in aliases.PARTS if part[1] != "drift")  # what the root of the tests has


@pytest.mark.parametrize(("page", "part"), RECORDED)
def test_an_old_address_is_the_map_with_a_color(catalog: Catalog, page: str, part: str):
    view = View(page, {"view": [part], "recipe": ["mxfp4"]})
    assert view.page == "map" and view.part == "map"
    assert view.params["recipe"] == ["mxfp4"] and view.params["metric"][0] in MAP_MEASURES
    assert View("tensor", {"view": [part]}).part == part  # the part of another page that has the name
    answer = view.draw(catalog)
    assert not answer.problems and answer.figures[0].name == "map"


@pytest.mark.parametrize(
    ("page", "query"),
    [
        ("map", {"view": ["advise"], "budget": ["6"], "by": ["site"], "parts": ["linear"], "recipe": ["bf16"]}),
        ("runs", {"view": ["advise"], "budget": ["6"], "recipe": ["bf16"]}),
        ("runs", {"view": ["parity"], "parity": ["a run"], "recipe": ["bf16"]}),
    ],
)
def test_addresses_of_advice_and_parity_lead_to_their_cost(page: str, query: dict[str, list[str]]):
    view = View(page, query)
    measured = {"measured": ["a run"]} if "parity" in query else {}
    assert (view.page, view.params) == ("runs", {"view": ["cost"], "recipe": ["bf16"]} | measured)
    assert [Pin(page, query, chart).chart for chart in ("parity_groups", "parity_steps", "")] == [
        "cost", "cost_steps", "",
    ]  # fmt: skip


CHARTS = [(part, chart) for part in RECORDED for chart in aliases.CHARTS[part]]


@pytest.mark.parametrize(("part", "chart"), CHARTS)
def test_an_old_pin_has_a_chart(catalog: Catalog, part: tuple[str, str], chart: str):
    pin = Pin(part[0], {"view": [part[1]], "recipe": ["mxfp4"]}, chart)
    answer = pin.draw(catalog)
    few = chart == "oscillating" and "at least 3 recorded iterations" in answer.problems[0]  # the root has two
    assert few or answer.get(pin.chart), answer.problems


def test_the_page_of_a_twin_step_is_a_color_of_its_run(tmp_path: Path):
    run = make_run(tmp_path, [(torch.randn(32, 64), {"format": "mxfp4", "module": "fc1", "layer_index": 1})])
    row = GradientTwin("step", None, None, None, 1.0, 0.2, 0.2, 0.0, 0.0, 0.0, 0.9)
    fc1 = GradientTwin("fc1.weight", 1, "fc1", None, 1.0, 0.3, 0.3, 0.0, 0.0, 0.0, 0.9)
    add_evaluations(run.directory, Twin(0, 5.0, (0.25,), False, (row, fc1)))
    other = make_run(tmp_path, [(torch.randn(32, 64), {"format": "mxfp4"})])
    with Catalog.open(tmp_path) as opened:
        tensor = opened.tensors(Filter(run_id=(run.run_id,)))["tensor_id"][0]
        assert tensor.startswith(f"{run.run_id}/")
        for params in ({"tensor": [tensor]}, {"against": [run.run_id], "tensor": ["other/x"]}):
            pin = Pin("tensor", {"view": ["drift"], "module": ["fc1"], **params}, "twin")
            assert (pin.page, pin.chart) == ("map", "map")
            assert pin.params == {"module": ["fc1"], "run_id": [run.run_id], "metric": ["twin_bias"]}
            assert pin.draw(opened).get("map").table["value"].tolist() == [0.3]
        (gone,) = View("tensor", {"view": ["drift"], "against": [other.run_id]}).draw(opened).problems
        assert "choose another one" in gone
    three_way = Pin("tensor", {"view": ["drift"], "tensor": [tensor]}, "three_way")
    assert three_way == Pin("tensor", {"view": ["pair"], "tensor": [tensor]}, "magnitudes")
