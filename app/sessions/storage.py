"""Sessions on disk, <root>/.sessions/<id>/0001.json, 0002.json ..., draft.json, and as bundles with their runs.

Saving never changes an earlier version, and of two writers at once each gets a number of its own. No Streamlit here.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from binade.app.sessions.pins import refreshed, tensors_of, views_of
from binade.app.sessions.session import ID, LONGEST_FILE, Session, SessionError, parse, to_json
from binade.data import bundle
from binade.data.access import check_writable
from binade.data.bundle import BundleError, BundleImport, BundleTooLargeError, WrittenBundle
from binade.data.cache import Done
from binade.data.catalog import Catalog
from binade.data.runs import now
from binade.data.store import LINK, locked, read_file, remove_directory, sweep_tree, write_atomic, write_new

FOLDER = ".sessions"
SESSION = "session.json"  # in a bundle
MOST_VERSIONS = 9999
DRAFT = "draft.json"  # the session as it is being edited, if that differs from the newest version


class DraftChangedError(SessionError):
    """A session's draft is not the one that the new one was made from: another tab or user has changed it."""


class Kept(NamedTuple):
    """A draft on disk, and its revision, the SHA-256 of its file."""

    session: Session
    revision: str


class Version(NamedTuple):
    """A saved session and the number of this version of it, from 1; 0 for a draft that was never saved."""

    session: Session
    number: int


def folder(root: Path) -> Path:
    return root / FOLDER


def _directory(root: Path, session_id: str) -> Path:
    """Raises SessionError for a text that is not an ID, and for a link in place of the session or of all."""
    if not isinstance(session_id, str) or not re.fullmatch(ID, session_id):
        raise SessionError(f"{str(session_id)[:40]!a} is not a session ID.")
    directory = folder(root) / session_id
    for place in (directory.parent, directory):
        if place.is_symlink():
            raise SessionError(f"{place} is {LINK}: replace it by a folder.")
    return directory


@contextmanager
def _changing(directory: Path) -> Iterator[None]:
    """Lock the sessions while the files of one change. Its directory is made if it does not exist, and deleted if it is
    empty at the end. If the block raises, so are the folders above that were made. Raises OSError."""
    sessions = directory.parent
    made = [place for place in directory.parents if not place.exists()]
    try:
        sessions.mkdir(parents=True, exist_ok=True)
        with locked(sessions, required=False):
            directory.mkdir(exist_ok=True)
            try:
                yield
            finally:
                _drop_empty(directory)
    except BaseException:
        for place in made:
            _drop_empty(place)
        raise


def _drop_empty(directory: Path) -> None:
    with suppress(OSError):  # not empty, or not a directory
        directory.rmdir()


def sweep_sessions(root: Path) -> None:
    """Delete what killed processes left among the sessions of a root, but nothing that is still being written."""
    sessions = folder(root)
    if not sessions.is_symlink():
        with suppress(OSError), locked(sessions):
            sweep_tree(sessions)
            for directory in sessions.iterdir():
                _drop_empty(directory)


def save(root: Path, session: Session) -> Version:
    """Save as the next version, with the time of saving. Earlier versions stay.

    Raises SessionError if it is beyond the limits or cannot be written, ReadOnlyError if the app is read-only; then
    nothing is left behind.
    """
    check_writable("Saving a session")
    session = replace(session, saved=now())
    content = to_json(session).encode()
    directory = _directory(root, session.id)
    sweep_sessions(root)
    try:
        with _changing(directory):
            for number in range(max(_numbers(directory), default=0) + 1, MOST_VERSIONS + 1):
                with suppress(FileExistsError):  # another writer took the number
                    write_new(directory / f"{number:04d}.json", content)
                    return Version(session, number)
    except OSError as error:
        raise SessionError(f"The session cannot be saved in {directory}: {error.strerror or error}.") from error
    raise SessionError(f"The session has {MOST_VERSIONS} versions, which is the limit: save it as a new one.")


def keep(root: Path, session: Session, revision: str) -> str:
    """Keep a session that is being edited, in place of the draft with this revision ("": there was none). Returns its
    own revision. Raises DraftChangedError if another draft is there, and leaves that one; SessionError,
    ReadOnlyError."""
    check_writable("Keeping a session")
    directory = _directory(root, session.id)
    content = to_json(session).encode()
    try:
        with _changing(directory):
            if _revision(directory) not in ("", revision, digest := _sha256(content)):
                raise DraftChangedError(f"“{session.name}” was changed in another tab or by someone else")
            write_atomic(directory / DRAFT, content)
    except OSError as error:
        text = f"Unsaved changes cannot be kept in {directory}: {error.strerror or error}."
        raise SessionError(text) from error
    return digest


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _revision(directory: Path) -> str:
    """The revision of a draft, which may be damaged; "" if there is none. Raises OSError."""
    try:
        return _sha256(read_file(directory / DRAFT, LONGEST_FILE + 1, directory))
    except FileNotFoundError:
        return ""


def draft_of(root: Path, session_id: str) -> Kept | None:
    """The kept draft of a session; None if there is none. Raises SessionError if it cannot be read."""
    path = _directory(root, session_id) / DRAFT
    return Kept(*_parsed(path, session_id, "The draft")) if os.path.lexists(path) else None


def drop_draft(root: Path, session_id: str, revision: str) -> None:
    """Delete the draft with this revision, if it is still there, and the session's directory if nothing was saved.
    Raises SessionError, ReadOnlyError."""
    check_writable("Deleting a draft")
    directory = _directory(root, session_id)
    if not directory.is_dir():
        return
    try:
        with _changing(directory):
            if _revision(directory) == revision:
                (directory / DRAFT).unlink(missing_ok=True)
    except OSError as error:
        raise SessionError(f"The draft of {session_id!r} cannot be deleted: {error.strerror or error}.") from error


