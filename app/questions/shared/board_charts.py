"""Parts of the charts that show a metric by tensor: bars, their axis, and the values as text."""

from __future__ import annotations

import math
from typing import Any, Literal

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.shared.boards import PLACE
from binade.data.evidence import Measure

BARS = 20  # of a ranking that are drawn


def with_labels(table: pd.DataFrame, measure: Measure) -> pd.DataFrame:
    """The table with figure (as drawn: percent, finite), label (as text) and, where there are low and high, figure_low
    and figure_high (missing for a single tensor), and between (as text)."""
    drawn = {
        name: (table[column] * measure.factor).where(table[column].abs() < math.inf)
        for name, column in (("figure", "value"), ("figure_low", "low"), ("figure_high", "high"))
        if column in table
    }
    if "figure_low" in drawn:
        several = table["tensors"] > 1
        drawn |= {name: drawn[name].where(several) for name in ("figure_low", "figure_high")}
        ends = zip(table["low"], table["high"], several, strict=True)
        texts = [f"{measure.text(a)} to {measure.text(b)}" if s else "" for a, b, s in ends]
        drawn["between"] = pd.Series(texts, table.index, dtype=object)
    return table.assign(**drawn, label=table["value"].map(measure.text))


def scale_type(shown: pd.DataFrame, measure: Measure) -> Literal["log", "linear"]:
    return "log" if measure.log and (shown["figure"].dropna() > 0).all() else "linear"


def color_scale(shown: pd.DataFrame, measure: Measure) -> alt.Scale:
    """The color scale of the column figure in a heatmap; brighter is worse."""
    ramp = style.RAMP[::-1] if measure.low_is_bad else style.RAMP
    if shown["figure"].nunique() < 2:
        middle = float(shown["figure"].mean()) if shown["figure"].notna().any() else 0.0
        return alt.Scale(range=ramp, domain=[middle - 1, middle + 1], interpolate="rgb", type="linear")
    return alt.Scale(range=ramp, interpolate="rgb", type=scale_type(shown, measure))


def bars(
    shown: pd.DataFrame, measure: Measure, y: str, order: list[str], color: Any, domain: list[float]
) -> alt.LayerChart:
    tooltip = [
        alt.Tooltip(f"{y}:N", title="tensor"),
        alt.Tooltip("operation:N", title="operation"),
        alt.Tooltip("label:N", title=measure.axis),
        *([alt.Tooltip("between:N", title="10th to 90th percentile")] if "between" in shown else []),
        alt.Tooltip("tensors:Q", title="tensors", format=","),
    ]
    end = shown["figure_high"].fillna(shown["figure"]) if "figure_high" in shown else shown["figure"]
    base = alt.Chart(shown.assign(end=end.fillna(0.0).clip(lower=0.0))).encode(
        y=style.names_axis(y, order), tooltip=tooltip
    )
    x = alt.X("figure:Q", title=measure.axis, scale=alt.Scale(domain=domain, nice=False), axis=alt.Axis(tickCount=5))
    choice = style.choice("tensor_id")
    bars = (
        base.mark_bar(size=15, cornerRadiusEnd=3, cursor="pointer")
        .encode(x=x, color=color, opacity=alt.condition(choice, alt.value(1.0), alt.value(0.35)))
        .add_params(choice, style.only(*(name for name in PLACE if name in shown)))
    )
    text = base.mark_text(align="left", dx=5, color=style.GREY, fontSize=12).encode(x="end:Q", text="label:N")
    layers: list[alt.Chart] = [bars, text]
    if "figure_low" in shown and shown["figure_low"].notna().any():
        layers.insert(1, whiskers(shown, alt.Y(f"{y}:N", sort=order)))
    result: alt.LayerChart = alt.LayerChart(layer=layers)
    return result


