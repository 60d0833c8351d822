"""One tensor file: {"tensor", "tensor_info", "metadata"} in torch's zip format, written aside and renamed.

It loads with torch.load(path, weights_only=True, mmap=True), here and in anyone's script. Nothing is ever unpickled
beyond what weights_only allows.

torch is imported where a tensor is read or written: who only asks the index does not wait for it.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class TensorFileError(ValueError):
    """A tensor file is missing, cut short or not what it should be. The message says which."""


def write_atomic(path: Path, content: bytes | memoryview) -> None:
    """Write a file aside and rename it: a reader sees the old content or the new, never a part. Raises OSError, and
    then leaves nothing behind."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(aside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def encode(tensor: Tensor, metadata: dict[str, Any], tensor_info: dict[str, Any]) -> memoryview:
    """The content of a tensor file.

    The tensor is stored contiguous, on the CPU, in a storage of its own: a view does not drag its base along.
    """
    import torch

    own = tensor.detach()
    whole = own.device.type == "cpu" and own.is_contiguous() and own.untyped_storage().nbytes() == own.nbytes
    if not whole:
        own = own.to("cpu", copy=True, memory_format=torch.contiguous_format)
    buffer = io.BytesIO()
    torch.save({"tensor": own, "tensor_info": tensor_info, "metadata": metadata}, buffer)
    return buffer.getbuffer()


def save(path: Path, tensor: Tensor, metadata: dict[str, Any], tensor_info: dict[str, Any]) -> int:
    """Write a tensor with its description; returns the file's size in bytes. Raises OSError."""
    content = encode(tensor, metadata, tensor_info)
    write_atomic(path, content)
    return len(content)


def load(path: Path) -> Tensor:
    """The tensor of a file, memory-mapped: pages are read when touched. Raises TensorFileError."""
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise TensorFileError(f"{path} is missing: it was moved or deleted since it was indexed") from None
    except Exception as error:  # whatever a damaged pickle trips over: KeyError, IndexError, struct.error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise TensorFileError(f"{path} cannot be read as a tensor file: {reason}") from error
    if not isinstance(content, dict) or not isinstance(content.get("tensor"), torch.Tensor):
        raise TensorFileError(f"{path} holds no tensor: expected a dict with the key 'tensor'")
    return content["tensor"]
