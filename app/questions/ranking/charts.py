"""Ranked bars, colored by operation."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.shared.board_charts import BARS, axis_domain, bars, with_labels
from binade.data.evidence import Measure


def ranking(table: pd.DataFrame, measure: Measure, title: str, subtitle: str | list[str]) -> alt.LayerChart:
    """The first BARS rows of `ranking` in compute.py as bars, worst at the top, colored by operation."""
    shown = with_labels(table.head(BARS), measure)
    names = [name for name in style.OPERATIONS if name in set(shown["operation"])]
    scale = alt.Scale(domain=names, range=[style.OPERATIONS[name] for name in names])
    legend = alt.Legend(title=None, orient="top", offset=0) if len(names) > 1 else None
    color = alt.Color("operation:N", scale=scale, legend=legend)
    chart = bars(shown, measure, "place", shown["place"].tolist(), color, axis_domain(shown["figure"]))
    return chart.properties(title=style.title(title, subtitle))


def ranking_height(table: pd.DataFrame) -> int:
    """Height of a ranking in pixels."""
    return 150 + 24 * min(len(table), BARS)
