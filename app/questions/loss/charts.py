"""Predicted loss change against SQNR."""

from __future__ import annotations

import pandas as pd

from binade.app import plot, style
from binade.app.figure import Chart
from binade.app.questions.shared.board_charts import with_labels
from binade.app.style import MEASURES
from binade.data.evidence import Measure


def scatter(table: pd.DataFrame, measure: Measure, title: str, subtitle: str | list[str]) -> Chart:
    """Chart of compute.costs: one point per place, with its 95% interval where there are several sequences."""
    shown = with_labels(table, measure).rename(columns={"tensor_name": "group"}).dropna(subset=["figure"])
    shown = shown[shown["sqnr_db"].abs() < float("inf")]
    shown = shown.assign(low=shown["figure"] - shown["margin"], high=shown["figure"] + shown["margin"])
    groups = sorted(set(shown["group"].dropna()))
    color = style.color(groups, "tensor")
    x = plot.x("sqnr_db", MEASURES["sqnr_db"].axis, {"tickCount": 8}, zero=False, nice=False, padding=16)
    tips = plot.tips(
        place="tensor", label=measure.axis, sqnr_db=MEASURES["sqnr_db"], rank="rank by loss",
        sqnr_rank="rank by SQNR", micro_batches="micro-batches",
    )  # fmt: skip
    points = plot.mark(
        "point", shown, x=x, y=plot.y("figure", measure.axis), color=color, shape=style.shape(groups, "tensor"),
        tips=tips, choose="tensor_id", fade=(0.9, 0.3),
    )  # fmt: skip
    spread = plot.intervals(shown, "low", "high", x=x, color=color, opacity=0.5)
    return plot.layers(title, subtitle, plot.rule(y=0, strokeDash=[4, 3]), spread, points)
