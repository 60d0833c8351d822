"""The parts of reports: sections of figures and tables, and the selection that questions draw them from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pandas as pd

from binade.app.figure import Drawn, Figure
from binade.app.formatting import first_formats
from binade.app.questions.shared.boards import ranking
from binade.app.questions.shared.labels import full_labels
from binade.app.questions.shared.runs import given_names
from binade.app.questions.shared.selection import Board, Of, SelectedTensor, Selection, select
from binade.data.evidence import Sentence

OF_VALUES = ("absmax", "std", "kurtosis", "crest_factor", "dynamic_range", "zero_share")


def slug(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:40] or "none"


@dataclass(frozen=True)
class Table:
    """A table without a figure. name is unique in a report."""

    name: str
    title: str
    frame: pd.DataFrame
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A section of a report, or what a question adds to the section of that name.

    name      of its folder too: letters, digits and "_", as the names of its figures
    text      what it shows
    verdict   the answer in words, empty where there is none
    problems  a sentence for each thing that is missing or left out; if_empty: if it has no figure
    texts     (title, text shown as it is)
    """

    name: str
    title: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    text: str = ""
    verdict: Sentence = field(default_factory=Sentence)
    problems: Sequence[str] = ()
    texts: Sequence[tuple[str, str]] = ()
    if_empty: str = ""

    @property
    def all_problems(self) -> tuple[str, ...]:
        return (*self.problems, *([] if self.figures or not self.if_empty else [self.if_empty]))


def merged(contributions: Iterable[Section]) -> tuple[Section, ...]:
    """One section per name, in the order of their first contributions, which have title and text."""
    found: dict[str, Section] = {}
    for one in contributions:
        first = found.setdefault(one.name, Section(one.name, one.title, text=one.text, if_empty=one.if_empty))
        found[one.name] = replace(
            first,
            figures=(*first.figures, *one.figures),
            tables=(*first.tables, *one.tables),
            verdict=first.verdict or one.verdict,
            problems=(*first.problems, *one.problems),
            texts=(*first.texts, *one.texts),
        )
    return tuple(found.values())


@dataclass(frozen=True)
class ReportSelection(Selection):
    """The input of a report: a catalog and a filter whose selection is not empty."""

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """The formats that the selection was scored with, the coarsest first."""
        return first_formats(self.opened, self.where)

    def boards(self) -> list[Board]:
        """The selection in each format."""
        return [Board(self.opened, self.where, format=fmt) for fmt in self.formats]

    def values_of(self, field: str) -> list[Any]:
        """The values of a field that occur in the selection: `facets` leaves each field's own restriction out."""
        wanted = getattr(self.where, field)
        return [value for value in self._facets.get(field, []) if not wanted or value in wanted]

    @cached_property
    def _facets(self) -> dict[str, list[Any]]:
        return self.opened.facets(self.where)

    def dividing(self, fields: Sequence[str]) -> list[str]:
        """The fields that divide the selection, and quant_type."""
        return [field for field in fields if field == "quant_type" or len(self.values_of(field)) > 1]

    def ranked(self, fmt: str) -> pd.DataFrame:
        """The places of the selection with their worst tensors, by SQNR in a format."""
        return ranking(self.opened, self.where, fmt, "sqnr_db")

    def tensor(self, tensor_id: str, fmt: str) -> tuple[SelectedTensor | None, list[str]]:
        """(a tensor with its values, None where they cannot be read; the problem)."""
        selected = select(Of.TENSOR, self.opened, self.where, {"tensor": tensor_id, "format": fmt})
        if isinstance(selected, SelectedTensor):
            return selected, []
        label = full_labels(self.opened.rows_of([tensor_id]), given_names(self.opened))[tensor_id]
        return None, [f"{label}: {problem}" for problem in selected.problems] if isinstance(selected, Drawn) else []
