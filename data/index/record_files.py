"""What a run says of itself beside tensors, its records and results, read from their files into the index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import pyarrow as pa

from binade.data.index.cubes import transaction
from binade.data.index.tables import INDEX_TABLES
from binade.data.run.directory import RUNNING, RunError, RunInfo
from binade.data.run.effects import effect_rows
from binade.data.run.experiment import EXPERIMENT, FORMER, check_experiment, experiment_files
from binade.data.run.records import RecordKind, RecordLines, read_lines
from binade.data.words.text import describe


@dataclass(frozen=True)
class RecordFile:
    """What was read of a file of records, or of the files of an experiment. kind: "" if the file is gone; replaces:
    whether the lines that the index has are no longer those of the file; mark: its inode, size and time, 0 if it could
    not be read; effects: the rows of an experiment in the table `effect`."""

    run_id: str
    name: str
    kind: str = ""
    replaces: bool = False
    mark: tuple[int, int, int] = (0, 0, 0)
    lines: RecordLines[Any] = field(default_factory=RecordLines)
    effects: Sequence[list[Any]] = ()

    @classmethod
    def stored(cls, run_id: str, name: str, *read: Any) -> RecordFile:
        """From its row in the table `record_file`, without the lines."""
        *mark, count, stop, problem = read
        lines = RecordLines[Any](count=count, stop=stop, problem=problem)
        return cls(run_id, name, mark=(mark[0], mark[1], mark[2]), lines=lines)

    @property
    def is_read(self) -> bool:
        return self.mark != (0, 0, 0)


def insert(cursor: duckdb.DuckDBPyConnection, sql: str, rows: pa.Table) -> None:
    """Run a statement that reads the table `incoming`."""
    cursor.register("incoming", rows)
    cursor.execute(sql)


def read_records(run: RunInfo, kind: RecordKind[Any], name: str, known: RecordFile | None) -> RecordFile:
    """A file of records: `known`, which the index has of it, unless it has changed; its new lines if it has only grown,
    else all."""
    mark, grown = (0, 0, 0), False
    try:
        found = os.stat(run.directory / name, follow_symlinks=False)
        mark = found.st_ino, found.st_size, found.st_mtime_ns
        if known and mark == known.mark:
            return known
        if known and mark[0] == known.mark[0] and mark[1] > known.mark[1]:
            grown = True
            lines = read_lines(kind, run.directory, name, known.lines.stop, known.lines.count)
            lines = replace(lines, problem=known.lines.problem or lines.problem)
        else:
            lines = read_lines(kind, run.directory, name)
    except OSError as error:
        mark, lines = (0, 0, 0), RecordLines(problem=describe(error))
    return RecordFile(run.run_id, name, kind.name, known is not None and not grown, mark, lines)


def read_results(run: RunInfo, known: RecordFile | None) -> list[RecordFile]:
    """The files of a run's experiment as one, if it has any: `known`, which the index has of them, unless they have
    changed. While the run goes on, they are replaced, and not checked."""
    names = [*experiment_files(run.directory), *(name for name in FORMER if os.path.lexists(run.directory / name))]
    if not names:
        return []
    mark, lines, effects = (0, 0, 0), RecordLines[Any](), list[list[Any]]()
    try:
        found = [os.stat(run.directory / name, follow_symlinks=False) for name in names]
        mark = sum(s.st_ino for s in found) % 2**63, sum(s.st_size for s in found), max(s.st_mtime_ns for s in found)
        if known and mark == known.mark:
            return [known]
        effects = effect_rows(run.run_id, run.directory)
        if run.status.state != RUNNING:
            check_experiment(run.directory)
    except (OSError, RunError, ValueError) as error:
        lines = RecordLines(problem=describe(error))
        mark = (0, 0, 0) if isinstance(error, OSError) else mark
    if run.status.state == RUNNING:
        mark, lines = (0, 0, 0), RecordLines()
    return [RecordFile(run.run_id, EXPERIMENT, EXPERIMENT, True, mark, lines, effects)]


def put_records(cursor: duckdb.DuckDBPyConnection, files: list[RecordFile]) -> None:
    """Write what was read of files in one transaction: one for each file would take as long as the disk does, thousands
    of times."""
    columns: dict[str, list[Any]] = {name: [] for name in (column.name for column in INDEX_TABLES["record"].columns)}
    for file in files:
        values = file.lines.values
        columns["iteration"] += (value["iteration"] if isinstance(value, dict) else value.iteration for value in values)
        columns["record"] += file.lines.texts
        columns["line"] += file.lines.numbers
        for column, word in (("run_id", file.run_id), ("kind", file.kind), ("file", file.name)):
            columns[column] += [word] * len(values)
    with transaction(cursor) if files else nullcontext():
        for file in files:
            for table in ("record", "record_file") if not file.kind else ("record",) if file.replaces else ():
                cursor.execute(f"DELETE FROM {table} WHERE run_id = ? AND file = ?", [file.run_id, file.name])
            if file.name == EXPERIMENT:
                cursor.execute("DELETE FROM effect WHERE run_id = ?", [file.run_id])
                if file.effects:
                    places = ", ".join("?" * len(file.effects[0]))
                    cursor.executemany(f"INSERT INTO effect VALUES ({places})", file.effects)
        if columns["record"]:
            insert(cursor, "INSERT INTO record BY NAME FROM incoming", pa.table(columns))
        rows = [
            [file.run_id, file.name, *file.mark, file.lines.count, file.lines.stop, file.lines.problem]
            for file in files
            if file.kind
        ]
        if rows:
            table = pa.table([*map(pa.array, zip(*rows, strict=True))], names=[f"column{at}" for at in range(8)])
            insert(cursor, "INSERT OR REPLACE INTO record_file FROM incoming", table)
