"""Every figure of every question, over real and odd tensors: its tooltips and its axes. What is visible of tables."""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import vl_convert
from altair.utils.schemapi import debug_mode
from PIL import Image, ImageColor
from streamlit.elements.lib.pandas_styler_utils import marshall_styler
from streamlit.proto.ArrowData_pb2 import ArrowData

from binade.app.draw.figure import Column, Figure
from binade.app.draw.show import displayed, with_texts
from binade.app.draw.style import title
from binade.app.questions.blocks import question as blocks
from binade.app.questions.difference import question as difference
from binade.app.questions.explore import question as explore
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.shared.heatmap import HOVER, heatmap
from binade.app.view.params import One
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from tests.numbers import NUMBER, read

pytestmark = pytest.mark.slow
AXIS = re.compile(r"aria-label=\"[XY]-axis titled '([^\"]*)' for a linear scale with values from \S+ to ([^\s\"]+)")


def walked(catalog: Catalog, every: bool) -> dict[str, Figure]:
    """The figures of each question with its defaults, and if asked, with each value of the parameters that change its
    charts."""
    figures = {}
    for question in QUESTIONS:
        view = View(question.page, {"view": [question.view]})
        params = {} if question.name in ("what_if",) or not every else view.params_in(catalog)
        several = {name: params[name] for name in question.uses if isinstance(params.get(name), One)}
        choices = [(name, text) for name, param in several.items() if not param.refers_to for text in param.allowed]
        for changed in (view, *(view.changed(**{name: text}) for name, text in choices)):
            for figure in changed.draw(catalog).figures:
                figures[f"{changed.params} {figure.name}"] = figure
    return figures


@pytest.fixture(scope="module", params=["defaults", pytest.param("every value", marks=pytest.mark.thorough)])
def figures(request: pytest.FixtureRequest, collected: Path, odd_root: Path, measured_root: Path) -> dict[str, Figure]:
    every, found = request.param == "every value", {}
    for root in (collected, odd_root) if every else (collected,):
        with Catalog.open(root) as catalog, debug_mode(True):
            found |= {f"{root.name} {name}": figure for name, figure in walked(catalog, every).items()}
    with Catalog.open(measured_root) as catalog, debug_mode(True):
        found |= {f"cost {figure.name}": figure for figure in View("runs", {"view": ["cost"]}).draw(catalog).figures}
    return found


def layers(spec: dict[str, Any], above: dict[str, Any] | None = None) -> Iterator[tuple[dict[str, Any], Any]]:
    """(layer, its tooltip) of a specification."""
    encoding = (above or {}) | spec.get("encoding", {})
    inner = [
        *spec.get("layer", ()),
        *(part for name in ("hconcat", "vconcat", "concat") for part in spec.get(name, ())),
    ]
    for each in [*inner, *([spec["spec"]] if "spec" in spec else [])]:
        yield from layers(each, encoding)
    if "mark" in spec:
        yield spec, encoding.get("tooltip")


def test_a_tooltip_names_what_it_shows(figures: dict[str, Figure]):
    assert len({name.split("'")[3] for name in figures if "'" in name}) > 10
    for name, figure in figures.items():
        for _, tooltip in layers(json.loads(figure.on_page.spec)):
            assert all(each.get("title") for each in tooltip or ()), (name, tooltip)


@pytest.mark.thorough
def test_no_axis_of_shares_goes_past_100_percent(figures: dict[str, Figure]):
    checked = set()
    for name, figure in figures.items():
        spec = figure.sized_spec(600)
        shares = re.search("%|share", json.dumps(spec | {"datasets": {}}))
        for words, last in AXIS.findall(vl_convert.vegalite_to_svg(spec)) if shares else ():
            if re.search("%|share", words + last) and "per binade" not in words:
                assert float(last.rstrip("%")) <= 100, (name, words, last)
                checked.add(words)
    assert len(checked) > 3


@pytest.mark.parametrize(
    ("columns", "last", "wide"),
    [(explore.STATISTICS, "infs", 1), (blocks.WORST_COLUMNS, "absmax", 2), (difference.COLUMNS, "by", 1)],
)  # fmt: skip
def test_important_columns_are_visible_at_1280_pixels(columns: dict[str, Column], last: str, wide: int):
    """The page is 1208 pixels wide; wide: how many share a row. A row's checkbox takes 34."""
    names = [*columns][: [*columns].index(last) + 1]
    texts = {"group": "layer 12 QKV weight", "place": "layer 12 QKV weight", "label": "hifp8_scaled", "gemm": "forward",
             "linear": "hifp8(scale=amax8)", "QK": "hifp8", "PV": "hifp8"}  # fmt: skip
    cells = {
        name: texts.get(name, "mxfp4") if column.text or name in texts else 1.5 for name, column in columns.items()
    }
    _, config, _ = displayed(pd.DataFrame([cells]), {name: columns[name] for name in names})
    widths = [given["width"] for given in config.values()]
    assert sum(widths) + 34 <= (1208 - 36 * (wide - 1)) / wide, widths


