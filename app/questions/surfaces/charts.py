"""Heatmaps of layer by iteration."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.shared import event_marks
from binade.app.questions.shared.board_charts import color_scale, with_labels
from binade.data.evidence import Measure


def surface(table: pd.DataFrame, measure: Measure, events: pd.DataFrame, title: str, subtitle: str) -> alt.LayerChart:
    """Draws compute.surface of one run: brighter is worse, and overflow is red."""
    shown = with_labels(table, measure)
    paint = _paint("figure:Q", color_scale(shown, measure), measure.axis)
    tooltip = [
        alt.Tooltip("label:N", title=measure.axis),
        alt.Tooltip("tensors:Q", title="tensors", format=","),
    ]
    layers = [_cells(shown.dropna(subset=["figure"]), paint, tooltip)]
    overflow = shown[shown["value"] == -float("inf")]
    if len(overflow):
        layers.append(_cells(overflow, dict.fromkeys(("color", "stroke"), alt.value(style.BAD)), tooltip))
    return _with_events(layers, events, title, subtitle)


def difference(
    table: pd.DataFrame, measure: Measure, names: tuple[str, str], events: pd.DataFrame, title: str, subtitle: str
) -> alt.LayerChart:
    """Chart of compute.difference: red where the first run is worse, blue where the other is."""
    shown = table.dropna(subset=["change"])
    shown = shown.assign(label=shown["value"].map(measure.text), other_label=shown["other"].map(measure.text))
    most = float(shown["change"].abs().max()) or 1.0
    ramp = style.DIVERGING[::-1] if measure.low_is_bad else style.DIVERGING
    axis = "log₂ ratio" if measure.log else f"difference ({measure.unit})" if measure.unit else "difference"
    scale = alt.Scale(range=ramp, domain=[-most, most], interpolate="rgb")
    tooltip = [
        alt.Tooltip("change:Q", title=axis, format="+.3g"),
        alt.Tooltip("label:N", title=names[0]),
        alt.Tooltip("other_label:N", title=names[1]),
    ]
    cells = _cells(shown, _paint("change:Q", scale, axis), tooltip)
    return _with_events([cells], events, title, subtitle)


def height(layers: int) -> int:
    """Pixels that a surface needs."""
    return 130 + min(max(16 * layers, 120), 620)


def _paint(field: str, scale: alt.Scale, title: str) -> dict[str, Any]:
    """The color of cells; their strokes cover the seams between them. With `fill` in place of `color`, Vega-Lite would
    merge the legends of both and draw circles in place of a color bar."""
    legend = alt.Legend(title=title, orient="right", gradientLength=100)
    color = alt.Color(field, scale=scale, legend=legend)
    return {"color": color, "stroke": alt.Stroke(field, scale=scale, legend=None)}


def _cells(shown: pd.DataFrame, paint: dict[str, Any], tooltip: list[alt.Tooltip]) -> alt.Chart:
    shown = shown.assign(
        layer=shown["layer_index"].astype(int), start=shown["iteration"] - 0.5, end=shown["last"] + 0.5
    )
    choice = style.choice("tensor_id")
    where = [
        alt.Tooltip("layer:O"),
        alt.Tooltip("first_measured:Q", title="from iteration"),
        alt.Tooltip("last_measured:Q", title="to"),
    ]
    # The last cell is as wide as the others, and may reach beyond the last iteration.
    label = f"datum.value > {shown['last_measured'].max()} ? '' : datum.label"
    over, crossed = style.crosshair("layer", "start", fade=True)
    result: alt.Chart = (
        alt.Chart(shown)
        .mark_rect(cursor="pointer", strokeWidth=0.8)
        .encode(
            x=alt.X(
                "start:Q", title="iteration", axis=alt.Axis(tickMinStep=1, format="d", labelExpr=label), scale=_FIT
            ),
            x2="end:Q",
            y=alt.Y("layer:O", title="layer", axis=alt.Axis(labelOverlap=True, ticks=False, domain=False)),
            **paint,
            **crossed,
            tooltip=[*where, *tooltip],
        )
        .add_params(*over, choice, style.only("layer_index"))
    )
    return result


_FIT = alt.Scale(nice=False, zero=False)


def _with_events(layers: list[alt.Chart], events: pd.DataFrame, title: str, subtitle: str) -> alt.LayerChart:
    rules = event_marks.rules(events, color=style.BAD)
    marks = [rules.mark_rule(color="white", opacity=0.6, strokeWidth=3), rules] if len(events) else []
    result: alt.LayerChart = (
        alt.layer(*layers, *marks).resolve_scale(stroke="independent").properties(title=style.title(title, subtitle))
    )
    return result
