"""The Triton kernels that round a tensor, or add up the errors of rounding it; `triton_kernels` launches them.

A tensor is [outer, axis, inner], row-major; a *block* is `block_size` neighbors along the axis, and a program takes
`groups` blocks. With inner = 1 the tile is [groups, block] (a block's values are adjacent), else [block, groups]
(adjacent blocks are), so that memory is read in order both ways. `triton_arithmetic` has the functions that they call.
"""

from __future__ import annotations

from typing import NamedTuple

from binade.quant.backends.triton_arithmetic import (
    EACH,
    FLOAT32_MAX,
    GIVEN,
    HIF4,
    LARGEST,
    NEAREST,
    NVFP4,
    SHARED,
    STOCHASTIC,
    add_errors,
    block_scale,
    factor,
    has_quotient,
    hif4_scale,
    is_usual,
    largest,
    noise,
    quotient,
    read_back,
    round_to_element,
    runs_of,
    tensor_scale,
    tl,
    triton,
    widen,
)
from binade.quant.backends.triton_scores import BINS, NUMBERS, ROUNDED, WORK, add_score, as_stored
from binade.quant.elements import Tier

_NUMBERS, _WORK, _OUT = (tl.constexpr(size) for size in (NUMBERS, WORK, NUMBERS + BINS))


class How(NamedTuple):
    """What `round_tile` is compiled for.

    block       values of a block along the axis
    block_pow2  the next power of two
    groups      blocks of a program
    adjacent    whether inner is 1
    whole       see `_tiling`
    tiers, taper, emax, mantissa, max, signed_zero   of the element
    scale_tiers of the block scale's element, for NVFP4 and HIF4
    limit       what values saturate at; infinite if they do not
    inverse     1 / max in float32
    rule        how scales are found: of `Kernel`, GIVEN, LARGEST, ROUNDED or SHARED
    rounding    of ROUNDINGS
    scales      whether the scales are written; for GIVEN and ROUNDED, read
    factors     of each given factor: 0, ALL or EACH
    bounded     as in `round_to_element`
    score       0: y is written; else its errors are added up: SUMS, BLOCKS or RUNS
    stored      for a score: the dtype of y, see `as_stored`
    limits      for a score: kinds of (left, right), -1 if none saturates; the numbers of those without one
    shared      for SHARED: see `Amax.shared`
    """

    block: int
    block_pow2: int
    groups: int
    adjacent: bool
    whole: bool
    tiers: tuple[Tier, ...]
    taper: int
    scale_tiers: tuple[Tier, ...]
    emax: int
    mantissa: int
    max: float
    limit: float
    inverse: float
    rule: int
    rounding: int
    signed_zero: bool
    scales: bool
    factors: tuple[int, ...] = (0, 0, 0, 0)
    bounded: bool = False
    score: int = 0
    stored: int = 0
    limits: tuple[float, ...] = (-1, -1, 0.0, 0.0)
    shared: tuple[float, float, bool] = (0.0, 0.0, False)


@triton.constexpr_function
def part(constant, index):
    """constant[index], which Triton 3.5 does not find by itself where that is a tuple of tuples."""
    return constant[index]


