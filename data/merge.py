"""Merges the small segments of a run into large ones, once, when the run has ended.

A merged segment appears all at once, and its manifest names the segments that it replaces. From then on, these are no
longer listed (`segment.segment_names`), and an index that has their rows keeps them. They are deleted after the merged
segment has been read back from disk and its checksums have been verified. If the process is killed before the merged
segment appears, nothing has changed; if it is killed later, the segments that are left only take space.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from binade.data.runs import RunInfo
from binade.data.segment import (
    GROUP_ROWS,
    MANIFEST,
    MERGED,
    TABLES,
    Replaced,
    last_number,
    manifest,
    parquet_options,
    read_manifest,
    segment_digest,
)
from binade.data.store import remove_directory, sha256, staged_directory, staged_file, write_atomic

SIZE = 128 << 20  # bytes of a segment that is large enough
MANY = 64  # fewest segments of a run for a merge
ROWS = 1 << 20  # that are held in memory


def merge_segments(run: RunInfo) -> None:
    """If the run has MANY segments, merge those smaller than SIZE into ones of at least this size; the rest become one.
    For the process that recorded the run, once it has ended. Raises OSError, and ValueError or pa.ArrowException for a
    damaged segment; the run is complete all the same."""
    numbers = count(last_number(run.segments) + 1)
    for names in _groups(run) if len(run.segments) >= MANY else ():
        _merge(run, names, f"{MERGED}{next(numbers):06d}")


def _groups(run: RunInfo) -> Iterator[list[str]]:
    """Groups of segments to merge with each other."""
    group: list[str] = []
    total = 0
    for name in run.segments:
        nbytes = sum(file.stat().st_size for file in (run.directory / "segments" / name).iterdir())
        if nbytes >= SIZE or name.startswith(MERGED):
            continue
        group.append(name)
        total += nbytes
        if total >= SIZE:
            yield group
            group, total = [], 0
    if len(group) > 1:
        yield group


def _merge(run: RunInfo, names: Sequence[str], merged: str) -> None:
    """Publish the segment `merged`, and delete those of these names."""
    segments, run_id = run.directory / "segments", run.config.get("run_id")
    replaces, digests = {}, {}
    for name in names:
        segment = segments / name
        read_manifest(segment, run_id).check(segment)
        replaces[name] = Replaced(sha256(segment / MANIFEST), segment.stat().st_mtime_ns)
        digests[name] = segment_digest(segment).hex()
    with staged_directory(segments / merged) as part:
        for stem, schema in TABLES.items():
            with (
                staged_file(part / f"{stem}.parquet") as file,
                pq.ParquetWriter(file, schema, **parquet_options(schema)) as writer,
            ):
                for table in _chunks([segments / name / f"{stem}.parquet" for name in names]):
                    writer.write_table(table, row_group_size=GROUP_ROWS[stem])  # ValueError for another schema
        files = {file.name: file for file in sorted(part.iterdir())}
        write_atomic(part / MANIFEST, manifest(run_id, merged, files, replaces, digests))
        _sync(part)
    _sync(segments)
    read_manifest(segments / merged, run_id).check(segments / merged)
    for name in names:
        remove_directory(segments / name)


def _chunks(files: Sequence[Path]) -> Iterator[pa.Table]:
    """The rows of some files in order, in tables of about ROWS rows."""
    tables: list[pa.Table] = []
    for file in files:
        with pq.ParquetFile(file) as opened:
            for group in range(opened.num_row_groups):
                tables.append(opened.read_row_group(group))
                if sum(map(len, tables)) >= ROWS:
                    yield pa.concat_tables(tables)
                    tables = []
    if sum(map(len, tables)):
        yield pa.concat_tables(tables)


def _sync(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
