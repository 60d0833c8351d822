"""Tokenized documents: the .bin/.idx pair that Megatron's preprocess_data writes, memory-mapped.

The .idx, little-endian (megatron-core 0.16, core/datasets/indexed_dataset.py):

    9 bytes   MMIDIDX, NUL, NUL
    uint64    version, 1
    uint8     code of the tokens' dtype in the .bin
    uint64    S, number of sequences
    uint64    D, number of documents + 1
    int32[S]  tokens in each sequence
    int64[S]  its first byte in the .bin
    int64[D]  the first sequence of each document, and S
    int8[S]   modes; only in multimodal data, not used here

Documents are used as they are. They have an end-of-document token if preprocess_data ran with --append-eod.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

import numpy as np

from binade.collector.datasets.inputs import Source
from binade.collector.errors import ConfigError
from binade.data.run.store import check_regular

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CHUNK = 1 << 20  # sequences checked at once


class IndexedDocuments:
    """Documents by number, read from disk on demand. total is the number of tokens in all of them.

    Raises ConfigError if the files violate the format or hold no token.
    """

    def __init__(self, source: Source) -> None:
        self.name = source.name
        data, self._index_path = source.paths
        try:
            for path in (self._index_path, data):
                check_regular(path)
            self.index_bytes, self.data_bytes = self._index_path.stat().st_size, data.stat().st_size
            sequences, documents = self._read_header()
            index = np.memmap(self._index_path, dtype=np.uint8, mode="r")
            self._lengths, position = _array(index, "<i4", sequences, HEADER.size)
            self._pointers, position = _array(index, "<i8", sequences, position)
            self._firsts, position = _array(index, "<i8", documents, position)
            self.total = self._check()
            self._data = np.memmap(data, dtype=np.uint8, mode="r")
            with open(self._index_path, "rb") as file:
                self.index_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(f"dataset {source.name} cannot be read: {error}") from error
        self.bounds = np.array([0, documents - 1])

    def tokens(self, index: int) -> np.ndarray:
        """[tokens of the document], a view of the file if it is one sequence."""
        first, end = self._firsts[index : index + 2].tolist()
        places = zip(self._lengths[first:end].tolist(), self._pointers[first:end].tolist(), strict=True)
        parts = [np.frombuffer(self._data, self._dtype, length, pointer) for length, pointer in places]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self._dtype), *parts])

    def _read_header(self) -> tuple[int, int]:
        """The counts S and D. Sets the dtype."""
        with open(self._index_path, "rb") as file:
            header = file.read(HEADER.size)
        if header[: len(MAGIC)] != MAGIC:
            self._refuse(f"it begins with {header[: len(MAGIC)]!r}: expected {MAGIC!r}")
        if len(header) < HEADER.size:
            self._refuse(f"it is cut short after {len(header)} bytes")
        _, version, code, sequences, documents = HEADER.unpack(header)
        if version != 1:
            self._refuse(f"its version is {version}: expected 1")
        if code not in DTYPES:
            self._refuse(f"its dtype code is {code}: expected 1 to 8")
        self._dtype = np.dtype(DTYPES[code])
        if self._dtype.kind == "f":
            self._refuse(f"it contains {self._dtype.name}: expected token ids")
        needed = HEADER.size + 12 * sequences + 8 * documents
        if self.index_bytes not in (needed, needed + sequences):
            self._refuse(f"it has {self.index_bytes} bytes: expected {needed} from its counts")
        if documents < 2 or sequences == 0:
            raise ConfigError(f"dataset {self.name} contains no documents")
        return sequences, documents

    def _check(self) -> int:
        """The number of tokens. Checks that lengths, pointers and documents lie within the .bin."""
        total = 0
        for part in _chunks(len(self._lengths)):
            lengths, pointers = self._lengths[part].astype(np.int64), self._pointers[part]
            if lengths.min() < 0:
                self._refuse(f"a sequence has {lengths.min()} tokens")
            beyond = (pointers < 0) | (pointers > self.data_bytes - lengths * self._dtype.itemsize)
            if beyond.any():
                number = part.start + int(beyond.argmax())
                self._refuse(f"sequence {number} is not within the {self.data_bytes} bytes of the .bin")
            total += int(lengths.sum())
        firsts = self._firsts
        if firsts[0] != 0 or firsts[-1] != len(self._lengths):
            self._refuse(f"its documents are sequences {firsts[0]} to {firsts[-1]} of {len(self._lengths)}")
        if any((np.diff(firsts[part.start : part.stop + 1]) < 0).any() for part in _chunks(len(firsts))):
            self._refuse("its documents are not in order")
        if total == 0:
            raise ConfigError(f"dataset {self.name} contains no tokens")
        return total

    def _refuse(self, why: str) -> None:
        raise ConfigError(f"dataset {self._index_path} is not a Megatron index: {why}")


def _array(file: np.ndarray, dtype: str, count: int, position: int) -> tuple[np.ndarray, int]:
    """`count` values from a byte position, and the position after them."""
    return np.frombuffer(file, dtype, count, position), position + count * np.dtype(dtype).itemsize


def _chunks(length: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK, length)) for start in range(0, length, CHUNK))
