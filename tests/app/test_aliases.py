"""Addresses and pins that name a former part of the Map open the Map with the color that has its numbers."""

from __future__ import annotations

import pytest

from binade.app import aliases
from binade.app.measures.registry import MAP_MEASURES
from binade.app.sessions.session import Pin
from binade.app.view import View
from binade.data.catalog import Catalog

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("part", aliases.PARTS)
def test_an_old_address_is_the_map_with_a_color(catalog: Catalog, part: str):
    view = View("map", {"view": [part], "recipe": ["mxfp4"]})
    assert view.part == "map" and view.params["recipe"] == ["mxfp4"] and view.params["metric"][0] in MAP_MEASURES
    assert View("tensor", {"view": [part]}).part == part  # the part of another page that has the name
    answer = view.draw(catalog)
    assert not answer.problems and answer.figures[0].name == "map"


@pytest.mark.parametrize(
    ("page", "query"),
    [
        ("map", {"view": ["advise"], "budget": ["6"], "by": ["site"], "parts": ["linear"], "recipe": ["bf16"]}),
        ("runs", {"view": ["parity"], "parity": ["a run"], "recipe": ["bf16"]}),
    ],
)
def test_addresses_of_advice_and_parity_lead_to_their_cost(page: str, query: dict[str, list[str]]):
    view = View(page, query)
    measured = {"measured": ["a run"]} if page == "runs" else {}
    assert (view.page, view.params) == ("runs", {"view": ["cost"], "recipe": ["bf16"]} | measured)
    assert [Pin(page, query, chart).chart for chart in ("parity_groups", "parity_steps", "")] == [
        "cost", "cost_steps", "",
    ]  # fmt: skip


@pytest.mark.parametrize(("part", "chart"), [(part, chart) for part in aliases.PARTS for chart in aliases.CHARTS[part]])
def test_an_old_pin_has_a_chart(catalog: Catalog, part: str, chart: str):
    pin = Pin("map", {"view": [part], "recipe": ["mxfp4"]}, chart)
    answer = pin.draw(catalog)
    few = chart == "oscillating" and "at least 3 recorded iterations" in answer.problems[0]  # the root has two
    assert few or answer.get(pin.chart), answer.problems
