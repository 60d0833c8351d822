"""Bars of one direction."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.shared.board_charts import BARS, axis_domain, bars, with_labels
from binade.data.evidence import Measure


def direction(table: pd.DataFrame, measure: Measure, operation: str, subtitle: str | list[str]) -> alt.LayerChart:
    """One operation of compute.directions; both operations share the axis, so that the two charts can be compared."""
    everything = with_labels(table, measure)
    shown, domain = everything[everything["operation"] == operation].head(BARS), axis_domain(everything["figure"])
    color = alt.value(style.OPERATIONS.get(operation, style.GREY))
    chart = bars(shown, measure, "row", shown["row"].tolist(), color, domain)
    return chart.properties(title=style.title(operation.capitalize(), subtitle))
