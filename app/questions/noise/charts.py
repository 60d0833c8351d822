"""Gradient to noise by iteration, with the line at √3."""

from __future__ import annotations

import pandas as pd

from binade.app import plot, style
from binade.app.figure import Chart
from binade.app.questions.shared import board_charts
from binade.data.evidence import Measure


def to_noise(table: pd.DataFrame, measure: Measure, line: float, title: str, subtitle: str) -> Chart:
    """Chart of compute.lowest: one line per layer, and the limit."""
    limit = pd.DataFrame({"limit": [line], "label": ["√3"]})
    name = plot.mark("text", limit, x=0, y="limit", text="label", color=style.BAD, baseline="bottom", dx=4, dy=-3)
    lines = board_charts.by_iteration(table, measure, title, subtitle)
    rule = plot.rule(y=line, color=style.BAD, strokeDash=[6, 4], strokeWidth=1.5)
    return plot.layers(title, subtitle, lines, rule, name)
