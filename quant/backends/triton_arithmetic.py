"""The arithmetic of the Triton kernels: functions that are compiled into them, and the choice of how that is done.

Rounding uses the float adder: (v + c) - c with c = 1.5 · 2^(23 + s) rounds v to a multiple of 2^s, ties to even.
Stochastic rounding uses a c that leaves 16 bits of the fraction, and the integer adder on these.
tests/bench/bench_sass.py counts the instructions per value.

On a machine without CUDA, Triton's interpreter runs the same source. Whether the kernels are compiled or interpreted is
decided once, when this module is imported.
"""

from __future__ import annotations

import os

import torch

from binade.quant.scheme import Kernel

INTERPRETED = {"1": True, "0": False}.get(os.environ.get("TRITON_INTERPRET", ""), not torch.cuda.is_available())
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

__all__ = ["INTERPRETED", "tl", "triton"]


def _interpret_library() -> None:
    """Make the interpreter run Triton's own functions that are written in Triton (tl.max, tl.sum). They are set up for
    the compiler if another library, such as transformers, imported triton before this module chose the interpreter."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for module in (tl, tl.standard, tl.core, tl.math, tl.random):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))


if INTERPRETED:
    _interpret_library()

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
NEAREST, HALF_AWAY, STOCHASTIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FLOOR, CEIL, EVEN, RCEIL, NVFP4, HIF4 = (tl.constexpr(rule.value) for rule in list(Kernel)[:6])
GIVEN, LARGEST, SHARED = tl.constexpr(0), tl.constexpr(-1), tl.constexpr(-3)  # rules that `Kernel` does not list
ALL, EACH = tl.constexpr(1), tl.constexpr(2)  # a factor of all blocks, or one for each; 0: there is none
IN_NUMPY = tl.constexpr(INTERPRETED)


@triton.jit
def mix(h):
    """lowbias32, on uint32."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def noise(start, rows, columns, seed):
    """16 random bits of the elements with the indices start + rows + columns, int32 from -2^15. See rounding.noise.

    The terms are multiplied one by one, so that a thread multiplies once for each of its rows and columns."""
    h = (start.to(tl.uint32) + mix(seed.to(tl.uint32))) * 0xDCF94B3B
    h = h + rows.to(tl.uint32) * 0xDCF94B3B + columns.to(tl.uint32) * 0xDCF94B3B
    h = (h ^ (h >> 16) ^ mix(seed.to(tl.uint32) ^ 0x9E3779B9)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h.to(tl.int32, bitcast=True) >> 16


@triton.jit
def down(t, k):
    """t without its last 16 bits, after 2^15 + k + 1 units of its last bit are subtracted. NaN stays NaN."""
    return ((t.to(tl.int32, bitcast=True) - 32769 - k) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def to_grid(v, k, TIERS: tl.constexpr, TAPER: tl.constexpr, EMAX: tl.constexpr, STOCHASTICALLY: tl.constexpr):
    """v, at most 2^(EMAX + 1) in magnitude or NaN, rounded to a multiple of its binade's ulp: ties to even, or up if
    its fraction, rounded to 16 bits, is more than 2^15 + k; then v must not be negative."""
    LOWEST: tl.constexpr = TIERS[0][0]
    # In ulps. Adding this many leaves no bit of the fraction, or 16 bits. In the second case one ulp more is added,
    # which `down` takes away again unless the fraction is more than 2^15 + k.
    ADDED: tl.constexpr = 129.0 if STOCHASTICALLY else 1.5 * 2.0**23
    TAKEN: tl.constexpr = 128.0 if STOCHASTICALLY else 1.5 * 2.0**23
    # 2^exponent is v without sign and mantissa; 0 for float32 subnormals, which lie below every lowest exponent.
    binade = v.to(tl.int32, bitcast=True) & 0x7F800000
    STEP: tl.constexpr = 2.0 ** -TIERS[0][1]
    if TAPER:
        # The length of an integer is the exponent of its float: of 2^23 · exponent, this power is 2^(22 + length).
        binade = tl.maximum(binade.to(tl.float32, bitcast=True), 2.0**LOWEST)
        exponent = binade.to(tl.int32, bitcast=True) - 0x3F800000
        length = tl.maximum(tl.abs(exponent.to(tl.float32)), 2.0**24).to(tl.int32, bitcast=True)
        power = (length & 0x7F800000).to(tl.float32, bitcast=True)
        added, taken = binade * (ADDED * 2.0 ** (-22 - TAPER)), binade * (TAKEN * 2.0 ** (-22 - TAPER))
        t = tl.fma(power, added, v)
        t = down(t, k) if STOCHASTICALLY else t
        return tl.fma(power, -taken, t)
    elif len(TIERS) == 1 and LOWEST >= EMAX:
        t = v + ADDED * STEP * 2.0**LOWEST
        t = down(t, k) if STOCHASTICALLY else t
        return t - TAKEN * STEP * 2.0**LOWEST
    elif len(TIERS) == 1:
        binade = tl.maximum(binade.to(tl.float32, bitcast=True), 2.0**LOWEST)
        t = tl.fma(binade, ADDED * STEP, v)  # the product is exact
        t = down(t, k) if STOCHASTICALLY else t
        return tl.fma(binade, -TAKEN * STEP, t)
    else:
        binade = tl.maximum(binade.to(tl.float32, bitcast=True), 2.0**LOWEST)
        step = STEP
        for i in tl.static_range(1, len(TIERS)):
            step = tl.where(binade >= 2.0 ** TIERS[i][0], 2.0 ** -TIERS[i][1], step)
        t = v + binade * (step * ADDED)
        t = down(t, k) if STOCHASTICALLY else t
        return t - binade * (step * TAKEN)


@triton.jit
def to_fine_grid(v, k, LOWEST: tl.constexpr, BITS: tl.constexpr):
    """As `to_grid`, stochastically, for elements with one tier that has so many mantissa bits that 16 more do not fit:
    the remainder of rounding to nearest, positive or negative, is rounded stochastically."""
    ULP: tl.constexpr = 2.0**-BITS  # of a binade
    binade = tl.maximum((v.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 2.0**LOWEST)
    y = tl.fma(binade, -1.5 * 2.0**23 * ULP, tl.fma(binade, 1.5 * 2.0**23 * ULP, v))
    return y + tl.fma(binade, -129.0 * ULP, down(tl.fma(binade, 130.0 * ULP, v - y), k))


@triton.jit
def with_sign(magnitude, bits):
    """A magnitude with the sign of other bits."""
    return (magnitude.to(tl.int32, bitcast=True) | (bits & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def round_to_element(
    x,
    k,  # 16 random bits, int32 from -2^15
    TIERS: tl.constexpr,
    TAPER: tl.constexpr,  # see `_taper`
    EMAX: tl.constexpr,
    MAX: tl.constexpr,
    LIMIT: tl.constexpr,
    ROUNDING: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    BOUNDED: tl.constexpr = False,  # no x exceeds MAX by so much that it would not round to MAX; LIMIT is then MAX
):
    """float32 x on the element's grid. See reference.round_to_element."""
    bits = x.to(tl.int32, bitcast=True)
    BITS: tl.constexpr = TIERS[0][1]
    if EMAX > 64:
        # bfloat16 has the upper bits of float32. A carry leads to the next binade, and at last to Inf.
        DROPPED: tl.constexpr = 23 - BITS
        half = 1 << (DROPPED - 1)
        if ROUNDING == STOCHASTIC:
            added = (1 << (DROPPED - 1)) - 1 - (k >> (16 - DROPPED))
        elif ROUNDING == HALF_AWAY:
            added = half
        else:
            added = ((bits >> DROPPED) & 1) + (half - 1)
        y = tl.where(x == x, ((bits + added) & -(1 << DROPPED)).to(tl.float32, bitcast=True), x)
        if LIMIT == MAX:
            y = tl.clamp(y, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    else:
        # Rounding is monotonic, so values beyond MAX may be replaced by MAX first. Without a negative zero, values keep
        # their sign in the adder.
        SIGNED: tl.constexpr = not SIGNED_ZERO and LIMIT == MAX and ROUNDING != STOCHASTIC
        if BOUNDED:
            v = x
        elif SIGNED:
            v = tl.clamp(x, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
        else:
            v = tl.minimum(tl.abs(x), MAX if LIMIT == MAX else 2.0 * 2.0**EMAX, propagate_nan=tl.PropagateNan.ALL)
        if ROUNDING == HALF_AWAY:
            # Setting float32's last bit moves a tie above the middle, and no other value to it or across it.
            v = (v.to(tl.int32, bitcast=True) | 1).to(tl.float32, bitcast=True)
        if ROUNDING == STOCHASTIC and BITS > 6:
            y = to_fine_grid(v, k, TIERS[0][0], BITS)
        else:
            y = to_grid(v, k, TIERS, TAPER, EMAX, ROUNDING == STOCHASTIC)
        if LIMIT != MAX:
            y = tl.where(y > MAX, LIMIT, y)
        if not SIGNED:
            y = with_sign(y, bits)
            if not SIGNED_ZERO:
                y += 0.0
    return y


@triton.jit
def block_scale(absmax, RULE: tl.constexpr, EMAX: tl.constexpr, MANTISSA: tl.constexpr, MAX: tl.constexpr):
    """(a block's E8M0 scale, its inverse), see reference.block_scale_exponent. A block that is not finite has NaN."""
    ROUND_UP: tl.constexpr = (
        1 << (22 - MANTISSA)
        if RULE == EVEN
        else 0x7FFFFF
        if RULE == CEIL
        else 0x7FFFFF - int((MAX / 2.0**EMAX - 1) * 2**23)
        if RULE == RCEIL
        else 0
    )
    bits = absmax.to(tl.int32, bitcast=True)
    if EMAX == 0 and RULE != FLOOR:
        # Only here may the scale of a subnormal absmax be more than 2^-127.
        lifted = (absmax * 16777216.0).to(tl.int32, bitcast=True) - (24 << 23)
        bits = tl.where(absmax < 1.1754943508222875e-38, lifted, bits)
    # Bits of floats, added as integers: a carry out of the mantissa raises the exponent.
    power = ((bits + ROUND_UP) & -8388608) - (EMAX << 23)
    if EMAX == 0:
        power = tl.minimum(power, 254 << 23)
    scale = tl.maximum(power, 1 << 22)  # 2^-127 is subnormal
    inverse = tl.maximum((254 << 23) - tl.maximum(power, 0), 1 << 22)
    scale = tl.where(absmax <= FLOAT32_MAX, scale.to(tl.float32, bitcast=True), float("nan"))
    return scale, inverse.to(tl.float32, bitcast=True)


@triton.jit
def widen(x):
    """A loaded tensor as float32. bfloat16 is shifted by hand: the compiler's conversion takes two instructions for the
    upper half of a register."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL).to(a.dtype)


@triton.jit
def largest(x, AXIS: tl.constexpr):
    """The largest magnitudes along an axis, which stays, with one value; NaN if any is NaN."""
    if IN_NUMPY:
        # There, reductions with our own functions take one value after the other. A NaN's bits are the largest integer.
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        return tl.max(bits, axis=AXIS, keep_dims=True).to(tl.float32, bitcast=True)
    else:
        return tl.reduce(tl.abs(x), AXIS, larger, keep_dims=True)


@triton.jit
def to_bfloat16(x):
    """Finite float32 x rounded to bfloat16, ties to even, as float32."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def factor(ptr, block, KIND: tl.constexpr, ADJACENT: tl.constexpr):
    """A factor of the blocks, all of which exist, to be multiplied with a tile."""
    if KIND == ALL:
        return tl.load(ptr)
    else:
        factors = tl.load(ptr + block)
        return factors[:, None] if ADJACENT else factors[None, :]


@triton.jit
def quotient(values, divisor):
    """values / divisor, to the bit, by a reciprocal in two parts: for finite values with at most 4 significant bits, 0
    or from 2^-30 to 2^60 in magnitude, and divisors from 2^-126 to 2^64; for the divisors 1536 and 2688, any values
    that are 0 or from 2^-90 to 2^90. The tests try every significand."""
    one = tl.full(divisor.shape, 1.0, tl.float32)
    high = tl.div_rn(one, divisor)
    above = tl.fma(-divisor, high, one) < 0
    high = (high.to(tl.int32, bitcast=True) - above.to(tl.int32)).to(tl.float32, bitcast=True)
    low = tl.div_rn(tl.fma(-divisor, high, one), divisor)  # not negative: a zero keeps its sign
    low = tl.broadcast_to(low, values.shape)
    return tl.fma(values, tl.broadcast_to(high, values.shape), values * low)


@triton.jit
def is_usual(divisor):
    """Whether `quotient` divides any element with at most 4 significant bits by it."""
    return (divisor >= 2.0**-126) & (divisor <= 2.0**64)


@triton.jit
def has_quotient(block, outer_ptr, divisor_ptr, FACTORS: tl.constexpr, ADJACENT: tl.constexpr):
    """Whether `quotient` divides what `read_back` divides, for elements with at most 4 significant bits."""
    if FACTORS[3] and not FACTORS[1] and not FACTORS[2]:
        usual = is_usual(factor(divisor_ptr, block, FACTORS[3], ADJACENT)).to(tl.int32)
        return (tl.min(tl.ravel(usual), axis=0) if FACTORS[3] == EACH else usual) != 0
    elif FACTORS[2] == ALL and FACTORS[3] == ALL:
        divisor, outer = tl.load(divisor_ptr), tl.load(outer_ptr)
        return ((divisor == 1536.0) | (divisor == 2688.0)) & (outer > 2.0**-60) & (outer < 2.0**60)
    else:
        return False


@triton.jit
def read_back(
    values,
    block,
    scale_ptr,
    outer_ptr,
    divisor_ptr,
    FACTORS: tl.constexpr,
    ADJACENT: tl.constexpr,
    QUOTIENT: tl.constexpr,  # see `has_quotient`
):
    """The values represented by values on the element's grid, with given factors."""
    if FACTORS[1]:
        values = values * factor(scale_ptr, block, FACTORS[1], ADJACENT)
    if FACTORS[2]:
        values = values * factor(outer_ptr, block, FACTORS[2], ADJACENT)
    if FACTORS[3]:
        divisor = factor(divisor_ptr, block, FACTORS[3], ADJACENT)
        if QUOTIENT:
            values = quotient(values, divisor)
        else:
            values = tl.div_rn(values, tl.broadcast_to(divisor, values.shape))
    return values


@triton.jit
def tensor_scale(absmax, TARGET: tl.constexpr, MOST: tl.constexpr, SATURATES: tl.constexpr):
    """`Amax.of_largest` of a tensor, from `Amax.shared`."""
    scale = tl.div_rn(tl.full([], TARGET, tl.float32), absmax)
    scale = tl.where(scale > MOST, MOST, scale)
    scale = tl.where(absmax == 0.0, 1.0, scale)
    if SATURATES:
        return tl.where(absmax == float("inf"), 1.0, scale)
    else:
        return scale + (absmax - absmax)  # NaN unless absmax is finite


@triton.jit
def hif4_scale(absmax, TIERS: tl.constexpr):
    """HiF4's E6M2 scale of blocks with these largest magnitudes, and its inverse as bfloat16."""
    wanted = tl.maximum(absmax * 0.142578125, 2.0**-48)
    scale = round_to_element(to_bfloat16(wanted), 0, TIERS, 0, 15, 49152.0, 49152.0, NEAREST, False)
    # Two bits of mantissa: no quotient is so near a tie of bfloat16 that an approximate division would round otherwise.
    inverse = to_bfloat16(1.0 / scale)
    return tl.fma(absmax, tl.zeros_like(absmax), scale), inverse  # NaN unless absmax is finite


@triton.jit
def runs_of(blocks, axis, inner, blocks_per_row, length, GROUPS: tl.constexpr):
    """The blocks of this program, where they begin, and how many values each has."""
    block = tl.program_id(0).to(blocks.dtype) * GROUPS + tl.arange(0, GROUPS)  # 64 bits if 32 are too few
    row_block = block // inner
    first = (row_block % blocks_per_row) * length
    base = ((row_block // blocks_per_row).to(tl.int64) * axis + first) * inner + block % inner
    return block, base, tl.where(block < blocks, tl.minimum(axis - first, length), 0)


@triton.jit
def add_errors(
    x_ptr,
    encode_ptr,
    given_ptr,
    outer_ptr,
    divisor_ptr,
    block,
    base,
    here,
    inner,
    LENGTH: tl.constexpr,
    WHOLE: tl.constexpr,
    TIERS: tl.constexpr,
    TAPER: tl.constexpr,
    EMAX: tl.constexpr,
    MAX: tl.constexpr,
    SIGNED_ZERO: tl.constexpr,
    SQUARE: tl.constexpr,
    FACTORS: tl.constexpr,
    QUOTIENT: tl.constexpr,  # see `has_quotient`
):
    """The output of `run_errors_kernel` for the blocks of a program."""
    total = tl.zeros(base.shape, tl.float32)[None, :]
    for i in tl.range(LENGTH, loop_unroll_factor=16):
        if WHOLE:
            x = widen(tl.load(x_ptr + base + i * inner))[None, :]
        else:
            x = widen(tl.load(x_ptr + base + i * inner, mask=i < here, other=0.0))[None, :]
        encoded = x * factor(encode_ptr, block, FACTORS[0], False) if FACTORS[0] else x
        values = round_to_element(encoded, 0, TIERS, TAPER, EMAX, MAX, MAX, NEAREST, SIGNED_ZERO)
        y = read_back(values, block, given_ptr, outer_ptr, divisor_ptr, FACTORS, False, QUOTIENT)
        error = tl.abs(y - x)
        total += error * error if SQUARE else error
    return total
