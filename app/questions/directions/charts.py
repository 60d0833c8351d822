"""Bars of one direction."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.shared.board_charts import BARS, axis_domain, bars, with_labels
from binade.app.style import Measure


def direction(
    table: pd.DataFrame, measure: Measure, operation: str, subtitle: str | list[str], everything: pd.DataFrame
) -> alt.LayerChart:
    """One operation of compute.directions; both operations share the axis, so that the two charts can be compared."""
    shown = with_labels(table[table["operation"] == operation].head(BARS), measure)
    domain = axis_domain(with_labels(everything, measure)["figure"])
    color = alt.value(style.OPERATIONS.get(operation, style.GREY))
    chart = bars(shown, measure, "row", shown["row"].tolist(), color, domain)
    return chart.properties(title=style.title(operation.capitalize(), subtitle))
