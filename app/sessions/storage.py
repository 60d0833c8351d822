"""Sessions on disk: <root>/.sessions/<id>/0001.json, 0002.json ...

Saving never changes an earlier version, and of two writers at once each gets a number of its own. No Streamlit here.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from binade.app.sessions.session import ID, LONGEST_FILE, Session, SessionError, parse, to_json
from binade.data.access import check_writable
from binade.data.runs import now
from binade.data.store import remove_directory

FOLDER = ".sessions"
MOST_VERSIONS = 9999


@dataclass(frozen=True)
class Version:
    """A saved version: its number from 1, and the session, or why it cannot be read."""

    number: int
    session: Session | None
    problem: str = ""


def folder(root: Path) -> Path:
    return root / FOLDER


def save(root: Path, session: Session) -> tuple[Session, int]:
    """Save as the next version: (the session with its time of saving, its number). Earlier versions stay.

    Raises SessionError if it is beyond the limits or the disk refuses, ReadOnlyError if the app is read-only; then
    nothing is left behind.
    """
    check_writable("Saving a session")
    session = replace(session, saved=now())
    content = to_json(session).encode()
    directory = folder(root) / session.id
    aside = directory / f".{secrets.token_hex(8)}.part"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(aside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        for number in range(max(_numbers(directory), default=0) + 1, MOST_VERSIONS + 1):
            with suppress(FileExistsError):  # another writer took the number
                os.link(aside, directory / f"{number:04d}.json")
                return session, number
    except OSError as error:
        with suppress(OSError):
            directory.rmdir()
        raise SessionError(f"The session cannot be saved in {directory}: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            aside.unlink()
    raise SessionError(f"The session has {MOST_VERSIONS} versions, which is the most: save it as a new one.")


def import_session(root: Path, session: Session) -> int:
    """Save a session from elsewhere and return its version's number: that of an equal version if there is one, else the
    next one of its id, so that nothing is lost. Raises as `save`."""
    for version in history(root, session.id):
        if version.session and replace(version.session, saved="") == replace(session, saved=""):
            return version.number
    return save(root, session)[1]


def load(root: Path, session_id: str, number: int | None = None) -> Version:
    """A saved session: the newest version, or the one of that number. Raises SessionError if it is not there or cannot
    be read."""
    if not isinstance(session_id, str) or not re.fullmatch(ID, session_id):
        raise SessionError(f"{str(session_id)[:40]!a} is no session's id.")
    directory = folder(root) / session_id
    numbers = _numbers(directory)
    if not numbers:
        raise SessionError(f"There is no session {session_id!r} in {root}: it was deleted, or belongs to another root.")
    if number is not None and number not in numbers:
        raise SessionError(f"The session {session_id!r} has no version {number}.")
    version = _read(directory, max(numbers) if number is None else number)
    if version.session is None:
        raise SessionError(version.problem)
    return version


def history(root: Path, session_id: str) -> list[Version]:
    """All versions, newest first, those that cannot be read with the reason."""
    directory = folder(root) / session_id
    return [_read(directory, number) for number in sorted(_numbers(directory), reverse=True)]


def list_sessions(root: Path) -> tuple[list[Version], list[str]]:
    """(the newest version of every session, latest saved first; a sentence for each that cannot be read)."""
    found, problems = [], []
    directory = folder(root)
    for entry in sorted(directory.iterdir()) if directory.is_dir() else []:
        if not re.fullmatch(ID, entry.name):
            continue
        try:
            found.append(load(root, entry.name))
        except SessionError as error:
            problems.append(str(error))
    found.sort(key=lambda version: version.session.saved if version.session else "", reverse=True)
    return found, problems


def delete(root: Path, session_id: str) -> int:
    """Delete a session with its history; how many versions went. Raises SessionError, ReadOnlyError."""
    check_writable("Deleting a session")
    if not re.fullmatch(ID, session_id):
        raise SessionError(f"{session_id[:40]!a} is no session's id.")
    directory = folder(root) / session_id
    count = len(_numbers(directory))
    try:
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
    path = directory / f"{number:04d}.json"
    try:
        with open(path, "rb") as file:
            session = parse(file.read(LONGEST_FILE + 1))
    except (OSError, SessionError) as error:
        return Version(number, None, f"Version {number} of {directory.name} cannot be read: {error}")
    if session.id != directory.name:
        return Version(number, None, f"Version {number} of {directory.name} says that it is {session.id}.")
    return Version(number, session)
