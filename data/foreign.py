"""Reads tensor files that other tools wrote. Nothing is copied or executed.

    .pt           torch.load(weights_only=True) only: a bare tensor, {"tensor", "metadata"}, or any dict, also of dicts,
                  as a checkpoint: each tensor by its keys, joined with dots. Torch's zip format is memory-mapped; its
                  older format is read whole. .pth, .bin and .ckpt are the same
    .safetensors  every tensor by its key, with the metadata of the header
    .npy, .npz    without pickles

A file is opened once and must be a regular file, not a link. Everything is read through that descriptor
(/proc/self/fd), so the file cannot be replaced in between. A file that is truncated while it is read can still kill the
process (SIGBUS), as with every memory-mapped file, so the import reads in separate processes.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.serialization import safe_globals

from binade.data.store import SUFFIXES, FileState, TensorFileError, changed_ns, check_content, sha256
from binade.data.text import counted

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# How torch's older format begins: its magic number, pickled by any protocol from 2 on.
OLDER_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019")
SHOWN = 200
ENGINE, GETATTR = ("transformer_engine.", "transformer_engine_torch."), "builtins.getattr"
# What Megatron's checkpoints contain besides tensors: megatron.core.safe_globals, and classes of Megatron.
MEGATRON = ("megatron.",)
BESIDES = frozenset(
    {
        *("argparse.Namespace", "types.SimpleNamespace", "pathlib.PosixPath", "_io.BytesIO", "signal.Signals"),
        *("numpy.ndarray", "numpy.dtype", "numpy.dtypes.UInt32DType"),
        *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
    }
)
DEEPEST = 32  # dicts in dicts
NUMPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
LFS = b"version https://git-lfs.github.com/spec/"  # how a pointer to a file begins
LARGEST_INFLATED = 1 << 32  # bytes of an array of a .npz, if no other limit is known
QUANTIZED = "quantized tensors of Transformer Engine are not decoded: only high_precision values are read"
NAMELESS = "in lists, by number or of a name that is used twice, as those of an optimizer, are not read"
OBJECTS = "it contains Python objects, which are pickled: they are not loaded"
NO_MEMORY = "it needs more memory than is available"
CHANGED = "it has changed since it was imported: import its directory again"


class TooLargeError(TensorFileError):
    """The file has to be read whole, and that does not fit into the memory allowed."""


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
        with _reading():
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
    descriptor = _open(path)
    try:
        before = os.fstat(descriptor)
        read = partial(readers[path.suffix], descriptor, before.st_size, room)
        yield ForeignFile(read, Path(f"/proc/self/fd/{descriptor}"))
        after = os.fstat(descriptor)
        if (before.st_size, changed_ns(before)) != (after.st_size, changed_ns(after)):
            raise TensorFileError("it changed while it was read")
    finally:
        os.close(descriptor)


def load_foreign(path: Path, key: str | None = None, imported: FileState | None = None) -> Tensor:
    """One tensor of a file, copied, so that it stays the same if the file is overwritten. imported: the file when it
    was imported. Raises TensorFileError with the file's name, also for a file that has changed since."""
    try:
        with opened(path) as file:
            if imported:
                check_unchanged(file.fixed_path, imported)
            for tensor in file.tensors:
                if tensor.key == key:
                    if tensor.tensor is None:
                        raise TensorFileError(tensor.refused)
                    return tensor.tensor.clone()
            raise TensorFileError(f"it no longer holds the tensor {key!r}")
    except TensorFileError as error:
        raise TensorFileError(f"{path} cannot be read: {error}") from error


def load_plain(path: Path) -> Any:
    """The content of a file that torch.save wrote, if it is tensors and plain data. Tensors are mapped, not read.
    Raises TensorFileError."""
    descriptor = _open(path)
    try:
        with _reading():
            return _loaded(descriptor, os.fstat(descriptor).st_size, None)
    finally:
        os.close(descriptor)


def check_unchanged(path: Path, imported: FileState) -> None:
    """Raise TensorFileError if a file has another content than when it was imported. It is read only if its size or
    time differs. Raises OSError."""
    try:
        check_content(path, imported.sha256, imported)
    except TensorFileError:
        raise TensorFileError(CHANGED) from None


def _open(path: Path) -> int:
    """A descriptor of a nonempty regular file. Other kinds are not opened: opening alone may block or have effects."""
    try:
        kind = os.lstat(path).st_mode
        if stat.S_ISLNK(kind):
            raise TensorFileError("it is a symbolic link")
        if not stat.S_ISREG(kind):
            raise TensorFileError("it is not a regular file")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise TensorFileError("it is missing: it was moved or deleted") from None
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else (error.strerror or str(error)).lower()
        raise TensorFileError(reason) from error
    status = os.fstat(descriptor)
    is_file = stat.S_ISREG(status.st_mode)
    is_pointer = is_file and os.pread(descriptor, len(LFS), 0) == LFS
    if is_file and status.st_size and not is_pointer:
        return descriptor
    os.close(descriptor)
    if is_pointer:
        raise TensorFileError("it is a pointer of Git LFS, not the file that it stands for: run git lfs pull")
    raise TensorFileError("it is empty (0 bytes)" if is_file else "it is not a regular file")


