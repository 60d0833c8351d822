"""A tensor block by block: the scale of each block, the codes of its values, and its error.

For a format without block scales, runs of 32 values take the place of blocks. Everything is computed by `reference`,
which suits tensors of a few million values; `sample` takes whole lines of a larger one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from binade.quant.codes import encode
from binade.quant.elements import Element
from binade.quant.formats import Format
from binade.quant.memory import ordinary
from binade.quant.quantizer import outer_absmax
from binade.quant.reference import from_blocks, noise_blocks, per_group, quantize_blocks, to_blocks
from binade.quant.rounding import floor_log2
from binade.quant.scaling import Amax
from binade.quant.specs import Block, Spec
from binade.quant.transform import transform, transform_back

GROUP = Block(1, 32)
RUN = 1 << 12  # a multiple of the block size of every format


@dataclass(frozen=True)
class BlockSums:
    """Over the finite values: Σx², Σ(y-x)², and the counts of those flushed to 0, nonzero, clipped, and of all."""

    signal: float
    noise: float
    flushed: int
    nonzero: int
    saturated: int
    finite: int


EXACT = 2.0**-24  # relative to a value: what float32 arithmetic may leave of an exact result


@dataclass(frozen=True)
class Blocks:
    """All tensors are [groups, block], in the order of `reference.to_blocks`.

    x        the values, float32
    values   x over the scale, rounded to the element's grid
    y        the dequantized values, in x's own dtype's precision
    scale    [groups, 1 or block] float64: what an element is multiplied by, the outer scale included; NaN for a block
             that holds NaN or Inf
    valid    False for the padding of short blocks
    result   the dequantized tensor, in x's own shape and dtype, transformed back
    signal   Σx² over the finite values of the tensor itself, for a centered spec; else None
    noise    Σ(y-x)² likewise, with y before it is rounded to x's dtype

    For a spec that transforms values, they refer to the coded values.
    """

    spec: Spec
    x: Tensor
    values: Tensor
    y: Tensor
    scale: Tensor
    valid: Tensor
    result: Tensor
    signal: float | None = None
    noise: float | None = None

    @cached_property
    def sqnr_db(self) -> Tensor:
        """[groups] float64: 10·log10(Σx² / Σ(y-x)²); +inf where nothing is lost, NaN for an all-zero block.

        An error below half a unit of float32 in the last place of x is that of the arithmetic: nothing is lost.
        """
        x = self.x.double()
        error = self.y.double() - x
        error = torch.where(error.abs() <= EXACT * x.abs(), 0.0, error)
        signal, noise_power = x.square().sum(-1), error.square().sum(-1)
        return torch.where(signal > 0, 10 * torch.log10(signal / noise_power), math.nan)

    @cached_property
    def flush_to_zero(self) -> Tensor:
        """[groups]: of the nonzero values, the share that becomes 0; NaN for an all-zero block."""
        nonzero = (self.x != 0) & self.x.isfinite()
        return (nonzero & (self.y == 0)).sum(-1).double() / nonzero.sum(-1)

    @cached_property
    def sums(self) -> BlockSums:
        """The sums that SQNR, flush_to_zero and saturated of the whole tensor follow from, in float64."""
        finite = self.x.isfinite() & self.valid
        x, y = self.x[finite].double(), self.y[finite].double()
        error = y - x
        nonzero = x != 0
        flushed, used, clipped = (int(mask.sum()) for mask in (nonzero & (y == 0), nonzero, self.clipped))
        return BlockSums(
            float(x @ x) if self.signal is None else self.signal,
            float(error @ error) if self.noise is None else self.noise,
            flushed,
            used,
            clipped,
            x.numel(),
        )

    @cached_property
    def magnitudes(self) -> Tensor:
        """|x| / scale, float64, to compare with the element's smallest and largest code. NaN where the scale is 0 or
        not finite, and in the padding."""
        good = self.valid & self.scale.isfinite() & (self.scale > 0) & self.x.isfinite()
        return torch.where(good, self.x.abs().double() / self.scale, math.nan)

    @cached_property
    def clipped(self) -> Tensor:
        """[groups, block] bool: |x / scale| above the largest finite value. The margin covers the rounding of the
        quotient; two float32 values differ by more."""
        if self.spec.history:  # the scale is a rounded quotient already, so the limit is one that float32 has
            return (self.x.abs() > (self.spec.format.max * self.scale).float()) & self.valid & self.x.isfinite()
        if not self.spec.scaling.saturates:
            return torch.zeros_like(self.valid)
        above = self.magnitudes > self.spec.format.max * (1 + 1e-12)
        if isinstance(self.spec.scaling, Amax):  # a scale fits all values unless one is infinite, see Amax.saturation
            return above & (self.x.isinf().any(-1, keepdim=True) if self.spec.has_blocks else self.scale == 1)
        return above

    @cached_property
    def saturated(self) -> Tensor:
        """[groups] float64: the share of values that are clipped."""
        return self.clipped.sum(-1).double() / self.valid.sum(-1)

    @property
    def last_bin(self) -> float:
        """The share of all values that round to the largest finite code, clipped or not."""
        return float(((self.values.abs() >= self.spec.format.max) & self.valid).sum().double() / self.valid.sum())

    @cached_property
    def scale_exponents(self) -> Tensor:
        """[groups] float64: floor(log2 scale); NaN for an all-zero block and for one that holds NaN or Inf."""
        used = (self.x != 0).any(-1, keepdim=True) & self.scale.isfinite() & (self.scale > 0)
        exponent = torch.frexp(self.scale)[1].double() - 1
        return torch.where(used, exponent, math.nan).amin(-1)

    @cached_property
    def codes(self) -> Tensor:
        """int64 codes of the element."""
        return encode(torch.where(self.scale.isnan(), 0.0, self.values), self.spec.format.element)


def look(
    x: Tensor,
    fmt: str | Format | Spec,
    dim: int = -1,
    *,
    seed: int = 0,
    sign_seed: int | None = None,
    absmax: Tensor | None = None,
    source: Tensor | None = None,
    **options: object,
) -> Blocks:
    """x [any shape] rounded to a format, blocks along `dim`. Options and errors as in `fake_quantize`.

    seed       of stochastic rounding
    sign_seed  of random signs; default: seed
    absmax     of the tensor from which x is a sample, for formats with one scale per tensor; with delayed scaling, the
               scale itself
    source     what is rounded in place of x: x as an earlier GEMM rounded it. Errors remain those against x
    """
    spec = Spec.of(fmt, **options)
    x, sign_seed = ordinary(x), seed if sign_seed is None else sign_seed
    coded = transform(x if source is None else ordinary(source), spec, dim, sign_seed)
    block = GROUP if not spec.has_blocks else spec.block
    absmax = outer_absmax(coded, spec, dim) if absmax is None else absmax
    absmax = per_group(absmax, coded, dim, block) if absmax.dim() else absmax
    u = noise_blocks(coded, spec, dim, block, seed)
    blocks = to_blocks(coded, dim, block).float()
    values, scale, y = quantize_blocks(blocks, spec, absmax, u)
    if source is not None:
        blocks = to_blocks(transform(x, spec, dim, sign_seed), dim, block).float()
    scale = spec.scaling.multiplier(scale, spec, absmax)
    valid = to_blocks(torch.ones_like(coded, dtype=torch.bool), dim, block)
    back = from_blocks(y.to(coded.dtype), coded, dim, block)
    back = transform_back(back, x, spec, dim, sign_seed)
    signal, noise = (energy(x), energy(back - x)) if spec.centered else (None, None)
    y, scale, back = y.to(coded.dtype).float(), scale.expand(len(blocks), -1), back.to(x.dtype)
    return Blocks(spec, blocks, values, y, scale, valid, back, signal, noise)


def energy(x: Tensor) -> float:
    """Σx² over the finite values, in float64."""
    values = ordinary(x).double()
    return float(torch.where(values.isfinite(), values, 0.0).square().sum())


def sample(x: Tensor, dim: int = -1, limit: int = 1 << 22, cut: bool = False) -> tuple[Tensor, int]:
    """(part, every): (x, 1) if x has at most `limit` values, else every n-th whole line along `dim` and n.

    The part is then [lines, axis], its blocks along the last axis. The lines are spread evenly over the tensor. With
    cut, lines of more than `limit` values are cut into ones of RUN, and what is left at their ends is not in the part.
    """
    if x.numel() <= limit or not x.dim():
        return x, 1
    at = dim % x.dim()
    axis, inner = x.shape[at], x.shape[at + 1 :].numel()
    run = RUN if cut and axis > limit else axis
    lines = x.reshape(-1, axis, inner).unfold(1, run, run)  # [outer, runs, inner, run], a view
    every = -(-x.numel() // limit)
    chosen = torch.arange(0, lines.shape[:3].numel(), every)
    return lines[chosen // (lines.shape[1] * inner), chosen // inner % lines.shape[1], chosen % inner], every


ZERO, DENORMAL, SPECIAL = "zero", "denormal", "Inf or NaN"


@lru_cache(maxsize=32)
def code_tiers(element: Element) -> tuple[str, ...]:
    """The kind of each code, in order: zero, denormal, "2 mantissa bits", or Inf or NaN.

    A denormal lies below the lowest exponent that has a tier of its own, on that tier's fixed step; HiFloat8 calls its
    lowest tier (no mantissa bits) denormal.
    """
    tapered = len(element.tiers) > 1
    values = list(element.values.values())
    names = []
    for value, exponent in zip(
        values, floor_log2(torch.tensor(values, dtype=torch.float32, device="cpu")).tolist(), strict=True
    ):
        if not math.isfinite(value):
            names.append(SPECIAL)
        elif value == 0:
            names.append(ZERO)
        else:
            bits = next((bits for lowest, bits in reversed(element.tiers) if exponent >= lowest), None)
            first = tapered and exponent < element.tiers[1][0]
            names.append(DENORMAL if bits is None or first else f"{bits} mantissa bit{'s' * (bits != 1)}")
    return tuple(names)
