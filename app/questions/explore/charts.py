"""Charts of Explore: distributions, Q–Q plots, panels of these by rows and columns, and the same operands in each
format."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.app.questions.explore.compute import RAW, SCALE, SIGMA, ByFormat
from binade.app.questions.shared.distribution_charts import EQUAL
from binade.app.view.params import TITLES
from binade.data.words.filter import INTEGER_FIELDS
from binade.data.words.text import number_text
from binade.quant.specs import Spec

OF = {RAW: "value", SIGMA: "value / σ of its tensor", SCALE: "value / scale of its block"}
WIDE, HIGH = 640, 120  # pixels of all columns of panels together, and of a panel
STRIP = 28  # pixels of a format
SMALL = 11  # the font size of a title that says more than a name


def magnitude(values: str) -> str:
    """The title of an axis of magnitudes."""
    name, _, of = OF[values].partition(" / ")
    return f"|{name}|{f' / {of}' if of else ''}"


def formats(dots: pd.DataFrame, ticked: pd.DataFrame, medians: pd.DataFrame, title: str) -> Chart:
    """One dot per operand and format, over its SQNR minus that of normal values, those of ticked tensors again, larger;
    the median as a line; at the right its absolute value and the bits of a value. The tables are `dots_of`."""
    y = plot.names("format", None, 150, {"grid": False}, paddingInner=0.15, paddingOuter=0.1)
    axis = {"tickCount": 8, "labelExpr": "datum.value ? format(datum.value, '+~g') : '0'", "titleFontSize": SMALL}
    x = plot.x("at", "SQNR minus that of normal values (dB)", axis, nice=False, zero=False)
    colors = {**style.OPERATIONS, "": style.GREY}
    look: plot.Look = {
        "x": x, "y": y, "yOffset": plot.shift("shift", -0.25, 1.25), "color": plot.named("operation", colors, None),
        "tips": plot.tips(
            name="tensor", gemm="GEMM", sqnr_db=("SQNR (dB)", ".1f"), delta=("minus normal (dB)", "+.1f")
        ),
    }  # fmt: skip
    points = plot.mark("circle", dots, size=20, opacity=0.4, choose="tensor", params=[style.drag()], **look)
    larger = plot.mark("circle", ticked, size=70, opacity=1, stroke=style.GREY, strokeWidth=1.5, **look)
    middle = plot.mark("tick", medians, x=x, y=y, thickness=3.5, size=STRIP - 8, color=style.GREY, opacity=1)
    right: plot.Look = {"dx": 10, "fontSize": 11.5, "clip": False, "x": {"expr": "width"}}
    labels = plot.mark("text", medians, y=y, text="text", **right)
    padding = {"left": 5, "top": 5, "bottom": 5, "right": 5}
    zero = plot.rule(x=0.0, strokeDash=[1, 0], opacity=0.8)
    return plot.layers(title, "", zero, larger, points, middle, labels, padding=padding)


def dots_of(by_format: ByFormat, names: Mapping[str, str], ticked: Sequence[str] = ()) -> tuple[pd.DataFrame, ...]:
    """(the dots, those of ticked tensors, the medians) of `formats`, the formats in order. names: of the tensors."""
    low, high = _ends(by_format.medians)
    dots = by_format.dots
    drawn = pd.DataFrame({
        "format": dots["format"], "tensor": dots["tensor_id"], "gemm": dots["gemm"].fillna(""),
        "name": dots["tensor_id"].map(names), "operation": dots["operation"].fillna(""),
        "sqnr_db": dots["sqnr_db"].round(2), "delta": dots["delta"].round(2),
        "at": dots["delta"].clip(low, high).round(2),
        "shift": [round(zlib.crc32(f"{a}{b}".encode()) / 2**32, 2)
                  for a, b in zip(dots["tensor_id"], dots["gemm"], strict=True)],
    })  # fmt: skip
    medians = by_format.medians
    texts = [f"{number_text(row['sqnr_db'])} dB median · {number_text(Spec.of(row['format']).bits_per_value)} bits"
             for row in medians.to_dict("records")]  # fmt: skip
    at = medians["delta"].clip(low, high).round(2)
    order = {name: place for place, name in enumerate(medians["format"])}
    drawn = drawn.sort_values("format", key=lambda column: column.map(order), kind="stable", ignore_index=True)
    of_ticked = drawn[drawn["tensor"].isin(ticked)].reset_index(drop=True)
    return drawn, of_ticked, pd.DataFrame({"format": medians["format"], "at": at, "text": texts})


def _ends(medians: pd.DataFrame) -> tuple[float, float]:
    low, high = float(medians["low"].min()), float(medians["high"].max())
    if not np.isfinite([low, high]).all():
        return -1.0, 1.0
    return float(np.floor(min(low, 0.0))) - 0.5, float(np.ceil(max(high, 0.0))) + 0.5


def formats_height(by_format: ByFormat) -> int:
    """Pixels of the chart of formats, with its title and axis."""
    return 92 + STRIP * len(by_format.medians)


def panels(
    table: pd.DataFrame, by: Mapping[str, str], kind: str, values: str, title: str, titles: tuple[str, str],
    looks: style.Looks | None = None,
) -> Chart:  # fmt: skip
    """Distributions ("histogram") or Q–Q plots ("qq") in panels with shared axes. table: with the columns rows, columns
    and group, the color; by: the field of each of these."""
    groups = style.groups_of(table)
    names = {
        place: {value: f"{TITLES[by[place]].lower()} {value}" for value in dict.fromkeys(table[place])}
        for place in ("rows", "columns") if by.get(place) in INTEGER_FIELDS
    }  # fmt: skip
    table = table.assign(**{place: table[place].map(labels) for place, labels in names.items()})
    by_color = TITLES[by["color"]].lower() if "color" in by else ""
    is_qq = kind == "qq"
    x, y = "theoretical", "sample"
    axis: Any = {"tickCount": 4}
    number: plot.Look = {"tickCount": 3}
    if not is_qq:
        x, y, titles = "low", "share", (magnitude(values), "share of values per binade")
        axis, number = style.binades(titles[0], 4), {"format": "~%", "tickCount": 3}
    tips: dict[str, plot.Tip] = {place: TITLES[name].lower() for place, name in by.items() if place != "color"}
    tips |= {"group": by_color} if "color" in by else {}
    places: plot.Look = {
        "x": plot.x(x, titles[0], axis, nice=False, zero=False),
        "y": plot.y(y, None if "rows" in by else titles[1], number),  # once for all rows
        "clip": True,
    }
    lines = plot.mark(
        "line", table, interpolate="linear" if is_qq else "step-after", strokeWidth=1.4,
        color=style.color(groups, by_color, line=True, own=looks, place="top"),
        strokeDash=style.dash(groups, by_color, "top", looks),
        tips=tips | {x: (titles[0], ".3~f"), y: (titles[1], ".3~f" if is_qq else ".3~p")}, **places,
    )  # fmt: skip
    ends = [float(end(table["theoretical"])) for end in (min, max)] if is_qq else []
    equal = plot.mark("line", pd.DataFrame({"theoretical": ends, "sample": ends}), **EQUAL, **places)
    header: plot.Look = {"title": None, "labelFontSize": 12, "labelFontWeight": "bold"}
    left = {"title": titles[1], "titleFontWeight": "normal", "labelOrient": "left", "labelAngle": 0}
    headers = {"rows": header | left, "columns": header}
    facets = {place.removesuffix("s"): (place, look) for place, look in headers.items() if place in by}
    width = max(90, WIDE // table["columns"].nunique() - 40)
    return plot.facets(title, lines, [equal] if ends else [], facets, width=width, height=HIGH)
