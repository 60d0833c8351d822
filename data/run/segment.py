"""Segments: the rows of some captured tensors as five Parquet files in a directory that appears all at once.

segments/rank00-000001/  tensor.parquet  sketch.parquet  score.parquet  block.parquet  trace.parquet
                         manifest.json   size and SHA-256 of these files, with the names of the segment and its run
segments/merged-000057/  several segments in one: see data/run/merge.py
segments/import-000001/  all rows of an import; it replaces the segments of the import before
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, field
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from binade.data.run.columns import (
    BLOCK_COLUMNS,
    SKETCH_COLUMNS,
    ColumnType,
    LoggedRow,
    Score,
    TableColumn,
    TensorRow,
    Trace,
    columns_of,
    values_of,
)
from binade.data.run.json_files import STRICT, read_json
from binade.data.run.store import (
    FileState,
    inside,
    remove_directory,
    sha256,
    staged_directory,
    staged_file,
    write_atomic,
)

_ARROW = {
    ColumnType.TEXT: pa.string(),
    ColumnType.TRUTH: pa.bool_(),
    ColumnType.SMALL: pa.int16(),
    ColumnType.INTEGER: pa.int32(),
    ColumnType.LONG: pa.int64(),
    ColumnType.REAL: pa.float64(),
    ColumnType.TIME: pa.timestamp("us"),
    ColumnType.INTEGERS: pa.list_(pa.int32()),
    ColumnType.LONGS: pa.list_(pa.int64()),
    ColumnType.SINGLES: pa.list_(pa.float32()),
    ColumnType.REALS: pa.list_(pa.float64()),
}


def _schema(columns: Sequence[TableColumn]) -> pa.Schema:
    return pa.schema([(each.name, _ARROW[each.type]) for each in columns])


_ID = TableColumn("tensor_id", ColumnType.TEXT)
_COLUMNS = {
    "tensor": columns_of(TensorRow),
    "sketch": (_ID, *SKETCH_COLUMNS),
    "score": (_ID, *columns_of(Score)),
    "block": (_ID, *BLOCK_COLUMNS),
    "trace": (_ID, *columns_of(Trace)),
}
TABLES = {name: _schema(columns) for name, columns in _COLUMNS.items()}
"""The files of a segment, and tables of the index."""
TENSOR_SCHEMA = TABLES["tensor"]
OPTIONAL = {each.name for columns in _COLUMNS.values() for each in columns if each.optional}
"""Columns that segments of earlier versions do not have: they are null there."""
# Rows of a row group: a sketch that is read alone costs one or two groups, see data/index/sketches.py.
GROUP_ROWS = {name: 1 << 14 if name == "sketch" else 1 << 20 for name in TABLES}
MANIFEST = "manifest.json"
DIGESTED = 1 << 12  # rows of a segment that are Python objects at once
MERGED, IMPORTED = "merged-", "import-"  # how the names of segments begin that may replace others
HELD_ROWS = 1 << 20  # that are in memory before they are written
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # a SHA-256
FileName = Annotated[str, Field(pattern=r"^[a-z]+\.parquet$")]


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
    """A segment that another one replaces: the SHA-256 of its manifest.json, and its time of modification."""

    manifest: str
    mtime_ns: int

    @classmethod
    def of(cls, segment: Path) -> Replaced:
        """Raises OSError."""
        return cls(sha256(segment / MANIFEST), segment.stat().st_mtime_ns)


@pydantic_dataclass(frozen=True, config=STRICT)
class Manifest:
    """manifest.json. run_id is None for a segment without rows.

    A segment of MERGED or IMPORTED names those that it replaces; a merged one also has the `segment_digest` of each
    that the run once wrote.
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
    encodings |= {column.name: "BYTE_STREAM_SPLIT" for column in schema if column.type == pa.float64()}
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


