"""How the scale of a block or a tensor is computed, applied, stored and multiplied back: one class per scheme.

A new scheme is a subclass of `scheme.Scaling` and its line in SCALINGS; formats name the schemes that they allow. This
module imports torch at its first computation, see `lazy`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from binade.quant.codes import decode_table, encode
from binade.quant.elements import E4M3, E6M2, E8M0, UE5M3, Element, Overflow, RoundingMode
from binade.quant.lazy import torch
from binade.quant.options import ROW, TENSOR, Block, Options
from binade.quant.rounding import floor_log2, lift_subnormals, pow2, round_to_element
from binade.quant.scheme import (
    FLOAT32_MAX,
    TILE,
    VECTOR,
    Factors,
    Follows,
    Kernel,
    Scaling,
    nan_max,
    nan_unless_finite,
    nearest,
    read_back,
    scaled,
)

if TYPE_CHECKING:
    from torch import Tensor

E8M0_MAX = 127  # the largest exponent, and minus the smallest
E4M3_MAX = 448.0
OPTIMUM = 2.92247856 / 6.0  # the scale of E2M1 that loses least on values of N(0, 1)


class Unscaled(Scaling):
    """No scale: values are rounded as they are. HiFloat8 is published without one."""

    name = "none"
    shares = "no scale"
    blocks = ()
    stored = None
    clips = False
    follows = Follows.LARGEST
    per_element = False

    def of_largest(self, largest: Tensor, spec: Options, absmax: Tensor) -> Tensor:
        return torch.ones_like(largest)

    def factors(self, scale: Tensor, spec: Options, absmax: Tensor) -> Factors:
        return Factors()


class PowerOfTwoScaling(Scaling):
    """A power of two for each block, E8M0, from the exponent k of `exponent`, int32 in [-127, 127].

    A block of subnormal values has k = -127, and they are rounded on its grid, as in torchao's `mx_tensor.py` today.
    Implementations that multiply by 1 where the scale is coded as 0 (earlier ones of torchao, ports of Transformer
    Engine's `exp2f_rcp`) make such a block 0; the specification has no such exception.
    """

    shares = "a power-of-two scale for {block}"
    blocks = (VECTOR, TILE)
    stored: ClassVar[Element | None] = E8M0
    follows = Follows.LARGEST
    per_element = False

    def exponent(self, bits: Tensor, element: Element) -> Tensor:
        """floor(log2 absmax) of a normal absmax with these bits, int32, plus what rounding up adds."""
        return (bits >> 23) - 127

    def of_largest(self, largest: Tensor, spec: Options, absmax: Tensor) -> Tensor:
        lifted, lift = lift_subnormals(largest)
        exponent = self.exponent(lifted.view(torch.int32), spec.format.element) - lift - spec.format.element.emax
        return pow2(exponent.clamp(-E8M0_MAX, E8M0_MAX)) + nan_unless_finite(largest)


def _one_above(bits: Tensor, threshold: float) -> Tensor:
    """floor(log2 absmax), and one more where the mantissa of absmax, from 1 to 2, exceeds the threshold."""
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    return (bits >> 23) - 127 + (mantissa > threshold)


class Floor(PowerOfTwoScaling):
    """Block scale 2^(floor(log2 absmax) - emax), E8M0: the largest values may saturate. MX specification 6.3; NVIDIA's
    MXFP8 training uses rceil instead (arXiv 2506.08027)."""

    name = "floor"
    clips = True
    kernel = Kernel.FLOOR


class Ceil(PowerOfTwoScaling):
    """Block scale 2^(ceil(log2 absmax) - emax), E8M0: fewer values saturate. torchao, ScaleCalculationMode.CEIL."""

    name = "ceil"
    clips = False
    kernel = Kernel.CEIL

    def exponent(self, bits: Tensor, element: Element) -> Tensor:
        return _one_above(bits, 1.0)


class Even(PowerOfTwoScaling):
    """As floor, after absmax is rounded to the element's mantissa (half an ulp is added), E8M0. torchao,
    ScaleCalculationMode.EVEN."""

    name = "even"
    clips = True
    kernel = Kernel.EVEN

    def exponent(self, bits: Tensor, element: Element) -> Tensor:
        return super().exponent(bits + (1 << (22 - element.mantissa_bits)), element)


class RCeil(PowerOfTwoScaling):
    """Block scale 2^ceil(log2(absmax / max)), E8M0: no value saturates. NVIDIA cuDNN, Transformer Engine, torchao's
    RCEIL. Kernels that multiply by float32(1/max), as Transformer Engine's for tiles, get the same scale where the
    product is normal; for INT8, not of the float32 above max · 2^k."""

    name = "rceil"
    clips = False
    kernel = Kernel.RCEIL

    def exponent(self, bits: Tensor, element: Element) -> Tensor:
        return _one_above(bits, element.max / 2.0**element.emax)


class Nearest(PowerOfTwoScaling):
    """Block scale 2^round(log2(absmax / max)), E8M0: the nearest exponent, so that the largest values may saturate.
    MLX's fp8_e8m0."""

    name = "nearest"
    clips = True

    def exponent(self, bits: Tensor, element: Element) -> Tensor:
        mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
        top = element.max / 2.0**element.emax
        return _one_above(bits, top * math.sqrt(2.0)) - (mantissa < top / math.sqrt(2.0)).int()


class FourThirds(PowerOfTwoScaling):
    """Block scale 4/3 · 2^(floor(log2 absmax) - emax): no value saturates. Quartet's backward pass.

    `mxfp4.py`, where the factor 4/3 is applied to the rotated tensor and the stored scale is the power of two."""

    name = "4over3"
    shares = "4/3 of a power of two for {block}"
    clips = False
    saturates = False

    def factors(self, scale: Tensor, spec: Options, absmax: Tensor) -> Factors:
        return super().factors(scale * (4.0 / 3.0), spec, absmax)


class Quest(PowerOfTwoScaling):
    """Block scale 2^floor(log2(0.487 · standard deviation of the block)). Quartet's forward pass, which rounds ties
    toward zero.

    2^floor(log2(0.4871 · σ + 1e-8)), σ the block's standard deviation about its mean, divided by n. `mxfp4.py` and
    `mxfp4_triton.py`. Without the floor, 0.4871 · σ is the scale that loses least on normal values. With it, these lose
    2.0 times as much as in plain MXFP4 at σ = 1, and 1.7 times on average over the σ between two powers of two.

    σ² = Σx²/n - (Σx/n)² in float64, both sums as in `sum_in_order`. The zeros that pad a short block count: n is the
    size of a full block. float64 holds the squares exactly and cannot overflow; one pass gives both sums."""

    name = "quest"
    clips = True
    follows = Follows.MOMENTS
    kernel: ClassVar[Kernel | None] = Kernel.QUEST

    def of_moments(self, total: Tensor, squares: Tensor, spec: Options) -> Tensor:
        wanted = self.deviation(total, squares, spec) * OPTIMUM + 1e-8
        exponent = floor_log2(wanted).clamp(-E8M0_MAX, E8M0_MAX)
        return pow2(exponent) + nan_unless_finite(wanted)

    def deviation(self, total: Tensor, squares: Tensor, spec: Options) -> Tensor:
        """The standard deviation of blocks with these sums, float32 [groups, 1]."""
        share = 1.0 / self.kernel_constant(spec)  # a division by n would round otherwise on CUDA
        return (squares * share - (total * share).square()).clamp(min=0).sqrt().clamp(max=FLOAT32_MAX).float()

    def kernel_constant(self, spec: Options) -> float:
        assert spec.block and spec.block.size
        return float(spec.block.size)


class QuestNearest(Quest):
    """As quest, with the nearest exponent instead of the next lower one: 2^round(log2(0.487 · standard deviation)).

    2^floor(log2(√2 · 0.4871 · σ + 1e-8))."""

    name = "quest_nearest"
    kernel = None

    def of_moments(self, total: Tensor, squares: Tensor, spec: Options) -> Tensor:
        return super().of_moments(total * math.sqrt(2.0), squares * 2.0, spec)


class Deviation(Quest):
    """Block scale 0.487 · standard deviation of the block, float32: quest without rounding to a power of two.

    0.4871 is the scale of E2M1 that loses least on many values of N(0, 1), `mxfp4.py` of Quartet. A block whose values
    are all equal becomes 0, as in quest."""

    name = "deviation"
    shares = "a float32 scale for {block}"
    stored = None
    kernel = None

    def of_moments(self, total: Tensor, squares: Tensor, spec: Options) -> Tensor:
        scale = self.deviation(total, squares, spec) * OPTIMUM
        return scale + nan_unless_finite(scale)

    def factors(self, scale: Tensor, spec: Options, absmax: Tensor) -> Factors:
        return Factors((torch.ones((), dtype=torch.float32, device=scale.device) / scale).clamp(max=FLOAT32_MAX), scale)


class Amax(Scaling):
    """Float32 scale max / absmax, for a tensor, a row or a tile: current scaling of Transformer Engine, which takes the
    scale 1 if a value is infinite. For DeepSeek's tiles, see deepgemm.

    Transformer Engine d0067d0, `recipe_common.cuh`, with its default `amax_epsilon` of 0: S = max / absmax, the largest
    float32 where it overflows, and 1 where absmax is 0 or Inf: Inf and values beyond max saturate then. A tensor or a
    row: an element is read back as v / S. Tiles: as v · float32(1/S), `quantize_scale_calc.py`.

    Exceptions. Transformer Engine's absmax passes over NaN; here a NaN makes everything NaN that shares its scale. For
    tiles of bfloat16, an S that overflows becomes the largest bfloat16 there.
    """

    name = "amax"
    shares = "one float32 scale for {block}"
    blocks: ClassVar[tuple[Block | str, ...]] = (VECTOR, TILE, ROW, TENSOR)
    stored = None
    clips = False
    follows = Follows.LARGEST
    per_element = False
    target: ClassVar[float | None] = None
    least: ClassVar[float] = 0.0
    pow2: ClassVar[bool] = False

    def shared(self, spec: Options) -> tuple[float, float, bool]:
        """(target, most, saturates): S = min(target / absmax, most), 1 where absmax is 0, and where it is Inf if
        values saturate then. The target includes the margin."""
        target = self.target or spec.format.max
        if self.pow2 and spec.format.element.precise_emax < spec.format.element.emax:
            target = 2.0 ** (spec.format.element.precise_emax + 1) * (1 - 2.0**-24)  # HiFloat8: just below 2^4
        target *= 2.0**-spec.margin
        return target, target / self.least if self.least else FLOAT32_MAX, self.saturates

    def of_largest(self, largest: Tensor, spec: Options, absmax: Tensor) -> Tensor:
        target, most, saturates = self.shared(spec)
        # With a Python number in place of either tensor, CUDA would multiply by a rounded reciprocal.
        scale = (torch.full_like(largest, target) / largest).clamp(max=most).masked_fill(largest == 0, 1.0)
        if self.pow2:
            scale = pow2(floor_log2(scale).clamp(max=E8M0_MAX))
        if saturates:
            return scale.masked_fill(largest.isinf(), 1.0).masked_fill(largest.isnan(), torch.nan)
        return scale + nan_unless_finite(largest)

    def factors(self, scale: Tensor, spec: Options, absmax: Tensor) -> Factors:
        if spec.block in (ROW, TENSOR):
            return Factors(scale, divisor=scale)
        return Factors(scale, torch.ones((), dtype=torch.float32, device=scale.device) / scale)

    def saturation(self, scale: Tensor | None, spec: Options, absmax: Tensor) -> tuple[float | Tensor, float | Tensor]:
        if spec.history or not self.saturates:
            return super().saturation(scale, spec, absmax)
        # Where an absmax is finite, nothing saturates, though x · S may be an ulp above the largest code. Where it is
        # Inf, S is 1; where S is 1 for another reason, nothing exceeds the largest code.
        if spec.block == TENSOR:
            unfit = absmax.isinf()
        else:
            assert scale is not None, "the scales of a block format are missing"
            unfit = scale == 1
        return 1.0, torch.where(unfit, absmax.new_tensor(spec.format.max, dtype=torch.float64), math.inf)


class AmaxPow2(Amax):
    """As amax, rounded down to a power of two: Transformer Engine's use_power_2_scales. DeepGEMM's ue8m0 is the same
    where absmax is at least 1e-4."""

    name = "pow2"
    pow2 = True


class TorchAO(Amax):
    """Float32 scale max / absmax, with an absmax of at least 1e-12, for a tensor or a row: torchao's float8 training.

    36027d8, `float8_utils.py`. The quotient is of float64 there, which rounds to the same S. One Inf or NaN makes
    everything NaN that shares its scale. Where absmax is 0, S is 1 here and max · 1e12 there; both give zeros."""

    name = "torchao"
    blocks = (ROW, TENSOR)
    saturates = False
    least = 1e-12


class TorchAOPow2(TorchAO):
    """As torchao, rounded down to a power of two: its rowwise recipes.

    Read from the bits. torchao computes exp2(floor(log2 S)) in float32, which is one binade higher for some S just
    below a power of two."""

    name = "torchao_pow2"
    pow2 = True


class Amax8(Amax):
    """Float32 scale that maps absmax to 8, so that large values keep HiFloat8's 3 mantissa bits. fake_quant_ops
    3617c05, hifp.py; the target of Huawei's own training is not known."""

    name = "amax8"
    saturates = False
    target = 8.0


class Amax15(Amax8):
    """As amax8, with 15, which comments in fake_quant_ops mention as a target."""

    name = "amax15"
    target = 15.0


class Float32(Scaling):
    """Block scale absmax / max in float32, without a tensor scale.

    Shows, with its subclasses, what the format of a scale costs. x is multiplied by float32(1/scale). A scale that
    underflows to 0 makes its block 0. An Inf makes its block NaN: Inf · 0 · Inf."""

    name = "float32"
    saturates = False
    shares = "a floating-point scale for {block}"
    blocks = (VECTOR, TILE)
    stored: ClassVar[Element | None] = None
    clips = False
    follows = Follows.LARGEST
    per_element = False
    least: ClassVar[float] = 0.0

    def wanted(self, largest: Tensor, spec: Options, absmax: Tensor) -> tuple[Tensor, ...]:
        quotient = largest.clamp(min=self.least) / torch.full_like(largest, spec.format.max)
        return (quotient + nan_unless_finite(quotient),)

    def factors(self, scale: Tensor, spec: Options, absmax: Tensor) -> Factors:
        return Factors((torch.ones((), dtype=torch.float32, device=scale.device) / scale).clamp(max=FLOAT32_MAX), scale)


class DeepGEMM(Float32):
    """As float32, of an absmax that is at least 1e-4: DeepSeek's kernels for FP8. An Inf makes its block NaN.

    DeepGEMM 54e2261, `utils/math.py`: s = max(absmax, 1e-4) / 448; x · float32(1/s) is rounded and read back as v · s.
    DeepSeek-V3 9b4e978, `inference/kernel.py`, divides x by s, which rounds some values near the middle between two
    codes the other way."""

    name = "deepgemm"
    least = 1e-4


class RoundedToE4M3(Float32):
    """Block scale absmax / max rounded to E4M3, without a tensor scale: for quotients from 2^-9 to 448."""

    name = "e4m3"
    saturates = True
    stored = E4M3
    clips = True


class RoundedToUE5M3(Float32):
    """Block scale absmax / max rounded to UE5M3, without a tensor scale. No document fixes UE5M3: here it is unsigned,
    has bias 15 and the largest value 114688."""

    name = "ue5m3"
    saturates = True
    stored = UE5M3
    clips = True


class TwoLevel(Scaling):
    """E4M3 block scales under a float32 scale of the tensor. NVIDIA Transformer Engine, quantize_nvfp4, each step in
    float32, m the element's largest value (E2M1: 6; INT4, arXiv 2510.25602: 7):

    S = min(448·m / absmax, largest float32), 1 where absmax is 0; a block's scale is e4m3(blockmax · (S · (1/m))),
    saturating, 0 where it underflows; in torchao's `nvfp4_tensor.py`, not in its kernels for training, it is at least
    2^-6. An element is read back as v · scale · (absmax / (448·m)).
    """

    shares = "an E4M3 scale for {block} and one for the tensor"
    blocks: ClassVar[tuple[Block | str, ...]] = (VECTOR, TILE)
    stored = E4M3
    outer: ClassVar[Block] = TENSOR
    follows = Follows.LARGEST
    per_element = False

    def limit(self, spec: Options) -> float:
        """The largest block scale times the value that a block's largest magnitude is scaled to."""
        return E4M3_MAX * spec.format.max

    def kernel_constant(self, spec: Options) -> float:
        return self.limit(spec)

    def tensor_scale(self, spec: Options, absmax: Tensor) -> Tensor:
        # A tensor over a tensor, as in Amax.
        scale = (torch.full_like(absmax, self.limit(spec)) / absmax).clamp(max=FLOAT32_MAX)
        return torch.where(absmax == 0, torch.ones_like(scale), scale)

    def of_tensor(self, spec: Options, absmax: float) -> float | None:
        if self.outer != TENSOR or self.of_blocks:
            return None
        return float(self.tensor_scale(spec, torch.tensor(absmax, dtype=torch.float32, device="cpu")))

    def wanted(self, largest: Tensor, spec: Options, absmax: Tensor) -> tuple[Tensor, ...]:
        inverse = torch.full((), 1.0 / spec.format.max, dtype=torch.float32, device=largest.device)
        return (largest * (self.tensor_scale(spec, absmax) * inverse),)

    def factors(self, scale: Tensor, spec: Options, absmax: Tensor) -> Factors:
        encode = (1.0 / (scale * (1.0 / self.tensor_scale(spec, absmax)))).clamp(max=FLOAT32_MAX)
        return Factors(encode, scale, absmax / torch.full_like(absmax, self.limit(spec)))

    def multiplier(self, scale: Tensor, spec: Options, absmax: Tensor) -> Tensor:
        return scale.double() * absmax.double() / self.limit(spec)

    def saturation(self, scale: Tensor | None, spec: Options, absmax: Tensor) -> tuple[float | Tensor, float | Tensor]:
        return self.limit(spec), absmax.double() * spec.format.max


class NVFP4(TwoLevel):
    """E4M3 block scale, absmax / max, over a float32 tensor scale, tensor absmax / (448 · max). Transformer Engine."""

    name = "nvfp4"
    clips = True
    kernel = Kernel.NVFP4


class NVFP4Row(NVFP4):
    """As nvfp4 with one float32 scale for each row. Transformer Engine, row_scaled_activation."""

    name = "nvfp4_row"
    shares = "an E4M3 scale for {block} and a float32 one above it"
    blocks = (VECTOR,)  # a tile would cross rows
    outer = ROW


class NVFP4Run(NVFP4):
    """As nvfp4 with one float32 scale for every 128 values. TetraJet-v2, whose stochastic rounding takes block scales
    of at least 2^-9.

    `nvfp4_quant_fused_kernel.py`."""

    name = "nvfp4_1x128"
    shares = NVFP4Row.shares
    blocks = (Block(1, 16),)
    outer = Block(1, 128)


class Unclipped(TwoLevel):
    """As nvfp4, with absmax at 16/17 of the largest element, so that a scale rounded down clips nothing and stochastic
    rounding is unbiased. Quartet II, fouroversix; Transformer Engine and torchao clip instead.

    A block's largest magnitude is scaled to m·16/17 = 5.647: E4M3 rounds a normal scale down by at most 16/17, so no
    value exceeds m, except where a scale is subnormal. The scale is e4m3((blockmax / 5.647) / (absmax / (448 ·
    5.647))). Quartet II `nvfp4_triton.py`; fouroversix, `stochastic_unbiased`."""

    name = "16over17"
    clips = False
    kernel = Kernel.UNCLIPPED

    def limit(self, spec: Options) -> float:
        return E4M3_MAX * self._target(spec)

    @staticmethod
    def _target(spec: Options) -> float:
        return spec.format.max * 16.0 / 17.0

    def wanted(self, largest: Tensor, spec: Options, absmax: Tensor) -> tuple[Tensor, ...]:
        tensor_scale = absmax / torch.full_like(absmax, self.limit(spec))
        wanted = largest / torch.full_like(largest, self._target(spec))
        return (torch.where(wanted == 0, wanted, wanted / tensor_scale),)  # of subnormals, the tensor scale may be 0


class Headroom(TwoLevel):
    """As nvfp4, with max(16384 · p1, p99.99) of the blocks' absmaxes in place of the tensor's: room for larger values;
    blocks above it saturate. For activations: blocks below 2^-40 are flushed. NVIDIA Model-Optimizer,
    nvfp4_act_headroom.

    `nvfp4_act_headroom.py`, which collects the absmaxes of calibration batches and then fixes the scale; here each
    tensor is a calibration of one batch. A percentile is the middle of its bin, of 512 between 2^-40 and 2^40 on a
    logarithmic scale. Blocks of zeros do not count, nor, for p1, blocks below p99.99 / 10^6. Model-Optimizer takes
    log2 in float32, which may choose the other bin for an absmax within a few ulps of an edge."""

    name = "headroom"
    blocks = (VECTOR,)
    clips = True
    of_blocks = True
    BINS: ClassVar[int] = 512

    def outer_absmax(self, largest: Tensor) -> Tensor:
        largest = largest.flatten()
        edges, middles = _log2_bins(self.BINS, largest.device)
        bins, used = torch.bucketize(largest, edges, right=True), largest > 0
        counts = torch.zeros_like(middles, dtype=torch.int64).scatter_add_(0, bins, used.long())
        upper = _percentile(counts, 0.9999)
        lowest = upper - 128  # the bin of p99.99 / 10^6
        anchor = _percentile(counts.where(torch.arange(self.BINS, device=counts.device) >= lowest, 0), 0.01)
        absmax = torch.maximum(16384.0 * middles[anchor], middles[upper]).squeeze()
        return absmax * used.any() + nan_unless_finite(largest).sum()


@lru_cache(maxsize=64)
def _log2_bins(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The inner edges and the middles of `Headroom`'s bins: on a device, copied once."""
    points = torch.tensor(
        [2.0 ** (-40 + i * 40 / count) for i in range(2 * count + 1)], dtype=torch.float32, device=device
    )
    return points[2:-1:2].contiguous(), points[1::2].contiguous()


def _percentile(counts: Tensor, share: float) -> Tensor:
    """The first bin up to which this share of all values lies, int64 [1]; in float32, as Model-Optimizer does."""
    total = counts.cumsum(0).float()
    return torch.searchsorted(total, share * total[-1:])


class FourOverSix(TwoLevel):
    """As nvfp4, each block scaled to 6 or to 4, whichever has the smaller error; a tie keeps 6. arXiv 2512.02010.

    B is the bound:

    1. S = min(6·B / absmax, largest float32), 1 if absmax is 0. base = (blockmax / 6) · S.
    2. The scales tried are e4m3(min(base, 448)) and e4m3(min(1.5 · base, 448)).
    3. An element reads back as ((v · scale) · absmax) / (6·B). The error is summed in float32, a line of the block
       from left to right, then the lines as a binary tree.

    Transformer Engine `quantize_4over6_nvfp4.cuh`: mae, 256, neither rotation nor stochastic rounding. fouroversix
    `reference.py`: mse, 256; values are not clamped to 6, so that under a subnormal scale one may become 8. FlashInfer:
    mae, 448. Quartet II: ties away from zero, and a scale of 0 becomes 1.

    Step 3 multiplies by absmax before it divides, as Transformer Engine does: of a tensor whose absmax exceeds 1.27e35,
    the products of its largest values overflow to Infinity.
    """

    name = "4over6"
    clips = True
    follows = Follows.ERRORS
    options: ClassVar = {"error": ("mse", "mae"), "bound": ("256", "448")}
    kernel = Kernel.FOUR_OVER_SIX

    def limit(self, spec: Options) -> float:
        assert spec.bound
        return spec.bound * spec.format.max

    def wanted(self, largest: Tensor, spec: Options, absmax: Tensor) -> tuple[Tensor, ...]:
        base = (largest / torch.full_like(absmax, spec.format.max)) * self.tensor_scale(spec, absmax)
        return base.clamp(max=E4M3_MAX), (1.5 * base).clamp(max=E4M3_MAX)

    def factors(self, scale: Tensor, spec: Options, absmax: Tensor) -> Factors:
        encode = super().factors(scale, spec, absmax).encode
        return Factors(encode, scale, absmax, torch.full_like(absmax, self.limit(spec)))


class Eden(TwoLevel):
    """MS-EDEN of Quartet II: nearest rounding that may clip, corrected by block scales that are rounded
    stochastically; over random rotations nearly unbiased for vectors that these make Gaussian.

    Not for all: the mean over rotations of e₀ + 0.1 e₁ is (0.990, 0.198), a bias of 1/101 of its length.
    `quartet_2.py:34-185`: half of stochastic rounding's error. Runs of 16 are rounded to nearest, ties away, with the
    targets 6 / (0.93 · 17/16) for 6 and 255.99 for 448, so that some values clip. The scales of 128 neighbors are then
    multiplied by Σv² / Σ(v·q), v the scaled values and q the elements, and rounded stochastically to E4M3.

    A scale that underflows to 0 becomes 1, which makes its values 0. In a subnormal tensor whose tensor scale
    underflows, the source divides 0 by 0; here all of it becomes 0."""

    name = "eden"
    blocks = (Block(1, 16),)
    clips = False
    follows = Follows.VALUES
    roundings = (RoundingMode.HALF_AWAY,)
    stochastic = True
    TARGET: ClassVar[float] = 6.0 / (0.93 * 17.0 / 16.0)
    LARGEST_SCALE: ClassVar[float] = 255.99
    RUN: ClassVar[int] = 128

    def limit(self, spec: Options) -> float:
        return self.LARGEST_SCALE * self.TARGET

    def quantize(self, x: Tensor, spec: Options, absmax: Tensor, u: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        assert u is not None, "MS-EDEN rounds its scales stochastically"
        tensor_scale = absmax / torch.full_like(absmax, self.limit(spec))
        wanted = nan_max(x) / torch.full_like(absmax, self.TARGET)
        scale = nearest(torch.where(wanted == 0, wanted, wanted / tensor_scale), E4M3)
        scale = torch.where(scale == 0, 1.0, scale)
        encoded = scaled(x, self.factors(scale, spec, absmax))
        values = round_to_element(encoded, spec.format.element, spec.rounding, spec.overflow)
        together = self.RUN // x.shape[-1]
        pad = -len(x) % together
        v, q = (torch.nn.functional.pad(t, (0, 0, 0, pad)).reshape(-1, self.RUN) for t in (encoded, values))
        below = (v * q).sum(-1, keepdim=True)
        correction = torch.where(below == 0, 1.0, v.square().sum(-1, keepdim=True) / below)
        wanted = scale * correction.repeat_interleave(together, 0)[: len(x)]
        scale = round_to_element(wanted, E4M3, RoundingMode.STOCHASTIC, Overflow.SATURATE, u[:, :1])
        return values, scale, read_back(values, self.factors(scale, spec, absmax))


class HiF4(Scaling):
    """One E6M2 scale for 64 values, and a one-bit exponent for every 8 and every 4 of them. arXiv 2602.11287.

    And its authors' library, ddddwee1/HiFloat4 999cc07. With m a largest magnitude,

    scale = e6m2(bf16(clamp(m64 · bf16(1/7), 2^-48, 49152))), r = bf16(1 / scale),
    e8 = [m8 · r >= 4], e4 = [m4 · r · 2^-e8 >= 2], v = min(floor(|x| · r · 2^-(e8+e4) · 4 + 1/2), 7) / 4.

    Scales are [groups, 25]: the E6M2 scale, eight factors 1 or 2, sixteen factors 1 or 2. A block whose largest
    magnitude exceeds 7 · 49152 saturates.

    Stochastic rounding takes |x| · r · 2^-(e8+e4) · 4 up or down; it is in no version of the library. A scale that was
    rounded down clips, so that it is biased.

    The library's torch version adds 1/2 in float32, so that a k of 0.49999997 rounds up; its NumPy version does not. In
    both, Inf saturates. HIFxV12 of fake_quant_ops is another format: its first level is a power of two.
    """

    name = "hif4"
    shares = "an E6M2 scale for {block} and binary exponents for 8 and 4"
    blocks = (Block(1, 64),)
    stored = E6M2
    clips = True
    follows = Follows.VALUES
    per_element = True
    roundings = (RoundingMode.HALF_AWAY, RoundingMode.STOCHASTIC)
    scale_bits = 8 + 24
    kernel = Kernel.HIF4

    def block_scale(self, x: Tensor, spec: Options, absmax: Tensor) -> Tensor:
        largest = nan_max(x)
        wanted = (largest * 0.142578125).clamp(2.0**-48, E6M2.max).bfloat16().float()
        scale = nearest(wanted, E6M2)
        inverse = (1.0 / scale).bfloat16().float()
        eights, fours = (x.abs().reshape(-1, 64 // n, n).amax(-1) * inverse for n in (8, 4))
        e8 = 1 + (eights >= 4).float()
        e4 = 1 + (fours / e8.repeat_interleave(2, -1) >= 2).float()
        return torch.cat((torch.where(largest.isfinite(), scale, torch.nan), e8, e4), -1)

    def factors(self, scale: Tensor, spec: Options, absmax: Tensor) -> Factors:
        first, e8, e4 = scale[:, :1], scale[:, 1:9], scale[:, 9:]
        finer = e8.repeat_interleave(8, -1) * e4.repeat_interleave(4, -1)
        one = torch.ones((), dtype=torch.float32, device=scale.device)
        return Factors((one / first).bfloat16().float() / finer, finer, first)

    def to_bytes(self, scale: Tensor) -> Tensor:
        first, micro = encode(scale[:, :1], E6M2), (scale[:, 1:] == 2).long()
        bits = (micro.reshape(-1, 3, 8) << torch.arange(8, device=scale.device)).sum(-1)
        return torch.cat((first, bits), -1).to(torch.uint8)

    def from_bytes(self, stored: Tensor) -> Tensor:
        bits = stored[:, 1:, None].long() >> torch.arange(8, device=stored.device) & 1
        return torch.cat(
            (decode_table(E6M2).to(stored.device)[stored[:, :1].long()], 1 + bits.reshape(-1, 24).float()), -1
        )


SCALINGS: dict[str, Scaling] = {
    scheme.name: scheme()
    for scheme in (
        *(
            Unscaled,
            Floor,
            Ceil,
            Even,
            RCeil,
            Nearest,
            FourThirds,
            Quest,
            QuestNearest,
            Deviation,
            Amax,
            AmaxPow2,
            TorchAO,
            TorchAOPow2,
        ),
        *(Amax8, Amax15),
        *(Float32, DeepGEMM, RoundedToE4M3, RoundedToUE5M3),
        *(NVFP4, NVFP4Row, NVFP4Run, Headroom, FourOverSix, Unclipped, Eden, HiF4),
    )
}
"""The scheme of each name."""


def kernel_of(spec: Options) -> Kernel | None:
    """How the compiled kernels find a spec's scales by themselves; None if they cannot."""
    vector = spec.block is not None and spec.block.rows == 1 and spec.block.columns is not None
    scaling = SCALINGS[spec.scale]
    if scaling.follows is Follows.VALUES and spec.rounding is RoundingMode.STOCHASTIC:  # these kernels round to nearest
        return None
    return scaling.kernel if vector else None


def has_kernel(spec: Options) -> bool:
    """Whether the compiled kernels know a spec, by themselves or with factors that they are given."""
    return kernel_of(spec) is not None or SCALINGS[spec.scale].follows is not Follows.VALUES


def scale_nbytes(spec: Options, shape: tuple[int, ...], dim: int) -> float:
    """Bytes of all scales of a tensor: of its blocks, and of the outer blocks, four each."""
    scaling = SCALINGS[spec.scale]
    scales = ((spec.block, scaling.scale_bits / 8), (scaling.outer, 4))
    return sum((block.count(shape, dim) * nbytes for block, nbytes in scales if block), 0.0)
