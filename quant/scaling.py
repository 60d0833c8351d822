"""How a block or a tensor finds its scale, divides by it, stores it and multiplies it back: one class per scheme.

A new scheme is a subclass of `Scaling` and its entry in SCALINGS; the name in `formats.ScaleRule` documents it. Without
a kernel the scheme runs by `reference` on every backend; a scheme with a tensor scale alone keeps the fast rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from binade.quant.codes import decode_table, encode
from binade.quant.elements import E4M3, E8M0, Element, Overflow, Rounding
from binade.quant.formats import ScaleRule
from binade.quant.rounding import floor_log2, lift_subnormals, pow2, round_to_element

FLOAT32_MAX = torch.finfo(torch.float32).max
E8M0_MAX = 127  # the largest exponent, and minus the smallest
NVFP4_TENSOR_MAX = 448.0 * 6.0

Scalars = tuple[Tensor, ...]  # of the tensor as a whole


@dataclass(frozen=True)
class Scaling:
    """A scheme. A subclass overrides what differs: with a block scale alone, `block_scale` is enough.

    rule                 its name, as users choose it
    kernel               its number in the compiled kernels; None if they do not know it
    scale_element        how a block scale is coded, one for each block; None without block scales
    tensor_scale_bytes   what a tensor scale takes; 0 without one. Schemes with one are given the tensor's absmax
    saturates            False if the scale follows the tensor's absmax, so that no finite value saturates
    shares               what values share, in words; {block} is the block size

    Methods take values as [groups, block] float32, block scales as [groups, 1] float32 (a scalar 1 without block
    scales), absmax, the tensor's largest magnitude, as a float32 scalar (NaN if any element is NaN), and tensor_scale,
    what the method of this name returns.
    """

    rule: str
    kernel: int | None = None

    scale_element: ClassVar[Element | None] = None
    tensor_scale_bytes: ClassVar[int] = 0
    saturates: ClassVar[bool] = True
    shares: ClassVar[str]

    def tensor_scale(self, element: Element, absmax: Tensor) -> Scalars:
        """What the three methods below need of the tensor as a whole, as scalars; empty without a tensor scale."""
        return ()

    def block_scale(self, x: Tensor, element: Element, tensor_scale: Scalars) -> Tensor:
        """The scale of each block, on the grid of scale_element."""
        return torch.ones((), device=x.device)

    def to_element(self, x: Tensor, scale: Tensor, element: Element, tensor_scale: Scalars) -> Tensor:
        """Values before they are rounded to the element's grid."""
        return x / scale

    def from_element(self, values: Tensor, scale: Tensor, element: Element, tensor_scale: Scalars) -> Tensor:
        """What values on the element's grid stand for."""
        return values * scale

    def multiplier(self, scale: Tensor, element: Element, absmax: Tensor) -> Tensor:
        """float64: the product of block scale and tensor scale, free of float32's rounding."""
        return scale.double()

    def saturation(self, element: Element, absmax: float | Tensor) -> tuple[float, float | Tensor]:
        """(left, right): an element saturates where |x| · left > its block's scale · right, both exact in float64."""
        return 1.0, element.max if self.saturates else math.inf

    def encode(self, scale: Tensor) -> Tensor | None:
        """Block scales as they are stored, uint8 [groups]; None without block scales."""
        if self.scale_element is None:
            return None
        return encode(scale.reshape(-1), self.scale_element).to(torch.uint8)

    def decode(self, stored: Tensor | None) -> Tensor:
        """The inverse of `encode`: [groups, 1], or a scalar 1."""
        if stored is None or self.scale_element is None:
            return torch.ones(())
        return decode_table(self.scale_element).to(stored.device)[stored.long()].reshape(-1, 1)

    def nbytes(self, blocks: float) -> float:
        """Bytes of the scales of a tensor of so many blocks."""
        return self.tensor_scale_bytes + (blocks * self.scale_element.bits / 8 if self.scale_element else 0)


@dataclass(frozen=True)
class Unscaled(Scaling):
    """Values are rounded as they are."""

    shares = "no scale"

    def to_element(self, x: Tensor, scale: Tensor, element: Element, tensor_scale: Scalars) -> Tensor:
        return x

    def from_element(self, values: Tensor, scale: Tensor, element: Element, tensor_scale: Scalars) -> Tensor:
        return values


@dataclass(frozen=True)
class BlockPow2(Scaling):
    """MX: a power of two for each block, by one of four rules. OCP Microscaling Formats v1.0, section 6.3."""

    scale_element = E8M0
    shares = "a power-of-two scale for every {block} values"

    def block_scale(self, x: Tensor, element: Element, tensor_scale: Scalars) -> Tensor:
        largest = nan_max(x)
        return torch.where(largest.isfinite(), pow2(block_scale_exponent(largest, element, self.rule)), torch.nan)


