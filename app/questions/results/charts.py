"""Errors of GEMM results by layer, and compared with the prediction from their operands."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.results.compute import GEMMS


def against(table: pd.DataFrame, title: str, subtitle: str) -> alt.LayerChart:
    """Chart of compute.by_product: measured against predicted SQNR, one point per layer, module and GEMM; on the line
    both are equal."""
    shown = table.rename(columns={"gemm": "group"}).dropna(subset=["operands_db"])
    shown = shown[shown["operands_db"].abs() < float("inf")]
    known = shown[["operands_db", "result_db"]]
    ends = pd.DataFrame({"at": [float(known.min().min()), float(known.max().max())]})
    scales = [
        alt.Scale(domain=[known[name].min() - 1, known[name].max() + 1], nice=False, zero=False) for name in known
    ]
    groups = [name for name in GEMMS if name in set(shown["group"])]
    line = alt.Chart(ends).mark_line(color=style.GREY, strokeDash=[4, 3], clip=True)
    choice, ticks = style.choice("tensor_id"), alt.Axis(tickCount=8)
    points = (
        alt.Chart(shown)
        .mark_point(filled=True, size=70, cursor="pointer")
        .encode(
            x=alt.X("operands_db:Q", title="predicted from the operands (dB)", scale=scales[0], axis=ticks),
            y=alt.Y("result_db:Q", title="SQNR of the result (dB)", scale=scales[1]),
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
