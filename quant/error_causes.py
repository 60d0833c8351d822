"""Where the error of a rounded tensor comes from: by cause, by binade, and in which values, over all values.

The scale's part is that of arXiv 2605.20402. Q is what x becomes, and Q* what it would become with the unrounded scale
max|x| / (largest of the element). D is where Q* is 0.

    scale      Q − Q*
    dead zone  Q* − x in D
    grid       Q* − x elsewhere

The three add up to Q − x. Their squares do not add up to its square, as they are correlated: shares can exceed 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from binade.quant.blocks import GROUP, Blocks
from binade.quant.memory import ordinary
from binade.quant.quantizer import outer_absmax
from binade.quant.reference import from_blocks, noise_blocks, per_group, quantize_blocks, to_blocks
from binade.quant.rounding import round_to_element
from binade.quant.specs import Spec
from binade.quant.transform import transform

PIECE = 1 << 18  # values worked on at a time
CAUSES = ("flushed", "saturated", "grid")
LOWEST, HIGHEST = -512, 512  # of the exponents of magnitudes over their scale


@dataclass(frozen=True)
class ScaleCost:
    """Sums over all values in units of Σe²: of the squares of the three parts, and of twice the products of the scale's
    part with the others. They add up to 1."""

    scale: float
    dead_zone: float
    grid: float
    scale_and_dead_zone: float
    scale_and_grid: float

    @property
    def without(self) -> float:
        """The squared error with the unrounded scale."""
        return self.dead_zone + self.grid


@dataclass(frozen=True)
class Largest:
    """What holds the largest share of the squared error. token: the index along all axes but the last, channel: along
    the last; a token or a channel has None for the other. value: x; NaN of more than one."""

    share: float
    token: int | None
    channel: int | None
    value: float = math.nan


@dataclass(frozen=True, eq=False)
class ErrorCauses:
    """
    noise      Σe² over the finite values of x, without those that a NaN or Inf in their block makes NaN
    shares     of it, of each of CAUSES; a value that becomes 0 is not saturated. NaN if it is 0 or not finite
    binades    int64 [n]: floor(log2 |x / scale|) of the values that have an error, ascending
    by_binade  float64 [n, len(CAUSES)]: shares of the noise. What has no scale other than 0 is in none
    scale      what the rounding of the block scales costs; None for specs without rounded scales
    largest    the value, and of a matrix the channel and the token with the largest share; () for rotated values

    Where shares are NaN, binades and largest are empty and scale is None.
    """

    noise: float
    shares: tuple[float, ...]
    binades: np.ndarray
    by_binade: np.ndarray
    scale: ScaleCost | None
    largest: tuple[Largest, ...]


def error_causes(
    x: Tensor,
    spec: Spec,
    dim: int = -1,
    *,
    seed: int = 0,
    sign_seed: int | None = None,
    absmax: Tensor | None = None,
    source: Tensor | None = None,
) -> ErrorCauses:
    """The causes of the error of x [any shape, on the CPU] in a format, blocks along `dim`, by the reference, piece by
    piece. A spec that transforms values is measured on the coded ones. seed, sign_seed, absmax and source as in
    `blocks.look`."""
    x, signs = ordinary(x), seed if sign_seed is None else sign_seed
    sources = (x, x if source is None else ordinary(source))
    of_x, coded = (transform(y, spec, dim, signs) if y.numel() else y for y in sources)
    block = GROUP if not spec.has_blocks else spec.block
    absmax = outer_absmax(coded, spec, dim) if absmax is None else absmax
    absmax = per_group(absmax, coded, dim, block) if absmax.dim() and coded.numel() else absmax
    u = noise_blocks(coded, spec, dim, block, seed)
    blocks, xs = to_blocks(coded, dim, block), to_blocks(of_x, dim, block)
    squares = torch.zeros(blocks.shape, dtype=torch.float32, device="cpu")
    noise, total = (torch.zeros(size, dtype=torch.float64, device="cpu") for size in (len(CAUSES), 5))
    by_binade = torch.zeros(len(CAUSES) * (HIGHEST - LOWEST), dtype=torch.float64, device="cpu")
    rounded_scale = spec.has_blocks and spec.scaling.stored is not None and not spec.scaling.per_element
    rows = max(1, PIECE // max(blocks.shape[-1], 1))
    for start in range(0, len(blocks) if x.numel() else 0, rows):
        at = slice(start, start + rows)
        before, noises = blocks[at].float(), None if u is None else u[at]
        piece = _piece(before, spec, absmax[at] if absmax.dim() else absmax, noises)
        piece = replace(piece, x=xs[at].float(), y=piece.y.to(coded.dtype).float())
        finite = piece.x.isfinite() & ~piece.y.isnan()
        error = torch.where(finite, piece.y.double() - piece.x.double(), 0.0)
        square = error.square()
        squares[at] = square.float()
        flushed = (piece.x != 0) & (piece.y == 0)
        cause = torch.where(flushed, 0, torch.where(piece.clipped, 1, 2))
        noise += torch.bincount(cause.reshape(-1), square.reshape(-1), len(CAUSES))
        used = (square > 0) & (piece.magnitudes > 0)
        binade = (torch.frexp(piece.magnitudes[used])[1].long() - 1).clamp(LOWEST, HIGHEST - 1) - LOWEST
        by_binade += torch.bincount(binade * len(CAUSES) + cause[used], square[used], len(by_binade))
        if rounded_scale:
            total += _scale_sums(piece, before, torch.where(finite, piece.y.double(), 0.0), finite, noises)
    whole = float(noise.sum())
    table = by_binade.reshape(-1, len(CAUSES)).numpy()
    present = table.sum(1) > 0
    if not 0 < whole < math.inf:
        return ErrorCauses(whole, (math.nan,) * len(CAUSES), np.zeros(0, int), np.zeros((0, len(CAUSES))), None, ())
    return ErrorCauses(
        whole,
        tuple((noise / whole).tolist()),
        np.flatnonzero(present) + LOWEST,
        table[present] / whole,
        ScaleCost(*(total / whole).tolist()) if rounded_scale else None,
        () if spec.hadamard else _largest(x, from_blocks(squares, coded, dim, block), whole),
    )


def _piece(x: Tensor, spec: Spec, absmax: Tensor, u: Tensor | None) -> Blocks:
    values, scale, y = quantize_blocks(x, spec, absmax, u)
    scale = spec.scaling.multiplier(scale, spec, absmax).expand(len(x), -1)
    return Blocks(spec, x, values, y, scale, torch.ones_like(x, dtype=torch.bool), y)


def _scale_sums(piece: Blocks, before: Tensor, y: Tensor, finite: Tensor, u: Tensor | None) -> Tensor:
    """The five sums of ScaleCost, not divided. before: what was rounded to y."""
    spec, x = piece.spec, piece.x.double()
    scale = before.double().abs().amax(-1, keepdim=True) / spec.format.element.max
    scaled = torch.where(scale > 0, before / scale, 0.0).float()
    ideal = round_to_element(scaled, spec.format.element, spec.rounding, spec.overflow, u).double() * scale
    used = finite & ideal.isfinite()
    of_scale = torch.where(used, y - ideal, 0.0)
    rest = torch.where(used, ideal - x, 0.0)
    dead = torch.where(ideal == 0, rest, 0.0)
    grid = rest - dead
    pairs = ((of_scale, of_scale), (dead, dead), (grid, grid), (2 * of_scale, dead), (2 * of_scale, grid))
    return torch.stack([(a * b).sum() for a, b in pairs])


def _largest(x: Tensor, squares: Tensor, noise: float) -> tuple[Largest, ...]:
    columns = x.shape[-1] if x.dim() else 1
    matrix = squares.reshape(-1, columns)
    place = int(matrix.argmax())
    channels, tokens = matrix.sum(0, dtype=torch.float64), matrix.sum(1, dtype=torch.float64)
    channel, token = int(channels.argmax()), int(tokens.argmax())
    value = float(x.reshape(-1)[place])
    lines = Largest(float(channels[channel]) / noise, None, channel), Largest(float(tokens[token]) / noise, token, None)
    held = float(matrix.reshape(-1)[place]) / noise
    return Largest(held, place // columns, place % columns, value), *(lines if min(matrix.shape) > 1 else ())
