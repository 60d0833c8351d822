"""Gradient to noise by iteration, with the line at √3."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.shared import board_charts
from binade.data.evidence import Measure


def to_noise(table: pd.DataFrame, measure: Measure, line: float, title: str, subtitle: str) -> alt.LayerChart:
    """Chart of compute.lowest: one line per layer, and the limit."""
    rule = alt.Chart(pd.DataFrame({"limit": [line], "label": ["√3"]}))
    dashed = rule.mark_rule(color=style.BAD, strokeDash=[6, 4], strokeWidth=1.5).encode(y="limit:Q")
    text = rule.mark_text(color=style.BAD, align="left", baseline="bottom", dx=4, dy=-3, fontSize=12)
    lines = board_charts.by_iteration(table, measure, title, subtitle)
    result: alt.LayerChart = lines + dashed + text.encode(x=alt.value(0), y="limit:Q", text="label:N")
    return result.properties(title=lines.title)
