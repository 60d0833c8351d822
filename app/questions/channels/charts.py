"""Which channels are hot in which iteration."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style

MOST = 60  # iterations that are drawn


def history(table: pd.DataFrame, title: str, subtitle: str) -> alt.Chart:
    """Chart of compute.channel_history: one line per channel, those that are hot most often at the top."""
    iterations = sorted(table["iteration"].unique())
    step = -(-len(iterations) // MOST)
    shown = table[table["iteration"].isin(iterations[::step])]
    order = table.sort_values(["of_all", "channel"], ascending=[False, True])["channel"].unique().tolist()
    several = (shown["share"] < 1).any()
    ramp = alt.Color(
        "share:Q",
        scale=alt.Scale(range=style.RAMP, domain=[0, 1], interpolate="rgb"),
        legend=alt.Legend(title="share of tensors", format=".0%", gradientLength=150),
    )
    over, crossed = style.crosshair("channel", "iteration")
    result: alt.Chart = (
        alt.Chart(shown)
        .mark_rect(stroke="#8884")
        .encode(
            x=alt.X("iteration:O", title="iteration", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("channel:O", title="channel", sort=order, axis=alt.Axis(labelOverlap=False)),
            color=ramp if several else alt.value(style.FINE),
            **crossed,
            tooltip=[
                alt.Tooltip("channel:O", title="channel"),
                alt.Tooltip("iteration:O", title="iteration"),
                alt.Tooltip("share:Q", title="share of tensors", format=".0%"),
                alt.Tooltip("of_all:Q", title="share over all iterations", format=".0%"),
            ],
        )
        .add_params(*over)
        .properties(title=style.title(title, subtitle))
    )
    return result
