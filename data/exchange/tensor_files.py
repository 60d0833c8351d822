"""Reads a tensor from a file that a user names. Nothing is unpickled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # slow to import
    from torch import Tensor


class UnreadableTensorError(ValueError):
    """The file has no tensor that can be read. The message says why, in one line."""

    exit_status = 2


def load(text: str) -> Tensor:
    """The tensor of a file: .pt (a tensor, or a recorded tensor of a run), .npy, or .safetensors as FILE:NAME. Raises
    UnreadableTensorError."""
    import numpy as np
    import torch
    from safetensors import safe_open

    from binade.data.run.tensor_files import load_open

    name, _, key = text.rpartition(":") if ".safetensors:" in text else (text, "", "")
    path = Path(name)
    if not path.is_file():
        raise UnreadableTensorError(f"{name} is not a file")
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                names = list(file.keys())
                if key not in names:
                    raise UnreadableTensorError(f"{text}: expected FILE:NAME with one of {', '.join(names[:20])}")
                named: Tensor = file.get_tensor(key)
                return named
        with path.open("rb") as file:
            loaded = load_open(file.fileno())
    except UnreadableTensorError:
        raise
    except Exception as error:  # of three libraries, which raise many kinds
        raise UnreadableTensorError(f"{name} cannot be read: {str(error).partition(chr(10))[0]}") from error
    tensor = loaded.get("tensor") if isinstance(loaded, dict) else loaded
    if not isinstance(tensor, torch.Tensor):
        raise UnreadableTensorError(f"{name} holds no tensor: expected one, or a recorded tensor of a run")
    return tensor
