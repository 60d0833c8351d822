"""Documents as text, from JSON lines, Parquet or a list.

Opening a file reads all of it once: damage is found before training starts, and the SHA-256 of all texts, joined by
NUL, identifies the data independently of the file. After that, memory holds the position of each document (8 bytes per
document; for Parquet, one row group) rather than the texts. A .jsonl.gz is unpacked into an anonymous temporary file in
$TMPDIR, because gzip has no random access. A process scans an unchanged file only once.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import shutil
import tempfile
import time
import weakref
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from binade.collector.datasets.inputs import Source
from binade.collector.errors import ConfigError, DataError
from binade.data.run.store import check_regular

COLUMN = "text"
SETTLED = 10**9  # ns; within the resolution of its clock, a file may change again without a new time stamp


class Texts(Protocol):
    """Documents by number. bounds are as in `loading.Documents`, digest is that of `_digest` for all texts in order."""

    bounds: np.ndarray
    digest: str

    def text(self, index: int) -> str: ...


def open_texts(source: Source) -> Texts:
    """Read and check a dataset of text. Raises ConfigError, naming the line or row."""
    if source.format == "python":
        topics = import_module("pydoc_data.topics").topics
        return ListedTexts([text for _, text in sorted(topics.items())])
    (path,) = source.paths
    try:
        check_regular(path)
        state = path.stat()
        scan = _scan.__wrapped__ if time.time_ns() - state.st_mtime_ns < SETTLED else _scan
        return scan(source, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns))
    except (OSError, EOFError, zlib.error, pa.ArrowException, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EFBIG):
            raise ConfigError(
                f"dataset {source.name} cannot be unpacked in {tempfile.gettempdir()}: {error.strerror}; "
                "set TMPDIR to a directory with more room"
            ) from error
        raise ConfigError(f"dataset {source.name} cannot be read: {error}") from error


@lru_cache(maxsize=1)
def _scan(source: Source, state: tuple[int, ...]) -> Texts:
    """state identifies the version of the file in the cache."""
    kind = ParquetTexts if source.format == "parquet" else JsonLinesText
    texts = kind(source)
    if texts.bounds[-1] == 0:
        raise ConfigError(f"dataset {source.name} contains no documents")
    return texts


def _digest(texts: Iterable[str]) -> str:
    """SHA-256 of the texts, joined by NUL."""
    sha = hashlib.sha256()
    for number, text in enumerate(texts):
        sha.update(b"\0" * (number > 0) + text.encode())
    return sha.hexdigest()


class ListedTexts:
    """Texts in memory, one block."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = list(texts)
        self.bounds = np.array([0, len(self._texts)])
        self.digest = _digest(self._texts)

    def text(self, index: int) -> str:
        return self._texts[index]


class JsonLinesText:
    """A file with a JSON object with a "text" on each line. Blank lines are ignored. One block."""

    def __init__(self, source: Source) -> None:
        self._name = source.name
        (path,) = source.paths
        self._file = _unpacked(path) if source.format == "jsonl.gz" else open(path, "rb")  # noqa: SIM115  (see below)
        weakref.finalize(self, self._file.close)
        self._starts = array("q")
        self.digest = _digest(self._scan())
        self.bounds = np.array([0, len(self._starts)])

    def _scan(self) -> Iterator[str]:
        """All texts. Notes where each starts."""
        position = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                yield _text(line, f"dataset {self._name}, line {number}")
                self._starts.append(position)
            position += len(line)

    def text(self, index: int) -> str:
        """Raises DataError if the file has changed."""
        start = self._starts[index]
        self._file.seek(start)
        try:
            return _text(self._file.readline(), f"dataset {self._name}, byte {start}")
        except ConfigError as error:
            raise DataError(f"{error}; the file changed while it was in use") from error


def _unpacked(path: Path) -> BinaryIO:
    file = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the texts)
    try:
        with gzip.open(path, "rb") as packed:
            shutil.copyfileobj(packed, file, 1 << 20)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _text(line: bytes, where: str) -> str:
    """The document on a line of JSON. `where` is the start of the message of ConfigError."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {getattr(error, 'msg', error)}") from error
    text = record.get(COLUMN) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f'{where}: expected an object with the key "{COLUMN}"')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: its text contains an unpaired surrogate") from error
    return text


class ParquetTexts:
    """The column "text" of a Parquet file. A row group is a block; one at a time is in memory."""

    def __init__(self, source: Source) -> None:
        self._name = source.name
        self._file = pq.ParquetFile(source.paths[0], page_checksum_verification=True)
        weakref.finalize(self, self._file.close)
        schema = self._file.schema_arrow
        if schema.names.count(COLUMN) != 1:
            columns = ", ".join(schema.names) or "none"
            raise ConfigError(f"dataset {source.name} needs one column {COLUMN!r}: its columns are {columns}")
        kind = schema.field(COLUMN).type
        if not _is_text(kind):
            raise ConfigError(f"dataset {source.name}: column {COLUMN!r} contains {kind}: expected text")
        metadata = self._file.metadata
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self.bounds = np.cumsum([0, *rows])
        self._group = -1
        self._column = pa.chunked_array([], pa.string())
        self.digest = _digest(map(self._read, range(sum(rows))))

    def text(self, index: int) -> str:
        """Raises DataError if the file has changed."""
        try:
            return self._read(index)
        except (ConfigError, OSError, pa.ArrowException) as error:
            raise DataError(f"dataset {self._name}: {error}; the file changed while it was in use") from error

    def _read(self, index: int) -> str:
        """Raises ConfigError for a row without text, OSError or ArrowException for data that cannot be decoded."""
        group = int(np.searchsorted(self.bounds, index, side="right")) - 1
        first, end = self.bounds[group : group + 2].tolist()
        if self._group != group:
            self._column = pa.chunked_array([], pa.string())  # frees one group before the next is read
            self._column = self._file.read_row_group(group, columns=[COLUMN]).column(COLUMN)
            self._group = group
            if len(self._column) != end - first:
                raise ConfigError(
                    f"dataset {self._name}: row group {group} has {len(self._column)} rows: expected {end - first}"
                )
        where = f"dataset {self._name}, row {index + 1}"
        try:
            text: str | None = self._column[index - first].as_py()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where} is not UTF-8: {error.reason}") from error
        if text is None:
            raise ConfigError(f"{where} has no text: null")
        return text


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return any((pa.types.is_string(kind), pa.types.is_large_string(kind), pa.types.is_string_view(kind)))
