"""The definition of every format, in plain torch, written to be read: float32 in, float32 out, any device.

Two steps make a quantizer. `scales` finds what a group of values shares; `round_to_element` puts a scaled value on
the element's grid. All scaling by powers of two is exact. What the formats are is in `formats`; what speed needs is in
`kernels`. The Triton twin gives the same bits; tests compare both with libraries written by others.

Layout: a tensor reaches these functions as [groups, block], blocks already along the last axis (see `to_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from binade.quant.formats import E4M3, Element, Format, Overflow, Rounding, ScaleRule

FLOAT32_MAX = torch.finfo(torch.float32).max
NVFP4_TENSOR_MAX = 448.0 * 6.0
E8M0_BIAS = 127
# Scale rules as the compiled kernels number them.
RULES = {"none": 0, "floor": 1, "ceil": 2, "even": 3, "rceil": 4, "amax": 5, "nvfp4": 6}


@dataclass(frozen=True)
class Plan:
    """A format with every option decided. Built and checked by `quantizer.plan`.

    scale_rule is "none" where no scale is used, "amax" and "pow2" for a tensor scale, "nvfp4" for that format's
    own rule.
    """

    format: Format
    block_size: int | None
    scale_rule: ScaleRule | str
    rounding: Rounding
    overflow: Overflow
    seed: int = 0


def floor_log2(x: Tensor) -> Tensor:
    """floor(log2|x|) of float32, from the exponent bits; exact for subnormals too. int32, same shape.

    Zero gives -151 (below every float32), Inf and NaN 128. `floor(log2(x + tiny))` would be wrong just below powers
    of two.
    """
    lifted, lift = lift_subnormals(x)
    return ((lifted.view(torch.int32) >> 23) & 0xFF) - 127 - lift


def lift_subnormals(x: Tensor) -> tuple[Tensor, Tensor]:
    """x with float32 subnormals multiplied by 2^24, and by how many binades each was lifted (0 or 24, int32)."""
    subnormal = x.abs() < 2.0**-126
    return torch.where(subnormal, x * 2.0**24, x), subnormal.to(torch.int32) * 24


def pow2(exponent: Tensor) -> Tensor:
    """2^exponent as float32, exact for exponents -149 to 127, subnormal results included."""
    normal = (exponent.clamp(min=-126) + 127) << 23
    subnormal = torch.ones_like(exponent) << (exponent + 149).clamp(0, 22)
    return torch.where(exponent >= -126, normal, subnormal).view(torch.float32)


def times_pow2(x: Tensor, exponent: Tensor) -> Tensor:
    """x · 2^exponent in two steps, exact also where 2^exponent alone is beyond float32 (bfloat16's subnormals)."""
    half = exponent >> 1
    return x * pow2(half) * pow2(exponent - half)


def noise(count: int, seed: int, device: torch.device, start: int = 0) -> Tensor:
    """Uniform float32 in [0, 1) with 24 bits, one for each element index: a function of (seed, index) alone.

    The 32-bit mixing function is "lowbias32" of C. Wellons' hash-prospector, applied to the index after the seed.
    """
    mask = 0xFFFFFFFF

    def mix(h: Tensor) -> Tensor:
        h = ((h ^ (h >> 16)) * 0x7FEB352D) & mask
        h = ((h ^ (h >> 15)) * 0x846CA68B) & mask
        return h ^ (h >> 16)

    index = torch.arange(start, start + count, device=device, dtype=torch.int64) & mask
    key = mix(torch.tensor(seed & mask, device=device, dtype=torch.int64))
    return (mix(index ^ key) >> 8).to(torch.float32) * 2.0**-24


def round_to_integer(t: Tensor, rounding: Rounding, u: Tensor | None = None) -> Tensor:
    """t rounded to an integer: ties to even, ties away from zero, or up with the probability of its fraction (u)."""
    if rounding == "nearest":
        return torch.round(t)
    whole = torch.floor(t.abs())
    fraction = t.abs() - whole  # exact, so no tie is missed or invented
    up = fraction >= 0.5 if rounding == "half_away" else fraction > u
    return torch.copysign(whole + up, t)


def round_to_element(
    x: Tensor,
    element: Element,
    rounding: Rounding,
    overflow: Overflow,
    u: Tensor | None = None,
) -> Tensor:
    """float32 x on the element's grid, as float32. NaN stays NaN.

    A value overflows when what it rounds to, with the exponent unbounded, exceeds the largest finite one. Infinity
    overflows always. "saturate" gives the largest finite value, "inf" infinity.
    """
    lowest = element.tiers[0][0]
    exponent = floor_log2(x).clamp(lowest, element.emax + 1)
    mantissa_bits = torch.full_like(exponent, element.tiers[0][1])
    for tier_lowest, tier_bits in element.tiers[1:]:
        mantissa_bits = torch.where(exponent >= tier_lowest, tier_bits, mantissa_bits)
    step = exponent - mantissa_bits
    y = round_to_integer(times_pow2(x, -step), rounding, u) * pow2(step)
    limit = element.max if overflow == "saturate" else torch.inf
    y = torch.where(y.abs() > element.max, torch.copysign(torch.full_like(y, limit), y), y)
    return y if element.signed_zero else y + 0.0


def block_scale_exponent(absmax: Tensor, element: Element, rule: str) -> Tensor:
    """Exponent k of a block's E8M0 scale 2^k, int32 in [-127, 127]. MX specification 6.3; absmax finite.

    floor   floor(log2 absmax) - emax
    ceil    the same with log2 rounded up
    even    floor, after absmax is rounded to the element's mantissa (half an ulp added)
    rceil   the smallest k for which max · 2^k >= absmax
    """
    lifted, lift = lift_subnormals(absmax)
    bits = lifted.view(torch.int32)
    if rule == "even":
        bits = bits + (1 << (22 - element.mantissa_bits))
    exponent = (bits >> 23) - 127 - lift - element.emax
    if rule in ("ceil", "rceil"):
        # absmax = m · 2^e with 1 <= m < 2: one more where m exceeds 1 (ceil), or the mantissa of max (rceil).
        threshold = 1.0 if rule == "ceil" else element.max / 2.0**element.emax
        mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
        exponent = exponent + (mantissa > threshold)
    return exponent.clamp(-E8M0_BIAS, E8M0_BIAS)


def nan_max(x: Tensor) -> Tensor:
    """max|x| over the last axis, NaN if any is NaN; 0 for an empty axis. [groups, block] -> [groups, 1]"""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1))
    return x.abs().amax(-1, keepdim=True)


