"""Reads tensor files that other tools wrote. Nothing is copied or executed.

    .pt           torch.load(weights_only=True) only: a bare tensor, {"tensor", "metadata"}, or any dict, also of dicts,
                  as a checkpoint: each tensor by its keys, joined with dots. Torch's zip format is memory-mapped; its
                  older format is read whole. .pth, .bin and .ckpt are the same
    .safetensors  every tensor by its key, with the metadata of the header
    .npy, .npz    without pickles

A file is opened and loaded by `data.run.tensor_files`. A file that is truncated while it is read can still kill the
process (SIGBUS), as with every memory-mapped file, so the import reads in separate processes.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from binade.data.exchange.quantized.files import dequantized
from binade.data.run.segment import file_when_imported
from binade.data.run.store import SUFFIXES, FileState, TensorFileError, changed_ns, check_content, sha256
from binade.data.run.tensor_files import (
    DTYPES,
    SHOWN,
    QuantizedTensor,
    StandIn,
    TooLargeError,
    load,
    load_open,
    opened_file,
    reading,
    too_large,
)
from binade.data.words.text import counted

DEEPEST = 32  # dicts in dicts
NUMPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
LARGEST_INFLATED = 1 << 32  # bytes of an array of a .npz, if no other limit is known
QUANTIZED = "quantized tensors of Transformer Engine are not decoded: only high_precision values are read"
NAMELESS = "in lists, by number or of a name that is used twice, as those of an optimizer, are not read"
OBJECTS = "it contains Python objects, which are pickled: they are not loaded"
CHANGED = "it has changed since it was imported: import its directory again"


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor of a file: float32, bfloat16 or float16 on the CPU, with at least one element.

    key       its name in a file of several tensors, else None
    metadata  the file's metadata, unchecked; for a dict in another form than the fork's, everything in it that is not a
              tensor
    note      a sentence on how the values were converted, or None
    dtype     its dtype in the file
    refused   why it cannot be used; tensor is then None
    """

    key: str | None
    metadata: object
    tensor: Tensor | None
    dtype: str | None = None
    note: str | None = None
    refused: str | None = None


Found = tuple[tuple[str, ...], Iterator[ForeignTensor]]  # the keys of a file with several tensors, and its tensors


@dataclass(frozen=True)
class ForeignFile:
    """An open tensor file, which is read when it is asked for its tensors, and a path under which it cannot be
    replaced. Raises TensorFileError."""

    read: Callable[[], Found]
    fixed_path: Path

    @cached_property
    def _content(self) -> Found:
        with reading():
            return self.read()

    @property
    def keys(self) -> tuple[str, ...]:
        """Those of all its tensors; none for a bare tensor."""
        return self._content[0]

    @property
    def tensors(self) -> Iterator[ForeignTensor]:
        """Its tensors, each read when it is reached, once."""
        return _guarded(self._content[1])

    def state(self) -> FileState:
        """Reads the file. Raises OSError."""
        status = os.stat(self.fixed_path)
        return FileState(sha256(self.fixed_path), status.st_size, changed_ns(status))


@contextmanager
def opened(path: Path, room: int | None = None) -> Iterator[ForeignFile]:
    """Opens a tensor file. float64 is rounded to float32.

    room limits the bytes that may be read into memory; None for no limit. Raises TensorFileError if the file cannot be
    opened or read, or changed while it was read, and TooLargeError if it needs more than `room`.
    """
    readers = {".safetensors": _safetensors, ".npy": _numpy, ".npz": _numpy_zip}
    readers |= dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _torch)
    if path.suffix not in readers:
        raise TensorFileError(f"not a tensor file: expected {', '.join(SUFFIXES)}")
    with opened_file(path) as descriptor:
        before = os.fstat(descriptor)
        read = partial(readers[path.suffix], descriptor, before.st_size, room)
        yield ForeignFile(read, Path(f"/proc/self/fd/{descriptor}"))
        after = os.fstat(descriptor)
        if (before.st_size, changed_ns(before)) != (after.st_size, changed_ns(after)):
            raise TensorFileError("it changed while it was read")


def load_values(run: Path, row: Mapping[str, Any]) -> Tensor:
    """The values of a tensor, given its run's directory and its row of the table `tensor`. Raises TensorFileError."""
    path = run / row["path"]  # an absolute path, of an imported tensor, stays as it is
    if not Path(row["path"]).is_absolute():
        return load(path, row, run)
    return load_foreign(path, row["file_key"], file_when_imported(row))