def read_tables(
    segment: Path, written: Manifest | None = None, names: Collection[str] = tuple(TABLES)
) -> dict[str, pa.Table]:
    """A segment's TABLES, or "tensor" and some others. In all but "tensor", `row` replaces tensor_id: the tensor's row
    there. Files are checked against the manifest, if one is given. Raises OSError, and pa.ArrowException or ValueError
    for a damaged segment."""
    tables: dict[str, pa.Table] = {}
    known = pa.array([], pa.string())
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
        table, schema = completed(name, table), TABLES[name]
        if name != "tensor":
            ids = table["tensor_id"].cast(pa.dictionary(pa.int32(), pa.string())).unify_dictionaries().combine_chunks()
            rows = pc.index_in(ids.dictionary, known).take(ids.indices)
            if rows.null_count:
                raise ValueError(f"{file.name} has rows of tensors that are not in tensor.parquet")
            schema = pa.schema([("row", pa.int32()), *list(schema)[1:]])
            table = table.set_column(table.column_names.index("tensor_id"), "row", rows)
        tables[name] = table.select(schema.names).cast(schema)
        if name == "tensor":
            known = tables[name]["tensor_id"].combine_chunks()
    return tables


def completed(name: str, table: pa.Table) -> pa.Table:
    """A table of a segment with the columns that segments of earlier versions do not have, which are null. Raises
    ValueError if it lacks any other column."""
    schema = TABLES[name]
    missing = set(schema.names) - set(table.column_names)
    for column in missing & OPTIONAL:
        table = table.append_column(column, pa.nulls(len(table), schema.field(column).type))
    if missing := missing - OPTIONAL:
        raise ValueError(f"{name}.parquet has no column {min(missing)!r}")
    return table


def tensor_record(row: TensorRow | LoggedRow) -> dict[str, Any]:
    """The columns of TENSOR_SCHEMA that the row has."""
    return {**values_of(row), **row.columns} if isinstance(row, LoggedRow) else values_of(row)


def file_when_imported(row: Mapping[str, Any]) -> FileState | None:
    """The file of an imported tensor when it was imported, from a row of the table `tensor`; None if it is not
    known."""
    sha, size, time_ns = (row[name] for name in ("sha256", "file_size", "file_time_ns"))
    return None if None in (sha, size, time_ns) else FileState(sha, size, time_ns)


def _place(row: TensorRow) -> tuple[int, str, str]:
    """The order of sketches: those of a layer, and of one tensor in several iterations, are in few row groups."""
    where = row.identity
    return where.layer_index or 0, where.module or "", where.tensor_name or ""


def write_segment(directory: Path, name: str, rows: Sequence[TensorRow | LoggedRow]) -> None:
    """Write rows as the segment directory/name; see `write_tables`."""
    write_tables(directory / name, [tables_of(rows)])


def tables_of(rows: Sequence[TensorRow | LoggedRow]) -> dict[str, pa.Table]:
    """Rows as TABLES."""
    measured = [row for row in rows if isinstance(row, TensorRow)]
    together = sorted(measured, key=_place)
    sketch = TABLES["sketch"].empty_table()
    if together:
        sketch = pa.table(
            {
                "tensor_id": np.repeat(
                    [row.tensor_id for row in together], [len(row.summary.bins) for row in together]
                ),
                "bin": np.concatenate([row.summary.bins for row in together]),
                "count": np.concatenate([row.summary.counts for row in together]),
            },
            schema=TABLES["sketch"],
        )
    scores = [{"tensor_id": row.tensor_id, **values_of(score)} for row in measured for score in row.scores]
    histograms = [
        (row.tensor_id, score.format, measure, bins, counts)
        for row in measured
        for score in row.scores
        for measure, (bins, counts) in score.blocks.items()
    ]
    block = TABLES["block"].empty_table()
    if histograms:
        *words, bins, counts = zip(*histograms, strict=True)
        columns = [np.repeat(texts, [len(one) for one in bins]) for texts in words]
        columns += [np.concatenate(arrays) for arrays in (bins, counts)]
        block = pa.table(dict(zip(TABLES["block"].names, columns, strict=True)), schema=TABLES["block"])
    traces = [{"tensor_id": row.tensor_id, **values_of(row.trace)} for row in measured if row.trace]
    return {
        "tensor": pa.Table.from_pylist([tensor_record(row) for row in rows], schema=TENSOR_SCHEMA),
        "sketch": sketch,
        "score": pa.Table.from_pylist(scores, schema=TABLES["score"]),
        "block": block,
        "trace": pa.Table.from_pylist(traces, schema=TABLES["trace"]),
    }