def test_a_table_shows_no_negative_zero():
    frame = pd.DataFrame({"gain": [-0.04, -0.06], "spread": [-1e-9, 1e-9]})
    shown, *_ = displayed(frame, {"gain": Column(format="+.1f"), "spread": Column(format=".3g")})
    assert [f"{value:+.1f}" for value in shown["gain"]] == ["+0.0", "-0.1"]
    assert shown["spread"].tolist() == frame["spread"].tolist()


def test_a_table_writes_numbers_as_texts_do():
    """As Streamlit sends them: the text of each cell, and no format of the column that would replace it."""
    frame = pd.DataFrame(
        {"gain": [-0.26, np.nan], "spread": [-1e-9, 29800.0], "blocks": [12345, 1], "layer": [2.0, np.nan]},
        index=[7, 7],
    )
    columns = {
        "gain": Column(format="+.1f"), "spread": Column(format=".3g"),
        "blocks": Column(format="d"), "layer": Column(),
    }  # fmt: skip
    styled, config = with_texts(*displayed(frame, columns))
    assert all(given["type_config"]["format"] is None for given in config.values())
    sent = ArrowData()
    marshall_styler(sent, styled, "table")
    shown = pa.ipc.open_stream(sent.styler.display_values).read_pandas()
    assert shown.to_numpy().tolist() == [["−0.3", "−1.0·10⁻⁹", "12,345", "2"], ["–", "3.0·10⁴", "1", "–"]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("rows", "columns", "each"), [(3, 5, 1), (48, 48, 1), (60, 401, 1), (400, 7, 3)])
def test_hovering_over_a_picture_says_which_cells_and_their_values(rows: int, columns: int, each: int):
    """Every cell lies in one rectangle, whose words are numpy's of the cells that the rectangle covers."""
    values = np.random.default_rng(1).normal(size=(rows, columns))
    values[1:3] = np.nan
    chart = heatmap(
        values, title("T", "s"), ("channel (last axis)", columns), ("token", rows * each), "dB", missing="zero"
    )
    found = [(layer, tooltip) for layer, tooltip in layers(chart.to_dict()) if tooltip]
    assert len(found) == 1 and found[0][0]["mark"]["type"] == "rect"
    assert [shown["title"] for shown in found[0][1]] == ["token", "channel", "dB"]
    covered = np.zeros((rows, columns))
    for cell in chart.layer[2].data.to_dict("records"):
        top, bottom, left, right = (round(cell[name]) for name in ("y", "y2", "x", "x2"))
        for words, low, high in ((cell["rows"], top, bottom), (cell["columns"], left, right)):
            assert words == (f"{low:,} to {high - 1:,}" if high - low > 1 else f"{low}")
        inside = np.s_[top // each : bottom // each, left:right]
        covered[inside] += 1
        known = values[inside][~np.isnan(values[inside])]
        numbers = [float(read(text)) for text in re.findall(NUMBER, cell["values"].replace(", highest", " highest"))]
        assert ("zero" in cell["values"]) == np.isnan(values[inside]).any()
        assert numbers == pytest.approx(
            [known.min(), known.max()][: len(known)] if known.size else [], rel=1e-3, abs=0.05
        )
    assert (covered == 1).all() and len(chart.layer[2].data) <= HOVER**2


@pytest.mark.parametrize("reverse", [False, True])
def test_a_picture_of_equal_values_has_the_color_that_its_legend_gives_them(reverse: bool):
    """They had that of the legend's middle."""
    chart = heatmap(np.full((2, 3), 7.0), title("T", "s"), ("channel", 3), ("token", 2), "dB", reverse=reverse)
    url = chart.layer[0].data["url"].iloc[0]
    picture = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGBA")
    scale = chart.to_dict()["layer"][1]["encoding"]["color"]["scale"]
    low, high = scale["domain"]
    assert 7.0 in (low, high)
    color = ImageColor.getcolor(scale["range"][0 if low == 7.0 else -1], "RGBA")
    assert picture.getcolors() == [(picture.width * picture.height, color)]