@triton.jit
def round_tile(
    program,
    programs,
    x_ptr,
    y_ptr,
    scale_ptr,  # the block scales; for LARGEST the largest magnitudes
    absmax_ptr,  # float32 scalar: the whole tensor's largest magnitude, for NVFP4 and SHARED
    encode_ptr,  # given factors, see scaling.Factors
    given_ptr,
    outer_ptr,
    divisor_ptr,
    left_ptr,  # float64, for a score: see `Scaling.saturation`
    right_ptr,
    partial_ptr,  # of a score, see `add_score`
    work_ptr,
    out_ptr,
    runs_ptr,
    blocks,  # number of blocks: outer · blocks_per_row · inner
    axis,
    inner,
    blocks_per_row,
    seed,
    HOW: tl.constexpr,
):
    """Round the tile of a program, and write it or add up its errors."""
    BLOCK: tl.constexpr = part(HOW, 0)
    BLOCK_POW2: tl.constexpr = part(HOW, 1)
    GROUPS: tl.constexpr = part(HOW, 2)
    ADJACENT: tl.constexpr = part(HOW, 3)
    WHOLE: tl.constexpr = part(HOW, 4)
    TIERS: tl.constexpr = part(HOW, 5)
    TAPER: tl.constexpr = part(HOW, 6)
    SCALE_TIERS: tl.constexpr = part(HOW, 7)
    EMAX: tl.constexpr = part(HOW, 8)
    MANTISSA: tl.constexpr = part(HOW, 9)
    MAX: tl.constexpr = part(HOW, 10)
    LIMIT: tl.constexpr = part(HOW, 11)
    INVERSE: tl.constexpr = part(HOW, 12)
    RULE: tl.constexpr = part(HOW, 13)
    ROUNDING: tl.constexpr = part(HOW, 14)
    SIGNED_ZERO: tl.constexpr = part(HOW, 15)
    WRITE_SCALES: tl.constexpr = part(HOW, 16)
    FACTORS: tl.constexpr = part(HOW, 17)
    BOUNDED: tl.constexpr = part(HOW, 18)
    SCORE: tl.constexpr = part(HOW, 19)
    STORED: tl.constexpr = part(HOW, 20)
    LIMITS: tl.constexpr = part(HOW, 21)
    BASE: tl.constexpr = part(HOW, 22)
    program = program.to(tl.int64)
    group = tl.arange(0, GROUPS)
    lane = tl.arange(0, BLOCK_POW2)
    block = program * GROUPS + group
    REDUCED: tl.constexpr = 1 if ADJACENT else 0
    PRECISE: tl.constexpr = MANTISSA <= 3 and LIMIT == MAX  # at most 4 significant bits; finite or NaN
    if WHOLE:
        # Whole blocks and whole tiles: the start of a tile is scalar arithmetic, 32 bits are enough within it, and
        # there is no mask.
        if ADJACENT:
            start = program * (GROUPS * BLOCK)
            rows, columns = group[:, None] * BLOCK, lane[None, :]  # [GROUPS, BLOCK]
            within = rows + columns
        else:
            strips = inner // GROUPS
            start = (program // strips) * BLOCK * inner + (program % strips) * GROUPS
            rows, columns = lane[:, None] * inner, group[None, :]  # [BLOCK, GROUPS]
            within = rows + columns
            if GROUPS >= 64:  # narrow enough that a thread has whole blocks, and computes per-block values only once
                within = tl.max_contiguous(within, [1, GROUPS // 32])
        x = tl.load(x_ptr + start + within)
    else:
        column = block % inner
        row_block = block // inner
        first = (row_block % blocks_per_row) * BLOCK  # along the axis
        base = (row_block // blocks_per_row) * axis * inner + first * inner + column
        length = tl.where(block < blocks, tl.minimum(axis - first, BLOCK), 0)
        if ADJACENT:
            rows, columns = base[:, None], lane[None, :]  # [GROUPS, BLOCK]
            inside = lane[None, :] < length[:, None]
        else:
            rows, columns = lane[:, None].to(tl.int64) * inner, base[None, :]  # [BLOCK, GROUPS]
            inside = lane[:, None] < length[None, :]
        start, within = tl.full([], 0, tl.int64), rows + columns
        x = tl.load(x_ptr + start + within, mask=inside, other=0.0)
    if RULE != LARGEST:
        x = widen(x)
    known = block if WHOLE else tl.minimum(block, blocks - 1)
    finer = 1.0  # the factor of a value within its block
    if ROUNDING == STOCHASTIC:
        k = noise(start, rows, columns, seed)
    else:
        k = 0
    if RULE == ROUNDED:
        y = widen(tl.load(y_ptr + start + within) if WHOLE else tl.load(y_ptr + start + within, mask=inside, other=0.0))
    elif RULE == SHARED:
        whole = tensor_scale(tl.load(absmax_ptr), BASE[0], BASE[1], BASE[2])
        values = round_to_element(x * whole, k, TIERS, TAPER, EMAX, MAX, LIMIT, ROUNDING, SIGNED_ZERO, BOUNDED)
        if PRECISE and is_usual(whole):
            y = quotient(values, whole)
        else:
            y = tl.div_rn(values, tl.broadcast_to(whole, values.shape))
    elif RULE == GIVEN:
        encoded = x * factor(encode_ptr, known, FACTORS[0], ADJACENT) if FACTORS[0] else x
        values = round_to_element(encoded, k, TIERS, TAPER, EMAX, MAX, LIMIT, ROUNDING, SIGNED_ZERO, BOUNDED)
        if PRECISE and has_quotient(known, outer_ptr, divisor_ptr, FACTORS, ADJACENT):
            y = read_back(values, known, given_ptr, outer_ptr, divisor_ptr, FACTORS, ADJACENT, True)
        else:
            y = read_back(values, known, given_ptr, outer_ptr, divisor_ptr, FACTORS, ADJACENT, False)
    else:
        if RULE == LARGEST:
            scale = largest(x, REDUCED).to(tl.float32)
        elif RULE == HIF4:
            # 64 values as 8 · 2 · 4; eights and fours are of neighbors along that axis.
            AT: tl.constexpr = 1 if ADJACENT else 0
            parts = tl.reshape(x, (GROUPS, 8, 2, 4) if ADJACENT else (8, 2, 4, GROUPS))
            fours = largest(parts, AT + 2)
            eights = largest(fours, AT + 1)
            scale, inverse = hif4_scale(largest(eights, AT), SCALE_TIERS)
            e8 = eights * inverse >= 4.0
            e4 = fours * inverse >= tl.where(e8, 4.0, 2.0)
            encode = tl.where(e8, inverse * 0.5, inverse)
            encode = tl.where(e4, encode * 0.5, encode)
            values = round_to_element(parts * encode, k, TIERS, TAPER, EMAX, MAX, LIMIT, ROUNDING, SIGNED_ZERO)
            decode = tl.where(e8, scale * 2.0, scale)
            decode = tl.where(e4, decode * 2.0, decode)
            y = tl.reshape(values * decode, x.shape)
            finer = tl.reshape(tl.where(e8, 2.0, 1.0) * tl.where(e4, 2.0, 1.0) + tl.zeros_like(parts), x.shape)
            scale = tl.reshape(scale, (GROUPS, 1) if ADJACENT else (1, GROUPS))
        elif RULE == NVFP4:
            absmax = tl.load(absmax_ptr)
            limit = tl.full([], 448.0 * MAX, tl.float32)
            one = tl.full([], 1.0, tl.float32)
            encode = tl.where(absmax == 0.0, 1.0, tl.div_rn(limit, absmax))
            encode = tl.where(encode > FLOAT32_MAX, FLOAT32_MAX, encode)
            wanted = largest(x, REDUCED) * (encode * INVERSE)
            scale = round_to_element(wanted, 0, SCALE_TIERS, 0, 8, 448.0, 448.0, NEAREST, True)
            decode = scale * tl.div_rn(one, encode)
            inverse = tl.div_rn(one, decode)
            inverse = tl.where(inverse > FLOAT32_MAX, FLOAT32_MAX, inverse)
            values = round_to_element(x * inverse, k, TIERS, TAPER, EMAX, MAX, MAX, ROUNDING, SIGNED_ZERO)
            y = values * scale * tl.div_rn(absmax, limit)
        else:
            scale, inverse = block_scale(largest(x, REDUCED), RULE, EMAX, MANTISSA, MAX)
            values = round_to_element(x * inverse, k, TIERS, TAPER, EMAX, MAX, LIMIT, ROUNDING, SIGNED_ZERO)
            y = values * scale
        if WRITE_SCALES:
            block_offsets = block[:, None] if ADJACENT else block[None, :]
            tl.store(scale_ptr + block_offsets, scale, mask=None if WHOLE else block_offsets < blocks)
    if SCORE:
        ok = tl.abs(x) <= FLOAT32_MAX
        if not WHOLE:
            ok = ok & inside
        if RULE == GIVEN or RULE == ROUNDED or RULE == SHARED:
            one = tl.full([GROUPS, 1] if ADJACENT else [1, GROUPS], 1.0, tl.float32)
            scale = factor(scale_ptr, known, EACH, ADJACENT) if WRITE_SCALES else one
        if RULE == NVFP4:
            left, right = 448.0 * MAX, absmax.to(tl.float64) * MAX
        elif LIMITS[0] >= 0:
            left = factor(left_ptr, known, LIMITS[0], ADJACENT) if LIMITS[0] else LIMITS[2]
            right = factor(right_ptr, known, LIMITS[1], ADJACENT) if LIMITS[1] else LIMITS[3]
            if RULE == SHARED:  # as in `Amax.saturation`
                right = tl.where(whole == 1.0, right, float("inf"))
        over = ok & False
        if RULE == NVFP4 or LIMITS[0] >= 0:
            over = (tl.abs(x).to(tl.float64) * left > scale.to(tl.float64) * finer * right) & (scale > 0.0)
        add_score(
            *(x, as_stored(y, STORED), ok, over, tl.reshape(scale, [GROUPS]), BLOCK if WHOLE else length),
            *(block, blocks, partial_ptr, work_ptr, out_ptr, runs_ptr, program, programs, REDUCED, SCORE),
        )
    elif RULE == LARGEST:
        pass
    elif WHOLE:
        tl.store(y_ptr + start + within, y.to(y_ptr.dtype.element_ty))
    else:
        tl.store(y_ptr + start + within, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def quantize_dequantize_kernel(
    x_ptr,  # as in `round_tile`
    y_ptr,
    scale_ptr,
    absmax_ptr,
    encode_ptr,
    given_ptr,
    outer_ptr,
    divisor_ptr,
    left_ptr,
    right_ptr,
    partial_ptr,
    work_ptr,
    out_ptr,
    runs_ptr,
    blocks,
    axis,
    inner,
    blocks_per_row,
    seed,
    HOW: tl.constexpr,
):
    round_tile(
        *(tl.program_id(0), tl.num_programs(0), x_ptr, y_ptr, scale_ptr, absmax_ptr),
        *(encode_ptr, given_ptr, outer_ptr, divisor_ptr, left_ptr, right_ptr),
        *(partial_ptr, work_ptr, out_ptr, runs_ptr, blocks, axis, inner, blocks_per_row, seed, HOW),
    )


@triton.jit(do_not_specialize=["seed"])
def score_formats_kernel(
    x_ptr,
    absmax_ptr,
    partial_ptr,  # float64 [formats, NUMBERS, most]
    work_ptr,  # int64 [formats, WORK]
    out_ptr,  # float64 [formats, NUMBERS + BINS]
    numel,
    axis,
    inner,
    most,  # programs of the format that has most
    seed,
    HOWS: tl.constexpr,  # of each format
    FLAT: tl.constexpr,  # of each format: whether the tensor is one row
):
    """Scores of several formats. A program scores a tile in one format after the other, so that all but the first find
    its values in the cache."""
    for i in tl.static_range(len(HOWS)):
        score_format(
            *(x_ptr, absmax_ptr, partial_ptr + i * most * _NUMBERS, work_ptr + i * _WORK, out_ptr + i * _OUT),
            *(numel, numel if FLAT[i] else axis, 1 if FLAT[i] else inner, seed, part(HOWS, i)),
        )


@triton.jit
def score_format(x_ptr, absmax_ptr, partial_ptr, work_ptr, out_ptr, numel, axis, inner, seed, HOW: tl.constexpr):
    blocks_per_row = tl.cdiv(axis, part(HOW, 0))
    blocks = numel // axis * blocks_per_row
    program, programs = tl.program_id(0), tl.cdiv(blocks, part(HOW, 2))
    if program < programs:
        round_tile(
            *(program, programs, x_ptr, x_ptr, x_ptr, absmax_ptr, x_ptr, x_ptr, x_ptr, x_ptr, x_ptr, x_ptr),
            *(partial_ptr, work_ptr, out_ptr, x_ptr, blocks, axis, inner, blocks_per_row, seed, HOW),
        )


@triton.jit(do_not_specialize=["blocks"])  # 1 would become a constant, which has no dtype
def run_errors_kernel(
    x_ptr,
    out_ptr,
    encode_ptr,
    given_ptr,
    outer_ptr,
    divisor_ptr,
    blocks,
    axis,
    inner,
    blocks_per_row,
    LENGTH: tl.constexpr,  # of a whole block
    GROUPS: tl.constexpr,
    WHOLE: tl.constexpr,  # no block is short, and GROUPS divides their number
    TIERS: tl.constexpr,
    TAPER: tl.constexpr,
    EMAX: tl.constexpr,
    MAX: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    SQUARE: tl.constexpr,
    FACTORS: tl.constexpr,
    PRECISE: tl.constexpr,  # elements have at most 4 significant bits
):
    """For each block, the float32 sum, from left to right, of |error| or its square, rounded to nearest."""
    block, base, here = runs_of(blocks, axis, inner, blocks_per_row, LENGTH, GROUPS)
    known = tl.minimum(block, blocks - 1)
    if PRECISE and has_quotient(known, outer_ptr, divisor_ptr, FACTORS, False):
        total = add_errors(
            *(x_ptr, encode_ptr, given_ptr, outer_ptr, divisor_ptr, known, base, here, inner),
            *(LENGTH, WHOLE, TIERS, TAPER, EMAX, MAX, SIGNED_ZERO, SQUARE, FACTORS, True),
        )
    else:
        total = add_errors(
            *(x_ptr, encode_ptr, given_ptr, outer_ptr, divisor_ptr, known, base, here, inner),
            *(LENGTH, WHOLE, TIERS, TAPER, EMAX, MAX, SIGNED_ZERO, SQUARE, FACTORS, False),
        )
    tl.store(out_ptr + block[None, :], total, mask=block[None, :] < blocks)


@triton.jit(do_not_specialize=["blocks"])
def run_moments_kernel(
    x_ptr, total_ptr, squares_ptr, blocks, axis, inner, blocks_per_row, length, GROUPS: tl.constexpr
):
    """For each block, the float64 sums, from left to right, of its values and of their squares."""
    block, base, here = runs_of(blocks, axis, inner, blocks_per_row, length, GROUPS)
    total = tl.zeros([GROUPS], tl.float64)
    squares = tl.zeros([GROUPS], tl.float64)
    for i in range(length):
        x = tl.load(x_ptr + base + i * inner, mask=i < here, other=0.0).to(tl.float64)
        total += x
        squares += x * x
    tl.store(total_ptr + block, total, mask=block < blocks)
    tl.store(squares_ptr + block, squares, mask=block < blocks)
