"""Segments: the rows of some captured tensors as three Parquet files in a directory that appears all at once.

segments/rank00-000001/  tensor.parquet  sketch.parquet  score.parquet
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:  # they import torch, which reading the index does not need
    from quant.metrics import Errors
    from quant.summary import Summary


@dataclass(frozen=True)
class Identity:
    """Which tensor it is: the words that users filter by. None where a word does not apply or is not known."""

    model: str | None
    size: str | None
    dataset: str | None
    recipe: str | None
    quant_type: str
    layer_type: str
    layer_index: int | None
    module: str | None
    component: str
    operation: str
    phase: str
    tensor_name: str
    iteration: int | None
    micro_batch: int | None
    rank: int | None
    expert: int | None = None


@dataclass(frozen=True)
class Shard:
    """How a tensor stands to the whole one that tensor-parallel ranks share: it is number `index` of `count`.

    kind    whole: every rank has all of it; slice: the ranks' tensors joined along `axis` are the whole; partial: their
            sum is
    stride  the whole is that many tensors, one after the other along the axis, each divided (SwiGLU's gate and up)
    replica which of the data-parallel copies of the model it belongs to
    """

    index: int = 0
    count: int = 1
    kind: str = "whole"
    axis: int | None = None
    stride: int = 1
    replica: int = 0


@dataclass(frozen=True)
class TensorRow:
    """All that the index keeps of one tensor. tensor_id is unique within its run (the index puts the run's id before
    it); format and error are None unless it is a quantized operand."""

    tensor_id: str
    run_id: str
    identity: Identity
    captured: datetime
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    path: str | None
    contracted_axis: int | None
    summary: Summary
    format: str | None = None
    error: Errors | None = None
    scores: dict[str, Errors] = field(default_factory=dict)
    shard: Shard = Shard()


_TEXT, _INT, _LONG, _REAL = pa.string(), pa.int32(), pa.int64(), pa.float64()
_INTEGER_WORDS = ("layer_index", "iteration", "micro_batch", "rank", "expert")
_MOMENTS = ("min", "max", "mean", "std", "rms", "absmax", "absmin", "skewness", "kurtosis")
_COUNTS = ("zeros", "nans", "infs")
ERROR_COLUMNS = (  # the fields of quant.metrics.Errors
    "sqnr_db",
    "mse",
    "relative_error",
    "cosine",
    "projection",
    "max_abs_error",
    "flush_to_zero",
    "underflow_of_all",
    "saturated",
)

_SHARD = (
    ("tp_rank", _INT),
    ("tp_size", _INT),
    ("dp_rank", _INT),
    ("shard", _TEXT),
    ("shard_axis", _INT),
    ("shard_stride", _INT),
)
# Columns that the segments of an earlier version lack: null there.
ADDED_LATER = frozenset(name for name, _ in _SHARD)

TENSOR_SCHEMA = pa.schema(
    [("tensor_id", _TEXT), ("run_id", _TEXT)]
    + [(f.name, _INT if f.name in _INTEGER_WORDS else _TEXT) for f in fields(Identity)]
    + [
        ("captured", pa.timestamp("us")),
        ("shape", pa.list_(_LONG)),
        ("dtype", _TEXT),
        ("numel", _LONG),
        ("nbytes", _LONG),
        ("path", _TEXT),
        ("contracted_axis", _INT),
    ]
    + [(name, _REAL) for name in _MOMENTS]
    + [(name, _LONG) for name in _COUNTS]
    + list(_SHARD)
    + [("format", _TEXT)]
    + [(name, _REAL) for name in ERROR_COLUMNS]
)
SKETCH_SCHEMA = pa.schema([("tensor_id", _TEXT), ("bin", pa.int16()), ("count", _LONG)])
SCORE_SCHEMA = pa.schema([("tensor_id", _TEXT), ("format", _TEXT), *((name, _REAL) for name in ERROR_COLUMNS)])


def _tensor_record(row: TensorRow) -> dict:
    record = {
        "tensor_id": row.tensor_id,
        "run_id": row.run_id,
        **asdict(row.identity),
        "captured": row.captured,
        "shape": list(row.shape),
        "dtype": row.dtype,
        "numel": row.summary.numel,
        "nbytes": row.nbytes,
        "path": row.path,
        "contracted_axis": row.contracted_axis,
        "tp_rank": row.shard.index,
        "tp_size": row.shard.count,
        "dp_rank": row.shard.replica,
        "shard": row.shard.kind,
        "shard_axis": row.shard.axis,
        "shard_stride": row.shard.stride,
        "format": row.format,
        **(asdict(row.error) if row.error else dict.fromkeys(ERROR_COLUMNS)),
    }
    return record | {name: getattr(row.summary, name) for name in (*_MOMENTS, *_COUNTS)}


def write_segment(directory: Path, name: str, rows: list[TensorRow]) -> None:
    """Publish rows as directory/name: filled aside, then renamed. Raises OSError, and then leaves nothing behind."""
    aside = directory / f".{name}.{os.getpid()}.part"
    try:
        aside.mkdir(parents=True)
        sketch = pa.table(
            {
                "tensor_id": np.repeat([row.tensor_id for row in rows], [len(row.summary.bins) for row in rows]),
                "bin": np.concatenate([row.summary.bins for row in rows]),
                "count": np.concatenate([row.summary.counts for row in rows]),
            },
            schema=SKETCH_SCHEMA,
        )
        scores = [
            {"tensor_id": row.tensor_id, "format": name} | asdict(error)
            for row in rows
            for name, error in row.scores.items()
        ]
        for stem, table in (
            ("tensor", pa.Table.from_pylist([_tensor_record(row) for row in rows], schema=TENSOR_SCHEMA)),
            ("sketch", sketch),
            ("score", pa.Table.from_pylist(scores, schema=SCORE_SCHEMA)),
        ):
            with open(aside / f"{stem}.parquet", "wb") as file:
                pq.write_table(table, file)
                file.flush()
                os.fsync(file.fileno())
        os.rename(aside, directory / name)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def segment_names(run_directory: Path) -> list[str]:
    """The published segments of a run, in order."""
    directory = run_directory / "segments"
    if not directory.is_dir():
        return []
    return sorted(entry.name for entry in directory.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def segment_digest(directory: Path) -> bytes:
    """SHA-256 of a segment's content: sketches and scores to the byte, rows by their values but for `path`. Raises
    OSError, and ValueError (pyarrow's too) for a file that is no Parquet."""
    total = hashlib.sha256()
    for name in ("sketch.parquet", "score.parquet"):
        total.update(hashlib.sha256((directory / name).read_bytes()).digest())
    with pq.ParquetFile(directory / "tensor.parquet") as file:
        names = [name for name in file.schema_arrow.names if name != "path"]
        for group in range(file.num_row_groups):
            for row in file.read_row_group(group, columns=names).to_pylist():
                total.update(json.dumps(row, default=str).encode())
    return total.digest()
