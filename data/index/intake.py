"""Updates the index from the run directories, for `Catalog.sync`.

Segments never change once they are published, so each is read once, and many are added in one transaction. A run that
has ended costs one `stat` of each of its files and segments, to see that nothing has changed.

A run with a damaged or missing segment is left out: only its row in the table `run` exists, with the reason. Sketches
are also summed up in advance: see `cubes`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from binade.data.index.cubes import CUBES, SUMS, next_key, sum_up, transaction
from binade.data.index.on_disk import Damage, RunOnDisk, mark_of, seen_of
from binade.data.index.record_files import RecordFile, insert, put_records, read_records, read_results
from binade.data.index.sketches import places
from binade.data.index.tables import INDEX_TABLES
from binade.data.run.directory import NotBegunError, RunError, RunInfo, read_run, run_names
from binade.data.run.experiment import EXPERIMENT
from binade.data.run.losses import first_step
from binade.data.run.record_kinds import RECORD_KINDS
from binade.data.run.run_notes import read_notes
from binade.data.run.segment import MERGED, SegmentError, read_manifest, read_tables, segment_names
from binade.data.words.text import describe

T = TypeVar("T")
BATCH = 1 << 13  # tensors that are held in memory and added in one transaction
SEGMENT = ("number", "run_id", "name", "mtime_ns", "shift", "sketch_rows")  # columns of the table
SCHEMA = Path(__file__).with_name("schema.sql")
ATTEMPTS = 5  # to list a run's segments while they are merged
# DuckDB's errors for rows that it rejects. Other errors concern the index.
DATA_ERRORS = (duckdb.DataError, duckdb.IntegrityError, duckdb.InvalidInputException, duckdb.OutOfMemoryException)


def schema() -> str:
    """The SQL that makes the tables of an empty index. A row of a cube holds the fields that some tensors have in
    common; <cube>_sketch has the sums of their sketches, in one or several rows per bin."""
    cubes = []
    for name, fields in CUBES.items():
        cubes.append(f"CREATE TABLE {name} AS SELECT key, {', '.join(fields)} FROM tensor;")
        cubes.append(f"CREATE TABLE {name}_sketch AS SELECT key, bin, {SUMS} FROM sketch GROUP BY ALL;")
        cubes.append(f"INSERT INTO cube VALUES ('{name}', 0, 0, 0, 0);")
    tables = [table.sql for table in INDEX_TABLES.values()]
    return "\n".join([*tables, SCHEMA.read_text(encoding="utf-8"), *cubes, "DROP TABLE sketch;"])


class Intake:
    """Adds new runs and segments of a root to its index. `refused`: what the last call skipped, with the reason;
    `idle`: whether it found no changes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.refused: list[str] = []  # replaced as a whole: pages read it while a call fills the next one
        self._skipped: list[str] = []
        self._settled: dict[str, RunOnDisk] = {}
        self._found: Set[str] | None = None  # the runs that the last call found, None if it did not end
        self._damaged: dict[str, Damage] = {}
        self._vanished = False  # whether a segment was deleted before the last call could read it
        self.idle = False

    def catch_up(self, cursor: duckdb.DuckDBPyConnection, changing: Callable[[], None]) -> int:
        """Add new segments, update the rows of runs and remove deleted runs; returns the number of segments added.
        changing: called before anything is written.

        Raises duckdb.Error if the index cannot be read or written; the index is then unchanged or partly updated.
        """
        self._skipped, self._vanished = [], False
        before, self._settled = self._settled, {}
        names, self._found = self._found, None
        unchanged, changed = self._look(before)
        self.idle = not changed and unchanged.keys() == names
        if self.idle:
            self._settled, self._found, self.refused = unchanged, names, self._skipped
            return 0
        changing()
        known = _known_segments(cursor)
        for run_id in known.keys() - unchanged.keys() - changed.keys():
            _drop(cursor, run_id)
        for run_id, on_disk in changed.items():
            taken = known.get(run_id, {})
            _take_over(cursor, on_disk, taken)
            if any(on_disk.segments.get(name) != mtime for name, mtime in taken.items() if name):
                _drop(cursor, run_id)  # replaced or deleted on disk: index the run again
                del known[run_id]
        self._damaged = {
            run_id: damage
            for run_id, damage in self._damaged.items()
            if run_id in changed and damage.seen is not None and damage.seen == seen_of(changed[run_id], damage.segment)
        }
        still = set(self._damaged)
        incomplete = self._write_runs(cursor, [on_disk.run for on_disk in changed.values()])
        for run_id in incomplete & known.keys():
            _drop(cursor, run_id)
        new = [
            (on_disk, name, mtime)
            for run_id, on_disk in changed.items()
            for name, mtime in on_disk.segments.items()
            if run_id not in incomplete | still and name not in known.get(run_id, {})
        ]
        added = 0
        for batch in self._read(new):
            added += len(_at_once(cursor, batch, _add, lambda segment, error: self._refuse(segment, error, changed)))
        sum_up(cursor, self.root)
        if self._vanished:  # merged, or deleted with its run: look again, before rows are missed
            self._damaged = {run_id: damage for run_id, damage in self._damaged.items() if run_id in still}
            return added + self.catch_up(cursor, changing)
        self._count(cursor, [on_disk for run_id, on_disk in changed.items() if run_id not in incomplete])
        sound = [on_disk.run for run_id, on_disk in changed.items() if run_id not in incomplete | {*self._damaged}]
        unread, faults = self._write_records(cursor, sound)
        incomplete |= unread
        for run_id in self._damaged.keys() - still:
            _drop(cursor, run_id)
            _put_runs(cursor, [[*_run_row(changed[run_id].run), self._damaged[run_id].reason]])
        self._skipped += [*(damage.reason for damage in self._damaged.values()), *chain.from_iterable(faults.values())]
        self._settled = unchanged | {
            run_id: replace(on_disk, faults=tuple(faults.get(run_id, ())))
            for run_id, on_disk in changed.items()
            if on_disk.settled and run_id not in incomplete and run_id not in self._damaged
        }
        self._found, self.refused = unchanged.keys() | changed.keys(), self._skipped
        return added

    def _count(self, cursor: duckdb.DuckDBPyConnection, runs: list[RunOnDisk]) -> None:
        """Mark the runs that lack a segment, or for which the index has fewer tensors than their status says."""
        counted = [
            on_disk for on_disk in runs if on_disk.run.missing((), -1) and on_disk.run.run_id not in self._damaged
        ]
        rows = cursor.execute(
            "SELECT run_id, count(*) FROM tensor WHERE run_id IN (SELECT unnest(?)) GROUP BY run_id",
            [[on_disk.run.run_id for on_disk in counted]],
        ).fetchall()
        for on_disk in counted:
            run_id = on_disk.run.run_id
            if missing := on_disk.run.missing(on_disk.segments, dict(rows).get(run_id, 0)):
                self._damaged[run_id] = Damage(f"{run_id} is damaged: {missing}", None, seen_of(on_disk, None))

    def _look(self, before: dict[str, RunOnDisk]) -> tuple[dict[str, RunOnDisk], dict[str, RunOnDisk]]:
        """The runs on disk by name: the unchanged ones, and the others, oldest first."""
        unchanged, changed = {}, []
        for name in run_names(self.root):
            on_disk = before.get(name)
            if on_disk and on_disk.mark == mark_of(f"{self.root}/{name}", on_disk.segments):
                unchanged[name] = on_disk
                self._skipped += on_disk.faults
                continue
            directory = self.root / name
            for _ in range(ATTEMPTS):
                try:
                    changed.append(self._on_disk(directory))
                except NotBegunError:
                    pass
                except RunError as error:
                    self._skipped.append(str(error))
                except FileNotFoundError:
                    continue  # segments were merged, or the run was deleted in the meantime
                except OSError as error:  # the directory of another user
                    self._skipped.append(f"{name} cannot be read: {describe(error)}")
                break
        changed.sort(key=lambda on_disk: (str(on_disk.run.config.get("started")), on_disk.run.run_id))
        return unchanged, {on_disk.run.run_id: on_disk for on_disk in changed}

    def _on_disk(self, directory: Path) -> RunOnDisk:
        """Raises RunError, and FileNotFoundError if a segment is deleted in the meantime."""
        # The mark comes first, so that later changes are noticed next time. The segments come last, since a run that
        # ends meanwhile may have published some that its status counts.
        mark = mark_of(str(directory), segment_names(directory))
        run = read_run(directory)
        segments = {name: os.stat(directory / "segments" / name).st_mtime_ns for name in run.segments}
        try:
            run = replace(run, notes=read_notes(directory))
        except (OSError, ValueError) as error:
            self._skipped.append(f"the name and note of {directory.name} are not shown: {describe(error)}")
            mark = None  # it is reported again next time
        return RunOnDisk(run, segments, mark)

    def _write_runs(self, cursor: duckdb.DuckDBPyConnection, runs: list[RunInfo]) -> set[str]:
        """Update the rows of runs that differ from the index. Returns the ids of runs that cannot be written."""
        stored = {row[0]: list(row) for row in cursor.execute("FROM run").fetchall()} if runs else {}
        rows: list[list[Any]] = []
        refused: set[str] = set()

        def refuse(run_id: str, error: Exception) -> None:
            self._skipped.append(f"{run_id!a} cannot be indexed: {describe(error)}")
            refused.add(run_id)

        for run in runs:
            try:
                damage = self._damaged.get(run.run_id)
                row = [*_run_row(run), damage.reason if damage else None]
            except (ValueError, TypeError) as error:
                refuse(run.run_id, error)
            else:
                if row != stored.get(run.run_id):
                    rows.append(row)
        _at_once(cursor, rows, _put_runs, lambda row, error: refuse(row[0], error))
        return refused

    def _write_records(
        self, cursor: duckdb.DuckDBPyConnection, runs: list[RunInfo]
    ) -> tuple[set[str], dict[str, list[str]]]:
        """Write the new records and results of runs. Returns the ids of runs with files that cannot be read, and what
        is damaged or cannot be read of each run."""
        known: dict[str, dict[str, RecordFile]] = {}
        for run_id, name, *read in cursor.execute("FROM record_file").fetchall():
            known.setdefault(run_id, {})[name] = RecordFile.stored(run_id, name, *read)
        unread, faults = set[str](), dict[str, list[str]]()
        batch: list[RecordFile] = []
        for run in runs:
            before = known.get(run.run_id, {})
            kinds = {name: kind for kind in RECORD_KINDS for name in kind.files(run.directory)}
            files = [read_records(run, kind, name, before.get(name)) for name, kind in kinds.items()]
            files += read_results(run, before.get(EXPERIMENT))
            for file in files:
                if file.lines.problem:
                    many = kinds[file.name].many if file.name in kinds else "results"
                    fault = f"some {many} of {run.run_id} are not shown: {file.lines.problem}"
                    faults.setdefault(run.run_id, []).append(fault)
                if not file.is_read:
                    unread.add(run.run_id)
            batch += (RecordFile(run.run_id, name) for name in before.keys() - {file.name for file in files})
            batch += (file for file in files if file is not before.get(file.name))
            if sum(len(file.lines.values) for file in batch) >= BATCH:
                put_records(cursor, batch)
                batch = []
        put_records(cursor, batch)
        return unread, faults

    def _read(self, new: Iterable[tuple[RunOnDisk, str, int]]) -> Iterator[list[_Segment]]:
        """Read segments, given as (run, name, modification time), in batches. A damaged run is not read further."""
        batch: list[_Segment] = []
        size = 0
        for on_disk, name, mtime in new:
            run = on_disk.run
            if run.run_id in self._damaged:
                continue
            segment = _Segment(run.run_id, name, mtime, {})
            directory = run.directory / "segments" / name
            try:
                segment.tables.update(read_tables(directory, run.manifest_of(name)))
                at = places(segment.tables.pop("sketch"), len(segment.tables["tensor"]))
                for column in at.column_names:
                    segment.tables["tensor"] = segment.tables["tensor"].append_column(column, at[column])
            except (OSError, ValueError, TypeError, MemoryError, pa.ArrowException) as error:
                if directory.exists():
                    self._refuse(segment, error, {run.run_id: on_disk})
                else:
                    self._vanished = True
                continue
            batch.append(segment)
            size += len(segment.tables["tensor"])
            if size >= BATCH:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _refuse(self, segment: _Segment, error: Exception, runs: Mapping[str, RunOnDisk]) -> None:
        reason = f"segment {segment.run_id}/{segment.name} is damaged: {describe(error)}"
        lasting = isinstance(error, (SegmentError, FileNotFoundError, duckdb.IntegrityError, pa.ArrowInvalid))
        seen = seen_of(runs[segment.run_id], segment.name) if lasting else None
        self._damaged.setdefault(segment.run_id, Damage(reason, segment.name, seen))