def import_session(root: Path, session: Session) -> Version:
    """Save a session from elsewhere as the next version of its id, unless an equal version exists. Raises as `save`."""
    for version in history(root, session.id)[0]:
        if replace(version.session, saved="") == replace(session, saved=""):
            return version
    return save(root, session)


def load(root: Path, session_id: str, number: int | None = None) -> Version:
    """A saved session: the newest version, or the one of that number. Raises SessionError if it is not there or cannot
    be read."""
    directory = _directory(root, session_id)
    numbers = _numbers(directory)
    if not numbers and number is None and (draft := draft_of(root, session_id)):
        return Version(draft.session, 0)
    if not numbers:
        raise SessionError(f"There is no session {session_id!r} in {root}: it was deleted, or belongs to another root.")
    if number is not None and number not in numbers:
        raise SessionError(f"The session {session_id!r} has no version {number}.")
    return _read(directory, max(numbers) if number is None else number)


def history(root: Path, session_id: str) -> tuple[list[Version], list[str]]:
    """(all versions that can be read, newest first; a sentence for each that cannot)."""
    directory = _directory(root, session_id)
    return _readable(partial(_read, directory, number) for number in sorted(_numbers(directory), reverse=True))


def list_sessions(root: Path) -> tuple[list[Version], list[str]]:
    """(the newest version of every session, latest saved first; a sentence for each that cannot be read)."""
    directory = folder(root)
    if directory.is_symlink():
        return [], [f"{directory} is {LINK}: replace it by a folder."]
    names = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    saved = [name for name in names if re.fullmatch(ID, name) and not _is_empty(directory / name)]
    versions, problems = _readable(partial(load, root, name) for name in saved)
    return sorted(versions, key=lambda version: version.session.saved, reverse=True), problems


def _is_empty(directory: Path) -> bool:
    """Whether a session was never written completely: a process was killed, or is writing it now."""
    try:
        return all(entry.name.startswith(".") for entry in directory.iterdir())
    except OSError:
        return False


def _readable(reads: Iterable[Callable[[], Version]]) -> tuple[list[Version], list[str]]:
    versions, problems = [], []
    for read in reads:
        try:
            versions.append(read())
        except SessionError as error:
            problems.append(str(error))
    return versions, problems


def delete(root: Path, session_id: str) -> int:
    """Delete a session with its history, and return the number of its versions. Raises SessionError, ReadOnlyError."""
    check_writable("Deleting a session")
    directory = _directory(root, session_id)
    count = len(_numbers(directory))
    try:
        with locked(folder(root), required=False):
            remove_directory(directory)
    except OSError as error:
        raise SessionError(f"The session {session_id!r} cannot be deleted: {error.strerror or error}.") from error
    return count


def _numbers(directory: Path) -> list[int]:
    try:
        names = [entry.name for entry in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(name[:4]) for name in names if re.fullmatch(r"[0-9]{4}\.json", name)]


def _read(directory: Path, number: int) -> Version:
    return Version(_parsed(directory / f"{number:04d}.json", directory.name, f"Version {number}")[0], number)


def _parsed(path: Path, session_id: str, what: str) -> tuple[Session, str]:
    """A session from a file, and the file's SHA-256. what: of the session it is, for messages. Raises SessionError."""
    try:
        content = read_file(path, LONGEST_FILE + 1, path.parent)
        session = parse(content)
    except (OSError, SessionError) as error:
        raise SessionError(f"{what} of {session_id} cannot be read: {error}") from None
    if session.id != session_id:
        raise SessionError(f"{what} of {session_id} has the ID {session.id}.")
    return session, _sha256(content)


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
    try:
        return _export(catalog, session, target, values, done, most)
    except BundleTooLargeError as error:
        raise BundleError(
            f"{error} Choose fewer values, or run binade bundle export {session.id} --values {values} --output FILE"
        ) from None


def _export(
    catalog: Catalog, session: Session, target: Path, values: str, done: Done, most: int | None
) -> WrittenBundle:
    now = refreshed(catalog, session, before=session)
    here = [run_id for run_id in now.run_ids if (catalog.root / run_id).is_dir()]
    chosen: list[str] | None = None if values == "all" else []
    if values == "charts":
        chosen = tensors_of(catalog, views_of(session), now.run_ids)
    return bundle.write(catalog.root, target, here, chosen, {SESSION: to_json(now).encode()}, done, most)


def import_bundle(root: Path, source: Path, done: Done = lambda count, of: None) -> tuple[BundleImport, Version | None]:
    """Import a bundle into a root: (what was done with its runs, the version of its session here). Raises BundleError,
    SessionError, ReadOnlyError, and then the root is unchanged."""
    sessions: list[Session] = []

    def check(extras: dict[str, bytes]) -> None:
        if SESSION in extras:
            sessions.append(parse(extras[SESSION]))

    versions: list[Version] = []

    def finish(extras: dict[str, bytes]) -> None:
        versions.extend(import_session(root, session) for session in sessions)

    imported = bundle.import_runs(root, source, check, done, finish)
    return imported, versions[0] if versions else None


def summary(imported: BundleImport) -> str:
    """What an import did with the runs, in a sentence."""
    added, kept = len(imported.added), len(imported.kept)
    already = f", {kept} {'was' if kept == 1 else 'were'} here already" if kept else ""
    return f"{added} run{'s' * (added != 1)} added{already}."
