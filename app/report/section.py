"""The parts of reports: sections of figures and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd

from binade.app.draw.figure import Figure
from binade.data.compare.evidence import Sentence


def slug(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")[:40] or "none"


@dataclass(frozen=True)
class ReportTable:
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
    problems  a sentence for each thing that is missing or left out
    texts     (title, text shown as it is)
    """

    name: str
    title: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[ReportTable] = ()
    text: str = ""
    verdict: Sentence = field(default_factory=Sentence)
    problems: Sequence[str] = ()
    texts: Sequence[tuple[str, str]] = ()


def merged(contributions: Iterable[Section]) -> tuple[Section, ...]:
    """One section per name, in the order of their first contributions, which have title and text."""
    sections: dict[str, Section] = {}
    for one in contributions:
        first = sections.setdefault(one.name, Section(one.name, one.title, text=one.text))
        sections[one.name] = replace(
            first,
            figures=(*first.figures, *one.figures),
            tables=(*first.tables, *one.tables),
            verdict=first.verdict or one.verdict,
            problems=tuple(dict.fromkeys((*first.problems, *one.problems))),
            texts=(*first.texts, *one.texts),
        )
    return tuple(sections.values())
