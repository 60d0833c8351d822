"""binade identify."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from binade.terminal import FAILED, CliOption, Command, print_text

if TYPE_CHECKING:  # slow to import
    from torch import Tensor


def _identify(x: str, q: str, scales: str | None, tensor_scale: float | None, block: str | None) -> int:
    """Say which spec makes Q of X, bit for bit.

    X has the values before rounding, Q what a kernel made of them: the dequantized values, or codes, packed or not,
    with --scales. Files: .pt (a tensor, or a recorded tensor of a run), .npy, or .safetensors as FILE:NAME. If no
    spec reproduces Q, the nearest are listed with the first value that differs and what those values have in common.

    Exit status: 0 if a spec reproduces Q without a deviation, else 1.
    """
    from binade.quant.identification.search import identify

    tensors = [load(x), load(q), None if scales is None else load(scales)]
    assert tensors[0] is not None and tensors[1] is not None
    try:
        found = identify(tensors[0], tensors[1], tensors[2], tensor_scale=tensor_scale, block=block)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    print_text(str(found))
    return 0 if found.spec else FAILED


def load(text: str) -> Tensor:
    """The tensor of a file. Raises UsageError."""
    import numpy as np
    import torch
    from safetensors import safe_open

    from binade.data.run.tensor_files import load_open

    name, _, key = text.rpartition(":") if ".safetensors:" in text else (text, "", "")
    path = Path(name)
    if not path.is_file():
        raise click.UsageError(f"{name} is not a file")
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                names = list(file.keys())
                if key not in names:
                    raise click.UsageError(f"{text}: expected FILE:NAME with one of {', '.join(names[:20])}")
                named: Tensor = file.get_tensor(key)
                return named
        with path.open("rb") as file:
            loaded = load_open(file.fileno())
    except click.UsageError:
        raise
    except Exception as error:  # of three libraries, which raise many kinds
        raise click.UsageError(f"{name} cannot be read: {str(error).partition(chr(10))[0]}") from error
    tensor = loaded.get("tensor") if isinstance(loaded, dict) else loaded
    if not isinstance(tensor, torch.Tensor):
        raise click.UsageError(f"{name} holds no tensor: expected one, or a recorded tensor of a run")
    return tensor


identify = Command(
    "identify",
    params=[
        click.Argument(["x"], metavar="X"),
        click.Argument(["q"], metavar="Q"),
        CliOption(["--scales"], metavar="FILE", help="The block scales, if Q has codes"),
        CliOption(["--tensor-scale"], type=float, metavar="S", help="A further factor of codes and scales"),
        CliOption(["--block"], metavar="BLOCK", help="A further block to try, such as 1x48"),
    ],
    callback=_identify,
    failed="the tensors cannot be read",
)
