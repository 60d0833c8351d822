"""Merges small segments of runs that have ended into large ones, for `binade compact` and at the end of a long run.

A merged segment appears all at once, and its manifest names the segments that it replaces. From then on, these are no
longer listed (`segment.segment_names`), and an index that has their rows keeps them. They are deleted after the merged
segment has been read back from disk and its checksums have been verified. If the process is killed before the merged
segment appears, nothing has changed; if it is killed later, the next call deletes what is left.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from binade.data.access import check_writable
from binade.data.cache import Done
from binade.data.runs import (
    CHECKPOINTS,
    DONE,
    IMPORT,
    RUNNING,
    RunError,
    RunInfo,
    check_root,
    read_run,
    run_directories,
)
from binade.data.segment import (
    GROUP_ROWS,
    MANIFEST,
    MERGED,
    TABLES,
    Replaced,
    SegmentError,
    last_number,
    manifest,
    parquet_options,
    read_manifest,
    replaced_names,
    segment_digest,
    with_columns_of,
)
from binade.data.store import anchored, locked, remove_directory, sha256, staged_directory, sweep, write_atomic
from binade.data.text import describe

SIZE = 128 << 20  # bytes of a segment that is large enough
MOST = 10_000  # most segments that one merged segment replaces
MANY = 64  # fewest segments of a run for a merge at its end
ROWS = 1 << 20  # that are held in memory


@dataclass
class Compacted:
    """The number of segments before and after, and their bytes; skipped: a line for each unchanged run, with the
    reason."""

    before: int = 0
    after: int = 0
    nbytes: int = 0
    skipped: list[str] = field(default_factory=list)


def compact(root: Path, size: int = SIZE, *, dry_run: bool = False, done: Done = lambda count, of: None) -> Compacted:
    """Merge the segments of each run that are smaller than `size` bytes into ones of at least this size; the rest of a
    run becomes one. Imports are not changed: they may drop rows later. done is called with the runs so far and their
    number. With dry_run, only count.

    Raises RunError if the root is not a directory, ReadOnlyError.
    """
    if not dry_run:
        check_writable("merging segments")
    check_root(root)
    found = Compacted()
    directories = run_directories(root)
    for number, directory in enumerate(directories, 1):
        _compact(directory, size, dry_run, found)
        done(number, len(directories))
    return found


def compact_ended(directory: Path) -> Compacted:
    """`compact` for one run that has just ended, if it has MANY segments."""
    found = Compacted()
    _compact(directory, SIZE, False, found, MANY)
    return found


def _compact(directory: Path, size: int, dry_run: bool, found: Compacted, fewest: int = 0) -> None:
    try:
        with ExitStack() as held:
            place = held.enter_context(anchored(directory))
            if not dry_run:
                held.enter_context(locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB))
            run = read_run(directory)
            if run.segments and len(run.segments) >= fewest:
                _compact_run(run, held.enter_context(anchored(place / "segments")), size, dry_run, found)
    except BlockingIOError:
        found.skipped.append(f"{directory.name} is in use by another process")
    except RunError as error:
        found.skipped.append(str(error))
    except (OSError, ValueError, pa.ArrowException) as error:
        found.skipped.append(f"{directory.name}: {describe(error)}")


def _compact_run(run: RunInfo, segments: Path, size: int, dry_run: bool, found: Compacted) -> None:
    if run.status.state == RUNNING or run.config.get("kind") == IMPORT:
        return
    if not run.config.get("checksums"):
        found.skipped.append(f"{run.run_id} has no checksums: it was recorded by an earlier version")
        return
    if run.status.state != DONE and (run.directory / CHECKPOINTS).is_dir():
        found.skipped.append(
            f"{run.run_id} can be resumed: use binade run --resume {run.run_id}, or delete its {CHECKPOINTS}"
        )
        return
    if not dry_run:
        _clean(segments)
    numbers = count(last_number(run.segments) + 1)
    for names in _groups(segments, run.segments, size):
        found.before, found.after = found.before + len(names), found.after + 1
        found.nbytes += sum(map(_size, (segments / name for name in names)))
        if not dry_run:
            _merge(run, segments, names, f"{MERGED}{next(numbers):06d}")


def _size(segment: Path) -> int:
    return sum(file.stat().st_size for file in segment.iterdir())


def _groups(segments: Path, names: Sequence[str], size: int) -> Iterator[list[str]]:
    """Groups of segments to merge with each other."""
    group: list[str] = []
    total = 0
    for name in sorted(names, key=lambda name: (name.startswith(MERGED), name)):
        nbytes = _size(segments / name)
        if nbytes >= size:
            continue
        group.append(name)
        total += nbytes
        if total >= size or len(group) == MOST:
            yield group
            group, total = [], 0
    if len(group) > 1:
        yield group


def _clean(segments: Path) -> None:
    """Delete leftovers of a killed process: segments that a merged one has replaced, and parts of a merged one."""
    sweep(segments, f".{MERGED}*")
    for gone in segments.glob(".*.gone"):
        remove_directory(gone)
    names = {entry.name for entry in segments.iterdir() if not entry.name.startswith(".")}
    for name in sorted(name for name in names if name.startswith(MERGED)):
        left = replaced_names(segments, {name} | (names & read_manifest(segments / name, None).replaces.keys()))
        if left:
            _delete(segments, name, left)


def _delete(segments: Path, merged: str, replaced: set[str]) -> None:
    """Delete segments if the merged one is intact on the disk. Raises SegmentError."""
    read_manifest(segments / merged, None).check(segments / merged)
    for name in sorted(replaced):
        remove_directory(segments / name)


def _merge(run: RunInfo, segments: Path, names: Sequence[str], merged: str) -> None:
    """Publish the segment `merged`, and delete those of these names. Raises SegmentError if one is damaged."""
    known: dict[str, str] = {}
    replaces = {}
    for name in names:
        segment = segments / name
        written = read_manifest(segment, run.config.get("run_id"))
        written.check(segment)
        replaces[name] = Replaced(sha256(segment / MANIFEST), segment.stat().st_mtime_ns)
        known |= written.digests or {name: segment_digest(segment).hex()}
    with staged_directory(segments / merged) as part:
        for stem, schema in TABLES.items():
            files = [file for name in names if (file := segments / name / f"{stem}.parquet").exists()]  # see OPTIONAL
            rows = 0
            with pq.ParquetWriter(part / f"{stem}.parquet", schema, **parquet_options(schema)) as writer:
                for table in _chunks(files, schema):
                    writer.write_table(table, row_group_size=GROUP_ROWS[stem])
                    rows += len(table)
            _sync(part / f"{stem}.parquet")
            if rows != (expected := sum(pq.read_metadata(file).num_rows for file in files)):
                raise SegmentError(f"{merged}/{stem}.parquet has {rows} rows, expected {expected}")
        write_atomic(
            part / MANIFEST,
            manifest(run.config.get("run_id"), merged, {f.name: f for f in sorted(part.iterdir())}, replaces, known),
        )
        _sync(part)
        if read_run(run.directory).status.state == RUNNING:
            raise RunError(f"{run.run_id} is running again")
    _sync(segments)
    _delete(segments, merged, set(names))


def _chunks(files: Sequence[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    """The rows of some files in order, in tables of about ROWS rows. Columns that are missing are null. Raises
    SegmentError for one that this version does not know."""
    tables: list[pa.Table] = []
    for file in files:
        with pq.ParquetFile(file) as opened:
            if unknown := set(opened.schema_arrow.names) - set(schema.names):
                raise SegmentError(
                    f"{file.parent.name}/{file.name} has the column {min(unknown)!r}: a later version wrote it"
                )
            for group in range(opened.num_row_groups):
                tables.append(with_columns_of(schema, opened.read_row_group(group)))
                if sum(map(len, tables)) >= ROWS:
                    yield pa.concat_tables(tables)
                    tables = []
    if sum(map(len, tables)):
        yield pa.concat_tables(tables)


def _sync(path: Path) -> None:
    """Wait until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
