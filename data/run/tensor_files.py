"""Reads what torch.save wrote: the one module that calls torch.load.

A recorded tensor file has one dense tensor that it stores whole. Before anything is computed from it, the file is
compared with its row of the index: dtype, shape, layout and the number of stored bytes. A view that repeats a few bytes
a billion times, or a sparse, quantized or meta tensor, is refused, and its pickle is not even loaded.

A file is opened once, and must be a regular file and not a link. Everything is read through that descriptor
(/proc/self/fd), so the file cannot be replaced in between.
"""

from __future__ import annotations

import os
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import safe_globals

from binade.data.run.store import TensorFileError, check_content, inside
from binade.data.words.text import describe

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of recorded tensors
DTYPE_NAMES = frozenset(str(dtype).removeprefix("torch.") for dtype in DTYPES)
LARGEST_PICKLE = 256 << 10  # bytes of the description of one tensor
# All that the pickle of a recorded tensor file refers to. Others build sparse, quantized and meta tensors, or allocate.
DENSE = re.compile(r"torch\._utils _rebuild_tensor_v2|collections OrderedDict|torch [A-Za-z0-9]+Storage")
# How torch's older format begins: its magic number, pickled by any protocol from 2 on.
OLDER_MAGIC = bytes.fromhex("6cfc9c46f9206aa85019")
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
NO_MEMORY = "it needs more memory than is available"
LFS = b"version https://git-lfs.github.com/spec/"  # how a pointer to a file begins
SHOWN = 200


class TooLargeError(TensorFileError):
    """The file has to be read whole, and that does not fit into the memory allowed."""


def load(path: Path, row: Mapping[str, Any] | None = None, run: Path | None = None) -> Tensor:
    """The tensor of a recorded file, memory-mapped: pages are read when touched.

    row: its sha256 (or None), dtype and shape, which the file is compared with. run: the directory that the file is
    in; no link below it is followed. Raises TensorFileError.
    """
    try:
        with opened_file(path, run) as descriptor, reading():
            if row and row["sha256"] is not None:
                check_content(path, row["sha256"])
            _check_pickle(descriptor)
            content = load_open(descriptor)
        tensor = content.get("tensor") if isinstance(content, dict) else None
        if not isinstance(tensor, Tensor):
            raise TensorFileError("it contains no tensor: expected a dict with the key 'tensor'")
        if problem := _difference(tensor, row):
            raise TensorFileError(f"it is not what its row describes: {problem}")
    except TensorFileError as error:
        raise TensorFileError(f"{path} cannot be read as a tensor file: {error}") from error
    return tensor


def _difference(x: Tensor, row: Mapping[str, Any] | None) -> str:
    """How a tensor differs from its row, or from one dense tensor that is stored whole; "" if it does not."""
    if type(x) is not Tensor or x.layout != torch.strided or x.device.type != "cpu" or x.is_nested or x.is_quantized:
        return "it has no dense tensor"
    if row is not None:
        dtype, shape = str(x.dtype).removeprefix("torch."), list(x.shape)
        if row["dtype"] not in DTYPE_NAMES:
            return f"its row has dtype {str(row['dtype'])[:20]}, expected one of {', '.join(sorted(DTYPE_NAMES))}"
        if dtype != row["dtype"]:
            return f"it has dtype {dtype}, expected {row['dtype']}"
        if row["shape"] is None or shape != list(row["shape"]):
            return f"it has shape {str(shape)[:80]}, expected {str(row['shape'] and list(row['shape']))[:80]}"
    stored, needed = x.untyped_storage().nbytes(), x.numel() * x.element_size()
    if stored != needed or not x.is_contiguous() or x.is_neg() or x.is_conj():
        return f"it stores {stored:,} bytes, expected the {needed:,} of its values"
    return ""


def load_plain(path: Path, *, mapped: bool = True) -> Any:
    """The content of a file that torch.save wrote, if it is tensors and plain data. With `mapped`, tensors are not read
    but memory-mapped. Raises TensorFileError."""
    with opened_file(path) as descriptor, reading():
        return load_open(descriptor, mapped=mapped)


@contextmanager
def opened_file(path: Path, base: Path | None = None) -> Iterator[int]:
    """The descriptor of a nonempty regular file to which no link leads from `base`, by default its folder. Other kinds
    are not opened: opening alone may block or have effects. Raises TensorFileError."""
    try:
        descriptor = inside(base or path.parent)(str(path), os.O_RDONLY)
    except FileNotFoundError:
        raise TensorFileError("it is missing: it was moved or deleted") from None
    except (OSError, ValueError) as error:
        raise TensorFileError(f"it cannot be opened: {describe(error)}") from error
    try:
        if not os.fstat(descriptor).st_size:
            raise TensorFileError("it is empty (0 bytes)")
        if os.pread(descriptor, len(LFS), 0) == LFS:
            raise TensorFileError("it is a pointer of Git LFS, not the file that it stands for: run git lfs pull")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def reading() -> Iterator[None]:
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


def too_large(why: str, needed: int, room: int) -> str:
    return f"{why}: that takes {needed / 2**30:.1f} GiB, but only {max(room, 0) / 2**30:.1f} GiB of memory are free"


def _check_pickle(descriptor: int) -> None:
    """Refuse a recorded tensor file whose pickle does more than describe one dense tensor."""
    with zipfile.ZipFile(f"/proc/self/fd/{descriptor}") as archive:
        pickles = [entry for entry in archive.infolist() if entry.filename.endswith("data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > LARGEST_PICKLE:
            raise TensorFileError("damaged, or no recorded tensor: expected one small pickle in it")
        content = archive.read(pickles[0])
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "GLOBAL" and not DENSE.fullmatch(str(argument)):
            raise TensorFileError(f"its tensor is built by {str(argument)[:80]!a}: expected a dense tensor")


def load_open(descriptor: int, room: int | None = None, *, mapped: bool = True) -> Any:
    """What torch.save wrote: tensors and plain data, nothing else. room: bytes of memory for what cannot be mapped."""
    size = os.fstat(descriptor).st_size
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
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    elif head.startswith(b"\x80") and OLDER_MAGIC in head:
        if room is not None and size > room:
            raise TooLargeError(too_large("it is in torch's legacy format, which cannot be memory-mapped", size, room))
        with open(path, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    raise TensorFileError("it is in neither of torch's two formats")


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
