"""The definition of every format in plain, readable torch: float32 in, float32 out, any device.

A quantizer has three steps: `scaling` computes the shared scale of a block and divides by it, `rounding` puts a scaled
value on the element's grid, and `scaling` multiplies back. `formats` and `specs` define the formats; `backends`
computes the same bits faster. Tests compare all of them with other libraries.

Layout: a tensor reaches `quantize_blocks` as [groups, block], each row the values that share a scale (see `to_blocks`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from binade.quant.rounding import noise
from binade.quant.scheme import nan_max, pad_end
from binade.quant.specs import ROW, TENSOR, Block, Spec

FIXED = 64  # the longest block of a scheme that allows one length only: HiF4's


def quantize_blocks(x: Tensor, spec: Spec, absmax: Tensor, u: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x [groups, block] float32 -> values on the element's grid, block scales, the dequantized values.

    absmax is the one that `Scaling.outer` needs, see `outer_absmax`. Block scales are [groups, 1]. u: see
    `noise_blocks`. A block that holds NaN or Inf gets the scale NaN and is NaN throughout.
    """
    return spec.scaling.quantize(x, spec, absmax, u)


def columns_of(block: Block | None, axis: int) -> int:
    """How many neighbors along an axis of this length make a block, padding included. A longer block is cut to the
    axis, since zeros change neither its scale nor its values. Schemes with a fixed block, of at most FIXED, take whole
    ones."""
    return min(block.columns, max(axis, FIXED)) if block and block.columns else max(axis, 1)


def to_blocks(x: Tensor, dim: int, block: Block | None) -> Tensor:
    """x cut into blocks, padded with zeros to whole ones: [groups, rows · columns]. The groups follow the axes before
    `dim`, the axes behind it, then `dim`; a tile's rows are neighbors in that order of lines along `dim`, whatever axes
    they are of: tokens are [sequence, batch]. Without a block, or with one that is longer, the whole axis is
    one."""
    moved = x.movedim(dim, -1) if x.dim() else x.reshape(1)
    if block == TENSOR:
        return moved.reshape(1, -1)
    rows, columns = block.rows or 1 if block else 1, columns_of(block, moved.shape[-1])
    moved = pad_end(moved, moved.dim() - 1, -moved.shape[-1] % columns)
    if rows == 1:
        return moved.reshape(-1, columns)
    moved = moved.reshape(-1, moved.shape[-1])
    moved = pad_end(moved, 0, -moved.shape[0] % rows)
    tiles = moved.reshape(len(moved) // rows, rows, moved.shape[-1] // columns, columns)
    return tiles.transpose(1, 2).reshape(-1, rows * columns)


def from_blocks(blocks: Tensor, like: Tensor, dim: int, block: Block | None) -> Tensor:
    """The inverse of `to_blocks` for a tensor of `like`'s shape."""
    if not like.dim():
        return blocks.reshape(-1)[:1].reshape(())
    if not like.numel():
        return blocks.new_zeros(like.shape)
    shape = like.movedim(dim, -1).shape
    rows = block.rows or 1 if block else 1
    if rows == 1:
        whole = blocks.reshape(*shape[:-1], -1)
        return whole[..., : shape[-1]].movedim(-1, dim).contiguous()
    lines, columns = shape[:-1].numel(), columns_of(block, shape[-1])
    high, wide = -(-lines // rows), -(-shape[-1] // columns)
    tiles = blocks.reshape(high, wide, rows, columns).transpose(1, 2)
    whole = tiles.reshape(high * rows, wide * columns)[:lines, : shape[-1]]
    return whole.reshape(shape).movedim(-1, dim).contiguous()


def per_group(outer: Tensor, x: Tensor, dim: int, block: Block | None) -> Tensor:
    """One value for each element of x's shape, equal within a block -> [groups, 1], in the order of `to_blocks`."""
    return to_blocks(outer.expand(x.shape), dim, block)[:, :1]


def absmax_over(x: Tensor, dim: int, block: Block) -> Tensor:
    """The largest magnitude of each block, at every element of it: x's shape, or a scalar for the whole tensor.
    float32; NaN if any element of the block is NaN, 0 for an empty tensor."""
    if block == TENSOR or not x.dim():
        if not x.numel():
            return torch.zeros((), dtype=torch.float32, device=x.device)
        if x.device.type != "cpu":  # one launch
            norm: Tensor = torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)
            return norm
        low, high = torch.aminmax(x)
        return torch.maximum(-low, high).float().abs()  # never -0, whose sign would carry over
    if block == ROW and x.numel():
        return x.abs().amax(dim, keepdim=True).float().expand(x.shape)
    blocks = to_blocks(x, dim, block)
    return from_blocks(blocks.abs().amax(-1, keepdim=True).float().expand(blocks.shape), x, dim, block)


def outer_absmax(x: Tensor, spec: Spec, dim: int) -> Tensor:
    """The absmax for `Scaling` methods, at each element (x's shape), or a scalar for the whole tensor."""
    outer = TENSOR if spec.block == TENSOR else spec.scaling.outer
    if spec.history:
        return torch.ones((), dtype=torch.float32, device=x.device)  # the scale before any iteration
    if spec.scaling.of_blocks:
        return spec.scaling.outer_absmax(nan_max(to_blocks(x, dim, spec.block)).float())
    return absmax_over(x, dim, outer) if outer else torch.zeros((), dtype=torch.float32, device=x.device)


def noise_blocks(x: Tensor, spec: Spec, dim: int, block: Block | None, seed: int) -> Tensor | None:
    """Noise for stochastic rounding as [groups, block], drawn by an element's place in x; None if none is needed."""
    if not spec.noisy:
        return None
    return to_blocks(noise(x.numel(), seed, x.device).reshape(x.shape), dim, block)


def scales_along(scales: Tensor, x: Tensor, dim: int, block: Block) -> Tensor:
    """Block scales [groups, n] in the order of `to_blocks` -> [outer, blocks, inner] over x's axes before and after
    `dim`: the first number of each block, repeated for each row of a tile."""
    dim = dim % x.dim() if x.dim() else 0
    axis = x.shape[dim] if x.dim() else 1
    blocks = -(-axis // columns_of(block, axis))
    shape = (*x.shape[:dim], blocks, *x.shape[dim + 1 :])
    like = torch.empty(shape, device="meta")
    whole = from_blocks(scales[:, :1].expand(-1, block.rows or 1), like, dim, Block(block.rows, 1))
    return whole.reshape(x.shape[:dim].numel(), blocks, x.shape[dim + 1 :].numel())


def quantize_dequantize(x: Tensor, spec: Spec, dim: int, absmax: Tensor, seed: int = 0) -> tuple[Tensor, Tensor | None]:
    """x (any shape, not empty) -> (y of x's shape and dtype, block scales [outer, blocks, inner] or None).

    absmax: of each element's outer block, as `absmax_over` gives it, or a scalar.
    """
    block = spec.block or TENSOR  # no shared scale, so one row is enough
    flat = block == TENSOR
    u = noise_blocks(x.reshape(-1) if flat else x, spec, 0 if flat else dim, block, seed)
    if flat:
        _, _, y = quantize_blocks(x.reshape(1, -1).float(), spec, absmax, u)
        return y.to(x.dtype).reshape(x.shape), None
    outer = per_group(absmax, x, dim, block) if absmax.dim() else absmax
    _, scales, y = quantize_blocks(to_blocks(x, dim, block).float(), spec, outer, u)
    return from_blocks(y.to(x.dtype), x, dim, block), scales_along(scales, x, dim, block)
