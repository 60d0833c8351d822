"""Records: what a run says of itself besides its tensors, one JSON object per line, each with its CRC-32.

A kind of record is a type and the file that has its lines. `append_record` is the only writer of these files and
`read_lines` the only reader; the table `record` of the index has their lines. Each rank but 0 has files of its own in
ranks/, so that each file has one writer.

No line depends on another: one that a kill has cut short is left out and counted, a damaged one is left out and
reported, and all others are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Generic, TypeVar

from binade.data.run.json_files import MARK, parse_json, sealed, unsealed
from binade.data.run.store import inside, read_file
from binade.data.words.text import describe

T = TypeVar("T")


@dataclass(frozen=True)
class RecordKind(Generic[T]):
    """A kind of record. file: the name of rank 0's file in the run's directory; many: several records, in words."""

    name: str
    file: str
    type: type[T]
    many: str

    def file_of(self, rank: int) -> str:
        """The file that a rank writes, relative to the run's directory."""
        return self.file if rank == 0 else f"ranks/rank{rank:02d}.{self.file}"

    def files(self, directory: Path) -> list[str]:
        """The files of a run that exist, rank 0's first."""
        ranks = f"{directory}/ranks"  # text: the index looks for the files of all runs each time
        of_ranks = sorted(Path(ranks).glob(f"rank*.{self.file}")) if os.path.isdir(ranks) else []
        own = [self.file] if os.path.lexists(f"{directory}/{self.file}") else []
        return own + [f"ranks/{path.name}" for path in of_ranks]


@dataclass(frozen=True)
class RecordLines(Generic[T]):
    """The sound lines of a file of records: their numbers, from 1, their JSON and values.

    count    how many lines end at byte `stop`; what follows is read again later
    torn     how many a kill has cut short
    problem  what is wrong with the first damaged one, None if none is
    """

    numbers: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    values: list[T] = field(default_factory=list)
    count: int = 0
    stop: int = 0
    torn: int = 0
    problem: str | None = None


def append_record(directory: Path, kind: RecordKind[Any], record: Mapping[str, Any], rank: int = 0) -> None:
    """Add a record to a run, as the one writer of its rank. What a full disk has cut short ends before it. Raises
    OSError."""
    with open(directory / kind.file_of(rank), "a+b", opener=inside(directory)) as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        before = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(before + sealed(json.dumps(record).encode()) + b"\n")


def read_records(kind: RecordKind[T], directory: Path) -> list[T]:
    """All records of a kind of a run, those of rank 0 first. Raises OSError."""
    return [value for name in kind.files(directory) for value in read_lines(kind, directory, name).values]


def read_lines(kind: RecordKind[T], directory: Path, name: str, start: int = 0, before: int = 0) -> RecordLines[T]:
    """The records of a file of a run from byte `start` on; before: how many lines end there. Raises OSError."""
    numbers, texts, values = list[int](), list[str](), list[T]()
    count, stop, torn, problem = before, start, 0, None
    content = read_file(directory / name, base=directory, start=start)
    for number, line in enumerate(BytesIO(content), before + 1):  # splitlines would also end lines at b"\r"
        _, mark, end = line.rpartition(MARK)
        if not line.endswith(b"\n") and not (mark and b'"}' in end):
            torn += 1
            break
        count, stop = number, stop + len(line)
        try:
            if text := unsealed(line.strip()):
                values.append(parse_json(kind.type, text))
                numbers.append(number)
                texts.append(text.decode())
        except ValueError as error:
            problem = problem or f"line {number} of its {name} is damaged: {describe(error)}"
    return RecordLines(numbers, texts, values, count, stop, torn, problem)
