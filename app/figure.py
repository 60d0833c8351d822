"""A figure: a chart with its numbers and its caption, and what a view of figures is. No Streamlit here.

A page shows figures, a session pins them, a report prints them: all from the `draw` functions of the questions.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from xml.sax.saxutils import escape

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
WIDTH, HEIGHT = 760, 360  # pixels, of a picture and of a chart that does not say its height
LETTER, LINE, MARGIN = 5.7, 16, 12  # pixels of a caption's letter on average, of its line, around it


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

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The Vega-Lite specification with all of its data, without its schema's address and a configuration."""
        with alt.data_transformers.enable("default", max_rows=None):
            spec = self.chart.to_dict()
        return {name: value for name, value in spec.items() if name not in ("$schema", "config")}

    def sized_spec(self, width: int | str) -> dict[str, Any]:
        """The specification at a size that holds title, axes and legend; concatenated charts keep their own sizes."""
        if not {"concat", "hconcat", "vconcat"}.isdisjoint(self.spec):
            return self.spec
        fit = {"type": "fit", "contains": "padding"}
        return self.spec | {"width": width, "height": self.height or HEIGHT, "autosize": fit}

    def csv(self, rows: int | None = None) -> str:
        """The table, or its first rows, as CSV; the caption before it as comments."""
        comments = "".join(f"# {line}\n" for line in self.caption.splitlines())
        return comments + self.table.head(len(self.table) if rows is None else rows).to_csv(index=False)

    @property
    def caption_svg(self) -> dict[str, Any]:
        """The caption as it stands beneath a picture, wrapped: {"svg": <text> elements below y = 0, "width", "height"}
        in pixels. Pages and reports place it."""
        letters = int((WIDTH - 2 * MARGIN) / LETTER)
        texts = self.caption.splitlines()
        lines = [line for text in texts for line in textwrap.wrap(text, letters, break_on_hyphens=False)]
        if not lines:
            return {"svg": "", "width": 0, "height": 0}
        svg = "".join(
            f'<text x="{MARGIN}" y="{LINE * (index + 0.5):g}" font-size="11.5">{escape(line)}</text>'
            for index, line in enumerate(lines)
        )
        longest = max(len(line) for line in lines)
        return {"svg": svg, "width": int(LETTER * longest) + 2 * MARGIN, "height": LINE * len(lines) + MARGIN}


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
