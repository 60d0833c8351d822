"""Hadamard rotation: spread each block's outliers over the whole block before it is rounded.

The orthonormal Sylvester-Hadamard matrix H (entries ±1/sqrt(size)) is symmetric and its own inverse, so rotating twice
gives the tensor back, and an error has the same size before and after: SQNR can be read on either side. With signs s,
x · diag(s) · H is a rotation too. If both operands of a product are rotated alike along the axis that it contracts, the
rotations cancel: A · D · H · (B · D · H)ᵀ = A · Bᵀ.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from binade.quant.memory import ordinary
from binade.quant.rounding import noise
from binade.quant.specs import Spec

# NVIDIA Transformer Engine, reference_nvfp4.py: one vector for all layers and steps.
FIXED_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def hadamard_rotate(x: Tensor, dim: int = -1, block: int = 32) -> Tensor:
    """x with each run of `block` values along `dim` multiplied by H: x's shape, float32. Its own inverse.

    block must be a power of two that divides the axis: a shorter last block would have no orthonormal H.
    Raises ValueError otherwise.
    """
    if block < 1 or block & (block - 1):
        raise ValueError(f"a Hadamard block must be a power of two, not {block}")
    x = ordinary(x)
    axis = x.shape[dim] if x.dim() else 1
    if axis % block:
        raise ValueError(f"a Hadamard block of {block} does not divide an axis of {axis} values")
    rows = x.float().movedim(dim, -1) if x.dim() else x.float().reshape(1)
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


def signs(spec: Spec, seed: int, device: torch.device) -> Tensor | None:
    """The signs of a spec's rotation, float32 [hadamard]; None if it has none. seed: of this call, for "random"."""
    if spec.signs == "none":
        return None
    if spec.signs == "fixed":
        return _fixed_signs(device)
    return 1 - 2 * (noise(spec.hadamard, seed if spec.signs == "random" else int(spec.signs), device) >= 0.5).float()


@cache
def _fixed_signs(device: torch.device) -> Tensor:
    """FIXED_SIGNS on a device: copied once, as a copy may wait for a GPU."""
    return torch.tensor(FIXED_SIGNS, dtype=torch.float32, device=device)


def rotate(x: Tensor, spec: Spec, dim: int, seed: int) -> Tensor:
    """x · diag(signs) · H in runs of `spec.hadamard` along `dim`, which is padded with zeros to whole runs: float32."""
    rows = x.float().movedim(dim, -1) if x.dim() else x.float().reshape(1)
    rows = pad(rows, (0, -rows.shape[-1] % spec.hadamard))
    diagonal = signs(spec, seed, x.device)
    if diagonal is not None:
        rows = (rows.reshape(-1, spec.hadamard) * diagonal).reshape(rows.shape)
    rows = hadamard_rotate(rows, -1, spec.hadamard)
    return rows.movedim(-1, dim) if x.dim() else rows


def rotate_back(y: Tensor, like: Tensor, spec: Spec, dim: int, seed: int) -> Tensor:
    """The inverse of `rotate`, without the padding: `like`'s shape, float32."""
    rows = hadamard_rotate(y.movedim(dim, -1) if like.dim() else y, -1, spec.hadamard)
    diagonal = signs(spec, seed, y.device)
    if diagonal is not None:
        rows = (rows.reshape(-1, spec.hadamard) * diagonal).reshape(rows.shape)
    if not like.dim():
        return rows[0]
    return rows[..., : like.shape[dim]].movedim(-1, dim)