def tensor_scale(absmax: Tensor, fmt: Format) -> Tensor:
    """FP8 current scaling: max / absmax in float32, absmax floored at 1e-12. 0 if absmax is Inf, NaN if NaN."""
    return torch.full_like(absmax, fmt.max) / absmax.clamp(min=1e-12)


def tensor_pow2_scale(absmax: Tensor, element: Element) -> tuple[Tensor, Tensor]:
    """HiFloat8's optional scale for a whole tensor: its exponent k (int32) and 2^k, NaN if absmax is not finite.

    k puts absmax into the highest binade that has all mantissa bits (exponent 3), k in [-127, 127]; 0 for an all-zero
    tensor. arXiv 2409.16626 leaves the target open; aligned with the largest value, 2^15, the tensor's largest elements
    would keep 1 mantissa bit of 3.
    """
    exponent = (floor_log2(absmax) - element.precise_emax).clamp(-E8M0_BIAS, E8M0_BIAS)
    exponent = torch.where((absmax > 0) & absmax.isfinite(), exponent, 0)
    return exponent, torch.where(absmax.isfinite(), pow2(exponent), torch.nan)


def nvfp4_encode_scale(absmax: Tensor) -> Tensor:
    """NVFP4's tensor scale S = min(2688 / absmax, largest float32); 1 where absmax is 0."""
    # A Python number over a tensor, or a tensor over one on CUDA, would be a multiplication by a rounded reciprocal.
    scale = (torch.full_like(absmax, NVFP4_TENSOR_MAX) / absmax).clamp(max=FLOAT32_MAX)
    return torch.where(absmax == 0, torch.ones_like(scale), scale)


