"""The Triton twins of `reference`: the same bits, in one pass over memory.

One kernel serves every format and either axis. A tensor is [outer, axis, inner], row-major; a *block* is `block_size`
neighbours along the axis, and a program takes `groups` blocks. With inner = 1 the tile is [groups, block] (a block's
values are adjacent), else [block, groups] (adjacent blocks are), so that memory is read in order both ways.

Rounding uses the float adder: (v + c) - c with c = 1.5 · 2^(23 + s) rounds v to a multiple of 2^s, ties to even.
Ties away from zero and stochastic rounding correct that result by one step where the exact difference asks for it.

On a machine without CUDA, Triton's interpreter runs the same source (large tiles: its cost is per operation, not per
value). Whether the kernels are compiled or interpreted is decided once, when this module is imported.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch
from torch import Tensor

from binade.quant.elements import E4M3, Overflow, Rounding
from binade.quant.reference import Plan
from binade.quant.scaling import NVFP4_TENSOR_MAX

INTERPRETED = {"1": True, "0": False}.get(os.environ.get("TRITON_INTERPRET", ""), not torch.cuda.is_available())
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

__all__ = ["INTERPRETED", "check_device", "quantize_dequantize", "tl", "triton"]


def _interpret_library() -> None:
    """Hand Triton's own functions that are written in Triton (tl.max, tl.sum) to the interpreter. They belong to the
    compiler if another library, such as transformers, imported triton before this module chose the interpreter."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for module in (tl, tl.standard, tl.core, tl.math, tl.random):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))


if INTERPRETED:
    _interpret_library()

# Values a program takes. The interpreter handles at most 2^20 elements in a tile.
TILE = 1 << 17 if INTERPRETED else 1 << 12

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
NEAREST, HALF_AWAY, STOCHASTIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NONE, FLOOR, CEIL, EVEN, RCEIL, AMAX, NVFP4 = (tl.constexpr(i) for i in range(7))  # see scaling.SCALINGS
NVFP4_LIMIT = tl.constexpr(NVFP4_TENSOR_MAX)
SIXTH = tl.constexpr(0.1666666716337204)  # 1/6 in float32

# Kernel launches in this process so far.
launches = 0

ROUNDINGS = {Rounding.NEAREST: 0, Rounding.HALF_AWAY: 1, Rounding.STOCHASTIC: 2}


@triton.jit
def pow2(exponent):
    """2^exponent for -149 <= exponent <= 127."""
    normal = (tl.maximum(exponent, -126) + 127) << 23
    subnormal = 1 << tl.minimum(tl.maximum(exponent + 149, 0), 22)
    return tl.where(exponent >= -126, normal, subnormal).to(tl.float32, bitcast=True)


@triton.jit
def mix(h):
    """lowbias32, on uint32."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def round_to_element(
    x,
    u,
    TIERS: tl.constexpr,
    EMAX: tl.constexpr,
    MAX: tl.constexpr,
    LIMIT: tl.constexpr,
    ROUNDING: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    SCALED: tl.constexpr,  # |x| is below 2^(EMAX + 1), or NaN or Inf in a block that becomes NaN
):
    """float32 x on the element's grid. See reference.round_to_element."""
    bits = x.to(tl.int32, bitcast=True)
    v = tl.abs(x)
    # 2^exponent is x without its mantissa; 0 for float32 subnormals, which lie below every element's lowest exponent.
    # It is held within the element's own range, one binade more to see overflow.
    binade = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    WIDE: tl.constexpr = EMAX > 64
    if WIDE:
        # bfloat16's range is float32's: move large values down and small ones up, or the constant would leave it.
        shift = tl.where(v < 1.0, 2.0**32, 2.0**-32)
        binade = tl.minimum(tl.maximum(binade, 2.0 ** TIERS[0][0]), 2.0**EMAX) * shift
        v = v * shift
    else:
        binade = tl.maximum(binade, 2.0 ** TIERS[0][0])
        if not SCALED:
            binade = tl.minimum(binade, 2.0 * 2.0**EMAX)
    step = 2.0 ** -TIERS[0][1]
    for i in tl.static_range(1, len(TIERS)):
        step = tl.where(binade >= 2.0 ** TIERS[i][0], 2.0 ** -TIERS[i][1], step)
    c = binade * (step * (1.5 * 2.0**23))
    y = (v + c) - c
    if ROUNDING != NEAREST:
        ulp = binade * step
        gap = v - y  # exact
        if ROUNDING == HALF_AWAY:
            y = tl.where(gap == 0.5 * ulp, y + ulp, y)
        else:
            floor = tl.where(gap < 0, y - ulp, y)
            y = tl.where(v - floor > u * ulp, floor + ulp, floor)
    if WIDE:
        y = y * tl.where(shift < 1.0, 2.0**32, 2.0**-32)
    if LIMIT == MAX:
        y = tl.minimum(y, MAX, propagate_nan=tl.PropagateNan.ALL)
    else:
        y = tl.where(y > MAX, LIMIT, y)
    y = (y.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)
    if not SIGNED_ZERO:
        y += 0.0
    return y


