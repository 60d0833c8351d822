"""What a kind of loss log is. No torch.

A kind is a row of the table in registry.py. `recognize` looks at the start of a file, never at its name alone; `rows`
yields its values by column. table.py finds the columns of steps and losses in these rows by known names, and makes
series of them. Files are untrusted: ConfigError, whose message is one line, is raised for one that cannot be read. All
text that others wrote is matched by RE2, in time linear in its length.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from binade.collector.imports.readers.series import Columns, Conventions, Notes, Rows, Series
from binade.collector.imports.readers.table import LossTable
from binade.data.run.store import regular

HEAD = 1 << 20  # bytes by which a file is recognized: some logs begin with the source of their program
COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # one pass: no character of it can begin another
MOST_OBJECTS = 200  # lines that are read as JSON to recognize a file


class Confidence(IntEnum):
    """How sure it is that a file is of a kind. The files of a folder are read from COLUMNS on. POSSIBLE is enough for a
    file that the user names, since the reader then says what is missing."""

    NONE = 0
    POSSIBLE = 1
    COLUMNS = 2
    SIGNATURE = 3


@dataclass(frozen=True)
class Start:
    """The beginning of a file: at most HEAD bytes, and their lines; no lines if they are not text."""

    path: Path
    content: bytes
    lines: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> Start:
        """Raises OSError, also for what is not a regular file."""
        with open(path, "rb", opener=regular) as file:
            content = file.read(HEAD)
        if b"\0" in content:
            return cls(path, content, ())
        lines = re.split("\r\n|\n|\r", content.decode("utf-8-sig", errors="replace"))
        cut = len(content) == HEAD and len(lines) > 1
        return cls(path, content, tuple(lines[:-1] if cut else lines))

    @property
    def first(self) -> str:
        """The first line that is not blank."""
        return next((line for line in self.lines if line.strip()), "")

    @cached_property
    def text(self) -> str:
        """All lines, without colors."""
        return COLORS.sub("", "\n".join(self.lines))

    @cached_property
    def objects(self) -> tuple[dict[str, Any], ...]:
        """The first lines as JSON objects; an empty one for a line that has none."""
        return tuple(json_object(line) for line in islice(filter(str.strip, self.lines), MOST_OBJECTS))


@dataclass(frozen=True, kw_only=True)
class Kind(Conventions):
    """A kind of loss log.

    kind          what it is, in words
    example       a file of this kind, as in a command
    columns       what is read, for the documentation
    whole_folder  whether all such files of a folder are one log
    """

    kind: str
    example: str
    columns: str
    whole_folder: bool = False

    def recognize(self, start: Start) -> Confidence:
        raise NotImplementedError

    def rows(self, path: Path, notes: Notes) -> Rows:
        """Raises ConfigError, and OSError."""
        raise NotImplementedError

    def read(self, path: Path, columns: Columns) -> tuple[Series, ...]:
        """Raises ConfigError, and OSError."""
        notes = Notes()
        table = LossTable(self, path, columns, notes)
        for place, row in self.rows(path, notes):
            table.add(place, row)
        return table.series(lambda: self.rows(path, Notes()))


def json_object(line: str) -> dict[str, Any]:
    """A line as a JSON object; an empty one if it is not one."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