@dataclass(frozen=True)
class _Segment:
    """A segment that was read, see `segment.read_tables`, with the places of its sketches instead of the sketches."""

    run_id: str
    name: str
    mtime: int
    tables: dict[str, pa.Table]


def _at_once(
    cursor: duckdb.DuckDBPyConnection,
    batch: list[T],
    write: Callable[[duckdb.DuckDBPyConnection, list[T]], None],
    refuse: Callable[[T, Exception], None],
) -> list[T]:
    """Write a batch in one transaction or, if that fails, one item at a time. Returns the items written."""
    if not batch:
        return []
    try:
        with transaction(cursor):
            write(cursor, batch)
        return batch
    except (*DATA_ERRORS, pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        if len(batch) == 1:
            refuse(batch[0], error)
            return []
    return [entry for one in batch for entry in _at_once(cursor, [one], write, refuse)]


def _known_segments(cursor: duckdb.DuckDBPyConnection) -> dict[str, dict[str, int]]:
    """The modification times of the indexed segments of each run; of a run without one, that of no name."""
    known: dict[str, dict[str, int]] = {}
    joined = "SELECT run_id, segment.name, mtime_ns FROM run FULL JOIN segment USING (run_id)"
    for run_id, name, mtime in cursor.execute(joined).fetchall():
        known.setdefault(run_id, {})[name] = mtime
    return known


def _take_over(cursor: duckdb.DuckDBPyConnection, on_disk: RunOnDisk, taken: dict[str, int]) -> None:
    """Assign the rows of indexed segments to the merged ones that have replaced them on disk."""
    for name in on_disk.segments.keys() - taken.keys():
        if not name.startswith(MERGED):
            continue
        with suppress(OSError, ValueError):  # damaged: it is read, and refused, as any other
            replaces = read_manifest(
                on_disk.run.directory / "segments" / name, on_disk.run.config.get("run_id")
            ).replaces
            if replaces and all(taken.get(old) == replaced.mtime_ns for old, replaced in replaces.items()):
                rows = dict(
                    cursor.execute(
                        "SELECT name, sum(sketch_rows)::BIGINT FROM segment WHERE run_id = ? GROUP BY name",
                        [on_disk.run.run_id],
                    ).fetchall()
                )
                before = 0
                with transaction(cursor):
                    for old in replaces:  # in the order of their rows
                        cursor.execute(
                            "UPDATE segment SET name = ?, mtime_ns = ?, shift = shift + ?"
                            " WHERE run_id = ? AND name = ?",
                            [name, on_disk.segments[name], before, on_disk.run.run_id, old],
                        )
                        before += rows[old]
                for old in replaces:
                    del taken[old]
                taken[name] = on_disk.segments[name]


def _put_runs(cursor: duckdb.DuckDBPyConnection, rows: list[list[Any]]) -> None:
    columns = [pa.array(column) for column in zip(*rows, strict=True)]
    table = pa.Table.from_arrays(columns, names=[f"column{number}" for number in range(len(columns))])
    insert(cursor, "INSERT OR REPLACE INTO run FROM incoming", table)


def _add(cursor: duckdb.DuckDBPyConnection, segments: list[_Segment]) -> None:
    first = next_key(cursor)
    tables: dict[str, list[pa.Table]] = {}
    names = []
    for segment in segments:
        stop = pc.max(segment.tables["tensor"]["sketch_stop"]).as_py() or 0
        names.append(dict(zip(SEGMENT, (first, segment.run_id, segment.name, segment.mtime, 0, stop), strict=True)))
        for name, table in segment.tables.items():
            if name == "tensor":
                # The directory's name is the run's id, so that a run may be copied or renamed.
                ids = pc.binary_join_element_wise(segment.run_id, table["tensor_id"], "/")
                table = table.set_column(0, "tensor_id", ids)
                table = table.set_column(1, "run_id", pa.repeat(segment.run_id, len(table)))
                keys = pa.array(np.arange(first, first + len(table), dtype=np.int32))
            else:
                keys = pc.add(table["row"], pa.scalar(first, pa.int32()))
                table = table.drop_columns("row")
            tables.setdefault(name, []).append(table.add_column(0, "key", keys))
        first += len(segment.tables["tensor"])
    for name, parts in tables.items():
        if len(rows := pa.concat_tables(parts)):
            insert(cursor, f"INSERT INTO {name} FROM incoming", rows)
    runs = list({segment.run_id for segment in segments})
    twice = cursor.execute(
        "SELECT tensor_id FROM tensor WHERE run_id IN (SELECT unnest(?)) GROUP BY ALL HAVING count(*) > 1 LIMIT 1",
        [runs],
    ).fetchall()
    if twice:
        raise ValueError(f"the tensor id {twice[0][0]!r} occurs twice")
    insert(cursor, "INSERT INTO segment FROM incoming", pa.Table.from_pylist(names))


def _drop(cursor: duckdb.DuckDBPyConnection, run_id: str) -> None:
    with transaction(cursor):
        for table in ("score", "block", "trace"):
            cursor.execute(f"DELETE FROM {table} WHERE key IN (SELECT key FROM tensor WHERE run_id = ?)", [run_id])
        for cube in CUBES:
            cursor.execute(
                f"DELETE FROM {cube}_sketch WHERE key IN (SELECT key FROM {cube} WHERE run_id = ?)", [run_id]
            )
        for table in ("tensor", "segment", "effect", "record", "record_file", "run", *CUBES):
            cursor.execute(f"DELETE FROM {table} WHERE run_id = ?", [run_id])


def _run_row(run: RunInfo) -> list[Any]:
    config, status = run.config, run.status
    return [
        run.run_id,
        *(config.get(key) for key in ("model", "size", "dataset", "recipe")),
        status.state,
        status.reason,
        config.get("device"),
        config.get("backend"),
        _time(config.get("started")),
        _time(status.finished),
        status.iteration,
        config.get("train_iters"),
        status.tensors,
        status.tensors_without_raw,
        status.bytes,
        status.loss_first,
        status.loss_last,
        json.dumps(config),
        run.notes.name or None,
        run.notes.color or None,
        run.notes.note or None,
        first_step(run.directory),
    ]


def _time(text: str | None) -> datetime | None:
    """A time in UTC, without its offset. One that was written without an offset is in UTC."""
    time = datetime.fromisoformat(text) if text else None
    return time.astimezone(UTC).replace(tzinfo=None) if time and time.tzinfo else time