def load_foreign(path: Path, key: str | None = None, imported: FileState | None = None) -> Tensor:
    """One tensor of a file, copied, so that it stays the same if the file is overwritten; a quantized weight of a
    checkpoint is dequantized. imported: the file when it was imported. Raises TensorFileError with the file's name,
    also for a file that has changed since."""
    try:
        with opened(path) as file:
            if imported:
                check_unchanged(file.fixed_path, imported)
            refused = None
            for tensor in file.tensors if key is None or key in file.keys else ():
                if tensor.key == key:
                    if tensor.tensor is not None:
                        return tensor.tensor.clone()
                    refused = tensor.refused
                    break
            if key and path.suffix == ".safetensors" and (values := dequantized(path, key)) is not None:
                return values
            raise TensorFileError(refused or f"it no longer holds the tensor {key!r}")
    except TensorFileError as error:
        raise TensorFileError(f"{path} cannot be read: {error}") from error


def check_unchanged(path: Path, imported: FileState) -> None:
    """Raise TensorFileError if a file has another content than when it was imported. It is read only if its size or
    time differs. Raises OSError."""
    try:
        check_content(path, imported.sha256, imported)
    except TensorFileError:
        raise TensorFileError(CHANGED) from None


def _guarded(tensors: Iterator[ForeignTensor]) -> Iterator[ForeignTensor]:
    """The same tensors; any exception caused by a damaged file is raised as TensorFileError."""
    while True:
        with reading():
            tensor = next(tensors, None)
        if tensor is None:
            return
        yield tensor


def _torch(descriptor: int, size: int, room: int | None) -> Found:
    content = load_open(descriptor, room)
    if isinstance(content, Tensor):
        return (), iter([_usable(None, None, content, size, room)])
    if isinstance(content, dict) and isinstance(content.get("tensor"), Tensor):
        return (), iter([_usable(None, content.get("metadata"), content["tensor"], size, room)])
    return _of_dict(content if isinstance(content, dict) else {0: content}, size, room)


def _of_dict(content: dict[Any, Any], size: int, room: int | None) -> Found:
    """The tensors of a dict and of the dicts in it, and refusals of those without a name of their own."""
    metadata = {key: value for key, value in content.items() if not isinstance(value, Tensor | StandIn)}
    tensors: dict[str, Tensor | QuantizedTensor] = {}
    nameless: Counter[str] = Counter()  # by the key that they are under
    seen: set[int] = set()  # a pickle can refer to a dict many times, and to the dict that it is in
    open_dicts: list[tuple[tuple[str, ...], Any]] = [((), content)]
    while open_dicts:
        keys, value = open_dicts.pop()
        name = ".".join(keys)
        if isinstance(value, Tensor | QuantizedTensor):
            if name in tensors:
                nameless[name] += 1
            tensors.setdefault(name, value)
        elif isinstance(value, dict) and id(value) not in seen and len(keys) < DEEPEST:
            seen.add(id(value))
            named = [((*keys, key), below) for key, below in value.items() if isinstance(key, str)]
            open_dicts += reversed(named)
            others: list[Any] = [below for key, below in value.items() if not isinstance(key, str)]
            nameless[name] += _count(others, seen)
        else:
            nameless[name] += _count([value], seen)
    nameless += Counter()  # drops zeros
    if not tensors and not nameless:
        raise TensorFileError("it contains no tensor: expected a tensor or a dict of tensors")

    def read() -> Iterator[ForeignTensor]:
        for key, x in tensors.items():
            if isinstance(x, Tensor):
                yield _usable(key, metadata, x, size, room)
            else:
                yield ForeignTensor(key, metadata, None, refused=QUANTIZED)
        for key, count in nameless.items():
            yield ForeignTensor(key or None, metadata, None, refused=f"{counted(count, 'tensor')} {NAMELESS}")

    return tuple(tensors), read()


def _count(values: list[Any], seen: set[int]) -> int:
    """The tensors in lists and dicts, each counted once."""
    count, left = 0, list(values)
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            count += 1
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value
    return count


def _safetensors(descriptor: int, size: int, room: int | None) -> Found:
    path = f"/proc/self/fd/{descriptor}"
    with safe_open(path, framework="pt") as opened_file:
        keys = tuple(opened_file.keys())
    if not keys:
        raise TensorFileError("it contains no tensor")

    def read() -> Iterator[ForeignTensor]:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            for key in keys:
                yield _usable(key, metadata, file.get_tensor(key), size, room)

    return keys, read()