def whiskers(shown: pd.DataFrame, y: alt.Y, x: str = "figure") -> alt.Chart:
    """A thin line from the 10th to the 90th percentile of each bar's tensors, from columns X_low and X_high."""
    several = alt.Chart(shown.dropna(subset=[f"{x}_low", f"{x}_high"]))
    rule: alt.Chart = several.mark_rule(color=style.GREY, strokeWidth=1.5).encode(x=f"{x}_low:Q", x2=f"{x}_high:Q", y=y)
    return rule


LEGEND_LAYERS = 10


def layer_color(layers: list[int]) -> alt.Color:
    """The color of the column layer, for one line per layer: in the order of the layers, of which the legend names
    LEGEND_LAYERS at most."""
    scale = alt.Scale(domain=layers, range=style.ordered_colors(len(layers)))
    named = layers[:: -(-len(layers) // LEGEND_LAYERS)]
    legend = alt.Legend(title="layer", orient="right", symbolType="stroke", values=named)
    return alt.Color("layer:O", scale=scale, legend=legend if len(layers) > 1 else None)


def with_layer_names(lines: alt.Chart, layers: list[int]) -> alt.Chart | alt.LayerChart:
    """`style.labelled` for one line per layer."""
    return style.labelled(lines, layers, {layer: f"layer {layer}" for layer in layers})


def axis_domain(figures: pd.Series, measure: Measure) -> list[float]:
    """From 0, with room for the labels of the bars, but no share above 100%."""
    low, high = figures.min(), figures.max()
    low = min(float(low), 0.0) if pd.notna(low) else 0.0
    high = max(float(high), 0.0) if pd.notna(high) else 0.0
    end = high * 1.3 if high > low else low + 1.0
    return [low * 1.1, min(end, 100.0) if measure.unit == "%" else end]


def ranking(table: pd.DataFrame, measure: Measure, title: str, subtitle: str | list[str]) -> alt.LayerChart:
    """The first BARS rows of `boards.ranking` as bars, worst at the top, colored by operation."""
    shown = with_labels(table.head(BARS), measure)
    scale = style.operation_scale(shown["operation"])
    legend = alt.Legend(title=None, orient="top", offset=0) if shown["operation"].nunique() > 1 else None
    color = alt.Color("operation:N", scale=scale, legend=legend)
    chart = bars(shown, measure, "place", shown["place"].tolist(), color, axis_domain(shown["figure"], measure))
    return chart.properties(title=style.title(title, subtitle))


def ranking_height(table: pd.DataFrame) -> int:
    """Height of a ranking in pixels."""
    return 150 + 24 * min(len(table), BARS)


def by_iteration(
    table: pd.DataFrame, measure: Measure, title: str, subtitle: str | list[str]
) -> alt.Chart | alt.LayerChart:
    """Chart of values by iteration and layer: one line per layer, in the order of their colors."""
    shown = with_labels(table, measure).dropna(subset=["figure"])
    shown["layer"] = shown["layer_index"].astype(int)
    layers = sorted(shown["layer"].unique().tolist())
    choice = style.choice("tensor_id")
    kind = scale_type(shown, measure)
    y_scale = alt.Scale(type="log") if kind == "log" else alt.Scale(zero=False)
    x_axis = alt.Axis(tickMinStep=1, format="d")
    lines: alt.Chart = (
        alt.Chart(shown)
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=45, cursor="pointer"))
        .encode(
            x=alt.X("iteration:Q", title="iteration", axis=x_axis, scale=alt.Scale(nice=False, padding=16)),
            y=alt.Y("figure:Q", title=measure.axis, scale=y_scale),
            color=layer_color(layers),
            tooltip=[
                alt.Tooltip("layer:O", title="layer"),
                alt.Tooltip("iteration:Q", title="iteration"),
                alt.Tooltip("label:N", title=measure.axis),
                alt.Tooltip("tensors:Q", title="tensors", format=","),
            ],
        )
        .add_params(choice, style.only("layer_index"))
        .properties(title=style.title(title, subtitle))
    )
    return with_layer_names(lines, layers)
