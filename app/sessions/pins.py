"""Pins drawn again, and the runs that a session shows. No Streamlit.

A pin is drawn as the page draws its view, with one difference, because its caption must stay true: a pin of a session
is drawn only from the session's runs, even if the root has new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

from binade.app.draw.figure import Drawn
from binade.app.sessions.session import Pin, RunReference, Session
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.run.directory import RunError, fingerprint


def runs_of(catalog: Catalog, views: Sequence[View]) -> list[str]:
    """The runs that views show."""
    shown = {run for view in views for run in view.runs(catalog)}
    return [run for run in catalog.runs()["run_id"] if run in shown]


def tensors_of(catalog: Catalog, pins: Iterable[Pin], runs: Sequence[str] | None = None) -> list[str]:
    """The tensors whose values it takes to draw pins, of these runs (as `draw`): found by drawing them."""
    loaded: dict[str, None] = {}

    watched = copy(catalog)
    watched.reads = lambda tensor_id: loaded.setdefault(tensor_id)
    watched.cache = None  # otherwise cached charts would load nothing
    for pin in pins:
        draw(watched, pin, runs)
        loaded |= dict.fromkeys(pin.tensors(catalog))
    return list(loaded)


def draw(catalog: Catalog, pin: Pin, runs: Sequence[str] | None = None) -> Drawn:
    """The figures of a pin (charts, their tables and captions), the view's verdict and texts, and what is missing.

    runs: those of the session that it is kept in: it is drawn from these and from the runs that it names itself. With
    None, from what is here. Never raises because of a pin's content, which is reported as
    a problem instead.
    """
    problems: tuple[str, ...] = ()
    if runs is not None:
        catalog, problems = _of_session(catalog, pin, runs)
    drawn = pin.draw(catalog)
    drawn = replace(drawn, problems=(*problems, *drawn.problems))
    if not pin.chart or not drawn.items:
        return drawn
    figure = drawn.get(pin.chart)
    if figure is None:
        lost = (*drawn.problems, f"The view no longer has the chart {pin.chart[:40]!r}.")
        return replace(drawn, items=(), problems=lost)
    return replace(drawn, items=(*drawn.texts, figure))


def _of_session(catalog: Catalog, pin: Pin, runs: Sequence[str]) -> tuple[Catalog, tuple[str, ...]]:
    """(the catalog of a session's runs and of those that the pin names; a sentence about those that are absent)."""
    here = catalog.runs()["run_id"].tolist()
    if not runs:
        return catalog, ("The session lists no runs, so this chart is drawn from all runs in the root.",)
    wanted = {*runs, *pin.named_runs(catalog)}
    absent = [run for run in runs if run not in here]
    lost = f"{len(absent)} of its session's {len(runs)} runs {'is' if len(absent) == 1 else 'are'} missing."
    problems = (lost,) * bool(absent and not pin.params.get("run_id"))
    if wanted.issuperset(here):
        return catalog, problems
    return catalog.restricted(run for run in here if run in wanted), problems


# The runs that a session shows


def references(catalog: Catalog, views: Sequence[View]) -> tuple[RunReference, ...]:
    """The runs that views show, as they are now. Raises RunError."""
    return tuple(RunReference(run_id, fingerprint(catalog.root / run_id)) for run_id in runs_of(catalog, views))


def refreshed(catalog: Catalog, session: Session) -> Session:
    """The session with references to the runs that it shows now: of its own runs and those that it names; of all, if it
    has none yet. References to runs that are absent here stay. Raises RunError."""
    views = views_of(session)
    if session.runs:
        catalog = catalog.restricted({*session.run_ids}.union(*(pin.named_runs(catalog) for pin in views)))
    absent = [run for run in session.runs if not _is_here(catalog.root, run.run_id)]
    return replace(session, runs=(*references(catalog, views), *absent))


def views_of(session: Session) -> list[Pin]:
    """What a session shows: its view, as a pin of all of it, and its pins."""
    return [Pin(session.view.page, session.view.params), *session.pins]


def other_runs(catalog: Catalog, session: Session) -> list[str]:
    """The runs that the session's view shows here and that are not the session's: they are newer, or this is another
    root."""
    shown = runs_of(catalog, views_of(session)[:1]) if session.runs else []
    return [run for run in shown if run not in session.run_ids]


def missing_runs(root: Path, session: Session) -> list[str]:
    """A sentence for each run of the session that is missing here or has changed."""
    problems = []
    for run in session.runs:
        if not _is_here(root, run.run_id):
            problems.append(f"Run {run.run_id[:80]} is missing and is left out of the charts.")
            continue
        try:
            same = fingerprint(root / run.run_id) == run.hash
        except RunError as error:
            problems.append(f"Run {run.run_id[:80]} cannot be read: {error}.")
            continue
        if not same:
            problems.append(
                f"Run {run.run_id[:80]} has changed since it was pinned: more was recorded, or another has its name."
            )
    return problems


def _is_here(root: Path, run_id: str) -> bool:
    """Whether a run's directory exists. The id is untrusted: it must be a plain name."""
    plain = not run_id.startswith(".") and "/" not in run_id and "\0" not in run_id
    try:
        return plain and (root / run_id / "run.json").is_file()
    except OSError:  # a name too long
        return False
