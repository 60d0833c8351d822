"""Bias and variance of gradients by layer."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style


def by_layer(table: pd.DataFrame, title: str, subtitle: str) -> alt.LayerChart:
    """Chart of twin.by_layer: a line for the bias and one for √variance, with 95% intervals."""
    groups = style.groups_of(table)
    x = alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0, labelOverlap=True))
    color = style.color(groups, "", line=True)
    name = f"{' and '.join(group.lower() for group in groups)}, relative to the norm (%)"
    lines = (
        alt.Chart(table)
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=45))
        .encode(
            x=x,
            y=alt.Y("value:Q", title=name, scale=alt.Scale(zero=True)),
            color=color,
            tooltip=[
                alt.Tooltip("layer:O", title="layer"),
                alt.Tooltip("group:N", title="measure"),
                alt.Tooltip("text:N", title="value"),
            ],
        )
    )
    known = alt.Chart(table.dropna(subset=["low", "high"]))
    rules = known.mark_rule(opacity=0.5).encode(x=x, y=alt.Y("low:Q", title=name), y2="high:Q", color=color)
    result: alt.LayerChart = (rules + lines).properties(title=style.title(title, subtitle))
    return result
