"""Answers for agents: text in Markdown, and figures as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlencode

import pandas as pd

from binade.app.draw.figure import Drawn, Facts, Figure, Table
from binade.app.draw.style import MEASURES
from binade.app.report.tables import axis_of, cells, shown
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.words.text import counted, markdown_table

ROWS = 50  # of a table: agents read every word


@dataclass(frozen=True)
class Reply:
    """text: in Markdown. pictures: SVG by the address of a figure."""

    text: str
    pictures: Mapping[str, str] = field(default_factory=dict)


def address(view: View, catalog: Catalog) -> str:
    """The address of a view in the app, without the host. It has all parameters, also those that were not given."""
    return f"/{view.page}?{urlencode(view.explicit(catalog).to_query(), doseq=True)}"


def text_of(drawn: Drawn, figures: Iterable[Figure]) -> Iterator[str]:
    """The parts of an answer: what it says, what it was computed from, its tables, and the numbers of these figures."""
    yield from filter(None, (drawn.verdict, *drawn.sentences))
    if drawn.scope:
        yield f"Of {drawn.scope.sentence}. Filter: {drawn.scope.where.sentence()}."
    for item in drawn.items:
        if isinstance(item, Facts):
            measured = ((MEASURES[name], value) for name, value in item.values.items())
            yield "\n".join(f"- {measure.label}: {measure.quantity(value)}" for measure, value in measured)
        elif isinstance(item, Table):
            yield f"## {item.title or item.name}\n\n{table(item.frame)}\n\n{item.note}".rstrip()
    for figure in figures:
        numbers = table(figure.table, axis_of(figure.spec))
        yield f"## Figure {figure.name}: {figure.title}\n\n{numbers}\n\n{figure.caption}"
    if drawn.figures:
        named = (f"- {each.name}: {each.title}. {each.caption.partition(chr(10))[0]}" for each in drawn.figures)
        yield "\n".join(("Figures:", *named))


def table(frame: pd.DataFrame, axis: str = "") -> str:
    """The first rows of a table, with names and units. axis: that of the table's chart, see `axis_of`."""
    readable = shown(frame.head(ROWS).dropna(axis=1, how="all"), axis)
    more = f"\nThe first {ROWS:,} of {counted(len(frame), 'row')}." if len(frame) > ROWS else ""
    return markdown_table(_one_line(map(str, readable.columns)), map(_one_line, cells(readable))) + more


def _one_line(texts: Iterable[str]) -> list[str]:
    """Cells in which only the signs of a table are escaped: an agent copies the names of runs and tensors."""
    return [" ".join(text.split()).replace("|", "\\|") for text in texts]
