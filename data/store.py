"""One tensor file: {"tensor", "tensor_info", "metadata"} in torch's zip format, written aside and renamed.

It loads with torch.load(path, weights_only=True, mmap=True), here and in anyone's script. Nothing is ever unpickled
beyond what weights_only allows.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class TensorFileError(ValueError):
    """A tensor file is missing, cut short or not what it should be. The message says which."""


def write_atomic(path: Path, content: bytes) -> None:
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


def save(path: Path, tensor: Tensor, metadata: dict[str, Any], tensor_info: dict[str, Any]) -> int:
    """Write a tensor with its description; returns the file's size in bytes. Raises OSError.

    The tensor is stored contiguous, on the CPU, in a storage of its own: a view does not drag its base along.
    """
    own = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    buffer = io.BytesIO()
    torch.save({"tensor": own, "tensor_info": tensor_info, "metadata": metadata}, buffer)
    write_atomic(path, buffer.getbuffer())
    return buffer.tell()


def load(path: Path) -> Tensor:
    """The tensor of a file, memory-mapped: pages are read when touched. Raises TensorFileError."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise TensorFileError(f"{path} is missing: it was moved or deleted since it was indexed") from None
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise TensorFileError(f"{path} cannot be read as a tensor file: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or not isinstance(content.get("tensor"), Tensor):
        raise TensorFileError(f"{path} holds no tensor: expected a dict with the key 'tensor'")
    return content["tensor"]
