"""What a view shows: figures, tables, numbers, texts and controls, in order. No Streamlit here.

A page shows them, a session pins the figures, and a report prints figures and tables, all from the return value of one
function.
"""

from __future__ import annotations

import json
import textwrap
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal
from xml.sax.saxutils import escape

import altair as alt
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from altair.utils import schemapi

from binade.app.draw import numbers
from binade.app.draw.control import Control
from binade.app.questions.shared.scope import Scope
from binade.data.compare.evidence import Sentence
from binade.data.words.fields import Field
from binade.data.words.filter import Filter
from binade.data.words.text import csv_table

# The Vega-Lite version that Streamlit and vl-convert support.
Chart = (
    alt.Chart
    | alt.ConcatChart
    | alt.FacetChart
    | alt.HConcatChart
    | alt.LayerChart
    | alt.RepeatChart
    | alt.VConcatChart
)
WIDTH, HEIGHT = 760, 360  # pixels: of a picture, and of a chart that does not set its height
INNER_WIDTH = 600  # pixels, of a chart without its axes and legend, if it is not fitted to a page
_altair = threading.Lock()  # all threads share its data transformers
NARROW = 400  # pixels: a narrower chart has its title broken into lines
LETTER, LINE, MARGIN = 5.7, 16, 12  # pixels: average width of a caption's letter, height of a line, and margin


@dataclass(frozen=True, kw_only=True)
class _Item:
    """group: items of one group are shown side by side; controls of the group come below them. width: its share."""

    group: str = ""
    width: float = 1


@dataclass(frozen=True)
class OnPage:
    """What a page draws of a figure: the text of its specification, in which data sets are named d0, d1 …; these by
    name, as {columns: values by name, length: number of rows}; the names of its selections."""

    spec: str
    tables: dict[str, Any]
    selections: tuple[str, ...]


