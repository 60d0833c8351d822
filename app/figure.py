"""A figure: a chart with its numbers and its caption, and what a view of figures is. No Streamlit here.

A page shows figures, a session pins them, a report prints them: all from the functions of `app.figures`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import altair as alt
import numpy as np
import pandas as pd

from binade.data.filter import Filter

# What Streamlit and vl-convert can draw.
Chart = (
    alt.Chart
    | alt.ConcatChart
    | alt.FacetChart
    | alt.HConcatChart
    | alt.LayerChart
    | alt.RepeatChart
    | alt.VConcatChart
)


@dataclass(frozen=True)
class Figure:
    """
    name     of the chart in its view, and of the files it is saved as
    table    what it was drawn from
    caption  goes into every export: the data, the filter, the metric's definition; a sentence a line
    note     what a reader needs beside the title
    height   pixels, where the chart does not say it itself
    choose   the field of a mark that can be clicked; hint: what that does
    group    figures of one group stand beside each other
    """

    name: str
    chart: Chart
    table: pd.DataFrame
    caption: str
    note: str = ""
    height: int | None = None
    choose: str | None = None
    group: str = ""
    hint: str = ""

    @property
    def title(self) -> str:
        title = self.chart.title
        return str(title.text) if isinstance(title, alt.TitleParams) else ""


@dataclass(frozen=True)
class Drawn:
    """What a view shows.

    verdict   the answer in words, "" where there is none
    problems  a sentence for each thing that is missing, left out or cannot be drawn
    tables    numbers that stand beside the charts, by title
    """

    figures: tuple[Figure, ...] = ()
    verdict: str = ""
    problems: tuple[str, ...] = ()
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)

    def get(self, name: str) -> Figure | None:
        return next((figure for figure in self.figures if figure.name == name), None)


def source(where: Filter, what: str) -> str:
    """The first line of a caption: what the data are, and the filter they were chosen with."""
    return f"Data: {what}. Filter: {where.sentence()}."


def grid(values: np.ndarray) -> pd.DataFrame:
    """A heatmap's cells as a table for its CSV: rows as drawn, a column each."""
    return pd.DataFrame(values, columns=[f"column {index}" for index in range(values.shape[1])])
