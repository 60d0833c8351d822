"""Which runs a session shows, and whether they are as they were when it was saved. No Streamlit here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from binade.app.sessions.pins import runs_of
from binade.app.sessions.session import Pin, RunReference, Session
from binade.data.catalog import Catalog
from binade.data.runs import RunError, fingerprint


def refreshed(catalog: Catalog, session: Session, before: Session | None = None) -> Session:
    """The session with references to the runs that it shows now. References to runs that are absent here stay.

    before: the session as it was saved last. The view and pins that it had then keep showing its runs alone; new ones
    show any run that is here.
    """
    old, new = _views(session), []
    among = before.run_ids if before else ()
    if among and before:
        former = [replace(pin, caption="") for pin in _views(before)]
        new = [pin for pin in old if replace(pin, caption="") not in former]
        old = [pin for pin in old if pin not in new]
    found = {*runs_of(catalog, old, among), *(runs_of(catalog, new) if new else ())}
    ids = [run_id for run_id in catalog.runs()["run_id"] if run_id in found]
    absent = [run for run in session.runs if not _is_here(catalog.root, run.run_id)]
    marks = [RunReference(run_id, fingerprint(catalog.root / run_id)) for run_id in ids]
    return replace(session, runs=(*marks, *absent))


def _views(session: Session) -> list[Pin]:
    return [Pin(session.view.page, session.view.params), *session.pins]


def other_runs(catalog: Catalog, session: Session) -> list[str]:
    """The runs that the session's view shows here and that it was not saved with: they are newer, or this is another
    root."""
    shown = runs_of(catalog, _views(session)[:1]) if session.runs else []
    return [run for run in shown if run not in session.run_ids]


def missing_runs(root: Path, session: Session) -> list[str]:
    """A sentence for each run of the session that is absent here, or differs from what it was."""
    problems = []
    for run in session.runs:
        if not _is_here(root, run.run_id):
            problems.append(f"Run {run.run_id[:80]} is not here: what the session shows of it is left out.")
            continue
        try:
            same = fingerprint(root / run.run_id) == run.hash
        except RunError as error:
            problems.append(f"Run {run.run_id[:80]} cannot be read: {error}.")
            continue
        if not same:
            problems.append(
                f"Run {run.run_id[:80]} is not as it was when the session was saved: it was recorded further, or is "
                "another run of the same name."
            )
    return problems


def _is_here(root: Path, run_id: str) -> bool:
    """Whether a run's directory is there. The id may be anyone's text: it must be a plain name."""
    plain = run_id not in (".", "..") and not run_id.startswith(".") and "/" not in run_id and "\0" not in run_id
    try:
        return plain and (root / run_id / "run.json").is_file()
    except OSError:  # a name too long
        return False
