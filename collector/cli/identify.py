"""binade identify."""

from __future__ import annotations

import click

from binade.data.exchange.tensor_files import load
from binade.terminal import FAILED, CliOption, Command, print_text


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
