"""The parts that charts are drawn from, as Vega draws them."""

from __future__ import annotations

import json
import re

import altair as alt
import numpy as np
import pandas as pd
import vl_convert

from binade.app.draw import plot
from binade.app.draw.figure import Figure
from binade.app.draw.style import MEASURES

TABLE = pd.DataFrame({"place": ["a", "b"], "layer": [1, 2], "sqnr_db": [12.345, np.inf], "share": [0.25, 0.5]})
PLACES = {"x": plot.x("layer", "layer"), "y": plot.y("share", "share")}


def test_a_tooltip_has_text_numbers_and_fields():
    """A field says in words what a number cannot: an infinite SQNR is a tensor without error."""
    tips = plot.tips(place="tensor", layer="layer", share=("share", ".1%"), sqnr_db=MEASURES["sqnr_db"])
    made = plot.mark("point", TABLE, tips=tips, **PLACES).to_dict()
    shown = [{"format": None} | each for each in made["encoding"]["tooltip"]]
    assert [(each["title"], each["type"], each["format"]) for each in shown] == [
        ("tensor", "nominal", None), ("layer", "quantitative", None), ("share", "quantitative", ".1%"),
        ("SQNR (dB)", "nominal", None),
    ]  # fmt: skip
    (rows,) = made["datasets"].values()
    assert [row[shown[-1]["field"]] for row in rows] == ["12.3", "no error"]


def test_every_selection_is_set_once_on_the_outermost_chart():
    """Vega refuses a signal that two nested charts define."""
    points = plot.mark("point", TABLE, choose="place", fade=(0.9, 0.3), only=["layer"], **PLACES)
    inner = plot.layers("inner", "", plot.rule(y=0.3), points)
    made = plot.layers("outer", "of two", plot.rule(x=1), inner, plot.rule(x=2)).to_dict()
    assert [param["name"] for param in made["params"]] == ["chosen", "only"]
    assert [layer["mark"]["type"] for layer in made["layer"]] == ["rule", "rule", "point", "rule"]
    assert not any("params" in layer or "title" in layer for layer in made["layer"])
    assert {view for param in made["params"] for view in param["views"]} == {made["layer"][2]["name"]}
    svg = vl_convert.vegalite_to_svg(made)
    assert ">outer<" in svg and ">of two<" in svg and ">inner<" not in svg


def test_layers_keep_the_data_that_they_share():
    """Altair moves them to the chart of the layers."""
    inner = plot.layers("inner", "", plot.mark("line", TABLE, **PLACES), plot.mark("point", TABLE, **PLACES))
    assert isinstance(inner, alt.LayerChart) and inner.layer[0].data is alt.Undefined
    svg = vl_convert.vegalite_to_svg(plot.layers("outer", "", inner, plot.rule(y=0.3)).to_dict())
    assert len(re.findall(r'aria-roledescription="point"', svg)) == len(TABLE)


def test_bars_have_texts_and_lines_between_known_ends():
    table = TABLE.assign(low=[0.1, np.nan], high=[0.3, np.nan], text=["one", "two"])
    bars = plot.bars(
        table, plot.names("place", table["place"]), plot.x("share", "share"), text="text", end="share",
        between=("low", "high"),
    )  # fmt: skip
    svg = vl_convert.vegalite_to_svg(plot.layers("Bars", "", *bars).to_dict())
    drawn = {
        kind: len(re.findall(rf'aria-roledescription="{kind}"', svg)) for kind in ("bar", "rule mark", "text mark")
    }
    assert drawn == {"bar": 2, "rule mark": 1, "text mark": 2}


def test_under_the_pointer_every_text_is_that_of_the_nearest_iteration():
    """Vega draws a cell around the rule of each iteration, whose data are those of the rule, not of the cell."""
    table = pd.DataFrame({"iteration": [0, 0, 1, 1], "group": ["a", "b"] * 2, "loss": [3.0, 2.5, 2.0, 1.5]})
    x, y = plot.iterations(), plot.y("loss", "loss")
    lines = plot.mark("line", table, x=x, y=y, color=plot.named("group", {"a": "red", "b": "blue"}))
    spec = Figure("x", plot.layers("loss", "", lines, *plot.pointer(lines, ["a", "b"], "loss")), table, "").spec
    made = vl_convert.vegalite_to_vega(json.dumps(spec))
    (cells,) = (
        each for group in made["marks"] for each in (group, *group.get("marks", []))
        if each["name"].endswith("voronoi")
    )  # fmt: skip
    shown = cells["encode"]["update"]["tooltip"]["signal"]
    assert len(re.findall(r"datum\.datum\[", shown)) == len(re.findall(r"datum\[", shown)) >= 3
