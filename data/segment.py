"""Segments: the rows of some captured tensors as five Parquet files in a directory that appears all at once.

segments/rank00-000001/  tensor.parquet  sketch.parquet  score.parquet  block.parquet  trace.parquet
                         files.jsonl     of an import: the files that the rows come from
                         manifest.json   size and SHA-256 of these files, with the names of the segment and its run
segments/merged-000057/  several segments in one: see data/merge.py
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from binade.data.json_files import STRICT, read_json
from binade.data.store import FileState, inside, sha256, staged_directory, staged_file, write_atomic

if TYPE_CHECKING:  # they import torch, which reading the index does not need
    from binade.quant.block_histograms import Histogram
    from binade.quant.metrics import Errors
    from binade.quant.summary import Summary
    from binade.quant.traces import Sample


@dataclass(frozen=True)
class Identity:
    """The identity of a tensor: the values that users filter by. None if one does not apply or is unknown."""

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
    """Which part of a tensor-parallel tensor this is: number `index` of `count`.

    kind    whole: every rank has the whole tensor; slice: the ranks' tensors concatenated along `axis` are the whole;
            partial: their sum is the whole
    stride  the whole consists of this many tensors along the axis, each divided (2 for SwiGLU's gate and up)
    replica which data-parallel copy of the model it belongs to
    """

    index: int = 0
    count: int = 1
    kind: str = "whole"
    axis: int | None = None
    stride: int = 1
    replica: int = 0


@dataclass(frozen=True)
class Origin:
    """What is known about an imported tensor in addition to its Identity.

    version      the tool that wrote the file; of the Megatron fork the version of the name, V0 to V7; None for others
    quant_type   as written in the log
    stage        "before" or "after" quantization; None if it was not quantized, or it is not known
    corrections  one sentence for each value that differs from the log
    key          the tensor's key in a file that holds several
    module_path  the path of its module in the model
    order        its place in the order in which its iteration was executed on its rank; None if the tool does not say
    file_size, file_time_ns  of the file when it was imported, with the content that the row's sha256 is of: see
                 store.changed_ns
    """

    version: str | None = None
    quant_type: str | None = None
    stage: str | None = None
    corrections: tuple[str, ...] = ()
    key: str | None = None
    module_path: str | None = None
    order: int | None = None
    file_size: int | None = None
    file_time_ns: int | None = None

    @property
    def correction_lines(self) -> str | None:
        return "\n".join(self.corrections) or None


@dataclass(frozen=True)
class RoundedWith:
    """What the rounding of an operand followed from besides its values and its spec, so that it can be repeated.

    tensor_scale  what all values were multiplied by before they were rounded, where one float32 number scales the
                  whole tensor; None elsewhere, and where it is not known
    noise_seed    of stochastic rounding; None if there is none
    sign_seed     of random signs; None if there are none
    """

    tensor_scale: float | None = None
    noise_seed: int | None = None
    sign_seed: int | None = None


@dataclass(frozen=True)
class Score:
    """The error of rounding a tensor to a format, along the axis that one GEMM contracts.

    gemm         forward, dgrad or wgrad; None for a tensor that is the operand of no known GEMM
    used         whether the GEMM used the tensor rounded to this format
    blocks       see quant.block_histograms; empty where they were not measured
    rounded_with of a used format; in others nothing is set
    second_sqnr_db
                 of an operand that the GEMM rounded from its rounded forward value: the error of this second rounding
                 alone. `error` is that of both. None for others, and in a row that ranks merged
    """

    format: str
    error: Errors
    gemm: str | None = None
    used: bool = False
    blocks: Mapping[str, Histogram] = field(default_factory=dict)
    rounded_with: RoundedWith = RoundedWith()
    second_sqnr_db: float | None = None


@dataclass(frozen=True)
class Trace:
    """Values for following a tensor over iterations: see quant.traces. sample: for a rounded weight, else None."""

    hot_channels: np.ndarray
    hot_ratio: float
    sample: Sample | None = None


@dataclass(frozen=True)
class TensorRow:
    """Everything that the index stores about one tensor.

    gemm: the GEMM that contracted_axis and error belong to, or whose result it is; None if it is not known. The scores
    are of every GEMM that takes the tensor. result_sqnr_db: of a result, against the same GEMM on unrounded operands.
    tensor_id is unique within its run (the index prefixes it with the run's id). format and error are None unless it is
    a quantized operand; rounded_with is set for one. path is relative to the run's directory; for an imported tensor,
    which has an origin, it is absolute. sha256 is that of the file. captured and shard are
    None if the log does not contain them. recomputed: the layer's forward pass ran a second time during the backward
    pass (activation recomputation); None if not known. last_bin: of a norm's gain, by MX format the share of its values
    that round to the largest code of their block; not written. tokens_left_out: how many tokens are padding, which
    statistics and errors leave out; None if there is no mask, or if it does not apply to the tensor. pairs_left_out:
    likewise how many pairs of a map of attention the softmax does not see; None without a mask.
    """

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
    rounded_with: RoundedWith = RoundedWith()
    scores: Sequence[Score] = ()
    gemm: str | None = None
    result_sqnr_db: float | None = None
    shard: Shard | None = Shard()
    recomputed: bool | None = None
    origin: Origin | None = None
    trace: Trace | None = None
    sha256: str | None = None
    last_bin: Mapping[str, float] = field(default_factory=dict)
    tokens_left_out: int | None = None
    pairs_left_out: int | None = None


@dataclass(frozen=True)
class LoggedRow:
    """A tensor of which another tool has logged statistics, but no values. columns: the others of TENSOR_SCHEMA that
    are known."""

    tensor_id: str
    run_id: str
    identity: Identity
    origin: Origin
    columns: Mapping[str, Any]


_TEXT, _INT, _LONG, _REAL = pa.string(), pa.int32(), pa.int64(), pa.float64()
_INTEGER_WORDS = {"layer_index": _INT, "iteration": _LONG, "micro_batch": _INT, "rank": _INT, "expert": _INT}
MOMENTS = ("min", "max", "mean", "std", "rms", "absmax", "absmin", "skewness", "kurtosis")
COUNTS = ("zeros", "nans", "infs")
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
    "flushed_error_share",
    "saturated_error_share",
)

# Columns of a Shard and of an Origin: name, type, field.
_SHARD = (
    ("tp_rank", _INT, "index"),
    ("tp_size", _INT, "count"),
    ("dp_rank", _INT, "replica"),
    ("shard", _TEXT, "kind"),
    ("shard_axis", _INT, "axis"),
    ("shard_stride", _INT, "stride"),
)
_ORIGIN = (
    ("source_version", _TEXT, "version"),
    ("original_quant_type", _TEXT, "quant_type"),
    ("stage", _TEXT, "stage"),
    ("corrections", _TEXT, "correction_lines"),
    ("file_key", _TEXT, "key"),
    ("module_path", _TEXT, "module_path"),
    ("execution_order", _LONG, "order"),
    ("file_size", _LONG, "file_size"),
    ("file_time_ns", _LONG, "file_time_ns"),
)
_ROUNDED_WITH = (("tensor_scale", _REAL), ("noise_seed", _LONG), ("sign_seed", _LONG))  # fields of RoundedWith
_SCORE = (  # fields of a Score
    ("gemm", _TEXT),
    ("used", pa.bool_()),
    ("second_sqnr_db", _REAL),
)

TENSOR_SCHEMA = pa.schema(
    [("tensor_id", _TEXT), ("run_id", _TEXT)]
    + [(f.name, _INTEGER_WORDS.get(f.name, _TEXT)) for f in fields(Identity)]
    + [
        ("captured", pa.timestamp("us")),
        ("shape", pa.list_(_LONG)),
        ("dtype", _TEXT),
        ("numel", _LONG),
        ("nbytes", _LONG),
        ("path", _TEXT),
        ("sha256", _TEXT),
        ("contracted_axis", _INT),
    ]
    + [(name, _REAL) for name in MOMENTS]
    + [(name, _LONG) for name in COUNTS]
    + [column[:2] for column in _SHARD]
    + [("recomputed", pa.bool_()), ("tokens_left_out", _INT), ("pairs_left_out", _LONG)]
    + [column[:2] for column in _ORIGIN]
    + [("gemm", _TEXT), ("result_sqnr_db", _REAL), ("format", _TEXT), *_ROUNDED_WITH]
    + [(name, _REAL) for name in ERROR_COLUMNS]
)
SKETCH_SCHEMA = pa.schema([("tensor_id", _TEXT), ("bin", pa.int16()), ("count", _LONG)])
SCORE_SCHEMA = pa.schema(
    [("tensor_id", _TEXT), ("format", _TEXT), *_SCORE, *_ROUNDED_WITH, *((name, _REAL) for name in ERROR_COLUMNS)]
)
BLOCK_SCHEMA = pa.schema(
    [("tensor_id", _TEXT), ("format", _TEXT), ("measure", _TEXT), ("bin", pa.int16()), ("count", _LONG)]
)
SAMPLE_COLUMNS = {"sampled": "values", "sampled_rounded": "rounded", "at_bin_edge": "at_bin_edge"}  # of a Sample
TRACE_SCHEMA = pa.schema(
    [
        ("tensor_id", _TEXT),
        ("hot_channels", pa.list_(_INT)),
        ("hot_ratio", _REAL),
        ("sampled", pa.list_(pa.float32())),
        ("sampled_rounded", pa.list_(pa.float32())),
        ("at_bin_edge", _REAL),
    ]
)
# The files of a segment, and the tables of the index.
TABLES = {"tensor": TENSOR_SCHEMA, "sketch": SKETCH_SCHEMA, "score": SCORE_SCHEMA, "block": BLOCK_SCHEMA}
TABLES |= {"trace": TRACE_SCHEMA}
# Rows of a row group: a sketch that is read alone costs one or two groups, see data/sketches.py.
GROUP_ROWS = {name: 1 << 14 if name == "sketch" else 1 << 20 for name in TABLES}
MANIFEST = "manifest.json"
DIGESTED = 1 << 12  # rows of a segment that are Python objects at once
MERGED = "merged-"  # how the names of merged segments begin
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # a SHA-256
FileName = Annotated[str, Field(pattern=r"^[a-z]+\.(parquet|jsonl)$")]  # of a segment, which may be untrusted input


class SegmentError(ValueError):
    """A segment differs from what was written. The message names the file, and says what was expected."""

    exit_status = 1


@pydantic_dataclass(frozen=True, config=STRICT)
class Checksum:
    """The checksum of a file: its size in bytes and the SHA-256 of its content."""

    bytes: int
    sha256: Digest

    @classmethod
    def of(cls, file: Path) -> Checksum:
        """Raises OSError."""
        return cls(os.stat(file).st_size, sha256(file))

    def difference(self, file: BufferedReader) -> str | None:
        """How an open file differs from this checksum; None if it does not. A file of another size, which may be
        enormous, is not read. Raises OSError."""
        size = os.fstat(file.fileno()).st_size
        if size != self.bytes:
            return f"has {size} bytes, expected {self.bytes}"
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.sha256:
            return f"has SHA-256 {digest[:12]}…, expected {self.sha256[:12]}…"
        return None


@pydantic_dataclass(frozen=True, config=STRICT)
class Replaced:
    """A segment that a merged one replaces: the SHA-256 of its manifest.json, and its time of modification."""

    manifest: str
    mtime_ns: int


@pydantic_dataclass(frozen=True, config=STRICT)
class Manifest:
    """manifest.json. run_id is None for a segment without rows.

    A merged segment names those that it replaces, and the `segment_digest` of each that the run once wrote.
    """

    run_id: str | None
    name: str
    files: dict[FileName, Checksum]
    replaces: dict[str, Replaced] = field(default_factory=dict)
    digests: dict[str, Digest] = field(default_factory=dict)

    def differences(self, segment: Path) -> dict[str, str]:
        """The files of the segment that have changed, with the difference. Raises OSError."""
        differences = {}
        for name, expected in self.files.items():
            try:
                with open(segment / name, "rb", opener=_inside_run(segment)) as opened:
                    if difference := expected.difference(opened):
                        differences[name] = difference
            except FileNotFoundError:
                differences[name] = f"is missing, expected {expected.bytes} bytes"
        more = [file.name for file in table_files(segment).values() if file.name not in self.files]
        return differences | dict.fromkeys(more, f"is not in {MANIFEST}")

    def check(self, segment: Path) -> None:
        """Raises SegmentError for a file of the segment that has changed, and OSError."""
        for name, difference in self.differences(segment).items():
            raise SegmentError(f"{segment / name} {difference}")


def manifest(
    run_id: str | None,
    name: str,
    files: Mapping[str, Path],
    replaces: Mapping[str, Replaced] = MappingProxyType({}),
    digests: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """The content of a segment's manifest. Raises OSError."""
    sums = {key: Checksum.of(file) for key, file in files.items()}
    return json.dumps(asdict(Manifest(run_id, name, sums, dict(replaces), dict(digests)))).encode()


def read_manifest(segment: Path, run_id: str | None) -> Manifest:
    """The manifest of a segment of this run; None for any. Raises OSError, and ValueError if it is damaged or the
    segment was written under another name or by another run."""
    try:
        written = read_json(Manifest, segment / MANIFEST, segment.parents[1])
    except FileNotFoundError:
        raise SegmentError(f"{MANIFEST} is missing: expected the checksums of the segment") from None
    except ValueError as error:
        raise SegmentError(f"{MANIFEST} cannot be read: {error}") from None
    if written.name != segment.name:
        raise SegmentError(f"it was written as segment {written.name}: it was copied or renamed")
    if None not in (run_id, written.run_id) and written.run_id != run_id:
        raise SegmentError(f"it was written by run {written.run_id}: expected a segment of {run_id}")
    return written


def _inside_run(segment: Path) -> Callable[[str, int], int]:
    """The opener of a segment's files: no link below its run's directory is followed."""
    return inside(segment.parents[1])


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """How a segment's tables are written, as keywords of pyarrow: measured numbers rarely repeat, so they take less
    space and time with byte-stream split than in a dictionary. The checksums of pages are compared at each read."""
    encodings = {"bin": "DELTA_BINARY_PACKED", "count": "BYTE_STREAM_SPLIT"}
    encodings |= {column.name: "BYTE_STREAM_SPLIT" for column in schema if column.type == _REAL}
    return {
        "compression": "lz4",
        "column_encoding": {name: encoding for name, encoding in encodings.items() if name in schema.names},
        "use_dictionary": [path for path in _leaves(schema) if path not in encodings],
        "write_page_checksum": True,
        "write_statistics": False,
    }


def _leaves(schema: pa.Schema) -> Iterator[str]:
    """The columns of a schema by their paths in a Parquet file."""
    for column in schema:
        yield f"{column.name}.list.element" if pa.types.is_list(column.type) else column.name


def table_files(directory: Path) -> dict[str, Path]:
    """The files of a segment by table. Their existence is not checked."""
    return {name: directory / f"{name}.parquet" for name in TABLES}


# Columns that segments of earlier versions do not have: they are null there.
ADDED = {"second_sqnr_db", "pairs_left_out"}
# Columns of scores that segments of earlier versions have, and that nothing reads.
FORMER = {name: pa.list_(_REAL) for name in ("loss_first_by_sequence", "loss_second_by_sequence")}


def read_tables(
    segment: Path, written: Manifest | None = None, names: Collection[str] = tuple(TABLES)
) -> dict[str, pa.Table]:
    """A segment's TABLES, or "tensor" and some others. In all but "tensor", `row` replaces tensor_id: the tensor's row
    there. Files are checked against the manifest, if one is given. Raises OSError, and pa.ArrowException or ValueError
    for a damaged segment."""
    tables: dict[str, pa.Table] = {}
    known = pa.array([], _TEXT)
    for name in written.files if written else ():
        if not (segment / name).is_file():
            raise SegmentError(f"{name} is missing")
    for name, file in table_files(segment).items():
        if name not in names:
            continue
        if written and file.name not in written.files:
            raise SegmentError(f"{file.name} is not in {MANIFEST}")
        with open(file, "rb", opener=_inside_run(segment)) as source:
            if written and (difference := written.files[file.name].difference(source)):
                raise SegmentError(f"{file.name} {difference}")
            source.seek(0)
            content = source.read()
        try:
            with pq.ParquetFile(pa.BufferReader(content), read_dictionary=["tensor_id"]) as opened:
                table = opened.read()
        except KeyError:  # of read_dictionary
            raise ValueError(f"{file.name} has no column 'tensor_id'") from None
        schema = TABLES[name]
        missing = set(schema.names) - set(table.column_names)
        for column in missing & ADDED:
            table = table.append_column(column, pa.nulls(len(table), schema.field(column).type))
        if missing := missing - ADDED:
            raise ValueError(f"{file.name} has no column {min(missing)!r}")
        if name != "tensor":
            ids = table["tensor_id"].cast(pa.dictionary(_INT, _TEXT)).unify_dictionaries().combine_chunks()
            rows = pc.index_in(ids.dictionary, known).take(ids.indices)
            if rows.null_count:
                raise ValueError(f"{file.name} has rows of tensors that are not in tensor.parquet")
            schema = pa.schema([("row", _INT), *list(schema)[1:]])
            table = table.set_column(table.column_names.index("tensor_id"), "row", rows)
        tables[name] = table.select(schema.names).cast(schema)
        if name == "tensor":
            known = tables[name]["tensor_id"].combine_chunks()
    return tables


def tensor_record(row: TensorRow | LoggedRow) -> dict[str, Any]:
    """The columns of TENSOR_SCHEMA; one that is absent is null."""
    origin = {column: getattr(row.origin, name, None) for column, _, name in _ORIGIN}
    if isinstance(row, LoggedRow):
        return {"tensor_id": row.tensor_id, "run_id": row.run_id, **vars(row.identity), **origin, **row.columns}
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
        "sha256": row.sha256,
        "contracted_axis": row.contracted_axis,
        **{column: getattr(row.shard, name, None) for column, _, name in _SHARD},
        "recomputed": row.recomputed,
        "tokens_left_out": row.tokens_left_out,
        "pairs_left_out": row.pairs_left_out,
        **origin,
        "gemm": row.gemm,
        "result_sqnr_db": row.result_sqnr_db,
        "format": row.format,
        **vars(row.rounded_with),
        **(vars(row.error) if row.error else dict.fromkeys(ERROR_COLUMNS)),
    }
    return record | {name: getattr(row.summary, name) for name in (*MOMENTS, *COUNTS)}


def file_when_imported(row: Mapping[str, Any]) -> FileState | None:
    """The file of an imported tensor when it was imported, from a row of the table `tensor`; None if it is not
    known."""
    sha, size, time_ns = (row[name] for name in ("sha256", "file_size", "file_time_ns"))
    return None if None in (sha, size, time_ns) else FileState(sha, size, time_ns)


def _place(row: TensorRow) -> tuple[int, str, str]:
    """The order of sketches: those of a layer, and of one tensor in several iterations, are in few row groups."""
    where = row.identity
    return where.layer_index or 0, where.module or "", where.tensor_name or ""


def write_segment(
    directory: Path, name: str, rows: Sequence[TensorRow | LoggedRow], files: bytes | None = None
) -> None:
    """Write rows as the segment directory/name; see `write_tables`."""
    measured = [row for row in rows if isinstance(row, TensorRow)]
    together = sorted(measured, key=_place)
    sketch = SKETCH_SCHEMA.empty_table()
    if together:
        sketch = pa.table(
            {
                "tensor_id": np.repeat(
                    [row.tensor_id for row in together], [len(row.summary.bins) for row in together]
                ),
                "bin": np.concatenate([row.summary.bins for row in together]),
                "count": np.concatenate([row.summary.counts for row in together]),
            },
            schema=SKETCH_SCHEMA,
        )
    scores = [
        {"tensor_id": row.tensor_id, **{name: getattr(score, name) for name in ("format", *dict(_SCORE))}}
        | vars(score.rounded_with)
        | vars(score.error)
        for row in measured
        for score in row.scores
    ]
    histograms = [
        (row.tensor_id, score.format, measure, bins, counts)
        for row in measured
        for score in row.scores
        for measure, (bins, counts) in score.blocks.items()
    ]
    block = BLOCK_SCHEMA.empty_table()
    if histograms:
        *words, bins, counts = zip(*histograms, strict=True)
        columns = [np.repeat(texts, [len(one) for one in bins]) for texts in words]
        columns += [np.concatenate(arrays) for arrays in (bins, counts)]
        block = pa.table(dict(zip(BLOCK_SCHEMA.names, columns, strict=True)), schema=BLOCK_SCHEMA)
    traces = [
        {"tensor_id": row.tensor_id, "hot_channels": row.trace.hot_channels, "hot_ratio": row.trace.hot_ratio}
        | {column: getattr(row.trace.sample, name, None) for column, name in SAMPLE_COLUMNS.items()}
        for row in measured
        if row.trace
    ]
    tables = {
        "tensor": pa.Table.from_pylist([tensor_record(row) for row in rows], schema=TENSOR_SCHEMA),
        "sketch": sketch,
        "score": pa.Table.from_pylist(scores, schema=SCORE_SCHEMA),
        "block": block,
        "trace": pa.Table.from_pylist(traces, schema=TRACE_SCHEMA),
    }
    write_tables(directory / name, tables, files)


def write_tables(segment: Path, tables: Mapping[str, pa.Table], files: bytes | None = None) -> None:
    """Write a segment's TABLES, with `files` as its files.jsonl. If it raises OSError, no part of the segment is
    left."""
    with staged_directory(segment) as part:
        _fill(part, segment.name, tables, files)


def drop_rows(directory: Path, name: str, tensor_ids: set[str], files: bytes) -> None:
    """Rewrite the segment directory/name without these tensors, with `files` as its files.jsonl.

    After a crash between the two renames neither version exists, so rows and their files are lost together. If it
    raises OSError, or SegmentError for a segment that is damaged, the old version stays."""
    dropped = pa.array(sorted(tensor_ids), _TEXT)
    _rewrite(directory / name, lambda _, table: table.filter(pc.invert(pc.is_in(table["tensor_id"], dropped))), files)


def rename_modules(segment: Path, modules: Mapping[str, str], files: bytes) -> None:
    """Rewrite a segment with other modules for these tensors, by id, with `files` as its files.jsonl. See `drop_rows`
    for crashes and errors."""

    def renamed(stem: str, table: pa.Table) -> pa.Table:
        if stem != "tensor":
            return table
        names = zip(table["tensor_id"].to_pylist(), table["module"].to_pylist(), strict=True)
        column = pa.array([modules.get(tensor_id, name) for tensor_id, name in names], _TEXT)
        return table.set_column(table.schema.get_field_index("module"), table.schema.field("module"), column)

    _rewrite(segment, renamed, files)


def _rewrite(segment: Path, change: Callable[[str, pa.Table], pa.Table], files: bytes) -> None:
    read_manifest(segment, None).check(segment)
    tables = {stem: change(stem, pq.read_table(file, partitioning=None)) for stem, file in table_files(segment).items()}
    with staged_directory(segment, replace=True) as part:
        _fill(part, segment.name, tables, files)


def _fill(part: Path, name: str, tables: Mapping[str, pa.Table], files: bytes | None) -> None:
    for stem, table in tables.items():
        with staged_file(part / f"{stem}.parquet") as file:
            pq.write_table(table, file, row_group_size=GROUP_ROWS[stem], **parquet_options(table.schema))
    if files is not None:
        write_atomic(part / "files.jsonl", files)
    run_ids = tables["tensor"]["run_id"]
    run_id = run_ids[0].as_py() if len(run_ids) else None
    write_atomic(part / MANIFEST, manifest(run_id, name, {file.name: file for file in sorted(part.iterdir())}))


def segment_names(run_directory: Path) -> list[str]:
    """Names of a run's complete segments, sorted. Those that a merged segment has replaced are left out."""
    directory = run_directory / "segments"
    if not directory.is_dir():
        return []
    names = {entry.name for entry in directory.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    replaced = set()  # and not deleted yet
    for merged in names:
        if merged.startswith(MERGED):
            with suppress(OSError, ValueError):  # a damaged manifest is reported when its rows are read
                replaces = read_json(Manifest, directory / merged / MANIFEST, run_directory).replaces
                replaced |= {name for name in replaces.keys() & names if _is_same(directory / name, replaces[name])}
    return sorted(names - replaced)


def last_number(names: Iterable[str]) -> int:
    """The largest number at the end of the names of some segments; 0 if none has one."""
    return max((int(match[1]) for name in names if (match := re.search(r"-([0-9]{1,9})$", name))), default=0)


def _is_same(segment: Path, written: Replaced) -> bool:
    try:
        return sha256(segment / MANIFEST) == written.manifest
    except FileNotFoundError:  # it was deleted in the meantime
        return True


def segment_digest(directory: Path) -> bytes:
    """SHA-256 of a segment's content: the bytes of its files, of tensor.parquet the values but `path`. Raises OSError,
    and ValueError for a file that is not Parquet."""
    total = hashlib.sha256()
    for name, path in table_files(directory).items():
        if name != "tensor":
            with open(path, "rb", opener=_inside_run(directory)) as opened:
                total.update(hashlib.file_digest(opened, "sha256").digest())
    with (
        open(directory / "tensor.parquet", "rb", opener=_inside_run(directory)) as opened,
        pq.ParquetFile(opened) as file,
    ):
        names = [name for name in file.schema_arrow.names if name != "path"]
        for batch in file.iter_batches(DIGESTED, columns=names):
            for row in batch.to_pylist():
                total.update(json.dumps(row, default=str).encode())
    return total.digest()