@triton.jit
def block_scale_exponent(absmax, RULE: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr):
    """The exponent of a block's E8M0 scale. See reference.block_scale_exponent."""
    subnormal = absmax < 1.1754943508222875e-38
    bits = tl.where(subnormal, absmax * 16777216.0, absmax).to(tl.int32, bitcast=True)
    if RULE == EVEN:
        bits += 1 << (22 - MANTISSA)
    exponent = (bits >> 23) - 127 - tl.where(subnormal, 24, 0) - EMAX
    if RULE == CEIL or RULE == RCEIL:
        THRESHOLD: tl.constexpr = 1.0 if RULE == CEIL else MAX / 2.0**EMAX
        mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        exponent += (mantissa > THRESHOLD).to(tl.int32)
    return tl.minimum(tl.maximum(exponent, -127), 127)


@triton.jit(do_not_specialize=["seed"])
def quantize_dequantize_kernel(
    x_ptr,
    y_ptr,
    scale_ptr,
    absmax_ptr,  # float32 scalar: the whole tensor's largest magnitude
    blocks,  # number of blocks: outer · blocks_per_row · inner
    axis,
    inner,
    blocks_per_row,
    seed,
    BLOCK: tl.constexpr,
    BLOCK_POW2: tl.constexpr,
    GROUPS: tl.constexpr,
    ADJACENT: tl.constexpr,  # inner == 1
    WHOLE: tl.constexpr,  # see `_tiling`
    TIERS: tl.constexpr,
    SCALE_TIERS: tl.constexpr,  # E4M3's, for NVFP4
    EMAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    MAX: tl.constexpr,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    ROUNDING: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    WRITE_SCALES: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    lane = tl.arange(0, BLOCK_POW2)
    block = program * GROUPS + group
    REDUCED: tl.constexpr = 1 if ADJACENT else 0
    if WHOLE:
        # Whole blocks, whole tiles: where a tile starts is scalar arithmetic, within it 32 bits do, nothing is masked.
        if ADJACENT:
            start = program * (GROUPS * BLOCK)
            within = group[:, None] * BLOCK + lane[None, :]  # [GROUPS, BLOCK]
        else:
            strips = inner // GROUPS
            start = (program // strips) * BLOCK * inner + (program % strips) * GROUPS
            within = lane[:, None] * inner + group[None, :]  # [BLOCK, GROUPS]
        offsets = start + within
        x = tl.load(x_ptr + start + within).to(tl.float32)
    else:
        column = block % inner
        row_block = block // inner
        first = (row_block % blocks_per_row) * BLOCK  # along the axis
        base = (row_block // blocks_per_row) * axis * inner + first * inner + column
        length = tl.where(block < blocks, tl.minimum(axis - first, BLOCK), 0)
        if ADJACENT:
            offsets = base[:, None] + lane[None, :]  # [GROUPS, BLOCK]
            inside = lane[None, :] < length[:, None]
        else:
            offsets = base[None, :] + lane[:, None].to(tl.int64) * inner  # [BLOCK, GROUPS]
            inside = lane[:, None] < length[None, :]
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if ROUNDING == STOCHASTIC:
        hashed = mix(offsets.to(tl.uint32) ^ mix(seed.to(tl.uint32)))
        u = (hashed >> 8).to(tl.float32) * 5.9604644775390625e-08
    else:
        u = 0.0
    if RULE == NONE:
        scale = 1.0
        y = round_to_element(x, u, TIERS, EMAX, MAX, LIMIT, ROUNDING, SIGNED_ZERO, False)
    elif RULE == AMAX:
        absmax = tl.load(absmax_ptr)
        encode = tl.div_rn(tl.full([], MAX, tl.float32), tl.where(absmax < 1e-12, 1e-12, absmax))
        values = round_to_element(x * encode, u, TIERS, EMAX, MAX, LIMIT, ROUNDING, SIGNED_ZERO, False)
        scale = 1.0
        y = tl.div_rn(values, encode)
    else:
        # NaN must win: the largest bit pattern of |x| is a NaN's if there is one, then infinity's.
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        block_absmax = tl.max(magnitude, axis=REDUCED, keep_dims=True).to(tl.float32, bitcast=True)
        if RULE == NVFP4:
            absmax = tl.load(absmax_ptr)
            limit = tl.full([], NVFP4_LIMIT, tl.float32)
            one = tl.full([], 1.0, tl.float32)
            encode = tl.where(absmax == 0.0, 1.0, tl.div_rn(limit, absmax))
            encode = tl.where(encode > FLOAT32_MAX, FLOAT32_MAX, encode)
            wanted = block_absmax * (encode * SIXTH)
            scale = round_to_element(wanted, 0.0, SCALE_TIERS, 8, 448.0, 448.0, NEAREST, True, False)
            decode = scale * tl.div_rn(one, encode)
            inverse = tl.div_rn(one, decode)
            inverse = tl.where(inverse > FLOAT32_MAX, FLOAT32_MAX, inverse)
            clamped = tl.minimum(x * inverse, MAX, propagate_nan=tl.PropagateNan.ALL)
            clamped = tl.maximum(clamped, -MAX, propagate_nan=tl.PropagateNan.ALL)
            values = round_to_element(clamped, u, TIERS, EMAX, MAX, MAX, ROUNDING, SIGNED_ZERO, True)
            y = values * scale * tl.div_rn(absmax, limit)
        else:
            exponent = block_scale_exponent(block_absmax, RULE, EMAX, MANTISSA, MAX)
            finite = block_absmax <= FLOAT32_MAX
            scale = tl.where(finite, pow2(exponent), float("nan"))
            values = round_to_element(x * pow2(-exponent), u, TIERS, EMAX, MAX, LIMIT, ROUNDING, SIGNED_ZERO, True)
            y = values * scale
        if WRITE_SCALES:
            block_offsets = block[:, None] if ADJACENT else block[None, :]
            tl.store(scale_ptr + block_offsets, scale, mask=block_offsets < blocks)
    if WHOLE:
        tl.store(y_ptr + start + within, y.to(y_ptr.dtype.element_ty))
    else:
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


def _tiling(block_size: int, axis: int, inner: int, blocks: int) -> tuple[int, bool]:
    """Blocks to a program, and whether tiles are whole: no block is short, no tile is part empty or spans two rows of
    blocks. Whole tiles need no mask and no division per block, which would otherwise cost more than the rounding."""
    block_pow2 = triton.next_power_of_2(block_size)
    groups = max(1, min(TILE // block_pow2, triton.next_power_of_2(blocks)))
    fit = math.gcd(groups, blocks if inner == 1 else inner)
    # A smaller tile that fits is worth it unless it is tiny, or interpreted, where each program costs milliseconds.
    enough = groups if INTERPRETED else max(1, min(groups, 1024 // block_pow2))
    whole = block_size == block_pow2 and axis % block_size == 0 and fit >= enough and block_size * inner < 2**31
    return (fit, True) if whole else (groups, False)


def check_device(x: Tensor) -> None:
    """Raises ValueError unless the kernels of this process can run on x's device."""
    if x.is_cuda == INTERPRETED:
        have = "interpreted" if INTERPRETED else "compiled for CUDA"
        raise ValueError(
            f"the Triton kernels are {have} in this process, the tensor is on {x.device}: "
            "set TRITON_INTERPRET=1 before the process starts to run on CPU tensors, unset it for CUDA"
        )


def quantize_dequantize(x: Tensor, plan: Plan, dim: int, absmax: Tensor, want_scales: bool) -> tuple[Tensor, Tensor]:
    """x (any shape, contiguous, not empty) -> (y of x's shape and dtype, scales).

    Scales are float32: [outer · blocks of a row · inner] for a block format if wanted, else empty.
    """
    check_device(x)
    element = plan.format.element
    dim = dim % x.dim() if x.dim() else 0
    axis = x.shape[dim] if x.dim() else 1
    inner = x.shape[dim + 1 :].numel() if x.dim() else 1
    outer = x.numel() // (axis * inner)
    if plan.block_size is None:  # nothing is shared along the axis: one flat row, cut anywhere
        outer, axis, inner = 1, x.numel(), 1
    block_size = plan.block_size or min(TILE, 1024)
    blocks_per_row = -(-axis // block_size)
    blocks = outer * blocks_per_row * inner
    global launches
    launches += 1
    groups, whole = _tiling(block_size, axis, inner, blocks)
    dtype = x.dtype
    if INTERPRETED:  # its own conversions flush bfloat16's subnormals to zero
        x = x.float()
    y = torch.empty_like(x)
    scales = torch.empty(blocks if want_scales and plan.block_size else 0, dtype=torch.float32, device=x.device)
    with np.errstate(all="ignore"):  # the interpreter computes in numpy, which would warn of every NaN and Inf
        quantize_dequantize_kernel[(triton.cdiv(blocks, groups),)](
            x,
            y,
            scales,
            absmax,
            blocks,
            axis,
            inner,
            blocks_per_row,
            plan.seed,
            BLOCK=block_size,
            BLOCK_POW2=triton.next_power_of_2(block_size),
            GROUPS=groups,
            ADJACENT=inner == 1,
            WHOLE=whole,
            TIERS=element.tiers,
            SCALE_TIERS=E4M3.tiers,
            EMAX=element.emax,
            MANTISSA=element.mantissa_bits,
            MAX=element.max,
            LIMIT=element.max if plan.overflow == Overflow.SATURATE else float("inf"),
            RULE=plan.scaling.kernel,
            ROUNDING=ROUNDINGS[plan.rounding],
            SIGNED_ZERO=element.signed_zero,
            WRITE_SCALES=scales.numel() > 0,
            enable_fp_fusion=False,
        )
    return y.to(dtype), scales
