"""A metric by tensor and layer, as a heatmap with values in its cells."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.questions.shared.board_charts import color_scale, with_labels
from binade.app.questions.shared.boards import PLACE
from binade.data.evidence import Measure


def by_layer(table: pd.DataFrame, measure: Measure, title: str, subtitle: str | list[str]) -> alt.LayerChart:
    """Tensor by layer, brighter is worse; cells show their figure if it fits."""
    shown = with_labels(table, measure)
    shown["layer"] = shown["layer_index"].astype(int)
    order = sorted(set(shown["row"]), key=lambda row: (row.split()[-1].startswith("grad"), row))
    scale = color_scale(shown, measure)
    choice = style.choice("tensor_id")
    base = alt.Chart(shown).encode(
        x=alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, orient="top", labelOverlap=True)),
        y=style.names_axis("row", order),
        tooltip=[
            alt.Tooltip("row:N", title="tensor"),
            alt.Tooltip("layer:O", title="layer"),
            alt.Tooltip("operation:N", title="operation"),
            alt.Tooltip("label:N", title=measure.axis),
            alt.Tooltip("tensors:Q", title="tensors", format=","),
        ],
    )
    legend = alt.Legend(title=measure.axis, orient="right", gradientLength=min(180, _cells(table) - 30))
    over, crossed = style.crosshair("row", "layer")
    cells = (
        base.mark_rect(cursor="pointer", stroke=style.GREY)
        .encode(
            color=alt.Color("figure:Q", scale=scale, legend=legend),
            opacity=alt.condition(choice, alt.value(1.0), alt.value(0.35)),
            **crossed,
        )
        .add_params(*over, choice, style.only(*PLACE))
    )
    layers = [cells]
    if shown["layer"].nunique() <= 12:
        figures = alt.Chart(shown.assign(ink=_ink(shown["figure"], measure, scale))).mark_text(fontSize=11)
        layers.append(
            figures.encode(
                x=alt.X("layer:O"), y=alt.Y("row:N", sort=order), text="label:N", color=alt.Color("ink:N", scale=None)
            )
        )
    result: alt.LayerChart = (
        alt.layer(*layers).resolve_scale(color="independent").properties(title=style.title(title, subtitle))
    )
    return result


def _ink(figure: pd.Series, measure: Measure, scale: alt.Scale) -> pd.Series:
    """Black on the ramp's bright end, white on the rest."""
    value = np.log(figure) if scale["type"] == "log" else figure
    low, high = value.min(), value.max()
    place = (value - low) / (high - low) if high > low else value * 0 + 0.5
    bright = 1 - place if measure.low_is_bad else place
    return bright.fillna(1.0).map(lambda b: "#10131a" if b > 0.55 else "#ffffff")


def height(table: pd.DataFrame) -> int:
    """Pixels that the chart needs."""
    return 150 + _cells(table)


def _cells(table: pd.DataFrame) -> int:
    """Pixels of all rows together: at least as many as the legend beside them needs."""
    return max(22 * table["row"].nunique(), 110)
