"""Every rule of a scaled format, derived a second time in NumPy. Nothing here imports binade.

Each function takes a float32 array and returns what quantize-dequantize gives, as float32. Arithmetic is float32 with
one rounding for each step unless a line says otherwise. Elements are rounded in float64 against a table of their
values, where midpoints are exact, so no rule depends on another rule's bit tricks.

The rules were read in the sources that each docstring names, and run beside them on a CPU: "checked" says against what
and with what result. "All inputs" are 24 tensors of 256 × 256 (HiF4: 64 × 256), in float32 and in values of bfloat16:
N(0, 1), N(0, 1) · 1e-6, Cauchy, one outlier of 1e4, blocks of zeros, all zeros, multiples of 1/16 (ties), powers of
two, magnitudes near 1e-38 and 5e37, magnitudes over 2^±60 within and over 2^±30 between rows.

Policies that hold everywhere and that most sources leave open: an all-zero block is zero; NaN or Inf makes its block
NaN, or the row or tensor if that is what shares a scale.

Sources
    TE           NVIDIA TransformerEngine d0067d0: custom_recipes/reference_nvfp4.py, tests/pytorch/references/*.py,
                 tests/pytorch/test_mxfp8_2d_quantize.py, recipe/delayed_scaling.cu
    torchao      0.18.0 from PyPI, and 36027d8 for its tests
    fouroversix  mit-han-lab dadfad6: quantize/pytorch/reference.py
    Quartet II   IST-DASLab 8776a90: nvfp4_triton.py and quartet_2.py, in Triton's interpreter; its own cast to E4M3,
                 which loses the carry out of the mantissa, replaced by that of ml_dtypes
    HiFloat4     ddddwee1 999cc07: HiF4_NVFP4_v14f16.py (NumPy), quant_cy/base/QFuncs/hifx.py (torch)
    fake_quant   Charles2530/fake_quant_ops 3617c05: quant/ops/hifp.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction

import numpy as np

Array = np.ndarray
F32 = np.float32
FLOAT32_MAX = F32(np.finfo(F32).max)


# --- Elements: the magnitudes of a format, ascending, the index being the code ---------------------------------------


def minifloat(exponent_bits: int, mantissa_bits: int, largest: float) -> Array:
    """Magnitudes of a binary float with subnormals and the bias of IEEE 754, up to the largest finite one."""
    bias = 2 ** (exponent_bits - 1) - 1
    steps = 2**mantissa_bits
    codes = range(steps * 2**exponent_bits)
    values = [
        math.ldexp(code % steps + (steps if code >= steps else 0), max(code // steps, 1) - bias - mantissa_bits)
        for code in codes
    ]
    return np.array([v for v in values if v <= largest])


def hifloat8() -> Array:
    """HiFloat8's magnitudes, arXiv 2409.16626: denormals 2^-22 to 2^-16, then 1, 2, 3, 2, 1 bits of mantissa."""
    values = [0.0] + [2.0**e for e in range(-22, -15)]
    for e in range(-15, 16):
        steps = 2 if abs(e) > 7 else 4 if abs(e) > 3 else 8
        values += [math.ldexp(1 + m / steps, e) for m in range(steps)]
    return np.array([v for v in values if v <= 2.0**15])


E2M1 = minifloat(2, 1, 6)
E4M3 = minifloat(4, 3, 448)
E5M2 = minifloat(5, 2, 57344)
UE5M3 = minifloat(5, 3, 114688)
"""Bias 15, the all-ones code NaN: 2^-17 to 114688."""
INT4 = np.arange(8.0)
HIF8 = hifloat8()
E6M2 = np.array([math.ldexp(4 + m, e - 2) for e in range(-48, 16) for m in range(4)][:-1])
"""Scale of HiF4: no zero, 2^-48 to 1.5 · 2^15."""


def nearest(x: Array, grid: Array, ties: str = "even") -> Array:
    """x on a grid of magnitudes, saturating; ties to the even code, or "away" from zero. float64.

    Checked: ml_dtypes (E2M1, E4M3, E5M2) and en_dtypes (HiFloat8), every bfloat16 value: equal to the bit.
    """
    x = np.asarray(x, np.float64)
    magnitude = np.minimum(np.where(np.isnan(x), 0, np.abs(x)), grid[-1])
    low = np.clip(np.searchsorted(grid, magnitude, "right") - 1, 0, len(grid) - 2)
    middle = (grid[low] + grid[low + 1]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & ((ties == "away") | (low % 2 == 1)))
    return np.where(np.isnan(x), np.nan, np.copysign(grid[low + up], x))