def _guarded(tensors: Iterator[ForeignTensor]) -> Iterator[ForeignTensor]:
    """The same tensors; any exception caused by a damaged file is raised as TensorFileError."""
    while True:
        with _reading():
            tensor = next(tensors, None)
        if tensor is None:
            return
        yield tensor


@contextmanager
def _reading() -> Iterator[None]:
    """A context that raises TensorFileError for any exception that a damaged file causes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except TensorFileError:
        raise
    except MemoryError as error:
        raise TensorFileError(NO_MEMORY) from error
    except Exception as error:  # KeyError, struct.error, SafetensorError: the readers do not document which
        raise TensorFileError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Why a file cannot be read, in one printable line."""
    text = str(error).strip() or type(error).__name__
    if match := re.search(r"GLOBAL ([\w.]{1,100}) ", text):
        return f"it contains more than tensors and plain data ({match[1]}), which could run code: it is not loaded"
    if "can't allocate memory" in text:
        return NO_MEMORY
    if "Weights only load failed" in text:
        return "damaged, or it contains more than tensors and plain data, which is not loaded"
    line = "".join(c if c.isprintable() else "?" for c in text.splitlines()[0][:SHOWN])
    return f"damaged, or not of the type that its name indicates: {line}"


def _too_large(why: str, needed: int, room: int) -> str:
    return f"{why}: that takes {needed / 2**30:.1f} GiB, but only {max(room, 0) / 2**30:.1f} GiB of memory are free"


def _loaded(descriptor: int, size: int, room: int | None) -> Any:
    """What torch.save wrote: tensors and plain data, nothing else."""
    path = f"/proc/self/fd/{descriptor}"
    head = os.pread(descriptor, 32, 0)
    if head.startswith(b"PK\x03\x04"):
        try:
            entries = zipfile.ZipFile(path).infolist()
        except zipfile.BadZipFile:
            raise TensorFileError("it was cut short or damaged: its ZIP directory cannot be read") from None
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise TensorFileError("its entries are compressed, and torch never compresses them")
        if any(entry.header_offset + entry.file_size > size for entry in entries):
            raise TensorFileError(
                "it was cut short or damaged: its ZIP directory lists entries beyond the end of the file"
            )
        stand_ins = _stand_ins(path)
        with safe_globals(stand_ins) if stand_ins else nullcontext():  # torch keeps them for the whole process
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    elif head.startswith(b"\x80") and OLDER_MAGIC in head:
        if room is not None and size > room:
            raise TooLargeError(_too_large("it is in torch's legacy format, which cannot be memory-mapped", size, room))
        with open(path, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    raise TensorFileError("it is in neither of torch's two formats")


def _torch(descriptor: int, size: int, room: int | None) -> Found:
    content = _loaded(descriptor, size, room)
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


class StandIn:
    """Replaces an object that is not a tensor or plain data. Its class is not imported, and its content is dropped."""

    def __new__(cls, *content: object) -> StandIn:
        return object.__new__(cls)

    def __init__(self, *content: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


class QuantizedTensor(StandIn):
    """Replaces what Transformer Engine has pickled."""


class _Attribute(QuantizedTensor):
    """Replaces getattr, through which Transformer Engine 2.15 refers to a constructor: returns the class."""

    def __new__(cls, owner: Any, name: str) -> Any:
        return owner


def _stand_ins(path: str) -> list[Any]:
    """Stand-ins for the classes and functions in a .pt that are Transformer Engine's or those of a checkpoint of
    Megatron: a dump that has a tensor before and after quantization is one pickle, and so are weights and arguments."""
    stand_ins = []
    unknown = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    of_engine = any(name.startswith(ENGINE) for name in unknown)
    for full in unknown:
        module, _, name = full.rpartition(".")
        if full == GETATTR and of_engine:
            kind: type[StandIn] = _Attribute
        elif full.startswith(ENGINE):
            kind = QuantizedTensor
        elif full.startswith(MEGATRON) or full in BESIDES:
            kind = StandIn
        else:  # torch refuses the file, and names it
            continue
        stand_ins.append(type(name, (kind,), {"__module__": module}))
    return stand_ins


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
                raise TooLargeError(_too_large("its arrays are read whole", entry.file_size, room or LARGEST_INFLATED))
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
        raise TooLargeError(_too_large("its values must be converted", copied, room))
    x = x.resolve_neg()
    if x.dtype == torch.float64:
        wide, x = x, x.float()
        beyond = int((x.isinf() & wide.isfinite()).sum())
        note = "Its values are float64 in the file and were rounded to float32, in which Binade computes" + (
            f"; {beyond} of them exceed the range of float32 and became infinite." if beyond else "."
        )
        return ForeignTensor(key, metadata, x, dtype, note)
    return ForeignTensor(key, metadata, x, dtype)
