"""Predicted loss change against SQNR."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.shared.board_charts import with_labels
from binade.app.style import MEASURES
from binade.data.evidence import Measure


def scatter(table: pd.DataFrame, measure: Measure, title: str, subtitle: str | list[str]) -> alt.LayerChart:
    """Chart of compute.costs: one point per place, with its 95% interval where there are several sequences."""
    sqnr = MEASURES["sqnr_db"]
    shown = with_labels(table, measure).rename(columns={"tensor_name": "group"}).dropna(subset=["figure"])
    shown = shown[shown["sqnr_db"].abs() < float("inf")]
    shown = shown.assign(
        low=shown["figure"] - shown["margin"], high=shown["figure"] + shown["margin"],
        decibels=shown["sqnr_db"].map(sqnr.text),
    )  # fmt: skip
    groups = sorted(set(shown["group"].dropna()))
    choice = style.choice("tensor_id")
    x = alt.X(
        "sqnr_db:Q", title=sqnr.axis, scale=alt.Scale(zero=False, nice=False, padding=16), axis=alt.Axis(tickCount=8)
    )
    base = alt.Chart(shown).encode(x=x)
    zero = alt.Chart(pd.DataFrame({"zero": [0]})).mark_rule(color=style.GREY, strokeDash=[4, 3]).encode(y="zero:Q")
    spread = (
        alt.Chart(shown.dropna(subset=["low"]))
        .mark_rule(opacity=0.5)
        .encode(
            x=x,
            y=alt.Y("low:Q", title=measure.axis),
            y2="high:Q",
            color=style.color(groups, "tensor"),
        )
    )
    points = (
        base.mark_point(filled=True, size=70, cursor="pointer")
        .encode(
            y=alt.Y("figure:Q", title=measure.axis),
            color=style.color(groups, "tensor"),
            shape=style.shape(groups, "tensor"),
            opacity=alt.condition(choice, alt.value(0.9), alt.value(0.3)),
            tooltip=[
                alt.Tooltip("place:N", title="tensor"),
                alt.Tooltip("label:N", title=measure.axis),
                alt.Tooltip("decibels:N", title=sqnr.axis),
                alt.Tooltip("rank:Q", title="rank by loss"),
                alt.Tooltip("sqnr_rank:Q", title="rank by SQNR"),
                alt.Tooltip("micro_batches:Q", title="micro-batches"),
            ],
        )
        .add_params(choice)
    )
    chart = zero + spread + points
    result: alt.LayerChart = chart.properties(title=style.title(title, subtitle))
    return result