@dataclass(frozen=True)
class Figure(_Item):
    """
    name     of the chart in its view, and of the files it is saved as
    table    what it was drawn from
    caption  part of every export: the data, the filter and the metric's definition, one sentence per line
    note     what readers need in addition to the title
    height   pixels, unless the chart sets its own height
    choose   the field of a mark that can be clicked: "tensor_id" opens the tensor, any other sets the parameter of
             this name
    brush    the parameter that a drag over the x axis sets, if the chart has `style.drag`
    marked   the value of one of these parameters, if the chart marks it. To click it again, or to double-click a range,
             clears it
    hint     what a click or a drag does
    """

    name: str
    chart: Chart
    table: pd.DataFrame
    caption: str
    note: str = ""
    height: int | None = None
    choose: str | None = None
    hint: str = ""
    brush: str = ""
    marked: Any = None

    @property
    def title(self) -> str:
        title = self.chart.title
        return str(title.text) if isinstance(title, alt.TitleParams) else ""

    @property
    def y_title(self) -> str:
        """The title of the y axis; "" if it has none, and for a chart of several plots."""
        titles = [
            (encoding.get("axis") or {}).get("title", encoding.get("title"))
            for encoding in numbers.encodings(json.loads(self.on_page.spec), "y")
        ]
        return next(filter(None, titles), "")

    @property
    def sized_chart(self) -> Chart:
        """The chart with an explicit size; concatenated and faceted charts already have one."""
        if isinstance(self.chart, alt.Chart | alt.LayerChart):
            return self.chart.properties(width=INNER_WIDTH, height=self.height or HEIGHT)
        return self.chart

    @cached_property
    def spec(self) -> dict[str, Any]:
        """The Vega-Lite specification with all of its data, without the URL of its schema and without a
        configuration."""
        return self._spec(_records)

    @cached_property
    def on_page(self) -> OnPage:
        """What a page draws."""
        spec = self._spec(_columns)
        tables = spec.pop("datasets")
        if "spec" not in spec:  # the signal width of a facet is not that of the chart
            _wrap_titles(spec)
        selections = tuple(param["name"] for param in spec.get("params", ()) if "select" in param)
        return OnPage(json.dumps(spec), tables, selections)

    def _spec(self, content: Callable[[pa.Table], Any]) -> dict[str, Any]:
        """The specification. content: returns the entry of a table in `datasets`. These are d0, d1 … in the order in
        which the chart has them, whatever they contain."""
        found: list[Any] = []

        def keep(data: Any) -> Any:
            place = next((place for place, other in enumerate(found) if other is data), len(found))
            found[place:] = found[place:] or [data]
            return {"name": f"d{place}"}

        with _altair:  # Altair's registry is shared by all threads
            alt.data_transformers.register("kept", keep)
            with alt.data_transformers.enable("kept"):
                spec = self.chart.to_dict(validate=schemapi.DEBUG_MODE)
        numbers.label(spec)
        kept = {name: value for name, value in spec.items() if name not in ("$schema", "config")}
        tables = {f"d{place}": content(_arrow(data)) for place, data in enumerate(found)}
        return kept | {"datasets": spec.get("datasets", {}) | tables}

    @property
    def is_several(self) -> bool:
        """Whether it consists of several plots, which have sizes of their own."""
        return not {"concat", "hconcat", "vconcat", "facet"}.isdisjoint(self.spec)

    def sized_spec(self, width: float | str) -> dict[str, Any]:
        """The specification at a size that holds title, axes and legend; concatenated charts keep their own sizes."""
        if self.is_several:
            return self.spec
        fit = {"type": "fit", "contains": "padding"}
        return self.spec | {"width": width, "height": self.height or HEIGHT, "autosize": fit}

    def csv(self) -> str:
        """The table as CSV; the caption before it as comments."""
        return csv_table(self.table, self.caption)

    @property
    def caption_svg(self) -> dict[str, Any]:
        """The caption that is drawn below a picture, wrapped: {"svg": <text> elements below y = 0, "width", "height"}
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
class Column:
    """How a page shows a column of a table.

    title, help  by default those of the field
    format       of its numbers, as in `Field` of data.words.fields; by default that of the field, else whole numbers or
                 three significant digits
    text         a function of a row that returns the text of its cell, if it is not the value
    bar          whether a bar from 0 to the largest value of the column is drawn behind a number
    field        what the values are: shares are shown in percent; by default the measure of the column's name
    """

    title: str = ""
    format: str = ""
    help: str | None = None
    text: Callable[[pd.Series], str] | None = None
    bar: bool = False
    field: Field | None = None
    align: Literal["left", "right"] | None = None


@dataclass(frozen=True)
class Table(_Item):
    """
    name      of the table in its view
    frame     what it shows, and what is exported
    columns   those that a page shows, in order; () for all
    title     above it; note: beneath it
    choose    the column of a row that can be clicked, as in a figure
    foldable  whether its title folds it away
    """

    name: str
    frame: pd.DataFrame
    columns: Mapping[str, Column] = field(default_factory=dict)
    title: str = ""
    note: str = ""
    height: int | None = None
    choose: str | None = None
    foldable: bool = False


@dataclass(frozen=True)
class Facts(_Item):
    """Single numbers, by metric."""

    values: Mapping[str, float]


@dataclass(frozen=True)
class Text(_Item):
    """A sentence between figures. A hint is for the page only. details: lines that can be unfolded beneath it."""

    text: str
    kind: Literal["note", "hint", "problem", "error", "heading"] = "note"
    details: tuple[str, ...] = ()


@dataclass(frozen=True)
class Controls(_Item):
    """Controls that depend on what was drawn, side by side."""

    controls: tuple[Control, ...]


@dataclass(frozen=True)
class Offers(_Item):
    """Buttons that set parameters. text: before them; choices: the parameters that each sets, by its label."""

    text: str
    choices: Mapping[str, Mapping[str, str]]


Item = Figure | Table | Facts | Text | Controls | Offers


@dataclass(frozen=True)
class Drawn:
    """What a view shows.

    items     in the order in which a page shows them
    verdict   the answer in words, with the estimates that it is made from; empty where there is none
    problems  a sentence for each thing that is missing, left out or cannot be drawn
    scope     what it was computed from

    Raises TypeError for a verdict that is not a Sentence: its numbers would have no evidence.
    """

    items: tuple[Item, ...] = field(default=(), repr=False)
    verdict: Sentence = field(default_factory=Sentence)
    problems: tuple[str, ...] = ()
    scope: Scope | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.verdict, Sentence):
            raise TypeError(
                f"the verdict {self.verdict!r} is a plain string: make it with binade.data.compare.evidence"
            )

    @property
    def figures(self) -> tuple[Figure, ...]:
        return tuple(item for item in self.items if isinstance(item, Figure))

    @property
    def charts(self) -> list[Chart]:
        """The charts of the figures, to be shown, changed, concatenated and saved with Altair."""
        return [figure.sized_chart for figure in self.figures]

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {item.name: item.frame for item in self.items if isinstance(item, Table)}

    @property
    def texts(self) -> tuple[Text, ...]:
        return tuple(item for item in self.items if isinstance(item, Text))

    @property
    def sentences(self) -> tuple[str, ...]:
        """The problems, and the texts between the figures."""
        return (*self.problems, *(text.text for text in self.texts if text.kind not in ("heading", "hint")))

    def _ipython_display_(self) -> None:
        """Display it in Jupyter: the verdict, the problems and texts, then the charts with their notes."""
        print("\n".join(filter(None, (self.verdict, *self.sentences))))
        with alt.data_transformers.enable("default", max_rows=None):
            for figure in self.figures:
                figure.sized_chart.show()
                if figure.note:
                    print(figure.note)

    def prepared(self) -> Drawn:
        """The same answer, with everything that pages need from its figures already computed."""
        for figure in self.figures:
            _ = figure.on_page
        return self

    def get(self, name: str) -> Figure | None:
        return next((figure for figure in self.figures if figure.name == name), None)


def _wrap_titles(spec: dict[str, Any]) -> None:
    """Break a chart's title into lines where it is as narrow as on a phone. A title that is too long would leave the
    chart less room. A faceted chart has no width of its own."""
    if "facet" in spec:
        return
    for layer in spec.get("layer", []):
        _wrap_titles(layer)
    title = spec.get("title")
    if isinstance(title, dict):
        for name, letters in (("text", NARROW // 10), ("subtitle", NARROW // 7)):
            lines = [title[name]] if isinstance(title.get(name), str) else title.get(name, [])
            if any(len(line) > letters for line in lines):
                broken = [part for line in lines for part in textwrap.wrap(line, letters)]
                title[name] = {"expr": f"width < {NARROW} ? {json.dumps(broken)} : {json.dumps(lines)}"}


def _arrow(data: pd.DataFrame) -> pa.Table:
    try:
        return pa.Table.from_pandas(data, preserve_index=False)
    except pa.ArrowException:  # a column of several types
        return pa.Table.from_pandas(data.astype(dict.fromkeys(data.select_dtypes(object), str)), preserve_index=False)


def _finite(table: pa.Table) -> list[pa.Array]:
    """The columns of a table for JSON, which has no NaN, infinities or dates. Altair's own takes six times as long."""
    columns = []
    for column in table.columns:
        if pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_finite(column), column, None)
        columns.append(column.cast(pa.string()) if pa.types.is_temporal(column.type) else column)
    return columns


def _records(table: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.table(_finite(table), table.column_names).to_pylist()
    return rows


def _columns(table: pa.Table) -> dict[str, Any]:
    columns = {name: column.to_pylist() for name, column in zip(table.column_names, _finite(table), strict=True)}
    return {"columns": columns, "length": table.num_rows}


def source(where: Filter | None, what: str) -> str:
    """The first line of a caption: what the data are, and the filter that selected them, if any did."""
    return f"Data: {what}." + (f" Filter: {where.sentence()}." if where is not None else "")


def grid(values: np.ndarray) -> pd.DataFrame:
    """A heatmap's cells as a table for its CSV: its rows and columns as drawn."""
    return pd.DataFrame(values, columns=[f"column {index}" for index in range(values.shape[1])])
