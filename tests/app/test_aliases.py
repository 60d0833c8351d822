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


@pytest.mark.parametrize(("part", "chart"), [(part, chart) for part in aliases.PARTS for chart in aliases.CHARTS[part]])
def test_an_old_pin_has_a_chart(catalog: Catalog, part: str, chart: str):
    pin = Pin("map", {"view": [part], "recipe": ["mxfp4"]}, chart)
    answer = pin.draw(catalog)
    few = chart == "oscillating" and "at least 3 recorded iterations" in answer.problems[0]  # the root has two
    assert few or answer.get(pin.chart), answer.problems
