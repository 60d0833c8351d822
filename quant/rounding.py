"""Exact float32 arithmetic with powers of two, and the rounding of one value to an element's grid.

Every operation is exact or a single IEEE 754 rounding, so that any backend can give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from binade.quant.elements import Element, Overflow, RoundingMode
from binade.quant.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def floor_log2(x: Tensor) -> Tensor:
    """floor(log2|x|) of float32, from the exponent bits; exact for subnormals too. int32, same shape.

    Zero gives -151 (below every float32), Inf and NaN 128. `floor(log2(x + tiny))` would be wrong just below powers
    of two.
    """
    lifted, lift = lift_subnormals(x)
    return ((lifted.view(torch.int32) >> 23) & 0xFF) - 127 - lift


def lift_subnormals(x: Tensor) -> tuple[Tensor, Tensor]:
    """x with float32 subnormals multiplied by 2^24, and by how many binades each was lifted (0 or 24, int32).

    Integer arithmetic: on a CPU, torch's comparisons and `where` take ten times as long as its products."""
    exponent = (x.view(torch.int32) >> 23) & 0xFF
    lift = (1 - exponent.clamp(max=1)) * 24
    return x * _normal_pow2(lift), lift


def pow2(exponent: Tensor) -> Tensor:
    """2^exponent as float32, exact for exponents -149 to 127, subnormal results included."""
    normal = exponent.clamp(min=-126)
    return _normal_pow2(normal) * _normal_pow2(exponent - normal)


def _normal_pow2(exponent: Tensor) -> Tensor:
    """2^exponent for int32 exponents -126 to 127."""
    return ((exponent + 127) << 23).view(torch.float32)


def times_pow2(x: Tensor, exponent: Tensor) -> Tensor:
    """x · 2^exponent in two steps, exact also where 2^exponent alone is beyond float32 (bfloat16's subnormals)."""
    half = exponent >> 1
    return x * pow2(half) * pow2(exponent - half)


def noise(count: int, seed: int, device: torch.device) -> Tensor:
    """Uniform float32 in [0, 1) with 16 bits, one for each element index: a function of (seed, index) alone.

    The index plus one key is multiplied, then mixed by "lowbias32" of C. Wellons' hash-prospector, whose first step
    also takes a second key. One multiplication less leaves elements that are 13,975,968 apart correlated by 0.87; one
    key alone makes the noise of two seeds the same sequence, shifted.
    """
    mask = 0xFFFFFFFF

    def mix(h: int) -> int:
        h = ((h ^ (h >> 16)) * 0x7FEB352D) & mask
        h = ((h ^ (h >> 15)) * 0x846CA68B) & mask
        return h ^ (h >> 16)

    index = torch.arange(count, device=device, dtype=torch.int64) & mask
    h = (((index + mix(seed & mask)) & mask) * 0xDCF94B3B) & mask
    h = ((h ^ (h >> 16) ^ mix((seed & mask) ^ 0x9E3779B9)) * 0x7FEB352D) & mask
    h = ((h ^ (h >> 15)) * 0x846CA68B) & mask
    return ((h >> 16) ^ 0x8000).to(torch.float32) * 2.0**-16  # kernels treat them as signed numbers


def round_to_integer(t: Tensor, rounding: RoundingMode, u: Tensor | None = None) -> Tensor:
    """t rounded to an integer: ties to even, ties away from zero, or up with the probability of its fraction (u), which
    is rounded to 16 bits, as many as u has."""
    if rounding == RoundingMode.NEAREST:
        return torch.round(t)
    whole = torch.floor(t.abs())
    fraction = t.abs() - whole  # exact, so no tie is missed or invented
    if rounding == RoundingMode.HALF_AWAY:
        up = fraction >= 0.5
    else:
        assert u is not None, "stochastic rounding needs noise"
        up = torch.round(fraction * 2.0**16) > u * 2.0**16
    return torch.copysign(whole + up, t)


def round_to_element(
    x: Tensor, element: Element, rounding: RoundingMode, overflow: Overflow, u: Tensor | None = None
) -> Tensor:
    """float32 x, any shape, on the element's grid, as float32. NaN stays NaN. u: `noise` for stochastic rounding.

    A value overflows when its rounded value, with the exponent unbounded, exceeds the largest finite one. Infinity
    always overflows.
    """
    lowest = element.tiers[0][0]
    exponent = floor_log2(x).clamp(lowest, element.emax + 1)
    mantissa_bits = torch.full_like(exponent, element.tiers[0][1])
    for tier_lowest, tier_bits in element.tiers[1:]:
        mantissa_bits = torch.where(exponent >= tier_lowest, tier_bits, mantissa_bits)
    step = exponent - mantissa_bits
    y = round_to_integer(times_pow2(x, -step), rounding, u) * pow2(step)
    limit = element.max if overflow == Overflow.SATURATE else torch.inf
    y = torch.where(y.abs() > element.max, torch.copysign(torch.full_like(y, limit), y), y)
    return y if element.signed_zero else y + 0.0