def write_tables(
    segment: Path,
    parts: Iterable[Mapping[str, pa.Table]],
    replaces: Mapping[str, Replaced] = MappingProxyType({}),
    digests: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write parts of TABLES, one after the other, as a segment, which appears when it is on the disk as a whole.
    replaces, digests: see Manifest; then the segment is on the disk before this returns, so that others can be deleted.
    If it raises OSError, or ValueError for a table with other columns, no part of the segment is left."""
    with staged_directory(segment) as staged:
        run_id = _fill(staged, parts)
        files = {file.name: file for file in sorted(staged.iterdir())}
        write_atomic(staged / MANIFEST, manifest(run_id, segment.name, files, replaces, digests))
        if replaces:
            _synchronize(staged)
    if replaces:
        _synchronize(segment.parent)


def _fill(directory: Path, parts: Iterable[Mapping[str, pa.Table]]) -> str | None:
    """Write the files of TABLES; returns the run of the rows, None if there are none."""
    run_id: str | None = None
    with ExitStack() as stack:
        writers: dict[str, pq.ParquetWriter] = {}
        for stem, schema in TABLES.items():
            file = stack.enter_context(staged_file(directory / f"{stem}.parquet"))
            writers[stem] = stack.enter_context(pq.ParquetWriter(file, schema, **parquet_options(schema)))
        held: dict[str, list[pa.Table]] = {stem: [] for stem in TABLES}

        def write(stem: str) -> None:
            if sum(map(len, held[stem])):
                writers[stem].write_table(pa.concat_tables(held[stem]), row_group_size=GROUP_ROWS[stem])
            held[stem] = []

        for tables in parts:
            for stem, table in tables.items():
                held[stem].append(table)
                if sum(map(len, held[stem])) >= HELD_ROWS:
                    write(stem)
            if run_id is None and len(tables["tensor"]):
                run_id = tables["tensor"]["run_id"][0].as_py()
        for stem in TABLES:
            write(stem)
    return run_id


def replace_segments(run_directory: Path, parts: Iterable[Mapping[str, pa.Table]]) -> None:
    """Write parts of TABLES as a segment that replaces all others of a run, which are then deleted. Raises as
    `write_tables`, and then the run is as it was."""
    directory = run_directory / "segments"
    former = [entry for entry in directory.iterdir() if not entry.name.startswith(".")]
    name = f"{IMPORTED}{last_number(entry.name for entry in former) + 1:06d}"
    write_tables(directory / name, parts, {entry.name: Replaced.of(entry) for entry in former})
    for entry in former:
        remove_directory(entry)


def _synchronize(directory: Path) -> None:
    """Wait until the names in a directory are on the disk. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def segment_names(run_directory: Path) -> list[str]:
    """Names of a run's complete segments, sorted. Those that another one has replaced are left out."""
    directory = run_directory / "segments"
    if not directory.is_dir():
        return []
    names = {entry.name for entry in directory.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
    replaced = set()  # and not deleted yet
    for name in names:
        if name.startswith((MERGED, IMPORTED)):
            with suppress(OSError, ValueError):  # a damaged manifest is reported when its rows are read
                replaces = read_json(Manifest, directory / name / MANIFEST, run_directory).replaces
                replaced |= {old for old in replaces.keys() & names if _is_same(directory / old, replaces[old])}
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
