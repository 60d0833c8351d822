"""Errors of GEMM results by layer, and compared with the prediction from their operands."""

from __future__ import annotations

import pandas as pd

from binade.app import plot, style
from binade.app.figure import Chart
from binade.app.questions.results.compute import GEMMS


def against(table: pd.DataFrame, title: str, subtitle: str) -> Chart:
    """Chart of compute.by_product: measured against predicted SQNR, one point per layer, module and GEMM; on the line
    both are equal."""
    shown = table.rename(columns={"gemm": "group"}).dropna(subset=["operands_db"])
    shown = shown[shown["operands_db"].abs() < float("inf")]
    known = shown[["operands_db", "result_db"]]
    groups = [name for name in GEMMS if name in set(shown["group"])]
    scales: list[plot.Look] = [
        {"domain": [known[name].min() - 1, known[name].max() + 1], "nice": False, "zero": False} for name in known
    ]
    tips = plot.tips(
        place="product", group="GEMM", result_db=("result (dB)", ".1f"), operands_db=("predicted (dB)", ".1f"),
        results=("results", ","),
    )  # fmt: skip
    points = plot.mark(
        "point", shown, color=style.color(groups, "GEMM"), shape=style.shape(groups, "GEMM"), tips=tips,
        x=plot.x("operands_db", "predicted from the operands (dB)", {"tickCount": 8}, **scales[0]),
        y=plot.y("result_db", "SQNR of the result (dB)", **scales[1]),
        choose="tensor_id", fade=(0.9, 0.3),
    )  # fmt: skip
    line = plot.diagonal(float(known.min().min()), float(known.max().max()), clip=True)
    return plot.layers(title, subtitle, line, points)