def nvfp4_decode_scale(absmax: Tensor) -> Tensor:
    """What NVFP4 multiplies back by: absmax / 2688 in float32."""
    return absmax / torch.full_like(absmax, NVFP4_TENSOR_MAX)


def nvfp4_block_scale(block_absmax: Tensor, encode_scale: Tensor) -> Tensor:
    """NVFP4's E4M3 block scale, e4m3(blockmax · (S · (1/6))), saturating. Zero where it underflows."""
    sixth = torch.tensor(1.0 / 6.0, dtype=torch.float32, device=block_absmax.device)
    return round_to_element(block_absmax * (encode_scale * sixth), E4M3, "nearest", "saturate")


def quantize_blocks(x: Tensor, plan: Plan, absmax: Tensor, u: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x [groups, block] float32 -> values on the element's grid, the blocks' scales, the dequantized values.

    absmax is the whole tensor's largest magnitude (a scalar tensor, NaN if any element is), used by formats with a
    tensor scale. The scales are what an element is multiplied by: [groups, 1], or a scalar for a tensor scale, or 1.
    A block that holds NaN or Inf gets the scale NaN and is NaN throughout.
    """
    element = plan.format.element
    if plan.scale_rule == "none":
        y = round_to_element(x, element, plan.rounding, plan.overflow, u)
        return y, torch.ones((), device=x.device), y
    if plan.scale_rule == "pow2":
        exponent, scale = tensor_pow2_scale(absmax, element)
        values = round_to_element(times_pow2(x, -exponent), element, plan.rounding, plan.overflow, u)
        return values, scale, values * scale
    if plan.scale_rule == "amax":
        scale = tensor_scale(absmax, plan.format)
        values = round_to_element(x * scale, element, plan.rounding, plan.overflow, u)
        return values, 1.0 / scale, values / scale
    block_absmax = nan_max(x)
    if plan.scale_rule == "nvfp4":
        encode = nvfp4_encode_scale(absmax)
        block_scale = nvfp4_block_scale(block_absmax, encode)
        inverse = (1.0 / (block_scale * (1.0 / encode))).clamp(max=FLOAT32_MAX)
        clamped = (x * inverse).clamp(-element.max, element.max)
        values = round_to_element(clamped, element, plan.rounding, "saturate", u)
        return values, block_scale, values * block_scale * nvfp4_decode_scale(absmax)
    exponent = block_scale_exponent(block_absmax, element, plan.scale_rule)
    scale = torch.where(block_absmax.isfinite(), pow2(exponent), torch.nan)
    values = round_to_element(x * pow2(-exponent), element, plan.rounding, plan.overflow, u)
    return values, scale, values * scale


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


def quantize_dequantize(x: Tensor, plan: Plan, dim: int, absmax: Tensor) -> tuple[Tensor, Tensor]:
    """x (any shape, not empty) -> (y of x's shape and dtype, scales [groups, 1] in the order of `to_blocks`).

    absmax as in `quantize_blocks`. Stochastic rounding draws its noise by an element's place in x.
    """
    if plan.block_size is None:  # nothing is shared along an axis
        blocks = x.reshape(1, -1)
    else:
        blocks = to_blocks(x, dim, plan.block_size)
    u = None
    if plan.rounding == "stochastic":
        u = noise(x.numel(), plan.seed, x.device).reshape(x.shape)
        u = u.reshape(1, -1) if plan.block_size is None else to_blocks(u, dim, plan.block_size)
    _, scales, y = quantize_blocks(blocks.float(), plan, absmax, u)
    y = y.to(x.dtype)
    return y.reshape(x.shape) if plan.block_size is None else from_blocks(y, x, dim), scales
