"""How the scale of a block or a tensor is computed, applied, stored and multiplied back: one class per scheme.

A new scheme is a subclass of `Scaling` and its entry in SCALINGS; the name in `formats.ScaleRule` documents it. The
kernels of every backend use its scales (see `backends.runs`), unless it overrides `quantize`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from binade.quant.codes import decode_table, encode
from binade.quant.elements import E4M3, E6M2, E8M0, UE5M3, Element, Overflow, Rounding
from binade.quant.formats import ScaleRule
from binade.quant.rounding import floor_log2, lift_subnormals, pow2, round_to_element
from binade.quant.specs import ROW, SCALE_BITS, TENSOR, Block, Spec

FLOAT32_MAX = torch.finfo(torch.float32).max
E8M0_MAX = 127  # the largest exponent, and minus the smallest
E4M3_MAX = 448.0


class Factors(NamedTuple):
    """x · encode is rounded to v; v stands for ((v · scale) · outer) / divisor. Every step is one float32 operation;
    None stands for 1. Scalars, or [groups, 1], or [groups, block]."""

    encode: Tensor | None = None
    scale: Tensor | None = None
    outer: Tensor | None = None
    divisor: Tensor | None = None


@dataclass(frozen=True)
class Scaling:
    """A scheme. A subclass overrides what differs: `wanted`, `of_largest` or `block_scale`, and `factors`.

    rule        its name, as users choose it
    kernel      its number in the compiled kernels that compute the scale themselves; None if they do not support it
    stored      how a scale is coded; None for float32
    outer       the block of the scale above the block scale, if there is one
    saturates   False if no finite value saturates
    follows_largest   False if `block_scale` needs more than a block's largest magnitude
    follows_moments   True if it follows from the sums of a block's values and of their squares
    per_element       True if the values of a block have different factors
    shares      what values share, in words; {block} is `Block.words`

    Methods take values as [groups, block] float32, scales as [groups, 1] (one for all if a tensor shares it), and
    absmax as a float32 scalar or [groups, 1]: the largest magnitude in the outer block, or in the tensor if that shares
    a scale, NaN if any element is NaN; with delayed scaling the scale itself; 0 where none is needed.
    """

    rule: str
    kernel: int | None = None

    stored: ClassVar[Element | None] = None
    outer: ClassVar[Block | None] = None
    saturates: ClassVar[bool] = True
    follows_largest: ClassVar[bool] = True
    follows_moments: ClassVar[bool] = False
    per_element: ClassVar[bool] = False
    shares: ClassVar[str]

    def wanted(self, largest: Tensor, spec: Spec, absmax: Tensor) -> tuple[Tensor, ...]:
        """The scales to choose from for blocks with these largest magnitudes, same shape, before they are rounded to
        `stored`: of several, the first with the smallest error. () if they do not follow from these or are not rounded
        to nearest."""
        return ()

    def of_largest(self, largest: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        """The scale of blocks with these largest magnitudes, same shape, on the grid of `stored`."""
        (wanted,) = self.wanted(largest, spec, absmax)
        return wanted if self.stored is None else _nearest(wanted, self.stored)

    def of_moments(self, total: Tensor, squares: Tensor, spec: Spec) -> Tensor:
        """The scale of blocks with these sums of values and of squares, float64 [groups, 1]."""
        raise NotImplementedError

    def block_scale(self, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        """The scale of each block."""
        if self.follows_moments:
            rows = spec.block.rows or 1 if spec.block else 1
            return self.of_moments(sum_in_order(x.double(), rows), sum_in_order(x.double().square(), rows), spec)
        return self.of_largest(nan_max(x), spec, absmax)

    def factors(self, scale: Tensor, spec: Spec, absmax: Tensor) -> Factors:
        """The factors that values are multiplied and divided by."""
        return Factors(torch.ones((), device=scale.device) / scale, scale)

    def quantize(self, x: Tensor, spec: Spec, absmax: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(values on the element's grid, scales, the values they represent). u: noise for stochastic rounding."""
        scale = self.block_scale(x, spec, absmax)
        factors = self.factors(scale, spec, absmax)
        values = round_to_element(scaled(x, factors), spec.format.element, spec.rounding, spec.overflow, u)
        return values, scale, read_back(values, factors)

    def multiplier(self, scale: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        """float64: what a value on the element's grid is multiplied by, free of float32's rounding."""
        factors = self.factors(scale, spec, absmax)
        product = torch.ones((len(scale), 1), dtype=torch.float64, device=scale.device)
        for factor in (factors.scale, factors.outer):
            product = product if factor is None else product * factor.double()
        return product if factors.divisor is None else product / factors.divisor.double()

    def saturation(self, spec: Spec, absmax: Tensor) -> tuple[float | Tensor, float | Tensor]:
        """(left, right): an element saturates where |x| · left > its block's scale · right, both exact in float64."""
        return 1.0, spec.format.max if self.saturates else math.inf

    def to_bytes(self, scale: Tensor) -> Tensor:
        """Scales [groups, n] as they are stored, uint8 [groups, bytes]."""
        if self.stored is None:
            return scale.float().contiguous().view(torch.uint8).reshape(len(scale), -1)
        return encode(scale, self.stored).to(torch.uint8)

    def from_bytes(self, stored: Tensor) -> Tensor:
        """The inverse of `to_bytes`."""
        if self.stored is None:
            return stored.view(torch.float32)
        return decode_table(self.stored).to(stored.device)[stored.long()]


@dataclass(frozen=True)
class Unscaled(Scaling):
    """Values are rounded without a scale."""

    shares = "no scale"

    def of_largest(self, largest: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        return torch.ones_like(largest)

    def factors(self, scale: Tensor, spec: Spec, absmax: Tensor) -> Factors:
        return Factors()


@dataclass(frozen=True)
class BlockPow2(Scaling):
    """MX: a power of two for each block, by one of four rules: see `block_scale_exponent`."""

    stored = E8M0
    shares = "a power-of-two scale for {block}"

    def of_largest(self, largest: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        exponent = block_scale_exponent(largest, spec.format.element, self.rule)
        return pow2(exponent) + nan_unless_finite(largest)


@dataclass(frozen=True)
class FourThirds(Scaling):
    """4/3 · 2^(floor(log2 absmax) - emax) in float32, which brings every value below E2M1's largest. Quartet,
    `mxfp4.py`, where the factor 4/3 is applied to the rotated tensor and the stored scale is the power of two."""

    saturates = False
    stored = E8M0
    shares = "4/3 of a power of two for {block}"

    def of_largest(self, largest: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        return SCALINGS[ScaleRule.FLOOR].of_largest(largest, spec, absmax)

    def factors(self, scale: Tensor, spec: Spec, absmax: Tensor) -> Factors:
        return super().factors(scale * (4.0 / 3.0), spec, absmax)


@dataclass(frozen=True)
class Quest(Scaling):
    """2^floor(log2(0.4871 · σ + 1e-8)), σ the block's standard deviation about its mean, divided by n: the scale that
    loses least on normal values. Quartet, `mxfp4.py` and `mxfp4_triton.py`, where ties round toward zero.

    σ² = Σx²/n - (Σx/n)² in float64, both sums as in `sum_in_order`. The zeros that pad a short block count: n is the
    size of a full block. float64 holds the squares exactly and cannot overflow; one pass gives both sums."""

    follows_largest = False
    follows_moments = True
    stored = E8M0
    shares = "a power-of-two scale for {block}"

    def of_moments(self, total: Tensor, squares: Tensor, spec: Spec) -> Tensor:
        assert spec.block and spec.block.columns
        share = 1.0 / ((spec.block.rows or 1) * spec.block.columns)  # a division by n would round otherwise on CUDA
        variance = (squares * share - (total * share).square()).clamp(min=0)
        wanted = variance.sqrt().float() * (2.92247856 / 6.0) + 1e-8
        exponent = floor_log2(wanted).clamp(-E8M0_MAX, E8M0_MAX)
        return pow2(exponent) + nan_unless_finite(wanted)


@dataclass(frozen=True)
class Amax(Scaling):
    """A float32 scale S = target / absmax for a tensor, a row or a tile; `pow2` clears its mantissa. S is 1 where
    absmax is 0, and the largest float32 where it overflows. The default target is the element's largest value.

    A tensor or a row: an element is read back as v / S; absmax is at least 1e-12, unless there is a target, a history,
    or a tensor's S is a power of two. Transformer Engine's current scaling; torchao's `float8_utils.py`, whose quotient
    in float64 rounds to the same S.
    Tiles: an element is read back as v · float32(1/S). Transformer Engine, `quantize_scale_calc.py`. DeepGEMM keeps
    s = max(absmax, 1e-4) / 448, rounds x · float32(1/s), and reads back v · s.
    """

    target: float | None = None
    pow2: bool = False

    saturates = False
    shares = "one float32 scale for {block}"

    def block_scale(self, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        if spec.history:
            return absmax.reshape(1, 1)
        return self.of_largest(absmax.reshape(1, 1) if spec.block == TENSOR else nan_max(x), spec, absmax)

    def of_largest(self, largest: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        target = self.target or spec.format.max
        if self.pow2 and spec.format.element.precise_emax < spec.format.element.emax:
            target = 2.0 ** (spec.format.element.precise_emax + 1) * (1 - 2.0**-24)  # HiFloat8: just below 2^4
        whole = spec.block in (ROW, TENSOR)
        # With a Python number in place of either tensor, CUDA would multiply by a rounded reciprocal.
        clamped = whole and not (self.target or spec.history or (self.pow2 and spec.block == TENSOR))
        divisor = largest.clamp(min=1e-12) if clamped else largest
        scale = (torch.full_like(largest, target) / divisor).clamp(max=FLOAT32_MAX)
        scale = torch.where(largest == 0, torch.ones_like(scale), scale)
        if self.pow2:
            scale = pow2(floor_log2(scale).clamp(max=E8M0_MAX))
        return scale + nan_unless_finite(largest)

    def saturation(self, spec: Spec, absmax: Tensor) -> tuple[float | Tensor, float | Tensor]:
        return (absmax.double(), spec.format.max) if spec.history else (1.0, math.inf)

    def factors(self, scale: Tensor, spec: Spec, absmax: Tensor) -> Factors:
        if spec.block in (ROW, TENSOR):
            return Factors(scale, divisor=scale)
        return Factors(scale, torch.ones((), device=scale.device) / scale)


@dataclass(frozen=True)
class Rounded(Scaling):
    """A block's absmax / max in float32, or rounded to an 8-bit format, without a tensor scale: shows what the format
    of a scale costs. x is multiplied by float32(1/scale). A scale that underflows to 0 makes its block 0."""

    scale_element: Element | None = E4M3

    shares = "a floating-point scale for {block}"

    @property
    def stored(self) -> Element | None:  # type: ignore[override]  # a constant of the other classes
        return self.scale_element

    def wanted(self, largest: Tensor, spec: Spec, absmax: Tensor) -> tuple[Tensor, ...]:
        quotient = largest / torch.full_like(largest, spec.format.max)
        return (quotient + nan_unless_finite(quotient),)

    def factors(self, scale: Tensor, spec: Spec, absmax: Tensor) -> Factors:
        return Factors((torch.ones((), device=scale.device) / scale).clamp(max=FLOAT32_MAX), scale)


@dataclass(frozen=True)
class NVFP4(Scaling):
    """E4M3 block scales under a float32 scale of the tensor. NVIDIA Transformer Engine, quantize_nvfp4, each step in
    float32, m the element's largest value (E2M1: 6; INT4, arXiv 2510.25602: 7):

    S = min(448·m / absmax, largest float32), 1 where absmax is 0; a block's scale is e4m3(blockmax · (S · (1/m))),
    saturating, 0 where it underflows; torchao's is at least 2^-6. An element is read back as v · scale · (absmax /
    (448·m)).
    """

    outer = TENSOR
    stored = E4M3
    shares = "an E4M3 scale for {block} and one for the tensor"

    def limit(self, spec: Spec) -> float:
        """The largest block scale times the value that a block's largest magnitude is scaled to."""
        return E4M3_MAX * spec.format.max

    def tensor_scale(self, spec: Spec, absmax: Tensor) -> Tensor:
        # A tensor over a tensor, as in Amax.
        scale = (torch.full_like(absmax, self.limit(spec)) / absmax).clamp(max=FLOAT32_MAX)
        return torch.where(absmax == 0, torch.ones_like(scale), scale)

    def wanted(self, largest: Tensor, spec: Spec, absmax: Tensor) -> tuple[Tensor, ...]:
        inverse = torch.full((), 1.0 / spec.format.max, dtype=torch.float32, device=largest.device)
        return (largest * (self.tensor_scale(spec, absmax) * inverse),)

    def factors(self, scale: Tensor, spec: Spec, absmax: Tensor) -> Factors:
        encode = (1.0 / (scale * (1.0 / self.tensor_scale(spec, absmax)))).clamp(max=FLOAT32_MAX)
        return Factors(encode, scale, absmax / torch.full_like(absmax, self.limit(spec)))

    def multiplier(self, scale: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        return scale.double() * absmax.double() / self.limit(spec)

    def saturation(self, spec: Spec, absmax: Tensor) -> tuple[float, float | Tensor]:
        return self.limit(spec), absmax.double() * spec.format.max


@dataclass(frozen=True)
class NVFP4Outer(NVFP4):
    """As NVFP4, with a float32 scale for each row (Transformer Engine, row_scaled_activation) or for each run of 128
    (TetraJet-v2, `nvfp4_quant_fused_kernel.py`)."""

    of: Block = ROW

    shares = "an E4M3 scale for {block} and a float32 one above it"

    @property
    def outer(self) -> Block:  # type: ignore[override]
        return self.of


@dataclass(frozen=True)
class Unclipped(NVFP4):
    """NVFP4 that scales a block's largest magnitude to m·16/17 = 5.647: E4M3 rounds a normal scale down by at most
    16/17, so no value exceeds m, and stochastic rounding is unbiased except where a scale is subnormal. The scale is
    e4m3((blockmax / 5.647) / (absmax / (448 · 5.647))). Quartet II `nvfp4_triton.py`; fouroversix,
    `stochastic_unbiased`."""

    def limit(self, spec: Spec) -> float:
        return E4M3_MAX * self._target(spec)

    @staticmethod
    def _target(spec: Spec) -> float:
        return spec.format.max * 16.0 / 17.0

    def wanted(self, largest: Tensor, spec: Spec, absmax: Tensor) -> tuple[Tensor, ...]:
        tensor_scale = absmax / torch.full_like(absmax, self.limit(spec))
        scaled = (largest / torch.full_like(largest, self._target(spec))) / tensor_scale
        return (torch.where(largest == 0, torch.zeros_like(scaled), scaled),)


@dataclass(frozen=True)
class FourOverSix(NVFP4):
    """NVFP4 that scales each block's largest magnitude to 6 or to 4, whichever has the smaller error; a tie keeps 6.
    arXiv 2512.02010. B is the bound:

    1. S = min(6·B / absmax, largest float32), 1 if absmax is 0. base = (blockmax / 6) · S.
    2. The scales tried are e4m3(min(base, 448)) and e4m3(min(1.5 · base, 448)).
    3. An element reads back as ((v · scale) · absmax) / (6·B). The error is summed in float32, a line of the block
       from left to right, then the lines as a binary tree.

    Transformer Engine `quantize_4over6_nvfp4.cuh`: mae, 256, neither rotation nor stochastic rounding. fouroversix
    `reference.py`: mse, 256; values are not clamped to 6, so that under a subnormal scale one may become 8. FlashInfer:
    mae, 448. Quartet II: ties away from zero, and a scale of 0 becomes 1.
    """

    follows_largest = False

    def limit(self, spec: Spec) -> float:
        assert spec.bound
        return spec.bound * spec.format.max

    def wanted(self, largest: Tensor, spec: Spec, absmax: Tensor) -> tuple[Tensor, ...]:
        base = (largest / torch.full_like(absmax, spec.format.max)) * self.tensor_scale(spec, absmax)
        return base.clamp(max=E4M3_MAX), (1.5 * base).clamp(max=E4M3_MAX)

    def block_scale(self, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        six, four = (_nearest(wanted, E4M3) for wanted in self.wanted(nan_max(x), spec, absmax))
        return torch.where(self._error(x, four, spec, absmax) < self._error(x, six, spec, absmax), four, six)

    def _error(self, x: Tensor, scale: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        factors = self.factors(scale, spec, absmax)
        values = round_to_element(scaled(x, factors), spec.format.element, Rounding.NEAREST, Overflow.SATURATE)
        error = (read_back(values, factors) - x).abs()
        return sum_in_order(error.square() if spec.error == "mse" else error, spec.block.rows or 1 if spec.block else 1)

    def factors(self, scale: Tensor, spec: Spec, absmax: Tensor) -> Factors:
        encode = super().factors(scale, spec, absmax).encode
        return Factors(encode, scale, absmax, torch.full_like(absmax, self.limit(spec)))


@dataclass(frozen=True)
class Eden(NVFP4):
    """MS-EDEN, Quartet II `quartet_2.py:34-185`: unbiased over random rotations, at half of stochastic rounding's
    error. Runs of 16 are rounded to nearest, ties away, with the targets 6 / (0.93 · 17/16) for 6 and 255.99 for 448,
    so that some values clip. The scales of 128 neighbors are then multiplied by Σv² / Σ(v·q), v the scaled values and q
    the elements, and rounded stochastically to E4M3."""

    follows_largest = False
    TARGET: ClassVar[float] = 6.0 / (0.93 * 17.0 / 16.0)
    LARGEST_SCALE: ClassVar[float] = 255.99
    RUN: ClassVar[int] = 128

    def limit(self, spec: Spec) -> float:
        return self.LARGEST_SCALE * self.TARGET

    def quantize(self, x: Tensor, spec: Spec, absmax: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        assert u is not None, "MS-EDEN rounds its scales stochastically"
        tensor_scale, largest = absmax / torch.full_like(absmax, self.limit(spec)), nan_max(x)
        scale = (largest / torch.full_like(absmax, self.TARGET)) / tensor_scale
        scale = _nearest(torch.where(largest == 0, torch.ones_like(scale), scale), E4M3)
        encoded = scaled(x, self.factors(scale, spec, absmax))
        values = round_to_element(encoded, spec.format.element, spec.rounding, spec.overflow)
        together = self.RUN // x.shape[-1]
        pad = -len(x) % together
        v, q = (torch.nn.functional.pad(t, (0, 0, 0, pad)).reshape(-1, self.RUN) for t in (encoded, values))
        below = (v * q).sum(-1, keepdim=True)
        correction = torch.where(below == 0, 1.0, v.square().sum(-1, keepdim=True) / below)
        wanted = scale * correction.repeat_interleave(together, 0)[: len(x)]
        scale = round_to_element(wanted, E4M3, Rounding.STOCHASTIC, Overflow.SATURATE, u[:, :1])
        return values, scale, read_back(values, self.factors(scale, spec, absmax))


@dataclass(frozen=True)
class HiF4(Scaling):
    """HiFloat4: an E6M2 scale for 64 values, a one-bit exponent for every 8 and one for every 4. arXiv 2602.11287 and
    its authors' library, ddddwee1/HiFloat4 999cc07. With m a largest magnitude,

    scale = e6m2(bf16(clamp(m64 · bf16(1/7), 2^-48, 49152))), r = bf16(1 / scale),
    e8 = [m8 · r >= 4], e4 = [m4 · r · 2^-e8 >= 2], v = min(floor(|x| · r · 2^-(e8+e4) · 4 + 1/2), 7) / 4.

    Scales are [groups, 25]: the E6M2 scale, eight factors 1 or 2, sixteen factors 1 or 2. A block whose largest
    magnitude exceeds 7 · 49152 saturates.

    The library's torch version adds 1/2 in float32, so that a k of 0.49999997 rounds up; its NumPy version does not. In
    both, Inf saturates. HIFxV12 of fake_quant_ops is another format: its first level is a power of two.
    """

    follows_largest = False
    per_element = True
    stored = E6M2
    shares = "an E6M2 scale for {block} and binary exponents for 8 and 4"

    def block_scale(self, x: Tensor, spec: Spec, absmax: Tensor) -> Tensor:
        largest = nan_max(x)
        wanted = (largest * 0.142578125).clamp(2.0**-48, E6M2.max).bfloat16().float()
        scale = _nearest(wanted, E6M2)
        inverse = (1.0 / scale).bfloat16().float()
        eights, fours = (x.abs().reshape(-1, 64 // n, n).amax(-1) * inverse for n in (8, 4))
        e8 = torch.where(eights >= 4, 2.0, 1.0)
        e4 = torch.where(fours / e8.repeat_interleave(2, -1) >= 2, 2.0, 1.0)
        return torch.cat((torch.where(largest.isfinite(), scale, torch.nan), e8, e4), -1)

    def factors(self, scale: Tensor, spec: Spec, absmax: Tensor) -> Factors:
        first, e8, e4 = scale[:, :1], scale[:, 1:9], scale[:, 9:]
        finer = e8.repeat_interleave(8, -1) * e4.repeat_interleave(4, -1)
        one = torch.ones((), device=scale.device)
        return Factors((one / first).bfloat16().float() / finer, finer, first)

    def to_bytes(self, scale: Tensor) -> Tensor:
        first, micro = encode(scale[:, :1], E6M2), (scale[:, 1:] == 2).long()
        bits = (micro.reshape(-1, 3, 8) << torch.arange(8, device=scale.device)).sum(-1)
        return torch.cat((first, bits), -1).to(torch.uint8)

    def from_bytes(self, stored: Tensor) -> Tensor:
        bits = stored[:, 1:, None].long() >> torch.arange(8, device=stored.device) & 1
        return torch.cat((decode_table(E6M2).to(stored.device)[stored[:, :1].long()], 1.0 + bits.reshape(-1, 24)), -1)


def kernel_of(spec: Spec) -> int | None:
    """The number of a spec's scheme in the compiled kernels that find the scale themselves; None if they cannot."""
    a_run = spec.block is not None and spec.block.rows == 1 and spec.block.columns is not None
    return SCALINGS[spec.scale].kernel if a_run else None


def has_kernel(spec: Spec) -> bool:
    """Whether the compiled kernels know a spec, by themselves or with factors that they are given."""
    scaling = SCALINGS[spec.scale]
    follows = scaling.follows_largest or scaling.follows_moments or type(scaling).wanted is not Scaling.wanted
    given = type(scaling).quantize is Scaling.quantize and not scaling.per_element and follows
    return kernel_of(spec) is not None or given


def _nearest(x: Tensor, element: Element) -> Tensor:
    return round_to_element(x, element, Rounding.NEAREST, Overflow.SATURATE)


def scale_nbytes(spec: Spec, shape: tuple[int, ...], dim: int) -> float:
    """Bytes of all scales of a tensor: of its blocks, and of the outer blocks, four each."""
    outer = SCALINGS[spec.scale].outer
    blocks = 0.0 if spec.block is None else _count(spec.block, shape, dim)
    return blocks * SCALE_BITS.get(spec.scale, 8) / 8 + (4 * _count(outer, shape, dim) if outer else 0)


def _count(block: Block, shape: tuple[int, ...], dim: int) -> int:
    """How many blocks a tensor of this shape is cut into."""
    lengths = [*shape] or [1]
    columns = lengths.pop(dim)
    rows = math.prod(lengths)
    if block.columns is None:
        return 1 if block == TENSOR else rows
    return -(-rows // (block.rows or 1)) * -(-columns // block.columns)


def scaled(x: Tensor, factors: Factors) -> Tensor:
    """The scaled values of x, which are then rounded."""
    return x if factors.encode is None else x * factors.encode


def read_back(values: Tensor, factors: Factors) -> Tensor:
    """The values represented by values on an element's grid, float32."""
    for factor in (factors.scale, factors.outer):
        values = values if factor is None else values * factor
    return values if factors.divisor is None else values / factors.divisor


def nan_unless_finite(x: Tensor) -> Tensor:
    """0 where x is finite, else NaN; added to a scale to make it NaN."""
    return x - x


def nan_max(x: Tensor) -> Tensor:
    """max|x| over the last axis, NaN if any is NaN; 0 for an empty axis. [groups, block] -> [groups, 1]"""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1))
    return x.abs().amax(-1, keepdim=True)


def pad_end(x: Tensor, dim: int, zeros: int) -> Tensor:
    """x with that many zeros at the end of axis `dim`; x itself for none, which torch's pad would copy."""
    return torch.cat((x, x.new_zeros(*x.shape[:dim], zeros, *x.shape[dim + 1 :])), dim) if zeros else x


def sum_in_order(x: Tensor, rows: int) -> Tensor:
    """[groups, rows · columns] -> [groups, 1]: each row added from left to right, then the rows as a binary tree."""
    columns = x.reshape(len(x), rows, -1).unbind(-1)
    total = columns[0]
    for column in columns[1:]:
        total = total + column
    while total.shape[1] > 1:
        half = (total.shape[1] + 1) // 2
        low, high = total[:, :half], total[:, half:]
        total = low + pad_end(high, 1, low.shape[1] - high.shape[1])
    return total


def block_scale_exponent(absmax: Tensor, element: Element, rule: str) -> Tensor:
    """Exponent k of a block's E8M0 scale 2^k, int32 in [-127, 127]; absmax finite.

    floor   floor(log2 absmax) - emax, OCP Microscaling Formats v1.0, section 6.3
    ceil    the same with log2 rounded up
    even    floor, after absmax is rounded to the element's mantissa (half an ulp added)
    rceil   the smallest k for which max · 2^k >= absmax

    A block of subnormal values has k = -127, and they are rounded on its grid, as in torchao's `mx_tensor.py` today.
    Implementations that multiply by 1 where the scale is coded as 0 (earlier ones of torchao, ports of Transformer
    Engine's `exp2f_rcp`) make such a block 0; the specification has no such exception.
    """
    lifted, lift = lift_subnormals(absmax)
    bits = lifted.view(torch.int32)
    if rule == ScaleRule.EVEN:
        bits = bits + (1 << (22 - element.mantissa_bits))
    exponent = (bits >> 23) - 127 - lift - element.emax
    if rule in (ScaleRule.CEIL, ScaleRule.RCEIL):
        # absmax = m · 2^e with 1 <= m < 2: one more where m exceeds 1 (ceil), or the mantissa of max (rceil).
        threshold = 1.0 if rule == ScaleRule.CEIL else element.max / 2.0**element.emax
        mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
        exponent = exponent + (mantissa > threshold)
    return exponent.clamp(-E8M0_MAX, E8M0_MAX)


SCALINGS: dict[str, Scaling] = {
    scaling.rule: scaling
    for scaling in (
        Unscaled(ScaleRule.NONE),
        BlockPow2(ScaleRule.FLOOR, 1),
        BlockPow2(ScaleRule.CEIL, 2),
        BlockPow2(ScaleRule.EVEN, 3),
        BlockPow2(ScaleRule.RCEIL, 4),
        FourThirds(ScaleRule.FOUR_THIRDS),
        Quest(ScaleRule.QUEST),
        Amax(ScaleRule.AMAX),
        Amax(ScaleRule.POW2, pow2=True),
        Amax(ScaleRule.AMAX8, target=8.0),
        Amax(ScaleRule.AMAX15, target=15.0),
        Rounded(ScaleRule.FLOAT32, scale_element=None),
        Rounded(ScaleRule.E4M3, scale_element=E4M3),
        Rounded(ScaleRule.UE5M3, scale_element=UE5M3),
        NVFP4(ScaleRule.NVFP4, 5),
        NVFP4Outer(ScaleRule.NVFP4_ROW, of=ROW),
        NVFP4Outer(ScaleRule.NVFP4_128, of=Block(1, 128)),
        FourOverSix(ScaleRule.FOUR_OVER_SIX),
        Unclipped(ScaleRule.UNCLIPPED),
        Eden(ScaleRule.EDEN),
        HiF4(ScaleRule.HIF4, 6),
    )
}
