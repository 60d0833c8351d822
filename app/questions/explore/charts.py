"""Charts of Explore: distributions, Q–Q plots, panels of these by rows and columns, and the same operands in each
format."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.params import TITLES
from binade.app.questions.explore.compute import RAW, SCALE, SIGMA, Compared
from binade.app.questions.explore.quantile_plots import QQ
from binade.app.questions.shared.distribution_charts import EQUAL
from binade.data.filter import INTEGER_FIELDS
from binade.data.text import number_text
from binade.quant.specs import Spec

OF = {RAW: "value", SIGMA: "value / σ of its tensor", SCALE: "value / scale of its block"}
WIDE, HIGH = 640, 120  # pixels of all columns of panels together, and of a panel
STRIP = 28  # pixels of a format
SMALL = 11  # the font size of a title that says more than a name


def magnitude(values: str) -> str:
    """The title of an axis of magnitudes."""
    name, _, of = OF[values].partition(" / ")
    return f"|{name}|{f' / {of}' if of else ''}"


def qq(
    found: QQ, title: str, by: str, groups: list[str], titles: tuple[str, str], looks: style.Looks | None = None
) -> alt.LayerChart | alt.FacetChart:
    """A Q–Q plot with its line of equal quantiles, cut off at `found.limit`: how many values lie beyond is written at
    the ends. titles: of the axes."""
    shown = found.points[found.points["sample"].abs() <= found.limit]
    ends = np.array([shown["theoretical"].min(), shown["theoretical"].max()]).clip(-found.limit, found.limit)
    line = alt.Chart(pd.DataFrame({"theoretical": ends, "sample": ends})).mark_line(**EQUAL, clip=True)
    tooltip = [alt.Tooltip("theoretical:Q", title=titles[0], format=".4~g")]
    tooltip += [alt.Tooltip("sample:Q", title=titles[1], format=".4~g")]
    tooltip += [alt.Tooltip("share:Q", title="values below", format=".4~%")]
    name = zlib.crc32(title.encode())
    x = alt.X("theoretical:Q", title=titles[0], scale=alt.Scale(nice=False, zero=False),
              axis=alt.Axis(tickCount=7, titleFontSize=SMALL))  # fmt: skip
    y = alt.Y(
        "sample:Q", title=titles[1], axis=alt.Axis(tickCount=6),
        scale=alt.Scale(domain=[-found.limit, found.limit] if (shown["sample"] < 0).any() else [0, found.limit]),
    )  # fmt: skip
    points = (
        alt.Chart(shown)
        .mark_point(filled=True, size=20, opacity=0.75, clip=True)
        .encode(
            x=x, y=y, color=style.color(groups, by, own=looks, place="top"),
            shape=style.shape(groups, by, "top", looks),
            tooltip=[alt.Tooltip("group:N", title=by), *tooltip] if len(groups) > 1 else tooltip,
        )
        .add_params(style.zoom(f"_{name:08x}"), style.only("group", chart=f"_{name:08x}"))
    )  # fmt: skip
    layers: list[alt.Chart] = [line.encode(x="theoretical:Q", y="sample:Q"), points]
    layers += _beyond(found, groups, by, looks)
    return alt.layer(*layers).properties(title=style.title(title, []))


def _beyond(found: QQ, groups: list[str], by: str, looks: style.Looks | None) -> list[alt.Chart]:
    """How many values of each group lie beyond the ends of the axis: written in the corners that quantiles, which rise,
    leave empty."""
    colors = dict(zip(groups, style.colors(groups, by, looks), strict=True))
    layers = []
    for sign, mark, place in ((0, "▲", "left"), (1, "▼", "right")):
        counts = [(group, found.beyond[group][sign]) for group in groups if found.beyond.get(group, (0, 0))[sign]]
        for index, (group, count) in enumerate(counts):
            text = f"{mark} {count:,} beyond {number_text(found.limit) if not sign else number_text(-found.limit)}"
            down = 8 + 14 * (index if not sign else len(counts) - 1 - index)
            look: dict[str, Any] = {
                "align": place, "fontSize": 11, "color": colors[group],
                "x": alt.ExprRef("width - 4") if place == "right" else 4,
                "y": down if not sign else alt.ExprRef(f"height - {down}"),
            }  # fmt: skip
            layers.append(alt.Chart(pd.DataFrame({"text": [text]})).mark_text(**look).encode(text="text:N"))
    return layers


def formats(found: Compared, title: str, ticked: Sequence[str] = ()) -> alt.LayerChart | alt.FacetChart:
    """One dot per operand and format, over its SQNR minus that of normal values, those of ticked tensors larger; the
    median as a line; at the right its absolute value and the bits of a value."""
    medians = found.medians
    order = medians["format"].tolist()
    low, high = _ends(medians)
    dots = found.dots.assign(
        at=found.dots["delta"].clip(low, high),
        shift=[zlib.crc32(f"{a}{b}".encode()) / 2**32 for a, b in zip(found.dots["tensor_id"], found.dots["gemm"],
                                                                       strict=True)],
    )  # fmt: skip
    layers = ["" if pd.isna(layer) else str(int(layer)) for layer in dots["layer_index"]]
    dots = dots.assign(tensor=dots["tensor_id"], layer=layers, ticked=dots["tensor_id"].isin(ticked))
    dots = dots.sort_values("ticked", kind="stable")
    axis = alt.Axis(ticks=False, domain=False, labelLimit=150, grid=False)
    y = alt.Y("format:N", sort=order, title=None, axis=axis, scale=alt.Scale(paddingInner=0.15, paddingOuter=0.1))
    x = alt.X("at:Q", title="SQNR minus that of normal values (dB)", scale=alt.Scale(domain=[low, high], nice=False),
              axis=alt.Axis(tickCount=8, labelExpr="datum.value ? format(datum.value, '+~g') : '0'",
                            titleFontSize=SMALL))  # fmt: skip
    present = sorted(set(dots["operation"].dropna()))
    scale = style.operation_scale(present)
    legend = alt.Legend(title=None, orient="top", offset=0) if len(present) > 1 else None
    tooltip = [
        alt.Tooltip(f"{name}:N", title=label)
        for name, label in (("layer", "layer"), ("module", "module"), ("tensor_name", "tensor"), ("gemm", "GEMM"))
    ]
    tooltip += [alt.Tooltip("sqnr_db:Q", title="SQNR (dB)", format=".1f")]
    tooltip += [alt.Tooltip("delta:Q", title="minus normal (dB)", format="+.1f")]
    zero = alt.Chart(pd.DataFrame({"at": [0.0]})).mark_rule(color=style.GREY, opacity=0.8).encode(x="at:Q")
    points = (
        alt.Chart(dots)
        .mark_circle(strokeWidth=1.5)
        .encode(
            opacity=alt.condition("datum.ticked", alt.value(1.0), alt.value(0.25 if len(ticked) else 0.55)),
            size=alt.condition("datum.ticked", alt.value(70), alt.value(22)),
            stroke=alt.condition("datum.ticked", alt.value(style.GREY), alt.value(None)),
            x=x, y=y, color=alt.Color("operation:N", scale=scale, legend=legend), tooltip=tooltip,
            yOffset=alt.YOffset("shift:Q", scale=alt.Scale(domain=[-0.25, 1.25])),
        )
        .add_params(style.choice("tensor"), style.drag())
    )  # fmt: skip
    texts = medians.assign(
        at=medians["delta"].clip(low, high),
        text=[f"{number_text(row['sqnr_db'])} dB median · {number_text(Spec.of(row['format']).bits_per_value)} bits"
              for row in medians.to_dict("records")],
    )  # fmt: skip
    base = alt.Chart(texts).encode(y=y)
    middle = base.mark_tick(thickness=3.5, size=STRIP - 8, color=style.GREY, opacity=1).encode(x=x)
    labels = base.mark_text(align="left", dx=10, fontSize=11.5, clip=False, color=style.GREY, x=alt.ExprRef("width"))
    drawn = alt.layer(zero, points, middle, labels.encode(text="text:N"))
    return drawn.properties(title=style.title(title, []), padding={"left": 5, "top": 5, "bottom": 5, "right": 5})


def _ends(medians: pd.DataFrame) -> tuple[float, float]:
    low, high = float(medians["low"].min()), float(medians["high"].max())
    if not np.isfinite([low, high]).all():
        return -1.0, 1.0
    return float(np.floor(min(low, 0.0))) - 0.5, float(np.ceil(max(high, 0.0))) + 0.5


def formats_height(found: Compared) -> int:
    """Pixels of the chart of formats, with its title and axis."""
    return 92 + STRIP * len(found.medians)


def panels(
    table: pd.DataFrame, by: Mapping[str, str], plot: str, values: str, title: str, titles: tuple[str, str],
    looks: style.Looks | None = None,
) -> alt.FacetChart:  # fmt: skip
    """Distributions ("histogram") or Q–Q plots ("qq") in panels with shared axes. table: with the columns rows, columns
    and group, the color; by: the field of each of these."""
    groups = style.groups_of(table)
    names = {
        place: {value: f"{TITLES[by[place]].lower()} {value}" for value in dict.fromkeys(table[place])}
        for place in ("rows", "columns") if by.get(place) in INTEGER_FIELDS
    }  # fmt: skip
    table = table.assign(**{place: table[place].map(found) for place, found in names.items()})
    by_color = TITLES[by["color"]].lower() if "color" in by else ""
    legend = style.legend(groups, by_color, line=True, place="top")
    colors, dashes = style.styles(groups, by_color, looks)
    color = alt.Color("group:N", scale=alt.Scale(domain=groups, range=colors), legend=legend)
    strokes = alt.Scale(domain=groups, range=[style.DASHES[n] for n in dashes])
    if plot == "qq":
        x, y = "theoretical:Q", "sample:Q"
        axis, number = alt.Axis(tickCount=4), alt.Axis(tickCount=3)
    else:
        x, y = "low:Q", "share:Q"
        titles = (magnitude(values), "share of values per binade")
        axis, number = style.binades(titles[0], 4), alt.Axis(format="~%", tickCount=3)
    tooltip = [alt.Tooltip(f"{place}:N", title=TITLES[name].lower()) for place, name in by.items() if place != "color"]
    tooltip += [alt.Tooltip("group:N", title=by_color)] * ("color" in by)
    tooltip += [
        alt.Tooltip(x, title=titles[0], format=".3~f"),
        alt.Tooltip(y, title=titles[1], format=".3~f" if plot == "qq" else ".3~p"),
    ]
    places = {
        "x": alt.X(x, title=titles[0], axis=axis, scale=alt.Scale(nice=False, zero=False)),
        "y": alt.Y(y, title=None if "rows" in by else titles[1], axis=number),  # once for all rows
    }
    lines = (
        alt.Chart()
        .mark_line(interpolate="linear" if plot == "qq" else "step-after", strokeWidth=1.4, clip=True)
        .encode(**places, color=color, tooltip=tooltip,
                strokeDash=alt.StrokeDash("group:N", scale=strokes, legend=legend))
    )  # fmt: skip
    ends = [float(end(table["theoretical"])) for end in (min, max)] if plot == "qq" else []
    equal = alt.Chart(pd.DataFrame({"theoretical": ends, "sample": ends}))
    layers = [equal.mark_line(**EQUAL, clip=True).encode(**places)] if ends else []
    count = table["columns"].nunique()
    panel = alt.layer(*layers, lines, data=table).properties(width=max(90, WIDE // count - 40), height=HIGH)

    def facet(place: str) -> dict[str, Any]:
        look: dict[str, Any] = {"title": None, "labelFontSize": 12, "labelFontWeight": "bold"}
        if place == "rows":
            look |= {"title": titles[1], "titleFontWeight": "normal", "labelOrient": "left", "labelAngle": 0}
        kind = {"rows": alt.Row, "columns": alt.Column}[place]
        sort = list(dict.fromkeys(table[place]))
        return (
            {place.removesuffix("s"): kind(f"{place}:O", header=alt.Header(**look), sort=sort)} if place in by else {}
        )

    drawn: alt.FacetChart = panel.facet(**facet("rows"), **facet("columns"), spacing={"row": 18, "column": 10})
    return drawn.properties(title=style.title(title, []))
