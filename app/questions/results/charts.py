"""Errors of GEMM results by layer, and against what their operands predict."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.results.compute import GEMMS


def against(table: pd.DataFrame, title: str, subtitle: str) -> alt.LayerChart:
    """Of compute.results: measured against predicted SQNR, a point a product and GEMM; on the line both are equal."""
    shown = table.rename(columns={"gemm": "group"}).dropna(subset=["operands_db"])
    shown = shown[shown["operands_db"].abs() < float("inf")]
    low = float(shown[["operands_db", "result_db"]].min().min())
    high = float(shown[["operands_db", "result_db"]].max().max())
    scale = alt.Scale(domain=[low - 1, high + 1], nice=False, zero=False)
    groups = [name for name in GEMMS if name in set(shown["group"])]
    line = alt.Chart(pd.DataFrame({"at": [low - 1, high + 1]})).mark_line(color=style.GREY, strokeDash=[4, 3])
    choice = style.choice("tensor_id")
    points = (
        alt.Chart(shown)
        .mark_point(filled=True, size=70, cursor="pointer")
        .encode(
            x=alt.X("operands_db:Q", title="predicted from the operands (dB)", scale=scale),
            y=alt.Y("result_db:Q", title="SQNR of the result (dB)", scale=scale),
            color=style.color(groups, "GEMM"),
            shape=style.shape(groups, "GEMM"),
            opacity=alt.condition(choice, alt.value(0.9), alt.value(0.3)),
            tooltip=[
                alt.Tooltip("place:N", title="product"),
                alt.Tooltip("group:N", title="GEMM"),
                alt.Tooltip("result_db:Q", title="result (dB)", format=".1f"),
                alt.Tooltip("operands_db:Q", title="predicted (dB)", format=".1f"),
                alt.Tooltip("results:Q", title="results", format=","),
            ],
        )
        .add_params(choice)
    )
    result: alt.LayerChart = (line.encode(x="at:Q", y="at:Q") + points).properties(title=style.title(title, subtitle))
    return result
