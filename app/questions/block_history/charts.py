"""Distributions over blocks by iteration or layer."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.shared.board_charts import layer_color, with_layer_names

MOST = 60  # columns of a heatmap


def distribution(table: pd.DataFrame, by: str, word: str, axis: str, title: str, subtitle: str) -> alt.LayerChart:
    """Chart of compute.shares: a column for each value of `by`, its blocks by bin."""
    values = sorted(table[by].unique())
    step = -(-len(values) // MOST)
    shown = table[table[by].isin(values[::step])].astype({by: int})
    scale = alt.Scale(range=style.RAMP, interpolate="rgb", type="sqrt")
    over, crossed = style.crosshair("low", by, fade=True)
    cells = (
        alt.Chart(shown)
        .mark_rect(strokeWidth=0.8)
        .encode(
            x=alt.X(f"{by}:O", title=word, axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("low:Q", title=axis, scale=alt.Scale(zero=False, nice=False), bin="binned"),
            y2="high:Q",
            color=alt.Color(
                "share:Q",
                scale=scale,
                legend=alt.Legend(title="share of blocks", format=".0%", gradientLength=180),
            ),
            stroke=alt.Stroke("share:Q", scale=scale, legend=None),  # covers the seams between cells
            **crossed,
            tooltip=[
                alt.Tooltip(f"{by}:O", title=word),
                alt.Tooltip("low:Q", title=f"{axis}, from"),
                alt.Tooltip("high:Q", title="to"),
                alt.Tooltip("share:Q", title="share of blocks", format=".2%"),
                alt.Tooltip("count:Q", title="blocks", format=","),
            ],
        )
        .add_params(*over)
    )
    result: alt.LayerChart = alt.layer(cells).resolve_scale(stroke="independent")
    return result.properties(title=style.title(title, subtitle))


def lines(table: pd.DataFrame, column: str, axis: str, title: str, subtitle: str) -> alt.Chart | alt.LayerChart:
    """Chart of compute.summary by iteration and layer: one of its columns by iteration, one line per layer."""
    shown = table.assign(layer=table["layer_index"].astype(int))
    layers = sorted(shown["layer"].unique().tolist())
    drawn: alt.Chart = (
        alt.Chart(shown)
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=45))
        .encode(
            x=alt.X("iteration:Q", title="iteration", axis=alt.Axis(tickMinStep=1, format="d")),
            y=alt.Y(f"{column}:Q", title=axis, scale=alt.Scale(zero=False)),
            color=layer_color(layers),
            tooltip=[
                alt.Tooltip("layer:O", title="layer"),
                alt.Tooltip("iteration:Q", title="iteration"),
                alt.Tooltip(f"{column}:Q", title=axis, format=".3g"),
                alt.Tooltip("blocks:Q", title="blocks", format=","),
            ],
        )
        .properties(title=style.title(title, subtitle))
    )
    return with_layer_names(drawn, layers)
