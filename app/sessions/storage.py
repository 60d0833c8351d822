"""Sessions on disk, <root>/.sessions/<id>.jsonl (see `app.sessions.log`), and as bundles with their runs. No Streamlit
here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from binade.app.sessions import log
from binade.app.sessions.log import Operation, State, state_of, to_line
from binade.app.sessions.pins import refreshed, tensors_of, views_of
from binade.app.sessions.session import ID, Session, SessionError, UnknownSessionError, new_id, parse, to_json
from binade.data.exchange import bundle
from binade.data.exchange.bundle import BundleError, BundleImport, BundleTooLargeError, WrittenBundle
from binade.data.index.cache import Done
from binade.data.index.catalog import Catalog
from binade.data.run.access import check_writable
from binade.data.run.store import LINK, locked, no_link, read_file, sweep_tree, write_atomic
from binade.data.words.text import describe

FOLDER = ".sessions"
SESSION = "session.json"  # in a bundle
LONG = 4 << 20  # bytes: a longer log is replaced by its state, without deleted pins
LONGEST = 64 << 20  # bytes of a log that is read
LOG = re.compile(rf"({ID[1:-1]})\.jsonl")


class Saved(NamedTuple):
    """A session on disk, and a sentence for each damaged line of its log."""

    state: State
    problems: tuple[str, ...] = ()

    @property
    def session(self) -> Session:
        return self.state.session


def folder(root: Path) -> Path:
    return root / FOLDER


def _path(root: Path, session_id: str) -> Path:
    """The log of a session. Raises SessionError for a text that is not an ID, and for a link in place of the folder."""
    if not isinstance(session_id, str) or not re.fullmatch(ID, session_id):
        raise UnknownSessionError(f"{str(session_id)[:40]!a} is not a session ID.")
    sessions = folder(root)
    if sessions.is_symlink():
        raise SessionError(f"{sessions} is {LINK}: replace it by a folder.")
    return sessions / f"{session_id}.jsonl"


@contextmanager
def _changing(path: Path, what: str, *, is_new: bool = False) -> Iterator[None]:
    """Lock the sessions, so that one process at a time changes them. what: what fails if the block raises OSError,
    which becomes a SessionError. is_new: make their folder if there is none. Raises ReadOnlyError."""
    check_writable("Changing a session")
    try:
        if is_new:
            path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):
            yield
    except OSError as error:
        raise SessionError(f"The session cannot be {what} in {path.parent}: {error.strerror or error}.") from error


def create(root: Path, session: Session) -> Saved:
    """Write a new session. Raises SessionError if it exists, is beyond the limits or cannot be written, ReadOnlyError;
    then nothing is left behind."""
    state, path = state_of(session), _path(root, session.id)
    to_json(session)  # within the limits
    with _changing(path, "saved", is_new=True):
        if session.id in _ids(root):
            raise SessionError(f"There is a session {session.id!r} already.")
        write_atomic(path, to_line(state))
    return Saved(state)


def append(root: Path, session_id: str, operation: Operation) -> Saved:
    """Add an operation to a session, and return the session as it is then. It is on the disk when this returns.

    Raises SessionError if there is no such session, or if it would be beyond the limits or cannot be written,
    ReadOnlyError; then it is as before.
    """
    path = _path(root, session_id)
    with _changing(path, "changed"):
        before, problems = load(root, session_id)
        state = log.applied(before, operation)
        to_json(state.session)  # within the limits
        try:
            line = to_line(operation)
        except ValueError as error:
            raise SessionError(f"The session cannot be changed: {describe(error)}.") from None
        if path.stat().st_size + len(line) <= LONG:
            _append(path, line)
        else:
            write_atomic(path, to_line(log.without_deleted(state)))
    return Saved(state, problems)


def _append(path: Path, line: bytes) -> None:
    """Add a line in place of what a killed process has written of one. Raises OSError."""
    whole = read_file(path, LONGEST, path.parent).rfind(b"\n") + 1
    with open(path, "r+b", opener=no_link) as file:
        os.truncate(file.fileno(), whole)
        file.seek(whole)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def load(root: Path, session_id: str) -> Saved:
    """A session. Raises SessionError if it is not there or cannot be read."""
    path = _path(root, session_id)
    if not os.path.lexists(path):
        raise UnknownSessionError(
            f"There is no session {session_id!r} in {root}: it was deleted, or belongs to another root."
        )
    try:
        state, damaged = log.read(read_file(path, LONGEST, path.parent))
        if state.session.id != session_id:
            raise SessionError(f"it has the ID {state.session.id}, expected {session_id}.")
    except (OSError, ValueError) as error:
        raise SessionError(f"{path.name} cannot be read: {error}") from None
    lost = (f"Line {number} of {path.name} is damaged: this change is left out." for number in damaged)
    return Saved(state, tuple(lost))


def _ids(root: Path) -> list[str]:
    """The ids of all sessions."""
    paths = list(folder(root).iterdir()) if folder(root).is_dir() else []
    return sorted(match[1] for path in paths if (match := LOG.fullmatch(path.name)))


def list_sessions(root: Path) -> tuple[list[Saved], list[str]]:
    """(all sessions, the one that changed last first; a sentence for each that cannot be read or has damaged lines)."""
    if folder(root).is_symlink():
        return [], [f"{folder(root)} is {LINK}: replace it by a folder."]
    found, problems = [], []
    for session_id in _ids(root):
        try:
            saved = load(root, session_id)
        except SessionError as error:
            problems.append(str(error))
        else:
            found.append(saved)
            problems += saved.problems
    return sorted(found, key=lambda saved: saved.session.saved, reverse=True), problems


def delete(root: Path, session_id: str) -> None:
    """Delete a session. Raises SessionError, ReadOnlyError."""
    path = _path(root, session_id)
    with _changing(path, "deleted"):
        path.unlink(missing_ok=True)


def sweep_sessions(root: Path) -> None:
    """Delete what killed processes left among the sessions of a root, but nothing that is still being written."""
    if not folder(root).is_symlink():
        sweep_tree(folder(root))


def import_session(root: Path, session: Session) -> Saved:
    """Save a session from elsewhere, unless it is here already. If another one has its ID, it gets a new one. Raises as
    `create`."""
    for saved in list_sessions(root)[0]:
        if saved.session == replace(session, id=saved.session.id):
            return saved
    if session.id in _ids(root):
        session = replace(session, id=new_id(session.name))
    return create(root, session)


VALUES = {
    "charts": "of the tensors that its charts read",
    "all": "of every tensor of its runs",
    "none": "of none",
}


def export_bundle(
    catalog: Catalog,
    session: Session,
    target: Path,
    values: str = "charts",
    done: Done = lambda count, of: None,
    most: int | None = None,
) -> WrittenBundle:
    """Write a session and the runs that it shows, as they are now; absent runs are left out. values: which tensors'
    values are included, a key of VALUES. most: bytes of its tensors and tables. Raises BundleError, SessionError."""
    now = refreshed(catalog, session)
    here = [run_id for run_id in now.run_ids if (catalog.root / run_id).is_dir()]
    chosen: list[str] | None = None if values == "all" else []
    if values == "charts":
        chosen = tensors_of(catalog, views_of(session), now.run_ids)
    try:
        return bundle.write(catalog.root, target, here, chosen, {SESSION: to_json(now).encode()}, done, most)
    except BundleTooLargeError as error:
        raise BundleError(
            f"{error} Choose fewer values, or run binade bundle export {session.id} --values {values} --output FILE"
        ) from None


def import_bundle(root: Path, source: Path, done: Done = lambda count, of: None) -> tuple[BundleImport, Saved | None]:
    """Import a bundle into a root: (what was done with its runs, its session as it is here). Raises BundleError,
    SessionError, ReadOnlyError, and then the root is unchanged."""
    sessions: list[Session] = []

    def check(extras: dict[str, bytes]) -> None:
        if SESSION in extras:
            sessions.append(parse(extras[SESSION]))

    saved: list[Saved] = []

    def finish(extras: dict[str, bytes]) -> None:
        saved.extend(import_session(root, session) for session in sessions)

    imported = bundle.import_runs(root, source, check, done, finish)
    return imported, saved[0] if saved else None


def summary(imported: BundleImport) -> str:
    """What an import did with the runs, in a sentence."""
    added, kept = len(imported.added), len(imported.kept)
    already = f", {kept} {'was' if kept == 1 else 'were'} here already" if kept else ""
    return f"{added} run{'s' * (added != 1)} added{already}."
