"""Reads the sketches of chosen tensors from the segments' files. They stay there: the index only has their places.

A sketch takes more space than all other data about a tensor. Most answers come from sums (see data/intake.py) and need
none; the others read the row groups that contain the chosen tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from binade.data.segment import SegmentError
from binade.data.text import describe

PLACED = "tensor.key, sketch_start, sketch_stop"
TYPES = {"bin": np.int16, "count": np.int64}
SCHEMA = pa.schema([("key", pa.int32()), *((name, pa.from_numpy_dtype(dtype)) for name, dtype in TYPES.items())])
BINS = 1 << 12
AT_ONCE = 1 << 11  # keys whose sketches are added up at once: each takes the room of BINS numbers
MOST = 2.0**62
GROUPS = 32  # row groups that are read at once
FOOTERS = 1 << 9  # files whose description is kept in memory


def places(table: pa.Table, tensors: int) -> pa.Table:
    """Where the sketch of each of a segment's tensors is, given the sketches as `segment.read_tables` returns them: the
    columns sketch_start and sketch_stop, null without a sketch. Raises SegmentError if the rows of a tensor are not
    together."""
    if any(column.null_count for column in table.columns):
        raise SegmentError("sketch.parquet has rows without a bin or a count")
    given, bins, counts = (table[name].to_numpy() for name in ("row", "bin", "count"))
    if len(bins) and not 0 <= bins.min() <= bins.max() < BINS:
        raise SegmentError(f"sketch.parquet has bins from {bins.min()} to {bins.max()}, expected 0 to {BINS - 1}")
    if len(counts) and counts.min() < 0:
        raise SegmentError(f"sketch.parquet has the count {counts.min()}")
    inside = np.flatnonzero(given[1:] != given[:-1]) + 1
    edges = np.concatenate([[0], inside, [len(given)]]) if len(given) else np.zeros(1, np.int64)
    row = given[edges[:-1]]
    found = np.zeros((2, tensors), np.int64)
    found[:, row] = edges[:-1], edges[1:]
    without = np.ones(tensors, bool)
    without[row] = False
    if without.sum() != tensors - len(row):
        raise SegmentError("sketch.parquet has the rows of a tensor in several places")
    return pa.table([pa.array(each, mask=without) for each in found], names=["sketch_start", "sketch_stop"])


@contextmanager
def sketches(
    cursor: duckdb.DuckDBPyConnection, root: Path, chosen: str, parameters: Sequence[Any] = ()
) -> Iterator[str]:
    """The name of a table that SQL may read once within this context: the sketches of the tensors that the statement
    `chosen` returns, as PLACED, added up under the key `other` that it returns with it, in the order of these. Raises
    SegmentError if a file is not the one that the index knows."""
    found = cursor.execute(f"FROM ({chosen}) WHERE sketch_start IS NOT NULL", parameters).fetchnumpy()
    key, other, start, stop = (np.asarray(found[name]) for name in ("key", "other", "sketch_start", "sketch_stop"))
    segments = cursor.execute("SELECT number, shift, run_id, name, mtime_ns FROM segment ORDER BY number").fetchall()
    number = np.searchsorted([each[0] for each in segments], key, "right") - 1
    shift = np.array([each[1] for each in segments], np.int64)[number]
    # Segments that were merged are one file.
    files = {each[2:]: at for at, each in enumerate(segments)}
    file = np.array([files[each[2:]] for each in segments], np.int64)[number]
    order = np.lexsort((start + shift, file))
    directories = {at: (f"{root}/{run_id}/segments/{name}", mtime_ns) for (run_id, name, mtime_ns), at in files.items()}
    failed: list[Exception] = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            yield from _sums(directories, *(each[order] for each in (file, other, start + shift, stop + shift)))
        except (OSError, ValueError, IndexError, pa.ArrowException) as error:  # IndexError: it has fewer rows
            failed.append(error)
            raise

    cursor.register("sketch", pa.RecordBatchReader.from_batches(SCHEMA, batches()))
    try:
        yield "sketch"
    except duckdb.Error as error:
        if failed:
            raise SegmentError(f"a segment cannot be read: {describe(failed[0])}") from error
        raise


def _sums(
    segments: Mapping[int, tuple[str, int]],
    segment: np.ndarray,
    other: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
) -> Iterator[pa.RecordBatch]:
    """The sketches in these rows of these segments, added up by key, AT_ONCE keys at a time."""

    def rows(chosen: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for part in np.split(chosen, np.flatnonzero(np.diff(segment[chosen])) + 1):
            for at, bins, counts in _read(*segments[int(segment[part[0]])], start[part], stop[part]):
                yield part[at], bins, counts

    keys, code = np.unique(other, return_inverse=True)
    if 0 < len(keys) == len(other):  # there is nothing to add up
        for at, bins, counts in rows(np.arange(len(other))):
            yield pa.RecordBatch.from_arrays([other[at], bins, counts], schema=SCHEMA)
        return
    for first in range(0, len(keys), AT_ONCE):
        total = np.zeros(min(AT_ONCE, len(keys) - first) * BINS, np.int64)
        place, values = (code - first) * BINS, 0.0
        for at, bins, counts in rows(np.flatnonzero((code >= first) & (code < first + AT_ONCE))):
            np.add.at(total, place[at] + bins, counts)
            values += counts.sum(dtype=np.float64)
        if values >= MOST:
            raise SegmentError(f"{values:.3g} values are too many to be added up")
        cells = np.flatnonzero(total)
        bins = (cells % BINS).astype(TYPES["bin"])
        yield pa.RecordBatch.from_arrays([keys[first + cells // BINS], bins, total[cells]], schema=SCHEMA)


@lru_cache(FOOTERS)
def _footer(file: str, mtime_ns: int) -> tuple[pq.FileMetaData, np.ndarray]:
    """The metadata of a file, the start of each of its row groups, and the end of the last."""
    metadata = pq.read_metadata(file)
    return metadata, np.cumsum([0, *(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))])


def _read(
    directory: str, mtime_ns: int, start: np.ndarray, stop: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The sketches in these rows, which are in order, of a segment, GROUPS row groups at a time: which of them a row
    belongs to, its bin and its count."""
    file = f"{directory}/sketch.parquet"
    metadata, ends = _footer(file, mtime_ns)
    with pq.ParquetFile(file, metadata=metadata, page_checksum_verification=True) as opened:
        if os.stat(directory).st_mtime_ns != mtime_ns:
            raise SegmentError(f"{directory} has changed")
        # In how many of the sketches each row group is.
        inside = np.bincount(ends.searchsorted(start, "right") - 1, minlength=len(ends))
        inside -= np.bincount(ends.searchsorted(stop, "left"), minlength=len(ends))
        (needed,) = inside.cumsum().nonzero()
        (breaks,) = ((needed[1:] - needed[:-1] > 1) | (np.arange(1, len(needed)) % GROUPS == 0)).nonzero()
        for a, b in pairwise([0, *(breaks + 1).tolist(), len(needed)]):
            first, end = ends[needed[a]], ends[needed[b - 1] + 1]
            low, high = stop.searchsorted(first, "right"), start.searchsorted(end, "left")
            begin = np.maximum(start[low:high], first) - first
            length = np.minimum(stop[low:high], end) - first - begin
            rows = opened.read_row_groups(needed[a:b].tolist(), columns=list(TYPES), use_threads=False)
            bins, counts = (rows[name].to_numpy().astype(dtype, copy=False) for name, dtype in TYPES.items())
            if length.sum() < len(rows):
                upto = length.cumsum()
                at = np.arange(upto[-1]) + np.repeat(begin - (upto - length), length)
                bins, counts = bins[at], counts[at]
            yield np.repeat(np.arange(low, high), length), bins, counts