@dataclass(frozen=True)
class TensorAmax(Scaling):
    """FP8 current scaling of Transformer Engine: one float32 scale for the tensor, from its own absmax."""

    tensor_scale_bytes = 4
    saturates = False
    shares = "one scale for the tensor"

    def tensor_scale(self, element: Element, absmax: Tensor) -> Scalars:
        """max / absmax in float32, absmax at least 1e-12. 0 if absmax is Inf, NaN if NaN."""
        # With a Python number in place of either tensor, CUDA would multiply by a rounded reciprocal.
        return (torch.full_like(absmax, element.max) / absmax.clamp(min=1e-12),)

    def to_element(self, x: Tensor, scale: Tensor, element: Element, tensor_scale: Scalars) -> Tensor:
        return x * tensor_scale[0]

    def from_element(self, values: Tensor, scale: Tensor, element: Element, tensor_scale: Scalars) -> Tensor:
        return values / tensor_scale[0]

    def multiplier(self, scale: Tensor, element: Element, absmax: Tensor) -> Tensor:
        return torch.full_like(scale, max(float(absmax), 1e-12) / element.max, dtype=torch.float64)


@dataclass(frozen=True)
class TensorPow2(Scaling):
    """HiFloat8's optional scale: one power of two 2^k for the tensor.

    k puts absmax into the highest binade with all mantissa bits (exponent 3), k in [-127, 127]; 0 for an all-zero
    tensor. 2^k is NaN if absmax is not finite. arXiv 2409.16626 leaves the target open; with absmax at the largest
    value, 2^15, the tensor's largest elements would keep 1 mantissa bit of 3.
    """

    tensor_scale_bytes = 4
    saturates = False
    shares = "one power-of-two scale for the tensor"

    def tensor_scale(self, element: Element, absmax: Tensor) -> Scalars:
        """2^k to divide by (1 where absmax is not finite), and to multiply by (NaN there)."""
        finite = absmax.isfinite()
        exponent = (floor_log2(absmax) - element.precise_emax).clamp(-E8M0_MAX, E8M0_MAX)
        scale = pow2(torch.where((absmax > 0) & finite, exponent, 0))
        return scale, torch.where(finite, scale, torch.nan)

    def to_element(self, x: Tensor, scale: Tensor, element: Element, tensor_scale: Scalars) -> Tensor:
        return x / tensor_scale[0]

    def from_element(self, values: Tensor, scale: Tensor, element: Element, tensor_scale: Scalars) -> Tensor:
        return values * tensor_scale[1]

    def multiplier(self, scale: Tensor, element: Element, absmax: Tensor) -> Tensor:
        return self.tensor_scale(element, absmax)[1].double()


@dataclass(frozen=True)
class NVFP4(Scaling):
    """E4M3 block scales over a float32 tensor scale. NVIDIA Transformer Engine, quantize_nvfp4, each step in float32.

    S = min(2688 / absmax, largest float32), 1 where absmax is 0; a block's scale is e4m3(blockmax · (S · (1/6))),
    saturating, zero where it underflows.
    """

    scale_element = E4M3
    tensor_scale_bytes = 4
    shares = "an E4M3 scale for every {block} values and one for the tensor"

    def tensor_scale(self, element: Element, absmax: Tensor) -> Scalars:
        """S, and absmax / 2688."""
        limit = torch.full_like(absmax, NVFP4_TENSOR_MAX)  # a tensor over a tensor, as in TensorAmax
        encode = (limit / absmax).clamp(max=FLOAT32_MAX)
        return torch.where(absmax == 0, torch.ones_like(encode), encode), absmax / limit

    def block_scale(self, x: Tensor, element: Element, tensor_scale: Scalars) -> Tensor:
        sixth = torch.tensor(1.0 / 6.0, dtype=torch.float32, device=x.device)
        scaled = nan_max(x) * (tensor_scale[0] * sixth)
        return round_to_element(scaled, E4M3, Rounding.NEAREST, Overflow.SATURATE)

    def to_element(self, x: Tensor, scale: Tensor, element: Element, tensor_scale: Scalars) -> Tensor:
        inverse = (1.0 / (scale * (1.0 / tensor_scale[0]))).clamp(max=FLOAT32_MAX)
        return (x * inverse).clamp(-element.max, element.max)

    def from_element(self, values: Tensor, scale: Tensor, element: Element, tensor_scale: Scalars) -> Tensor:
        return values * scale * tensor_scale[1]

    def multiplier(self, scale: Tensor, element: Element, absmax: Tensor) -> Tensor:
        return scale.double() * float(absmax) / NVFP4_TENSOR_MAX

    def saturation(self, element: Element, absmax: float | Tensor) -> tuple[float, float | Tensor]:
        return NVFP4_TENSOR_MAX, element.max * absmax


def nan_max(x: Tensor) -> Tensor:
    """max|x| over the last axis, NaN if any is NaN; 0 for an empty axis. [groups, block] -> [groups, 1]"""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1))
    return x.abs().amax(-1, keepdim=True)


def block_scale_exponent(absmax: Tensor, element: Element, rule: str) -> Tensor:
    """Exponent k of a block's E8M0 scale 2^k, int32 in [-127, 127]. MX specification 6.3; absmax finite.

    floor   floor(log2 absmax) - emax
    ceil    the same with log2 rounded up
    even    floor, after absmax is rounded to the element's mantissa (half an ulp added)
    rceil   the smallest k for which max · 2^k >= absmax
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
        Unscaled(ScaleRule.NONE, 0),
        BlockPow2(ScaleRule.FLOOR, 1),
        BlockPow2(ScaleRule.CEIL, 2),
        BlockPow2(ScaleRule.EVEN, 3),
        BlockPow2(ScaleRule.RCEIL, 4),
        TensorAmax(ScaleRule.AMAX, 5),
        NVFP4(ScaleRule.NVFP4, 6),
        TensorPow2(ScaleRule.POW2),
    )
}
