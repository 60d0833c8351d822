"""The definition of every format, in plain torch, written to be read: float32 in, float32 out, any device.

Three steps make a quantizer: `scaling` finds what a block shares and divides by it, `rounding` puts a scaled value on
the element's grid, and `scaling` multiplies back. What the formats are is in `formats`; the same bits, faster, come
from `backends`. Tests compare all of them with libraries written by others.

Layout: a tensor reaches `quantize_blocks` as [groups, block], blocks already along the last axis (see `to_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from binade.quant.elements import Overflow, Rounding
from binade.quant.formats import Format
from binade.quant.rounding import noise, round_to_element
from binade.quant.scaling import Scaling


@dataclass(frozen=True)
class Plan:
    """A format with every option decided. Built and checked by `quantizer.plan`. seed: of stochastic rounding."""

    format: Format
    block_size: int | None
    scaling: Scaling
    rounding: Rounding
    overflow: Overflow
    seed: int = 0


def quantize_blocks(x: Tensor, plan: Plan, absmax: Tensor, u: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x [groups, block] float32 -> values on the element's grid, block scales, the dequantized values.

    absmax is the whole tensor's largest magnitude (a scalar tensor, NaN if any element is NaN), used by formats with a
    tensor scale. Block scales are [groups, 1], or a scalar 1 without them. u: see `noise_blocks`.
    A block that holds NaN or Inf gets the scale NaN and is NaN throughout.
    """
    element, scaling = plan.format.element, plan.scaling
    tensor_scale = scaling.tensor_scale(element, absmax)
    scale = scaling.block_scale(x, element, tensor_scale)
    scaled = scaling.to_element(x, scale, element, tensor_scale)
    values = round_to_element(scaled, element, plan.rounding, plan.overflow, u)
    return values, scale, scaling.from_element(values, scale, element, tensor_scale)


def to_blocks(x: Tensor, dim: int, block_size: int | None) -> Tensor:
    """x with `dim` moved last, padded with zeros to whole blocks: [groups, block]. Without a block size the axis is
    one block."""
    moved = x.movedim(dim, -1) if x.dim() else x.reshape(1)
    block = block_size or max(moved.shape[-1], 1)
    short = -moved.shape[-1] % block
    if short:
        moved = torch.nn.functional.pad(moved, (0, short))
    return moved.reshape(-1, block)


def from_blocks(blocks: Tensor, like: Tensor, dim: int) -> Tensor:
    """The inverse of `to_blocks` for a tensor of `like`'s shape."""
    if not like.dim():
        return blocks.reshape(-1)[:1].reshape(())
    shape = like.movedim(dim, -1).shape
    if not like.numel():
        return blocks.new_zeros(like.shape)
    rows = blocks.reshape(*shape[:-1], -1)
    return rows[..., : shape[-1]].movedim(-1, dim).contiguous()


def noise_blocks(x: Tensor, plan: Plan, dim: int, block_size: int | None) -> Tensor | None:
    """Noise for stochastic rounding as [groups, block], drawn by an element's place in x; None for other roundings."""
    if plan.rounding != Rounding.STOCHASTIC:
        return None
    return to_blocks(noise(x.numel(), plan.seed, x.device).reshape(x.shape), dim, block_size)


def scales_along(scales: Tensor, x: Tensor, dim: int, block_size: int) -> Tensor:
    """Block scales [groups, 1] in the order of `to_blocks` -> [outer, blocks, inner] over x's axes before and after
    `dim`."""
    dim = dim % x.dim() if x.dim() else 0
    blocks = -(-(x.shape[dim] if x.dim() else 1) // block_size)
    return scales.reshape(x.shape[:dim].numel(), x.shape[dim + 1 :].numel(), blocks).transpose(1, 2)


def quantize_dequantize(x: Tensor, plan: Plan, dim: int, absmax: Tensor) -> tuple[Tensor, Tensor | None]:
    """x (any shape, not empty) -> (y of x's shape and dtype, block scales [outer, blocks, inner] or None).

    absmax as in `quantize_blocks`.
    """
    if plan.block_size is None:  # nothing is shared along an axis
        u = noise_blocks(x.reshape(-1), plan, 0, None)
        return quantize_blocks(x.reshape(1, -1).float(), plan, absmax, u)[2].to(x.dtype).reshape(x.shape), None
    u = noise_blocks(x, plan, dim, plan.block_size)
    _, scales, y = quantize_blocks(to_blocks(x, dim, plan.block_size).float(), plan, absmax, u)
    return from_blocks(y.to(x.dtype), x, dim), scales_along(scales, x, dim, plan.block_size)