def _numpy(descriptor: int, size: int, room: int | None) -> Found:
    path = f"/proc/self/fd/{descriptor}"
    try:
        array = np.lib.format.open_memmap(path, mode="c")
    except ValueError as error:
        if "Python objects" in str(error):
            raise TensorFileError(OBJECTS) from None
        raise
    if reason := _not_float(array.dtype):
        raise TensorFileError(reason)
    if any(step < 0 for step in array.strides):
        raise TensorFileError("it has negative strides")
    return (), iter([_usable(None, None, torch.from_numpy(array), size, room)])


def _not_float(kind: np.dtype[Any]) -> str | None:
    """Why arrays of a dtype are not read; None if they are."""
    if kind.hasobject:
        return OBJECTS
    if kind.kind != "f" or kind.itemsize > 8 or not kind.isnative:
        return f"dtype {kind.str} cannot be read: expected float16, float32 or float64 in this machine's byte order"
    return None


def _numpy_zip(descriptor: int, size: int, room: int | None) -> Found:
    """The arrays of numpy.savez, each read whole, and by name."""
    path = f"/proc/self/fd/{descriptor}"
    try:
        with zipfile.ZipFile(path) as file:
            entries = [entry for entry in file.infolist() if entry.filename.endswith(".npy")]
    except zipfile.BadZipFile:
        raise TensorFileError("it was cut short or damaged: its ZIP directory cannot be read") from None
    if not entries:
        raise TensorFileError("it contains no array")
    return tuple(entry.filename.removesuffix(".npy") for entry in entries), _arrays(path, entries, room)


def _arrays(path: str, entries: list[zipfile.ZipInfo], room: int | None) -> Iterator[ForeignTensor]:
    with zipfile.ZipFile(path) as file, np.load(path, allow_pickle=False) as arrays:
        for entry in entries:
            key = entry.filename.removesuffix(".npy")
            if entry.file_size > (LARGEST_INFLATED if room is None else room):
                raise TooLargeError(too_large("its arrays are read whole", entry.file_size, room or LARGEST_INFLATED))
            with file.open(entry) as opened_entry:
                version = np.lib.format.read_magic(opened_entry)
                if version not in NUMPY_HEADERS:
                    yield ForeignTensor(key, None, None, refused="its header is not of version 1.0 or 2.0 of .npy")
                    continue
                shape, _, kind = NUMPY_HEADERS[version](opened_entry)
            if reason := _not_float(kind):
                yield ForeignTensor(key, None, None, kind.name, refused=reason)
            elif math.prod(shape) * kind.itemsize > entry.file_size:
                raise TensorFileError(f"{key!r} claims the shape {shape}, but has {entry.file_size} bytes"[:SHOWN])
            else:
                array = arrays[entry.filename]
                yield _usable(key, None, torch.from_numpy(array), array.nbytes, room)


def _usable(key: str | None, metadata: object, x: Tensor, size: int, room: int | None) -> ForeignTensor:
    """A tensor that can be summarized, or the reason why it cannot.

    size is the file's: a tensor with more bytes than the file repeats its elements (stride 0). Raises TooLargeError if
    the conversion needs more than `room`.
    """
    x = x.detach()
    dtype = str(x.dtype).removeprefix("torch.")
    reason = None
    if type(x) is not Tensor:
        reason = f"it is a {type(x).__name__}, not a plain tensor"
    elif x.is_nested or x.layout != torch.strided:
        reason = "it is sparse or nested: only dense tensors are read"
    elif x.is_quantized or x.is_complex() or x.dtype not in (*DTYPES, torch.float64):
        reason = f"its dtype is {dtype}: expected float32, bfloat16, float16 or float64"
    elif x.device.type != "cpu":
        reason = "it has no values (device meta)"
    elif not x.numel():
        reason = f"it is empty: its shape is {tuple(x.shape)}"[:SHOWN]
    elif x.numel() * x.element_size() > size:
        reason = f"it claims {x.numel()} values of {dtype}, but the file has {size} bytes"
    if reason:
        return ForeignTensor(key, metadata, None, dtype, refused=reason)
    copied = x.numel() * min(x.element_size(), 4)
    if room is not None and copied > room and (x.dtype == torch.float64 or not x.is_contiguous()):
        raise TooLargeError(too_large("its values must be converted", copied, room))
    x = x.resolve_neg()
    if x.dtype == torch.float64:
        wide, x = x, x.float()
        beyond = int((x.isinf() & wide.isfinite()).sum())
        note = "Its values are float64 in the file and were rounded to float32, in which Binade computes" + (
            f"; {beyond} of them exceed the range of float32 and became infinite." if beyond else "."
        )
        return ForeignTensor(key, metadata, x, dtype, note)
    return ForeignTensor(key, metadata, x, dtype)
