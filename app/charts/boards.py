"""Where it hurts: ranked bars, depth, training, forward against backward. Each mark of a chart can be chosen: its
tensor is the field tensor_id of the selection."""

from __future__ import annotations

import math

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.style import Measure

BARS = 20  # of a ranking that are drawn


def _shown(table: pd.DataFrame, measure: Measure) -> pd.DataFrame:
    """The table with figure (as drawn: percent, finite) and label (as text)."""
    figure = (table["value"] * measure.factor).where(table["value"].abs() < math.inf)
    return table.assign(figure=figure, label=table["value"].map(measure.text))


def _scale_type(shown: pd.DataFrame, measure: Measure) -> str:
    return "log" if measure.log and (shown["figure"].dropna() > 0).all() else "linear"


def _bars(
    shown: pd.DataFrame, measure: Measure, y: str, order: list[str], color: str | alt.Color, domain: list[float]
) -> alt.LayerChart:
    tooltip = [
        alt.Tooltip(f"{y}:N", title="tensor"),
        alt.Tooltip("operation:N", title="operation"),
        alt.Tooltip("label:N", title=measure.axis),
        alt.Tooltip("tensors:Q", title="tensors", format=","),
    ]
    base = alt.Chart(shown.assign(end=shown["figure"].fillna(0.0))).encode(
        y=alt.Y(f"{y}:N", title=None, sort=order, axis=alt.Axis(ticks=False, domain=False, labelLimit=240)),
        tooltip=tooltip,
    )
    x = alt.X("figure:Q", title=measure.axis, scale=alt.Scale(domain=domain, nice=False), axis=alt.Axis(tickCount=5))
    choice = style.choice("tensor_id")
    bars = (
        base.mark_bar(size=15, cornerRadiusEnd=3, cursor="pointer")
        .encode(x=x, color=color, opacity=alt.condition(choice, alt.value(1.0), alt.value(0.35)))
        .add_params(choice)
    )
    text = base.mark_text(align="left", dx=5, color=style.GREY, fontSize=12).encode(x="end:Q", text="label:N")
    return bars + text


def _domain(figures: pd.Series) -> list[float]:
    low, high = figures.min(), figures.max()
    low = min(float(low), 0.0) if pd.notna(low) else 0.0
    high = max(float(high), 0.0) if pd.notna(high) else 0.0
    return [low * 1.1, high * 1.18 if high > low else low + 1.0]


def ranking(table: pd.DataFrame, measure: Measure, title: str, subtitle: str | list[str]) -> alt.LayerChart:
    """Of analysis.boards.ranking: its first BARS rows, worst at the top, coloured by operation."""
    shown = _shown(table.head(BARS), measure)
    names = [name for name in style.OPERATIONS if name in set(shown["operation"])]
    scale = alt.Scale(domain=names, range=[style.OPERATIONS[name] for name in names])
    legend = alt.Legend(title=None, orient="top", offset=0) if len(names) > 1 else None
    color = alt.Color("operation:N", scale=scale, legend=legend)
    chart = _bars(shown, measure, "place", shown["place"].tolist(), color, _domain(shown["figure"]))
    return chart.properties(title=style.title(title, subtitle))


def ranking_height(table: pd.DataFrame) -> int:
    """Pixels that a ranking needs."""
    return 150 + 24 * min(len(table), BARS)


def direction(
    table: pd.DataFrame, measure: Measure, operation: str, subtitle: str | list[str], everything: pd.DataFrame
) -> alt.LayerChart:
    """One operation of analysis.boards.directions; the axis is that of both, so that the two can be read across."""
    shown = _shown(table[table["operation"] == operation].head(BARS), measure)
    domain = _domain(_shown(everything, measure)["figure"])
    color = alt.value(style.OPERATIONS.get(operation, style.GREY))
    chart = _bars(shown, measure, "row", shown["row"].tolist(), color, domain)
    return chart.properties(title=style.title(operation.capitalize(), subtitle))


