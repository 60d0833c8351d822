"""What a spec does to normally distributed values: the SQNR that an operand is compared with.

The values are quantiles of N(0,1) in a fixed random order, so that the result is the same everywhere and a fourth of
the 2048² random values of a plain simulation suffices: they differ by less than 0.02 dB.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from binade.quant.specs import Block, Spec

VS_NORMAL = "sqnr_vs_normal"
SIDE = 1024  # values of a row and rows


def normal_sqnr(spec: Spec | str) -> float:
    """The SQNR in dB of values from N(0,1), rounded along rows of 1024. A delayed scale is that of the values
    themselves. Computed once for each spec: about 0.2 s."""
    spec = replace(Spec.of(spec), history=0)
    if spec.block and spec.block.columns:  # a larger block would only be padded
        spec = replace(spec, block=Block(min(spec.block.rows or 1, SIDE), min(spec.block.columns, SIDE)))
    return _of(spec)


@cache
def _of(spec: Spec) -> float:
    import torch

    from binade.quant.metrics import score  # imports torch

    number = SIDE * SIDE
    quantiles = torch.special.ndtri((torch.arange(number, dtype=torch.float64, device="cpu") + 0.5) / number).float()
    order = torch.randperm(number, generator=torch.Generator().manual_seed(0))
    sqnr = score(quantiles[order].reshape(SIDE, SIDE), spec, -1).sqnr_db
    return sqnr if math.isfinite(sqnr) else math.nan
