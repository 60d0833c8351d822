"""What HiFloat8 makes of values of different sizes."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.analysis import hifp8
from binade.app.charts.tensor import TIER_COLORS

COLORS = {
    hifp8.CLIPPED: style.CLIPPED,
    hifp8.THREE: TIER_COLORS["3 mantissa bits"],
    hifp8.TWO: TIER_COLORS["2 mantissa bits"],
    hifp8.ONE: TIER_COLORS["1 mantissa bit"],
    hifp8.DENORMAL: "#db9a3a",
    hifp8.FLUSHED: style.BAD,
    hifp8.ZERO: style.GREY,
}


def precisions(table: pd.DataFrame, subtitle: str | list[str]) -> alt.Chart:
    """Of analysis.hifp8.precisions: a bar a group, divided by the precision that its values get."""
    shown = table.assign(order=table["precision"].map({name: index for index, name in enumerate(COLORS)}))
    names = [name for name in COLORS if shown.loc[shown["precision"] == name, "count"].any()]
    scale = alt.Scale(domain=names, range=[COLORS[name] for name in names])
    return (
        alt.Chart(shown[shown["count"] > 0])
        .mark_bar(size=18)
        .encode(
            x=alt.X(
                "share:Q",
                title="share of the finite values",
                stack="zero",
                axis=alt.Axis(format="~%", tickCount=5),
                scale=alt.Scale(domain=[0, 1], nice=False),
            ),
            y=alt.Y(
                "group:N",
                title=None,
                sort=style.groups_of(table),
                axis=alt.Axis(ticks=False, domain=False, labelLimit=240),
            ),
            color=alt.Color(
                "precision:N", scale=scale, legend=alt.Legend(title=None, orient="bottom", columns=4, labelLimit=160)
            ),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("group:N", title="group"),
                alt.Tooltip("precision:N", title="precision"),
                alt.Tooltip("share:Q", title="share of the values", format=".3~p"),
                alt.Tooltip("count:Q", title="values", format=","),
            ],
        )
        .properties(title=style.title("Precision that HiFloat8 gives", subtitle))
    )


def precisions_height(table: pd.DataFrame) -> int:
    """Pixels that the bars need."""
    return 175 + 28 * table["group"].nunique()
