"""Sessions with their runs as one archive, from the app and the command line. See data.bundle. No Streamlit here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from binade.app.sessions import session as sessions
from binade.app.sessions.pins import Pin, tensors_of
from binade.app.sessions.session import Session
from binade.data import bundle
from binade.data.bundle import Taken, Written
from binade.data.catalog import Catalog

SESSION = "session.json"
VALUES = {
    "charts": "of the tensors that its charts read",
    "all": "of every tensor of its runs",
    "none": "of none",
}


def export(
    catalog: Catalog,
    session: Session,
    target: Path,
    values: str = "charts",
    done: Callable[[int, int], None] = lambda count, of: None,
) -> Written:
    """Write a session and the runs it speaks of. values: whose go along, a key of VALUES. The session in the bundle
    speaks of its runs as they are now; runs that are not here are left out. Raises BundleError, SessionError."""
    now = sessions.marked(catalog, session, before=session)
    here = [run.run_id for run in now.runs if (catalog.root / run.run_id).is_dir()]
    pins = (Pin(session.view.page, session.view.params), *session.pins)
    chosen = {"charts": lambda: tensors_of(catalog, pins, now.run_ids), "all": lambda: None, "none": list}[values]()
    return bundle.write(catalog.root, target, here, chosen, {SESSION: sessions.to_json(now).encode()}, done)


def bring_in(
    root: Path, source: Path, done: Callable[[int, int], None] = lambda count, of: None
) -> tuple[Taken, Session | None, int]:
    """Take a bundle into a root: (what was done with its runs, its session and the number it has here). Raises
    BundleError, SessionError, ReadOnlyError, and then the root is as it was."""

    def check(beside: dict[str, bytes]) -> None:
        if SESSION in beside:
            sessions.parse(beside[SESSION])

    taken = bundle.take_in(root, source, check, done)
    if SESSION not in taken.beside:
        return taken, None, 0
    session = sessions.parse(taken.beside[SESSION])
    return taken, session, sessions.bring_in(root, session)


def summary(taken: Taken) -> str:
    """What an import did with the runs, in a sentence."""
    kept = f", {len(taken.kept)} {'was' if len(taken.kept) == 1 else 'were'} here already" if taken.kept else ""
    return f"{len(taken.added)} run{'s' * (len(taken.added) != 1)} added{kept}."
