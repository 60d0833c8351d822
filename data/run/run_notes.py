"""The name, color and note that users give a run: its notes.json."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from binade.data.run.access import check_writable
from binade.data.run.directory import RunError, RunNotes
from binade.data.run.json_files import (
    parse_json,
    read_json,
    write_json,
)
from binade.data.run.store import (
    locked,
)


class NotesChangedError(RunError):
    """Someone else has changed a field of a run's notes since `seen` was read. current: the notes now."""

    def __init__(self, field: str, current: RunNotes) -> None:
        self.current = current
        theirs = getattr(current, field) or "empty"
        super().__init__(f"someone else has changed the {field} in the meantime; it is now: {theirs}")


def read_notes(directory: Path) -> RunNotes:
    """The name, color and note of a run. Raises OSError, and ValueError if the file is damaged."""
    try:
        return read_json(RunNotes, directory / "notes.json")
    except FileNotFoundError:
        return RunNotes()


def change_notes(directory: Path, notes: RunNotes, seen: RunNotes) -> None:
    """Change the fields of a run's notes in which `notes` differs from `seen`, the notes that the user started from.
    Raises NotesChangedError if someone else has changed such a field in the meantime, RunError if the file is damaged,
    ReadOnlyError, OSError."""
    check_writable("naming a run")
    changes = {name: text for name, text in asdict(notes).items() if text != getattr(seen, name)}
    with locked(directory, required=False):
        try:
            current = read_notes(directory)
        except ValueError as error:
            raise RunError(f"{directory / 'notes.json'} is damaged: {error}; delete it to name the run again") from None
        for name, text in changes.items():
            if getattr(current, name) not in (getattr(seen, name), text):
                raise NotesChangedError(name, current)
        write_json(directory / "notes.json", replace(current, **changes))


def parse_notes(name: str = "", color: str = "", note: str = "") -> RunNotes:
    """Raises RunError for a value that is not allowed."""
    try:
        return parse_json(RunNotes, json.dumps({"name": name.strip(), "color": color.lower(), "note": note}).encode())
    except ValueError as error:
        raise RunError(
            f"{error}. A name has at most 80 characters, a note 10,000, and a color looks like #1f77b4"
        ) from None
