"""Merges the small segments of a run into large ones, once, when the run has ended.

A merged segment appears all at once, and its manifest names the segments that it replaces. From then on, these are no
longer listed (`segment.segment_names`), and an index that has their rows keeps them. They are deleted after the merged
segment has been read back from disk and its checksums have been verified. If the process is killed before the merged
segment appears, nothing has changed; if it is killed later, the segments that are left only take space.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from binade.data.run.directory import RunInfo
from binade.data.run.segment import (
    MERGED,
    TABLES,
    Replaced,
    completed,
    last_number,
    read_manifest,
    segment_digest,
    table_files,
    write_tables,
)
from binade.data.run.store import remove_directory

SIZE = 128 << 20  # bytes of a segment that is large enough
MANY = 64  # fewest segments of a run for a merge


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
        replaces[name] = Replaced.of(segment)
        digests[name] = segment_digest(segment).hex()
    write_tables(segments / merged, (_tables(segments / name) for name in names), replaces, digests)
    read_manifest(segments / merged, run_id).check(segments / merged)
    for name in names:
        remove_directory(segments / name)


def _tables(segment: Path) -> dict[str, pa.Table]:
    """The tables of a segment as this version writes them. Raises OSError, and ValueError or pa.ArrowException."""
    tables: dict[str, pa.Table] = {}
    for stem, file in table_files(segment).items():
        table, schema = completed(stem, pq.read_table(file, partitioning=None)), TABLES[stem]
        if more := {*table.column_names} - {*schema.names}:
            raise ValueError(f"{file} has a column {min(more)!r}, which this version does not know")
        tables[stem] = table.select(schema.names).cast(schema)
    return tables