def depth(table: pd.DataFrame, measure: Measure, title: str, subtitle: str | list[str]) -> alt.LayerChart:
    """Of analysis.boards.depth: tensor by layer, bright where it is bad; figures in the cells where they have room."""
    shown = _shown(table, measure)
    shown["layer"] = shown["layer_index"].astype(int)
    order = sorted(set(shown["row"]), key=lambda row: (row.split()[-1].startswith("grad"), row))
    ramp = style.RAMP[::-1] if measure.low_is_bad else style.RAMP
    scale = alt.Scale(range=ramp, interpolate="rgb", type=_scale_type(shown, measure))
    if shown["figure"].nunique() < 2:
        middle = float(shown["figure"].mean()) if shown["figure"].notna().any() else 0.0
        scale = alt.Scale(range=ramp, domain=[middle - 1, middle + 1], interpolate="rgb", type="linear")
    choice = style.choice("tensor_id")
    base = alt.Chart(shown).encode(
        x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, orient="top", labelOverlap=True)),
        y=alt.Y("row:N", title=None, sort=order, axis=alt.Axis(labelLimit=240, ticks=False, domain=False)),
        tooltip=[
            alt.Tooltip("row:N", title="tensor"),
            alt.Tooltip("layer:O", title="layer"),
            alt.Tooltip("operation:N", title="operation"),
            alt.Tooltip("label:N", title=measure.axis),
            alt.Tooltip("tensors:Q", title="tensors", format=","),
        ],
    )
    legend = alt.Legend(title=measure.axis, orient="right", gradientLength=180)
    cells = (
        base.mark_rect(cursor="pointer", stroke="#8884", strokeWidth=0.5)
        .encode(
            color=alt.Color("figure:Q", scale=scale, legend=legend),
            opacity=alt.condition(choice, alt.value(1.0), alt.value(0.35)),
        )
        .add_params(choice)
    )
    layers = [cells]
    if shown["layer"].nunique() <= 12:
        figures = alt.Chart(shown.assign(ink=_ink(shown["figure"], measure, scale))).mark_text(fontSize=11)
        layers.append(
            figures.encode(
                x=alt.X("layer:O"), y=alt.Y("row:N", sort=order), text="label:N", color=alt.Color("ink:N", scale=None)
            )
        )
    return alt.layer(*layers).resolve_scale(color="independent").properties(title=style.title(title, subtitle))


def _ink(figure: pd.Series, measure: Measure, scale: alt.Scale) -> pd.Series:
    """Black on the ramp's bright end, white on the rest."""
    value = np.log(figure) if scale["type"] == "log" else figure
    low, high = value.min(), value.max()
    place = (value - low) / (high - low) if high > low else value * 0 + 0.5
    bright = 1 - place if measure.low_is_bad else place
    return bright.fillna(1.0).map(lambda b: "#10131a" if b > 0.55 else "#ffffff")


def depth_height(table: pd.DataFrame) -> int:
    """Pixels that a depth chart needs."""
    return 150 + 22 * table["row"].nunique()


def training(table: pd.DataFrame, measure: Measure, title: str, subtitle: str | list[str]) -> alt.Chart:
    """Of analysis.boards.training: a line a layer, in the order of their colours."""
    shown = _shown(table, measure).dropna(subset=["figure"])
    shown["layer"] = shown["layer_index"].astype(int)
    layers = sorted(shown["layer"].unique().tolist())
    scale = alt.Scale(domain=layers, range=style.ordered_colors(len(layers)))
    legend = alt.Legend(title="layer", orient="right", symbolType="stroke", columns=-(-len(layers) // 16))
    choice = style.choice("tensor_id")
    kind = _scale_type(shown, measure)
    y_scale = alt.Scale(type="log") if kind == "log" else alt.Scale(zero=False)
    x_axis = alt.Axis(tickMinStep=1, format="d")
    return (
        alt.Chart(shown)
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=45, cursor="pointer"))
        .encode(
            x=alt.X("iteration:Q", title="iteration", axis=x_axis, scale=alt.Scale(nice=False, padding=16)),
            y=alt.Y("figure:Q", title=measure.axis, scale=y_scale),
            color=alt.Color("layer:O", scale=scale, legend=legend if len(layers) > 1 else None),
            tooltip=[
                alt.Tooltip("layer:O", title="layer"),
                alt.Tooltip("iteration:Q", title="iteration"),
                alt.Tooltip("label:N", title=measure.axis),
                alt.Tooltip("tensors:Q", title="tensors", format=","),
            ],
        )
        .add_params(choice)
        .properties(title=style.title(title, subtitle))
    )
