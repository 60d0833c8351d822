"""Sessions with their runs as one archive, from the app and the command line. See data.bundle. No Streamlit here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from binade.app.sessions import references, storage
from binade.app.sessions import session as sessions
from binade.app.sessions.pins import tensors_of
from binade.app.sessions.session import Pin, Session
from binade.data import bundle
from binade.data.bundle import Imported, Written
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
    """Write a session and the runs that it shows, as they are now; absent runs are left out. values: which tensors'
    values are included, a key of VALUES. Raises BundleError, SessionError."""
    now = references.refreshed(catalog, session, before=session)
    here = [run.run_id for run in now.runs if (catalog.root / run.run_id).is_dir()]
    pins = (Pin(session.view.page, session.view.params), *session.pins)
    chosen = tensors_of(catalog, pins, now.run_ids) if values == "charts" else None if values == "all" else []
    return bundle.write(catalog.root, target, here, chosen, {SESSION: sessions.to_json(now).encode()}, done)


def import_bundle(
    root: Path, source: Path, done: Callable[[int, int], None] = lambda count, of: None
) -> tuple[Imported, Session | None, int]:
    """Import a bundle into a root: (what was done with its runs, its session and its version's number here). Raises
    BundleError, SessionError, ReadOnlyError, and then the root is unchanged."""
    session: Session | None = None

    def check(extras: dict[str, bytes]) -> None:
        nonlocal session
        if SESSION in extras:
            session = sessions.parse(extras[SESSION])

    imported = bundle.import_runs(root, source, check, done)
    return imported, session, storage.import_session(root, session) if session else 0


def summary(imported: Imported) -> str:
    """What an import did with the runs, in a sentence."""
    added, kept = len(imported.added), len(imported.kept)
    already = f", {kept} {'was' if kept == 1 else 'were'} here already" if kept else ""
    return f"{added} run{'s' * (added != 1)} added{already}."
