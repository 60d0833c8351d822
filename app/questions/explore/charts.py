"""Charts of Explore: distributions, Q–Q plots, panels of these by rows and columns, and the same operands in each
format."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from binade.app import plot, style
from binade.app.figure import Chart
from binade.app.params import TITLES
from binade.app.questions.explore.compute import RAW, SCALE, SIGMA, ByFormat
from binade.app.questions.explore.quantile_plots import QQ
from binade.app.questions.shared.distribution_charts import EQUAL
from binade.data.filter import INTEGER_FIELDS
from binade.data.text import number_text
from binade.quant.specs import Spec

OF = {RAW: "value", SIGMA: "value / σ of its tensor", SCALE: "value / scale of its block"}
WIDE, HIGH = 640, 120  # pixels of all columns of panels together, and of a panel
STRIP = 28  # pixels of a format
SMALL = 11  # the font size of a title that says more than a name
MOST_COUNTS = 4  # groups whose counts are written in a corner of a plot


def magnitude(values: str) -> str:
    """The title of an axis of magnitudes."""
    name, _, of = OF[values].partition(" / ")
    return f"|{name}|{f' / {of}' if of else ''}"


def qq(
    qq_plot: QQ, title: str, by: str, groups: list[str], titles: tuple[str, str], looks: style.Looks | None = None
) -> Chart:
    """A Q–Q plot with its line of equal quantiles, cut off at `qq_plot.limit`: how many values lie beyond is written at
    the ends. titles: of the axes."""
    shown = qq_plot.points[qq_plot.points["sample"].abs() <= qq_plot.limit]
    ends = np.array([shown["theoretical"].min(), shown["theoretical"].max()]).clip(-qq_plot.limit, qq_plot.limit)
    tips: dict[str, plot.Tip] = {"group": by} if len(groups) > 1 else {}
    tips |= {"theoretical": (titles[0], ".4~g"), "sample": (titles[1], ".4~g"), "share": ("values below", ".4~%")}
    name = f"_{zlib.crc32(title.encode()):08x}"
    low = -qq_plot.limit if (shown["sample"] < 0).any() else 0
    points = plot.mark(
        "point", shown, size=20, opacity=0.75, clip=True, tips=tips,
        x=plot.x("theoretical", titles[0], {"tickCount": 7, "titleFontSize": SMALL}, nice=False, zero=False),
        y=plot.y("sample", titles[1], {"tickCount": 6}, domain=[low, qq_plot.limit]),
        color=style.color(groups, by, own=looks, place="top"), shape=style.shape(groups, by, "top", looks),
        params=[style.zoom(name), style.only("group", chart=name)],
    )  # fmt: skip
    line = plot.diagonal(*ends, **EQUAL, clip=True)
    return plot.layers(title, "", line, points, *_beyond(qq_plot, groups, by, looks))


def _beyond(qq_plot: QQ, groups: list[str], by: str, looks: style.Looks | None) -> list[Chart]:
    """How many values of each group lie beyond the ends of the axis: written in the corners that quantiles, which rise,
    leave empty. Of more than MOST_COUNTS groups, which would not fit, the lowest and the highest number."""
    colors = dict(zip(groups, style.colors(groups, by, looks), strict=True))
    layers: list[Chart] = []
    for sign, mark, place in ((0, "▲", "left"), (1, "▼", "right")):
        counts = [(group, qq_plot.beyond[group][sign]) for group in groups if qq_plot.beyond.get(group, (0, 0))[sign]]
        lines = [(f"{count:,}", colors[group]) for group, count in counts]
        if len(counts) > MOST_COUNTS:
            numbers = [count for _, count in counts]
            lines = [(f"{min(numbers):,} to {max(numbers):,} in each of {len(counts)}", style.GREY)]
        for index, (words, color) in enumerate(lines):
            text = f"{mark} {words} beyond {number_text(qq_plot.limit) if not sign else number_text(-qq_plot.limit)}"
            down = 8 + 14 * (index if not sign else len(lines) - 1 - index)
            look: plot.Look = {
                "align": place, "fontSize": 11, "color": color,
                "x": {"expr": "width - 4"} if place == "right" else 4,
                "y": down if not sign else {"expr": f"height - {down}"},
            }  # fmt: skip
            layers.append(plot.mark("text", pd.DataFrame({"text": [text]}), text="text", **look))
    return layers


def formats(by_format: ByFormat, title: str, ticked: Sequence[str] = ()) -> Chart:
    """One dot per operand and format, over its SQNR minus that of normal values, those of ticked tensors larger; the
    median as a line; at the right its absolute value and the bits of a value."""
    medians = by_format.medians
    order = medians["format"].tolist()
    low, high = _ends(medians)
    dots = by_format.dots.assign(
        at=by_format.dots["delta"].clip(low, high),
        shift=[zlib.crc32(f"{a}{b}".encode()) / 2**32
               for a, b in zip(by_format.dots["tensor_id"], by_format.dots["gemm"], strict=True)],
    )  # fmt: skip
    layers = ["" if pd.isna(layer) else str(int(layer)) for layer in dots["layer_index"]]
    dots = dots.assign(tensor=dots["tensor_id"], layer=layers, ticked=dots["tensor_id"].isin(ticked))
    dots = dots.sort_values("ticked", kind="stable")
    y = plot.names("format", order, 150, {"grid": False}, paddingInner=0.15, paddingOuter=0.1)
    axis = {"tickCount": 8, "labelExpr": "datum.value ? format(datum.value, '+~g') : '0'", "titleFontSize": SMALL}
    x = plot.x("at", "SQNR minus that of normal values (dB)", axis, domain=[low, high], nice=False)
    points = plot.mark(
        "circle", dots, x=x, y=y, yOffset=plot.shift("shift", -0.25, 1.25), strokeWidth=1.5, choose="tensor",
        params=[style.drag()],
        color=plot.operations(dots["operation"].dropna()),
        tips=plot.tips(
            layer="layer", module="module", tensor_name="tensor", gemm="GEMM", sqnr_db=("SQNR (dB)", ".1f"),
            delta=("minus normal (dB)", "+.1f"),
        ),
        **plot.when(
            "datum.ticked", opacity=(1.0, 0.25 if len(ticked) else 0.55), size=(70, 22), stroke=(style.GREY, None)
        ),
    )  # fmt: skip
    texts = medians.assign(
        at=medians["delta"].clip(low, high),
        text=[f"{number_text(row['sqnr_db'])} dB median · {number_text(Spec.of(row['format']).bits_per_value)} bits"
              for row in medians.to_dict("records")],
    )  # fmt: skip
    middle = plot.mark("tick", texts, x=x, y=y, thickness=3.5, size=STRIP - 8, color=style.GREY, opacity=1)
    right: plot.Look = {"dx": 10, "fontSize": 11.5, "clip": False, "x": {"expr": "width"}}
    labels = plot.mark("text", texts, y=y, text="text", **right)
    padding = {"left": 5, "top": 5, "bottom": 5, "right": 5}
    zero = plot.rule(x=0.0, strokeDash=[1, 0], opacity=0.8)
    return plot.layers(title, "", zero, points, middle, labels, padding=padding)


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
