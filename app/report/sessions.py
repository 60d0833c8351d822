"""What the report of a session holds: its notes, its pinned charts with what their keeper says, its view, its runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd
from markdown_it import MarkdownIt

from binade.app.figure import Drawn, Figure
from binade.app.params import read_filter
from binade.app.report import runs as run_tables
from binade.app.report.plates import Part, Plate, Table
from binade.app.sessions import notes as session_notes
from binade.app.sessions.pins import draw, missing_runs
from binade.app.sessions.session import Pin, Session
from binade.data.catalog import Catalog
from binade.data.filter import Filter


def notes_html(session: Session) -> str:
    """The notes as HTML: no tag of their own, no picture, no link that runs a script."""
    return MarkdownIt("js-default", {"html": False}).render(session_notes.safe(session.notes)) if session.notes else ""


def filter_of(opened: Catalog, session: Session) -> Filter:
    """The filter of the session's view, as far as it can be met here."""
    return read_filter(opened.facets(), session.view.params)[0]


def parts(opened: Catalog, session: Session, command: str) -> Iterator[Part]:
    """The parts of a session's report, drawn anew from its runs as they are now; what is missing is said."""
    if session.pins:
        yield _pins(opened, session)
    yield _view(opened, session)
    yield _runs(opened, session)
    yield run_tables.definitions()
    yield run_tables.made_with(command)


def _pins(opened: Catalog, session: Session) -> Part:
    found: list[Plate] = []
    problems: list[str] = []
    for number, pin in enumerate(session.pins, 1):
        drawn = draw(opened, pin, session.run_ids)
        problems += [f"Pin {number}: {problem}" for problem in drawn.problems]
        found += [Plate(f"pins/{number:02d}_{f.name}", _said(f, pin, drawn)) for f in drawn.figures]
    return Part("pins", "Pinned charts", tuple(found), problems=tuple(problems))


def _said(figure: Figure, pin: Pin, drawn: Drawn) -> Figure:
    """The figure with what its keeper says, and the view's answer, before its own caption."""
    words = [" ".join(pin.caption.split()), drawn.verdict, figure.caption]
    return replace(figure, caption="\n".join(filter(None, words)))


def _view(opened: Catalog, session: Session) -> Part:
    drawn = draw(opened, Pin(session.view.page, session.view.params), session.run_ids)
    tables = tuple(
        Table(f"view_{number}", title.capitalize(), frame)
        for number, (title, frame) in enumerate(drawn.tables.items(), 1)
    )
    text = f"The page {session.view.page} with the filter: {filter_of(opened, session).sentence()}."
    found = tuple(Plate(f"view/{figure.name}", figure) for figure in drawn.figures)
    return Part("view", "The view", found, tables, text, drawn.verdict, drawn.problems)


def _runs(opened: Catalog, session: Session) -> Part:
    runs = opened.runs()
    part = run_tables.part(opened, runs[runs["run_id"].isin({run.run_id for run in session.runs})])
    marks = pd.DataFrame([{"run_id": run.run_id, "SHA-256 when saved": run.hash} for run in session.runs])
    tables = (*part.tables, *((Table("fingerprints", "Fingerprints", marks),) if len(marks) else ()))
    return replace(part, tables=tables, problems=(*missing_runs(opened.root, session), *part.problems))
