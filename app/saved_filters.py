"""Filters that users have named, in <root>/.filters.json. No Streamlit here."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

from pydantic.dataclasses import dataclass

from binade.data.access import check_writable
from binade.data.filter import Filter
from binade.data.json_files import STRICT, read_json, write_json
from binade.data.store import locked

FILE = ".filters.json"
LONGEST_NAME = 60


class SavedFiltersError(ValueError):
    """The saved filters cannot be read or written."""


@dataclass(frozen=True, config=STRICT)
class _File:
    filters: dict[str, dict[str, list[str | int]]] = field(default_factory=dict)


def load(root: Path) -> dict[str, Filter]:
    """The saved filters by name. Raises SavedFiltersError if the file is damaged."""
    try:
        return {name: Filter.from_dict(given) for name, given in read_json(_File, root / FILE).filters.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SavedFiltersError(f"{root / FILE} cannot be read: {error}. Repair or delete it.") from error


def save(root: Path, name: str, where: Filter | None) -> None:
    """Save a filter under a name, or delete that name for None. Raises SavedFiltersError and ReadOnlyError."""
    check_writable("Saving a filter")
    try:
        with locked(root):  # two users may save at once
            found = load(root)
            found.pop(name, None)
            if where is not None:
                found[name] = where
            write_json(root / FILE, _File({each: found[each].to_dict() for each in sorted(found)}))
    except OSError as error:
        raise SavedFiltersError(f"{root / FILE} cannot be written: {error.strerror or error}.") from error