def stochastic(x: Array, grid: Array, u: Array) -> Array:
    """x on a grid, up with probability (v - low) / (high - low): where that exceeds u, uniform in [0, 1). float64.

    Source: Quartet II sr_fp4, checked through `nvfp4_unbiased_parts`. A value on the grid stays here; there it goes to
    one of the two values around it, without bias.
    """
    x = np.asarray(x, np.float64)
    magnitude = np.minimum(np.where(np.isnan(x), 0, np.abs(x)), grid[-1])
    low = np.clip(np.searchsorted(grid, magnitude, "right") - 1, 0, len(grid) - 2)
    up = (magnitude - grid[low]) / (grid[low + 1] - grid[low]) > u
    return np.where(np.isnan(x), np.nan, np.copysign(grid[low + up], x))


def bfloat16(x: Array) -> Array:
    """float32 x rounded to bfloat16, ties to even; normal values only."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.round(mantissa * 256) / 256, exponent).astype(F32)


# --- Tiles: what shares a scale -------------------------------------------------------------------------------------


def by_tiles(x: Array, dim: int, rows: int, columns: int, rule: Callable[[Array], Array], spread: bool = True) -> Array:
    """`rule` applied to tiles [n, rows, columns] of x, padded with zeros; the padding is dropped again.

    Columns lie along dim. Rows are neighbouring lines, all other axes flattened, as TransformerEngine does: for a
    matrix, dim=-1 and dim=-2 see the same square tiles. columns=0: one tile takes the whole of dim.
    spread: a tile with NaN or Inf becomes NaN, whatever the rule says.
    """
    x = np.asarray(x, F32)
    moved = np.moveaxis(x, dim, -1)
    matrix = moved.reshape(-1, moved.shape[-1])
    m, k = matrix.shape
    c = columns or k
    padded = np.pad(matrix, ((0, -m % rows), (0, -k % c)))
    grid = padded.shape[0] // rows, padded.shape[1] // c
    tiles = padded.reshape(grid[0], rows, grid[1], c).swapaxes(1, 2).reshape(-1, rows, c)
    with np.errstate(all="ignore"):
        y = np.asarray(rule(tiles)).astype(F32)
    if spread:
        y[~np.isfinite(tiles).all((1, 2))] = np.nan
    result = y.reshape(*grid, rows, c).swapaxes(1, 2).reshape(padded.shape)[:m, :k]
    return np.moveaxis(result.reshape(moved.shape), -1, dim)


def amax(tiles: Array) -> Array:
    """[n, 1, 1]"""
    return np.abs(tiles).max((1, 2), keepdims=True)


def tensor_amax(x: Array) -> np.float32:
    return F32(np.abs(np.asarray(x, F32)).max())


def power_of_two_at_most(scale: Array) -> Array:
    """The mantissa of positive float32 cleared."""
    return (np.asarray(scale, F32).view(np.uint32) & np.uint32(0xFF800000)).view(F32)


# --- MX ------------------------------------------------------------------------------------------------------------


def mx_exponent(largest: float, grid: Array, rule: str) -> int:
    """Exponent of an E8M0 scale in exact rational arithmetic, clamped to ±127; `largest` positive and finite.

    floor: floor(log2 amax) - emax. rceil: ceil(log2(amax / max)).
    Checked: TE _float_to_e8m0 (rceil) on 20,000 magnitudes and within 2 ulp of every 448 · 2^k: equal but for one,
    below 2^-118: TE rounds amax / 448 to a float32 subnormal first, which can lose what lifts the exponent by one.
    """
    value = Fraction(float(largest)) / (Fraction(float(grid[-1])) if rule == "rceil" else 1)
    e = value.numerator.bit_length() - value.denominator.bit_length()
    e -= Fraction(2) ** e > value  # floor(log2 value)
    if rule == "rceil":
        return max(-127, min(127, e + (Fraction(2) ** e < value)))
    return max(-127, min(127, e - (math.frexp(grid[-1])[1] - 1)))


def mx(x: Array, dim: int = -1, grid: Array = E4M3, block: tuple[int, int] = (1, 32), rule: str = "floor") -> Array:
    """OCP MX with tiles of any shape: mxfp8 32 × 32 with rceil is TE's 2-D recipe, INT4 with rceil is MXINT4.

    Source: TE test_mxfp8_2d_quantize.py. Checked: its _mxfp8_2d_quantize_reference equal on all inputs; torchao to_mx
    (E4M3 and E2M1, floor and rceil, 1 × 32) and fouroversix quantize_to_mxfp4 equal on all but those near 1e-38: they
    have no scale below 2^-126, or flush it.
    """

    def rule_of(tiles: Array) -> Array:
        y = np.zeros_like(tiles)
        for tile, result in zip(tiles, y, strict=True):
            largest = np.abs(tile).max()
            if largest and np.isfinite(largest):
                scale = 2.0 ** mx_exponent(largest, grid, rule)
                result[:] = nearest(tile.astype(np.float64) / scale, grid) * scale
        return y

    return by_tiles(x, dim, *block, rule_of)


def mxfp4_quest(x: Array, dim: int = -1, block: tuple[int, int] = (1, 32)) -> Array:
    """MXFP4 under Quartet's scale, 2^floor(log2(0.48708 σ + 1e-8)); zeros fill a short block and count in σ.

    Source: Quartet `mxfp4.py`; not run beside it. σ² = Σx²/n - (Σx/n)²: the sums correctly rounded, the rest exact.
    """

    def rule_of(tiles: Array) -> Array:
        y = np.zeros_like(tiles)
        for tile, result in zip(tiles, y, strict=True):
            values = tile.astype(np.float64).ravel()
            if np.isfinite(values).all():
                total, squares = Fraction(math.fsum(values)), Fraction(math.fsum(values**2))
                variance = squares / values.size - (total / values.size) ** 2
                wanted = F32(math.sqrt(max(variance, 0))) * F32(2.92247856 / 6.0) + F32(1e-8)
                scale = 2.0 ** (math.frexp(wanted)[1] - 1)
                result[:] = nearest(tile.astype(np.float64) / scale, E2M1) * scale
        return y

    return by_tiles(x, dim, *block, rule_of)


def mxint4(x: Array, dim: int = -1) -> Array:
    """As published: blocks of 32, INT4 -7..7 with ties to even, E8M0 scale 2^ceil(log2(amax / 7)). arXiv 2510.25602
    (not run)."""
    return mx(x, dim, INT4, (1, 32), "rceil")


def with_scale_type(x: Array, scale_type: str, dim: int = -1, grid: Array = E2M1, block: int = 16) -> Array:
    """amax / max of a block rounded to E4M3, UE5M3 or float32, without a tensor scale.

    element = rne(clamp(x · min(1 / sf, largest float32), ±max)), read back as element · sf. sf saturates and may
    underflow to zero: then the block is zero.
    Source: torchao nvfp4_quantize without a tensor scale (E4M3). Checked: equal on all inputs except in blocks whose sf
    is below 2^-6, where torchao puts 2^-6. HiFloat4's To_NVF4 divides by sf instead: it differs in 24 of 400,000
    values, all ties of one of the two in bfloat16 data (in none of 400,000 of float32 N(0, 1)).
    """
    scale_grid = {"e4m3": E4M3, "ue5m3": UE5M3, "float32": None}[scale_type]

    def rule(tiles: Array) -> Array:
        sf = amax(tiles) / F32(grid[-1])
        sf = sf if scale_grid is None else nearest(sf, scale_grid).astype(F32)
        inverse = np.minimum(F32(1) / sf, FLOAT32_MAX)
        element = nearest(tiles * inverse, grid).astype(F32)
        return np.where(sf == 0, F32(0), element * sf)

    return by_tiles(x, dim, 1, block, rule)


# --- FP8 -----------------------------------------------------------------------------------------------------------


def te_scale(largest: Array, grid: Array = E4M3, pow2: bool = False) -> Array:
    """S = max / amax of TE, float32: the largest float32 if that overflows, 1 for 0 and Inf, NaN for NaN, for which TE
    has 1; mantissa cleared with pow2.

    Source: TE recipe_common.cuh, references/quantize_scale_calc.py. Checked: scale_from_amax_tensor on 200,000
    magnitudes, both rules: equal. Its overflow value for bfloat16 input is the largest bfloat16, and the kernel's
    value_for_inf too: this uses the largest float32 for every input type, as FORMATS2 does.
    """
    largest = np.asarray(largest, F32)
    with np.errstate(all="ignore"):
        scale = np.minimum(F32(grid[-1]) / largest, FLOAT32_MAX)
        scale = power_of_two_at_most(scale) if pow2 else scale
    return np.where(np.isnan(largest), largest, np.where((largest == 0) | np.isinf(largest), F32(1), scale))


def fp8_blocks(
    x: Array, dim: int = -1, block: tuple[int, int] = (1, 128), pow2: bool = False, grid: Array = E4M3
) -> Array:
    """FP8 with one scale for each tile: 1 × 128 or 128 × 128. element = e4m3(clamp(x · S)), read back as q · (1/S).

    Source: TE blockwise_quantizer_reference.py. Checked: BlockwiseQuantizerReference.quantize and its
    ref_dequantize_rowwise, both tiles, both scale rules, E4M3 and E5M2, also 200 × 300: equal on all inputs.
    """

    def rule(tiles: Array) -> Array:
        scale = te_scale(amax(tiles), grid, pow2)
        return nearest(tiles * scale, grid).astype(F32) * (F32(1) / scale)

    return by_tiles(x, dim, *block, rule, spread=False)


def fp8_rows(x: Array, dim: int = -1, pow2: bool = False, grid: Array = E4M3) -> Array:
    """FP8 with one scale for the whole of dim: S = fp32(max / max(amax, 1e-12)), read back as q / S.

    Source: torchao float8_utils.py. Checked: hp_tensor_to_float8_dynamic(AXISWISE).to_original_precision(), both rules:
    equal on all inputs. This clears the mantissa for pow2, torchao computes exp2(floor(log2 S)) in float32: too high by
    one binade for S just below a power of two (152 of 420 amaxes within 3 ulp of 448 / 2^k).
    For amax of at least 1e-12 the float64 quotient gives what a float32 division does: rounding a quotient of float32
    to 53 and then to 24 bits is innocuous.
    """

    def rule(tiles: Array) -> Array:
        scale = (grid[-1] / np.maximum(amax(tiles).astype(np.float64), 1e-12)).astype(F32)
        scale = power_of_two_at_most(scale) if pow2 else scale
        return nearest(tiles * scale, grid).astype(F32) / scale

    return by_tiles(x, dim, 1, 0, rule)


def fp8_tensor_pow2(x: Array, grid: Array = E4M3) -> Array:
    """FP8 current scaling whose S is a power of two: max / amax, mantissa cleared; read back as q / S.

    Source: TE use_power_2_scales. Checked: scale_from_amax_tensor and a saturating cast: equal on all inputs with an
    absmax of at least 1e-12.
    """
    x = np.asarray(x, F32)
    scale = te_scale(tensor_amax(x), grid, True)
    return nearest(x * scale, grid).astype(F32) / scale


def delayed_scales(
    amaxes: Iterable[float], history: int = 1024, algorithm: str = "max", margin: int = 0, largest: float = 448.0
) -> list[np.float32]:
    """The scale that each pass uses, then the one after the last: delayed scaling of TE.

    amaxes    of the tensor in each pass
    history   how many amaxes are remembered, the newest included
    algorithm "max" over them, or "most_recent"

    Source: TE delayed_scaling.cu:167-256 (CUDA: read, not run). Checked: _default_get_amax_and_update_history and
    _default_sf_compute of quantization.py on 300 random sequences, with Inf too: equal within 2 ulp, since torch
    multiplies 448 by 1 / amax there. They drop the oldest amax when the new one is 0, the kernel does not, nor this.
    The kernel's other rules: a maximum that is not finite leaves the scale; fmaxf passes over NaN; an S that overflows
    is the largest float32.
    """
    window: list[np.float32] = []
    scale = F32(1)
    used = [scale]
    scaled_max = F32(largest) * F32(2.0**-margin)
    for newest in map(F32, amaxes):
        if newest != 0:
            window = [*window, newest][-history:]
        numbers = [a for a in window if not np.isnan(a)]
        reduced = newest if algorithm == "most_recent" else max(numbers, default=F32(0))
        if np.isfinite(reduced) and reduced > 0:
            with np.errstate(over="ignore"):
                scale = np.minimum(scaled_max / reduced, FLOAT32_MAX)
        used.append(scale)
    return used


def fp8_with_scale(x: Array, scale: float, grid: Array = E4M3) -> Array:
    """What delayed scaling does with a given S: e4m3(clamp(x · S)) read back as q · fp32(1/S)."""
    scale = F32(scale)
    return (nearest(np.asarray(x, F32) * scale, grid).astype(F32) * (F32(1) / scale)).astype(F32)


# --- NVFP4 ---------------------------------------------------------------------------------------------------------


def nv_encode_scale(absmax: Array, product: float) -> Array:
    """S = min(product / absmax, largest float32), 1 where absmax is 0."""
    absmax = np.asarray(absmax, F32)
    with np.errstate(all="ignore"):
        return np.where(absmax == 0, F32(1), np.minimum(F32(product) / absmax, FLOAT32_MAX))


def nv_inverse(sf: Array, encode: Array) -> Array:
    return np.minimum(F32(1) / (sf * (F32(1) / encode)), FLOAT32_MAX)


def nv_tiles(tiles: Array, absmax: Array, grid: Array, u: Array | None = None) -> Array:
    """E4M3 block scales under a float32 scale that follows from absmax, a scalar or [n, 1, 1]."""
    top = F32(grid[-1])
    encode = nv_encode_scale(absmax, 448 * float(top))
    wanted = amax(tiles) * (encode * (F32(1) / top))
    sf = nearest(np.minimum(wanted, F32(448)), E4M3).astype(F32)
    scaled = np.clip(tiles * nv_inverse(sf, encode), -top, top)
    element = (nearest(scaled, grid) if u is None else stochastic(scaled, grid, u)).astype(F32)
    return (element * sf) * (np.asarray(absmax, F32) / F32(448 * float(top)))


def nvfp4(
    x: Array,
    dim: int = -1,
    block: tuple[int, int] = (1, 16),
    grid: Array = E2M1,
    absmax: float | None = None,
    row_scaled: bool = False,
) -> Array:
    """NVFP4 with tiles of any shape, or with a tensor scale for each row along dim.

    Source: TE reference_nvfp4.py. Checked: NVFP4QuantizerRef with tiles (1, 16) and (16, 16) and with row_scaled_nvfp4,
    and torchao's nvfp4_reference.py: equal on all inputs, its codes and scales read back as here. Quartet II's kernel
    (ties away, blockmax / 6 / tensor scale) agrees on N(0, 1) and differs where there are ties.
    """
    absmax = tensor_amax(x) if absmax is None else F32(absmax)
    if not np.isfinite(absmax) and not row_scaled:
        return np.full_like(np.asarray(x, F32), np.nan)
    if row_scaled:
        return nvfp4_by_rows(x, dim, grid)
    return by_tiles(x, dim, *block, lambda tiles: nv_tiles(tiles, absmax, grid))


def nvfp4_by_rows(x: Array, dim: int, grid: Array) -> Array:
    moved = np.moveaxis(np.asarray(x, F32), dim, -1)
    size = moved.shape[-1]
    rows = np.pad(moved.reshape(-1, size), ((0, 0), (0, -size % 16)))
    absmax = np.abs(rows).max(1)
    with np.errstate(all="ignore"):
        y = nv_tiles(rows.reshape(-1, 1, 16), absmax.repeat(rows.shape[1] // 16)[:, None, None], grid)
    y = np.where(np.isfinite(absmax)[:, None], y.reshape(rows.shape), F32(np.nan))
    return np.moveaxis(y[:, :size].reshape(moved.shape), -1, dim)


def headroom_absmax(x: Array, dim: int = -1) -> np.float32:
    """max(16384 · p1, p99.99) of the absmaxes of blocks of 16, a percentile being the middle of its bin.

    Source: NVIDIA Model-Optimizer a2fbac7, nvfp4_act_headroom.py. Checked: NVFP4ActHeadroomCalibrator on one batch:
    equal on 22 inputs, among them N(0, 1) with and without outliers, Cauchy, sparse, magnitudes of 13 decades, one
    value, and values beyond the bins.
    """
    moved = np.moveaxis(np.asarray(x, F32), dim, -1).reshape(-1, np.shape(x)[dim])
    blocks = np.pad(np.abs(moved), ((0, 0), (0, -moved.shape[1] % 16))).reshape(-1, 16).max(1)
    if not np.isfinite(blocks).all():
        return F32(np.nan)
    if not blocks.any():
        return F32(0)
    width = 80 / 512  # of a bin, in binades
    bins = np.clip(np.floor((np.log2(blocks[blocks > 0].astype(np.float64)) + 40) / width), 0, 511)

    def middle(share: float) -> float:
        return 2.0 ** (-40 + width * (np.quantile(bins, share, method="inverted_cdf") + 0.5))

    upper = middle(0.9999)
    bins = bins[bins >= np.floor((np.log2(upper / 1e6) + 40) / width)]
    return F32(max(16384 * middle(0.01), upper))


def nvint4(x: Array, dim: int = -1) -> Array:
    """NVFP4's rule with INT4 -7..7, 7 in place of 6 (448 · 7 = 3136), ties to even. arXiv 2510.25602.

    Checked: fouroversix nvint4: no block of 32,768 differs on N(0, 1). It computes (blockmax / 7) · S and not
    blockmax · (S · (1/7)): at ties of E4M3, frequent in bfloat16 data, up to 0.9 % of the scales differ by one step.
    """
    return nvfp4(x, dim, (1, 16), INT4)


def nvfp4_stochastic(x: Array, u: Array, dim: int = -1) -> Array:
    """Plain stochastic rounding under NVFP4's scales; elements beyond 6 are clipped, which biases them. u: x's shape.

    Source: TE nvfp4 kernels, torchao. They round by hardware or by Philox; only the neighbours can be compared.
    """
    absmax = tensor_amax(x)
    noise = iter_tiles(u, dim, 1, 16)
    return by_tiles(x, dim, 1, 16, lambda tiles: nv_tiles(tiles, absmax, E2M1, next(noise)))


def iter_tiles(u: Array, dim: int, rows: int, columns: int) -> Iterable[Array]:
    """What by_tiles would pass to its rule, one matrix after the other."""
    found: list[Array] = []
    by_tiles(u, dim, rows, columns, lambda tiles: found.append(tiles) or tiles)
    return iter(found)


UNBIASED_TARGET = F32(6 * 16 / 17)
"""E4M3 rounds a normal number down by at most 16/17, so that this target keeps every element within 6."""


def nvfp4_unbiased_parts(x: Array) -> tuple[Array, Array, np.float32]:
    """(x as blocks [n, 16], scaled; block scales [n, 1]; tensor scale) of stochastic rounding that does not clip.

    Blocks along the last axis, a multiple of 16. Tensor scale absmax / 448 / 5.647, sf = e4m3((blockmax / 5.647) /
    tensor scale), 1 where that is 0; v = x / (sf · tensor scale).
    Source: Quartet II sr_1x16s_fp4_kernel with scale_override 17/16. Checked: the kernel, on 7 inputs of 16 × 512:
    every result is one of the two neighbours, to the bit (but see `stochastic`). fouroversix stochastic_unbiased
    computes (blockmax / 5.647) · S: no scale of 32,768 differs on N(0, 1), up to 2.4 % where blockmaxes are on ties of
    E4M3. A block whose sf underflows is zero in fouroversix, as in NVFP4.
    """
    blocks = np.asarray(x, F32).reshape(-1, 16)
    absmax = tensor_amax(x)
    tensor = F32(1) if absmax == 0 else absmax / F32(448) / UNBIASED_TARGET
    sf = nearest((np.abs(blocks).max(1, keepdims=True) / UNBIASED_TARGET) / tensor, E4M3).astype(F32)
    sf = np.where(sf == 0, F32(1), sf)
    return blocks / (sf * tensor), sf, tensor


def nvfp4_unbiased(x: Array, u: Array) -> Array:
    """Stochastic rounding without clipping, see `nvfp4_unbiased_parts`; read back as q · (sf · tensor scale)."""
    scaled, sf, tensor = nvfp4_unbiased_parts(x)
    return (stochastic(scaled, E2M1, u.reshape(-1, 16)).astype(F32) * (sf * tensor)).reshape(np.shape(x))


def four_over_six(
    x: Array, dim: int = -1, error: str = "mse", bound: int = 256, block: tuple[int, int] = (1, 16)
) -> Array:
    """NVFP4 that takes, for each tile, the better of blockmax on 6 and blockmax on 4; a tie keeps 6.

    Source: TE reference_nvfp4.py, whose arithmetic this is. Checked: NVFP4QuantizerRef(nvfp4_use_4over6), MAE and MSE,
    256 and 448, tiles (1, 16) and (16, 16): equal on all inputs, its codes and scales read back as here. fouroversix
    (mse, mae, 256): no block of 32,768 differs on N(0, 1). It does not clamp to ±6, so that with a subnormal sf an
    element can be 8 (up to 55 of 4,096 blocks differ), and sums in another order (MAE ties of powers of two).
    The result is read back as the error is, ((element · sf) · absmax) / (6 · bound), which can differ by an ulp from
    the element · sf · (absmax / (6 · bound)) of plain NVFP4.
    """
    absmax = tensor_amax(x)
    if not np.isfinite(absmax):
        return np.full_like(np.asarray(x, F32), np.nan)
    encode = nv_encode_scale(absmax, 6 * bound)

    def rule(tiles: Array) -> Array:
        base = (amax(tiles) / F32(6)) * encode
        found = []
        for wanted in (base, base * F32(1.5)):
            sf = nearest(np.minimum(wanted, F32(448)), E4M3).astype(F32)
            element = nearest(np.clip(tiles * nv_inverse(sf, encode), F32(-6), F32(6)), E2M1).astype(F32)
            y = ((element * sf) * absmax) / F32(6 * bound)
            difference = y - tiles
            cost = np.abs(difference) if error == "mae" else difference * difference
            by_row = np.zeros(cost.shape[:2], F32)
            for column in range(cost.shape[2]):  # from left to right, in float32
                by_row = by_row + cost[:, :, column]
            while by_row.shape[1] > 1:  # a tile's rows as a binary tree
                half = by_row.shape[1] // 2
                by_row = by_row[:, :half] + by_row[:, half:]
            found.append((y, by_row[:, :, None]))
        (six, error_six), (four, error_four) = found
        return np.where(error_four < error_six, four, six)

    return by_tiles(x, dim, *block, rule)


def if4(x: Array, dim: int = -1) -> Array:
    """NVFP4, or 6/7 · INT4(7/6 · v) with the same sf where its squared error is smaller. arXiv 2603.28765.

    Source: fouroversix select_intfloat. Checked: no block of 32,768 differs on N(0, 1) by more than 4e-7. There sf is
    e4m3((blockmax / 6) · S), here NVFP4's own order, and nothing is clamped: up to 1.7 % differ at ties of E4M3 and
    where sf is subnormal.
    """
    absmax = tensor_amax(x)
    if not np.isfinite(absmax):
        return np.full_like(np.asarray(x, F32), np.nan)
    encode = nv_encode_scale(absmax, 2688)

    def rule(tiles: Array) -> Array:
        sf = nearest(np.minimum(amax(tiles) * (encode * (F32(1) / F32(6))), F32(448)), E4M3).astype(F32)
        scaled = np.clip(tiles * nv_inverse(sf, encode), F32(-6), F32(6))
        step = sf * (absmax / F32(2688))
        as_float = nearest(scaled, E2M1).astype(F32) * step
        as_integer = nearest(scaled * F32(7 / 6), INT4).astype(F32) * F32(6 / 7) * step
        errors = [((y - tiles).astype(np.float64) ** 2).sum((1, 2), keepdims=True) for y in (as_float, as_integer)]
        return np.where(errors[1] < errors[0], as_integer, as_float)

    return by_tiles(x, dim, 1, 16, rule)


# --- Rotations -----------------------------------------------------------------------------------------------------

NVIDIA_SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float64)
"""The fixed signs of NVIDIA's recipe. Checked: equal to TE's get_wgrad_sign_vector and to torchao's."""


