"""Hadamard rotation: spread each block's outliers over the whole block before it is rounded.

The orthonormal Sylvester-Hadamard matrix H (entries ±1/sqrt(block)) is symmetric and its own inverse, so rotating twice
gives the tensor back, and an error has the same size before and after: SQNR can be read on either side.
"""

from __future__ import annotations

import math

from torch import Tensor


def hadamard_rotate(x: Tensor, dim: int = -1, block: int = 32) -> Tensor:
    """x with each run of `block` values along `dim` multiplied by H: x's shape, float32. Its own inverse.

    block must be a power of two that divides the axis: a shorter last block would have no orthonormal H.
    Raises ValueError otherwise.
    """
    if block < 1 or block & (block - 1):
        raise ValueError(f"a Hadamard block is a power of two, not {block}")
    axis = x.shape[dim] if x.dim() else 1
    if axis % block:
        raise ValueError(f"a Hadamard block of {block} does not divide an axis of {axis} values")
    rows = x.detach().float().movedim(dim, -1) if x.dim() else x.detach().float().reshape(1)
    y = rows.reshape(-1, block)
    half = 1
    while half < block:  # the fast transform: log2(block) passes of sums and differences
        pairs = y.reshape(-1, block // (2 * half), 2, half)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        y = pairs.new_empty(pairs.shape)
        y[:, :, 0], y[:, :, 1] = a + b, a - b
        y = y.reshape(-1, block)
        half *= 2
    y = (y / math.sqrt(block)).reshape(rows.shape)
    return y.movedim(-1, dim) if x.dim() else y.reshape(())
