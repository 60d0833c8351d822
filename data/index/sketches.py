"""Reads the sketches of chosen tensors from the segments' files. They stay there: the index only has their places.

A sketch takes more space than all other data about a tensor. Most answers come from sums (see data/index/intake.py) and
need none; the others read the row groups that contain the chosen tensors.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from binade.data.run.segment import SegmentError
from binade.data.words.text import describe

PLACED = "tensor.key, sketch_start, sketch_stop"
TYPES = {"bin": np.int16, "count": np.int64}
SCHEMA = pa.schema([("key", pa.int32()), *((name, pa.from_numpy_dtype(dtype)) for name, dtype in TYPES.items())])
BINS = 1 << 12
AT_ONCE = 1 << 10  # keys whose sketches are added up at once: each takes the room of BINS numbers
MOST = 2.0**62
GROUPS = 32  # row groups that are read at once
OPTIONS = {"page_checksum_verification": True, "pre_buffer": False}  # row groups are small: no threads to read them
BLOCK = 1 << 18  # rows that are held in memory
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
    bounds = np.zeros((2, tensors), np.int64)
    bounds[:, row] = edges[:-1], edges[1:]
    without = np.ones(tensors, bool)
    without[row] = False
    if without.sum() != tensors - len(row):
        raise SegmentError("sketch.parquet has the rows of a tensor in several places")
    return pa.table([pa.array(bound, mask=without) for bound in bounds], names=["sketch_start", "sketch_stop"])


def sketch_file(root: Path, run_id: str, segment: str) -> str:
    return f"{root}/{run_id}/segments/{segment}/sketch.parquet"


@contextmanager
def sketches(
    cursor: duckdb.DuckDBPyConnection, root: Path, chosen: str, parameters: Sequence[Any] = ()
) -> Iterator[str]:
    """The name of a table that SQL may read once within this context: the sketches of the tensors that the statement
    `chosen` returns, as PLACED, added up under the key `other` that it returns with it, in the order of these. Raises
    SegmentError if a file is not the one that the index knows."""
    columns = cursor.execute(f"FROM ({chosen}) WHERE sketch_start IS NOT NULL", parameters).fetchnumpy()
    key, other, start, stop = (np.asarray(columns[name]) for name in ("key", "other", "sketch_start", "sketch_stop"))
    segments = cursor.execute("SELECT number, shift, run_id, name, mtime_ns FROM segment ORDER BY number").fetchall()
    number = np.searchsorted([segment[0] for segment in segments], key, "right") - 1
    shift = np.array([segment[1] for segment in segments], np.int64)[number]
    # Segments that were merged are one file.
    files = {segment[2:]: at for at, segment in enumerate(segments)}
    file = np.array([files[segment[2:]] for segment in segments], np.int64)[number]
    order = np.lexsort((start + shift, file))
    directories = {at: (sketch_file(root, run_id, name), mtime) for (run_id, name, mtime), at in files.items()}
    failed: list[BaseException] = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            yield from _sums(directories, *(column[order] for column in (file, other, start + shift, stop + shift)))
        except (OSError, ValueError, IndexError, pa.ArrowException, KeyboardInterrupt) as error:
            # IndexError: it has fewer rows
            failed.append(error)
            raise

    cursor.register("sketch", pa.RecordBatchReader.from_batches(SCHEMA, batches()))
    try:
        yield "sketch"
    except duckdb.Error as error:
        if failed and isinstance(failed[0], KeyboardInterrupt):
            raise failed[0] from error
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
    keys, code = np.unique(other, return_inverse=True)
    if 0 < len(keys) == len(other):  # there is nothing to add up
        for at, bins, counts in _blocks(segments, segment, start, stop):
            yield pa.RecordBatch.from_arrays([other[at], bins, counts], schema=SCHEMA)
        return
    for first in range(0, len(keys), AT_ONCE):
        total = np.zeros(min(AT_ONCE, len(keys) - first) * BINS, np.int64)
        chosen, values = (code >= first) & (code < first + AT_ONCE), 0.0
        place = (code[chosen] - first) * BINS
        for at, bins, counts in _blocks(segments, segment[chosen], start[chosen], stop[chosen]):
            np.add.at(total, place[at] + bins, counts)
            values += counts.sum(dtype=np.float64)
        if values >= MOST:
            raise SegmentError(f"the sketches count {values:.3g} values, which does not fit in 64 bits")
        cells = np.flatnonzero(total)
        bins = (cells % BINS).astype(TYPES["bin"])
        yield pa.RecordBatch.from_arrays([keys[first + cells // BINS], bins, total[cells]], schema=SCHEMA)


def _blocks(
    segments: Mapping[int, tuple[str, int]], segment: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The sketches in these rows, which are in order, of these segments, some at a time: for each row the index of its
    sketch, its bin and its count."""
    upto = np.concatenate([[0], np.cumsum(stop - start)])
    (breaks,) = ((segment[1:] != segment[:-1]) | (start[1:] != stop[:-1])).nonzero()
    first, last = np.concatenate([[0], breaks + 1]), np.concatenate([breaks, [len(start) - 1]])
    ranges = zip(segment[first].tolist(), start[first].tolist(), stop[last].tolist(), strict=True) if len(start) else ()
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    before = held = 0

    def block() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        bins, counts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        after = before + len(bins)
        low, high = upto.searchsorted(before, "right") - 1, upto.searchsorted(after, "left")
        return np.repeat(np.arange(low, high), np.diff(upto[low : high + 1].clip(before, after))), bins, counts

    for number, rows in groupby(ranges, itemgetter(0)):
        for bins, counts, chosen in _read(*segments[number], [row[1:] for row in rows]):
            parts += [(bins[span], counts[span]) for span in chosen]
            held += len(bins)
            if held >= BLOCK:
                columns = block()
                yield columns
                before, held, parts = before + len(columns[0]), 0, []
    if parts:
        yield block()


@lru_cache(FOOTERS)
def _footer(file: str, mtime_ns: int) -> tuple[pq.FileMetaData, list[int]]:
    """The metadata of a file, the start of each of its row groups, and the end of the last."""
    metadata = pq.read_metadata(file)
    sizes = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    return metadata, list(accumulate(sizes, initial=0))


def _read(
    file: str, mtime_ns: int, ranges: list[tuple[int, int]]
) -> Iterator[tuple[np.ndarray, np.ndarray, list[slice]]]:
    """The bins and counts of a segment's row groups that contain these ranges of its rows, which are in order, GROUPS
    row groups at a time, and where the ranges are in them."""
    metadata, ends = _footer(file, mtime_ns)
    needed = sorted({group for a, b in ranges for group in range(bisect_right(ends, a) - 1, bisect_left(ends, b))})
    left = deque(ranges)
    with pa.OSFile(file) as source, pq.ParquetFile(source, metadata=metadata, **OPTIONS) as opened:
        if os.stat(directory := os.path.dirname(file)).st_mtime_ns != mtime_ns:
            raise SegmentError(f"{directory} has changed")
        for at in range(0, len(needed), GROUPS):
            groups = needed[at : at + GROUPS]
            rows = opened.read_row_groups(groups, columns=list(TYPES), use_threads=False)
            bins, counts = (rows[name].to_numpy().astype(dtype, copy=False) for name, dtype in TYPES.items())
            chosen, before = [], 0
            for group in groups:
                first, end = ends[group], ends[group + 1]
                while left and left[0][0] < end:
                    a, b = left[0]
                    chosen.append(slice(max(a, first) - first + before, min(b, end) - first + before))
                    if b > end:
                        break
                    left.popleft()
                before += end - first
            yield bins, counts, chosen