def hadamard(size: int) -> Array:
    """Sylvester's matrix, entries ±1."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def rotate(x: Array, signs: Array, dim: int = -1) -> Array:
    """x in runs of len(signs) along dim, times diag(signs) · H / sqrt(g); in float64.

    Source: TE NVFP4QuantizerRef._apply_rht. Checked: equal to it, run in float32, within 1.4e-7 of a run's norm. TE
    runs it in bfloat16. Quartet II multiplies by (H · diag(s))ᵀ, which is diag(s) · H too; its signs of successive
    steps multiply.
    """
    g = len(signs)
    moved = np.moveaxis(np.asarray(x, np.float64), dim, -1)
    y = moved.reshape(-1, g) * signs @ hadamard(g) / math.sqrt(g)
    return np.moveaxis(y.reshape(moved.shape), -1, dim)


def rotate_back(y: Array, signs: Array, dim: int = -1) -> Array:
    """The inverse: y · Hᵀ · diag(signs) / sqrt(g); in float64."""
    g = len(signs)
    moved = np.moveaxis(np.asarray(y, np.float64), dim, -1)
    x = moved.reshape(-1, g) @ hadamard(g).T / math.sqrt(g) * signs
    return np.moveaxis(x.reshape(moved.shape), -1, dim)


MS_EDEN_TARGET = F32(6 / (17 / 16 * 0.93))


def ms_eden_parts(rotated: Array, run: int = 128) -> tuple[Array, Array, np.float32]:
    """(elements [n, 16], block scales times their correction [n, 1], tensor scale): what MS-EDEN computes before it
    rounds the scales stochastically. `rotated`: after the rotation, last axis a multiple of `run`.

    Tensor scale absmax / 255.99 / 6.072; sf = e4m3((blockmax / 6.072) / tensor scale), 1 where 0; elements to nearest,
    ties away, clipped at 6; correction Σv² / Σ(v · q) over a run.
    Source: Quartet II quartet_2.py, eden_1x16s_fp4_kernel. Checked: the kernel, on 7 inputs of 16 × 512, runs of 128:
    each of 3,584 blocks is read back with one of the two E4M3 neighbours of its corrected scale, elements equal.
    """
    blocks = np.asarray(rotated, F32).reshape(-1, 16)
    absmax = tensor_amax(rotated)
    tensor = F32(1) if absmax == 0 else absmax / F32(255.99) / MS_EDEN_TARGET
    sf = nearest((np.abs(blocks).max(1, keepdims=True) / MS_EDEN_TARGET) / tensor, E4M3).astype(F32)
    sf = np.where(sf == 0, F32(1), sf)
    scaled = blocks / (sf * tensor)
    element = nearest(scaled, E2M1, "away")
    runs, rounded = scaled.reshape(-1, run).astype(np.float64), element.reshape(-1, run)
    projection = (runs * rounded).sum(1)
    with np.errstate(all="ignore"):
        correction = np.where(projection == 0, 1.0, (runs * runs).sum(1) / projection)
    corrected = sf.reshape(-1, run // 16) * correction[:, None]
    return element.astype(F32), corrected.reshape(-1, 1).astype(F32), tensor


def ms_eden(x: Array, signs: Array, u: Array) -> Array:
    """MS-EDEN of x, turned back. u: uniform in [0, 1), one for each block of 16. Quartet II's default run is 32."""
    element, corrected, tensor = ms_eden_parts(rotate(x, signs).astype(F32), len(signs))
    sf = stochastic(corrected, E4M3, u.reshape(-1, 1)).astype(F32)
    return rotate_back((element * sf * tensor).reshape(np.shape(x)), signs)


