"""Numbers in charts, drawn by Vega, against those that Python writes."""

from __future__ import annotations

import math
import re

import altair as alt
import numpy as np
import pandas as pd
import pytest
import vl_convert

from binade.app.draw.figure import Figure
from binade.app.draw.numbers import expression
from binade.data.words.text import number_text

EDGES = [
    *(0.0, 1.0, -1.0, 0.5, 123456, -29800, 9994, 9995.1, 9996, 9999, 0.001, 0.000999, 0.0009994, 0.00099949, 1e-300),
    *(-1.234e-7, 1230, 1234.56, 0.0123456, 1e22, 6.745e161, 99.96),
]


def texts(values: list[float], calculated: str) -> list[str]:
    """What Vega writes for each value."""
    spec = {
        "data": {"values": [{"v": value, "at": at} for at, value in enumerate(values)]},
        "transform": [{"calculate": calculated, "as": "text"}],
        "mark": "text",
        "encoding": {"text": {"field": "text", "type": "nominal"}},
    }
    found = re.findall(r'aria-label="text: ([^"]*)"', vl_convert.vegalite_to_svg(spec))
    assert len(found) == len(values)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sign", ["", "+"])
def test_vega_writes_numbers_as_python_does(sign: str):
    random = np.random.default_rng(0)
    values = EDGES + list(random.choice([-1.0, 1.0], 2000) * 10 ** random.uniform(-12, 12, 2000))
    assert texts(values, expression("datum.v", sign)) == [number_text(value, f"{sign}.3g") for value in values]


def test_whole_numbers_keep_their_digits():
    assert texts([0, 12345, -7, 1.5, 1e-5], expression("datum.v", whole=True)) == [
        "0", "12,345", "−7", "1.5", "1.0·10⁻⁵",
    ]  # fmt: skip


def drawn(chart: alt.Chart) -> tuple[set[str], str]:
    """(the texts, the SVG) of a chart in a figure."""
    svg = vl_convert.vegalite_to_svg(Figure("x", chart, pd.DataFrame(), "").spec | {"width": 400, "height": 300})
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", svg)), svg


@pytest.mark.parametrize(
    ("kind", "low", "high", "labels"),
    [
        ("log", 0.01, 100, {"0.01", "0.1", "1", "10", "100"}),
        ("log", 1e-7, 1e-5, {"10⁻⁷", "10⁻⁶", "10⁻⁵"}),
        ("linear", 0, 5_200_000, {"0", "1·10⁶", "5·10⁶"}),
        ("linear", 0, 0.00002, {"0", "2·10⁻⁵"}),
        ("linear", -4000, 4000, {"−4,000", "0", "4,000"}),
    ],
)
def test_axes_have_numbers_as_texts_have(kind: str, low: float, high: float, labels: set[str]):
    y = alt.Y("y:Q", title=None, scale=alt.Scale(type=kind, domain=[low, high]))
    shown, _ = drawn(alt.Chart(pd.DataFrame({"y": [low or 1, high]})).mark_point().encode(y=y))
    assert labels <= shown and not any(re.search(r"e|\d[kMGmµ]|-", text) for text in shown)


def test_tooltips_texts_and_legends_have_them_too():
    table = pd.DataFrame({"x": [12345, 2], "value": [29800.0, -1.2e-7], "share": [0.25, math.nan]})
    chart = alt.Chart(table).mark_text().encode(
        x=alt.X("x:Q", axis=None), color=alt.Color("value:Q", scale=alt.Scale(domain=[0, 40_000])),
        text=alt.Text("value:Q", format=".3g"),
        tooltip=[alt.Tooltip("x:Q", title="x"), alt.Tooltip("value:Q", title="v", format="+.4~g"),
                 alt.Tooltip("share:Q", title="s", format=".1%")],
    )  # fmt: skip
    shown, svg = drawn(chart)
    assert {"3.0·10⁴", "−1.2·10⁻⁷", "2.0·10⁴", "0"} <= shown
    encoding = Figure("x", chart, pd.DataFrame(), "").spec["encoding"]["tooltip"]
    assert [each["type"] for each in encoding] == ["nominal", "nominal", "quantitative"]
    assert encoding[2]["format"] == ".1%"
    assert "e+" not in svg
