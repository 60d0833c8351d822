"""The contents of a session's report: its notes, its pinned charts with their captions, its view and its runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pandas as pd

from binade.app.draw.figure import Drawn, Figure
from binade.app.questions.shared.runs import matching
from binade.app.report import runs as run_tables
from binade.app.report.section import ReportTable, Section
from binade.app.sessions.pins import draw, missing_runs, views_of
from binade.app.sessions.session import Pin, Session
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter

DRAWERS = 2  # threads that draw pins: half of their time is spent in torch, numpy and DuckDB, which run in parallel


def filter_of(opened: Catalog, session: Session) -> Filter:
    """The filter of the session's view, as far as it applies here."""
    return session.view.read(opened).where


def contributions(opened: Catalog, session: Session, command: str) -> Iterator[Section]:
    """The report of a session, drawn again from the current state of its runs; missing parts are listed as problems."""
    yield from _pins(opened, session)
    yield _view(opened, session)
    yield _runs(opened, session)
    yield run_tables.definitions()
    yield run_tables.made_with(command)


def _pins(opened: Catalog, session: Session) -> Iterator[Section]:
    """A section for each pin, so that pins are drawn while earlier ones are rendered."""
    for number, (pin, drawn) in enumerate(_drawn(opened, session), 1):
        figures: list[Figure] = []
        for figure in drawn.figures:
            lines = [" ".join(pin.caption.split()), drawn.verdict, figure.caption]
            caption = "\n".join(filter(None, lines))
            figures.append(replace(figure, name=f"{number:02d}_{figure.name}", caption=caption))
        problems = [f"Pin {number}: {sentence}" for sentence in drawn.sentences]
        yield Section("pins", "Pinned charts", figures, problems=problems)


def _drawn(opened: Catalog, session: Session) -> Iterator[tuple[Pin, Drawn]]:
    """Each pin, drawn, in order."""
    ahead: deque[tuple[Pin, Future[Drawn]]] = deque()
    with ThreadPoolExecutor(DRAWERS, "pins") as pool:
        try:
            for pin in session.pins:
                ahead.append((pin, pool.submit(draw, opened, pin, session.run_ids)))
                if len(ahead) > 2 * DRAWERS:
                    first, drawn = ahead.popleft()
                    yield first, drawn.result()
            for last, drawn in ahead:
                yield last, drawn.result()
        finally:  # after Ctrl-C, only wait for those that are being drawn
            pool.shutdown(wait=False, cancel_futures=True)


def _view(opened: Catalog, session: Session) -> Section:
    drawn = draw(opened, Pin(session.view.page, session.view.params), session.run_ids)
    tables = [
        ReportTable(f"view_{number}", title.capitalize(), frame)
        for number, (title, frame) in enumerate(drawn.tables.items(), 1)
    ]
    text = f"The page {session.view.page} with the filter: {filter_of(opened, session).sentence()}."
    return Section("view", "The view", drawn.figures, tables, text, drawn.verdict, drawn.problems)


def runs_of(opened: Catalog, session: Session) -> pd.DataFrame:
    """The rows of `Catalog.runs` of the session's runs, with the column shown: "selected" if its view or a pin selects
    or names the run, "baseline only" if others are compared with it."""
    runs = opened.runs()
    runs = runs[runs["run_id"].isin(session.run_ids)]
    selected: set[str] = set()
    for view in views_of(session):
        selected.update(matching(opened, view.read(opened).where, opened.runs())["run_id"], view.named_runs(opened))
    return runs.assign(shown=runs["run_id"].isin(selected).map({True: "selected", False: "baseline only"}))


def _runs(opened: Catalog, session: Session) -> Section:
    section = run_tables.section(opened, runs_of(opened, session))
    hashes = pd.DataFrame([{"run_id": run.run_id, "SHA-256 when saved": run.hash} for run in session.runs])
    tables = [*section.tables, *([ReportTable("fingerprints", "Fingerprints", hashes)] if len(hashes) else [])]
    return replace(section, tables=tables, problems=[*missing_runs(opened.root, session), *section.problems])