# --- HiFloat -------------------------------------------------------------------------------------------------------


def hif4(x: Array, dim: int = -1) -> Array:
    """HiF4: blocks of 64 with an E6M2 scale, 8 and 16 one-bit exponents, and elements k/4, k = 0..7. arXiv 2602.11287.

    Products are float32; ½ is added exactly. Inf and NaN make the block NaN, a policy of ours: in the library Inf
    saturates and NaN is undefined.
    Source: HiFloat4. Checked: To_HiFX (NumPy, products in float64) and quant_hifx (torch, float32) equal on all inputs
    and To_HiFX on 400,000 values of N(0, 1). quant_hifx adds ½ in float32 and so turns 0.12499999 into 0.25.
    """

    def rule(tiles: Array) -> Array:
        m4 = np.abs(tiles).reshape(-1, 16, 4).max(2)
        m8 = m4.reshape(-1, 8, 2).max(2)
        m64 = m8.max(1, keepdims=True)
        wanted = bfloat16(np.clip(m64 * F32(0.142578125), F32(2.0**-48), F32(49152)))
        sf = nearest(wanted, E6M2).astype(F32)
        r = bfloat16(F32(1) / sf)
        e8 = np.repeat(m8 * r >= 4, 2, axis=1)
        e4 = m4 * r * np.exp2(-e8.astype(F32)) >= 2
        lift = np.repeat(np.exp2((e8.astype(F32) + e4).astype(F32)), 4, axis=1)
        flat = tiles.reshape(-1, 64)
        k = np.floor((np.abs(flat) * r / lift * F32(4)).astype(np.float64) + 0.5)
        y = np.copysign(np.minimum(k, 7) / 4 * lift * sf, flat)
        return y.reshape(tiles.shape)

    return by_tiles(x, dim, 1, 64, rule)


def hifp8_amax8(x: Array) -> Array:
    """HiFloat8 with S = 8 / absmax in float32, 1 for a zero tensor; ties away; read back as q / S.

    Source: fake_quant quant/ops/hifp.py. Checked: quant_hif8_core on x · S for N(0, 1), N(0, 1) · 1e-6 and Cauchy:
    equal above 2^-22. Below, it gives 2^-22 for every value; quant_hif8 also adds the epsilon of float32 to absmax and
    ends in bfloat16.
    """
    x = np.asarray(x, F32)
    absmax = tensor_amax(x)
    if not np.isfinite(absmax):
        return np.full_like(x, np.nan)
    with np.errstate(over="ignore"):
        scale = F32(1) if absmax == 0 else np.minimum(F32(8) / absmax, FLOAT32_MAX)
    return nearest(x * scale, HIF8, "away").astype(F32) / scale
