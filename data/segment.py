"""Segments: the rows of some captured tensors as three Parquet files in a directory that appears all at once.

segments/rank00-000001/  tensor.parquet  sketch.parquet  score.parquet
                         files.jsonl     of an import: the files whose rows these are
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from binade.data.store import staged_directory, staged_file, write_atomic

if TYPE_CHECKING:  # they import torch, which reading the index does not need
    from binade.quant.metrics import Errors
    from binade.quant.summary import Summary


@dataclass(frozen=True)
class Identity:
    """Which tensor it is: the words that users filter by. None where a word does not apply or is not known."""

    model: str | None
    size: str | None
    dataset: str | None
    recipe: str | None
    quant_type: str | None
    layer_type: str | None
    layer_index: int | None
    module: str | None
    component: str | None
    operation: str | None
    phase: str | None
    tensor_name: str | None
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
class Origin:
    """What is known of a tensor that another tool logged, beside its Identity.

    version      how that tool named the file (V0 to V7); None for any other name
    quant_type   as the log spells it
    stage        before or after it was quantized; None if it was not, or is not known
    corrections  a sentence for each thing that is not as the log says
    key          of the tensor in a file of several
    """

    version: str | None = None
    quant_type: str | None = None
    stage: str | None = None
    corrections: tuple[str, ...] = ()
    key: str | None = None


@dataclass(frozen=True)
class TensorRow:
    """All that the index keeps of one tensor. tensor_id is unique within its run (the index puts the run's id before
    it); format and error are None unless it is a quantized operand. path is relative to the run's directory; that of an
    imported tensor, which has an origin, is absolute. captured and shard are None where a log does not tell them.
    recomputed: its layer's forward pass ran a second time during the backward pass (activation recomputation); None
    where that is not known."""

    tensor_id: str
    run_id: str
    identity: Identity
    captured: datetime | None
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    path: str | None
    contracted_axis: int | None
    summary: Summary
    format: str | None = None
    error: Errors | None = None
    scores: dict[str, Errors] = field(default_factory=dict)
    shard: Shard | None = Shard()
    recomputed: bool | None = None
    origin: Origin | None = None


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
_ORIGIN = (
    ("source_version", _TEXT),
    ("original_quant_type", _TEXT),
    ("stage", _TEXT),
    ("corrections", _TEXT),
    ("file_key", _TEXT),
)
# Columns that the segments of an earlier version lack: null there.
ADDED_LATER = frozenset((*(name for name, _ in (*_SHARD, *_ORIGIN)), "recomputed"))

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
    + [("recomputed", pa.bool_())]
    + list(_ORIGIN)
    + [("format", _TEXT)]
    + [(name, _REAL) for name in ERROR_COLUMNS]
)
SKETCH_SCHEMA = pa.schema([("tensor_id", _TEXT), ("bin", pa.int16()), ("count", _LONG)])
SCORE_SCHEMA = pa.schema([("tensor_id", _TEXT), ("format", _TEXT), *((name, _REAL) for name in ERROR_COLUMNS)])


def _tensor_record(row: TensorRow) -> dict[str, Any]:
    record = {
        "tensor_id": row.tensor_id,
        "run_id": row.run_id,
        **vars(row.identity),
        "captured": row.captured,
        "shape": list(row.shape),
        "dtype": row.dtype,
        "numel": row.summary.numel,
        "nbytes": row.nbytes,
        "path": row.path,
        "contracted_axis": row.contracted_axis,
        **_shard_record(row.shard),
        "recomputed": row.recomputed,
        **_origin_record(row.origin or Origin()),
        "format": row.format,
        **(vars(row.error) if row.error else dict.fromkeys(ERROR_COLUMNS)),
    }
    return record | {name: getattr(row.summary, name) for name in (*_MOMENTS, *_COUNTS)}


def _shard_record(shard: Shard | None) -> dict[str, Any]:
    if shard is None:
        return dict.fromkeys(name for name, _ in _SHARD)
    return {
        "tp_rank": shard.index,
        "tp_size": shard.count,
        "dp_rank": shard.replica,
        "shard": shard.kind,
        "shard_axis": shard.axis,
        "shard_stride": shard.stride,
    }


def _origin_record(origin: Origin) -> dict[str, Any]:
    return {
        "source_version": origin.version,
        "original_quant_type": origin.quant_type,
        "stage": origin.stage,
        "corrections": "\n".join(origin.corrections) or None,
        "file_key": origin.key,
    }


def write_segment(directory: Path, name: str, rows: list[TensorRow], files: bytes | None = None) -> None:
    """Publish rows as directory/name; files goes with them as files.jsonl. Raises OSError, and then leaves nothing
    behind."""
    sketch = pa.table(
        {
            "tensor_id": np.repeat([row.tensor_id for row in rows], [len(row.summary.bins) for row in rows]),
            "bin": np.concatenate([row.summary.bins for row in rows]),
            "count": np.concatenate([row.summary.counts for row in rows]),
        },
        schema=SKETCH_SCHEMA,
    )
    scores = [
        {"tensor_id": row.tensor_id, "format": name} | vars(error) for row in rows for name, error in row.scores.items()
    ]
    tables = {
        "tensor": pa.Table.from_pylist([_tensor_record(row) for row in rows], schema=TENSOR_SCHEMA),
        "sketch": sketch,
        "score": pa.Table.from_pylist(scores, schema=SCORE_SCHEMA),
    }
    with staged_directory(directory / name) as part:
        _fill(part, tables, files)


def drop_rows(directory: Path, name: str, tensor_ids: set[str], files: bytes) -> None:
    """Rewrite the segment directory/name without these tensors, with `files` as its files.jsonl. After a crash in the
    middle neither version is there: rows and the files that they are of are forgotten together. Raises OSError, and
    then the old version stays."""
    tables = {}
    for stem in ("tensor", "sketch", "score"):
        table = pq.read_table(directory / name / f"{stem}.parquet", partitioning=None)
        tables[stem] = table.filter(pc.invert(pc.is_in(table["tensor_id"], pa.array(sorted(tensor_ids), _TEXT))))
    with staged_directory(directory / name, replace=True) as part:
        _fill(part, tables, files)


def _fill(part: Path, tables: dict[str, pa.Table], files: bytes | None) -> None:
    for stem, table in tables.items():
        with staged_file(part / f"{stem}.parquet") as file:
            pq.write_table(table, file)
    if files is not None:
        write_atomic(part / "files.jsonl", files)


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
