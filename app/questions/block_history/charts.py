"""Distributions over blocks by iteration or layer."""

from __future__ import annotations

import pandas as pd

from binade.app import plot
from binade.app.figure import Chart
from binade.app.questions.shared.board_charts import lines_by_layer

MOST = 60  # columns of a heatmap


def distribution(table: pd.DataFrame, by: str, word: str, axis: str, title: str, subtitle: str) -> Chart:
    """Chart of compute.shares: a column for each value of `by`, its blocks by bin."""
    values = sorted(table[by].unique())
    shown = table[table[by].isin(values[:: -(-len(values) // MOST)])].astype({by: int})
    legend = {"title": "share of blocks", "format": ".0%", "gradientLength": 180}
    tips = {
        by: word, "low": f"{axis}, from", "high": "to", "share": ("share of blocks", ".2%"), "count": ("blocks", ","),
    }  # fmt: skip
    cells = plot.cells(
        shown, "low", by, seams=False, tips=tips, x=plot.ordinal(by, word),
        y=plot.y("low", axis, zero=False, nice=False).bin("binned"), y2="high",
        color=plot.ramp("share", legend, type="sqrt"),
    )  # fmt: skip
    return plot.layers(title, subtitle, cells, independent="stroke")


def lines(table: pd.DataFrame, column: str, axis: str, title: str, subtitle: str) -> Chart:
    """Chart of compute.summary by iteration and layer: one of its columns by iteration, one line per layer."""
    tips = {"layer": "layer", "iteration": "iteration", column: (axis, ".3g"), "blocks": ("blocks", ",")}
    y = plot.y(column, axis, zero=False)
    return lines_by_layer(table, title, subtitle, x=plot.iterations(), y=y, tips=tips)
