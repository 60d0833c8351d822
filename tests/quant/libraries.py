"""Oracles written by others: `library_round` rounds to an element with a published library (ml_dtypes, en_dtypes,
numpy); `gfloat_round` is a second opinion. Whole formats are built on top of them in numpy, from their definitions,
without a line of quant."""

from __future__ import annotations

from types import SimpleNamespace

import en_dtypes
import gfloat
import gfloat.formats as gf
import ml_dtypes
import numpy as np

# What each element is in the libraries: the numpy dtype, gfloat's descriptor, the largest value, emax.
LIBRARY = {
    "bf16": SimpleNamespace(
        dtype=ml_dtypes.bfloat16, gfloat=gf.format_info_bfloat16, max=3.3895313892515355e38, emax=127
    ),
    "fp16": SimpleNamespace(dtype=np.float16, gfloat=gf.format_info_binary16, max=65504.0, emax=15),
    "fp8_e4m3": SimpleNamespace(dtype=ml_dtypes.float8_e4m3fn, gfloat=gf.format_info_ocp_e4m3, max=448.0, emax=8),
    "fp8_e5m2": SimpleNamespace(dtype=ml_dtypes.float8_e5m2, gfloat=gf.format_info_ocp_e5m2, max=57344.0, emax=15),
    "fp8_e4m3fnuz": SimpleNamespace(dtype=ml_dtypes.float8_e4m3fnuz, gfloat=None, max=240.0, emax=7),
    "fp8_e5m2fnuz": SimpleNamespace(dtype=ml_dtypes.float8_e5m2fnuz, gfloat=None, max=57344.0, emax=15),
    "hifp8": SimpleNamespace(dtype=en_dtypes.hifloat8, gfloat=None, max=32768.0, emax=15),
    "mxfp8": SimpleNamespace(dtype=ml_dtypes.float8_e4m3fn, gfloat=gf.format_info_ocp_e4m3, max=448.0, emax=8),
    "mxfp8_e5m2": SimpleNamespace(dtype=ml_dtypes.float8_e5m2, gfloat=gf.format_info_ocp_e5m2, max=57344.0, emax=15),
    "mxfp6_e3m2": SimpleNamespace(dtype=ml_dtypes.float6_e3m2fn, gfloat=gf.format_info_ocp_e3m2, max=28.0, emax=4),
    "mxfp6_e2m3": SimpleNamespace(dtype=ml_dtypes.float6_e2m3fn, gfloat=gf.format_info_ocp_e2m3, max=7.5, emax=2),
    "mxfp4": SimpleNamespace(dtype=ml_dtypes.float4_e2m1fn, gfloat=gf.format_info_ocp_e2m1, max=6.0, emax=2),
    "mxint8": SimpleNamespace(dtype=None, gfloat=gf.format_info_ocp_int8, max=127 / 64, emax=0),
    "mxfp8_e4m3fnuz": SimpleNamespace(dtype=ml_dtypes.float8_e4m3fnuz, gfloat=None, max=240.0, emax=7),
    "mxfp8_e5m2fnuz": SimpleNamespace(dtype=ml_dtypes.float8_e5m2fnuz, gfloat=None, max=57344.0, emax=15),
    "nvfp4": SimpleNamespace(dtype=ml_dtypes.float4_e2m1fn, gfloat=gf.format_info_ocp_e2m1, max=6.0, emax=2),
    "hif4": SimpleNamespace(dtype=en_dtypes.float4_e1m2, gfloat=None, max=1.75, emax=0),
    "nvint4": SimpleNamespace(dtype=ml_dtypes.int4, gfloat=None, max=7.0, emax=2),
    "mxint4": SimpleNamespace(dtype=ml_dtypes.int4, gfloat=None, max=7.0, emax=2),
}


def library_round(name: str, x: np.ndarray, saturate: bool = True) -> np.ndarray:
    """float32 x on the element's grid by the library's own cast; what overflows is ±max or, not saturated, ±Inf."""
    spec = LIBRARY[name]
    x = np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        if spec.dtype is None:  # MXINT8: numpy's rint is ties to even
            y = np.rint(x.astype(np.float64) * 64) / 64
            y = np.where(np.isnan(x), np.nan, np.clip(y, -spec.max, spec.max)) + 0.0
        else:
            y = x.astype(spec.dtype).astype(np.float64)
        overflowed = ~np.isfinite(y) & ~np.isnan(x)
        y = np.where(overflowed, np.copysign(spec.max if saturate else np.inf, x), y)
        return np.where(np.isnan(x), np.nan, y).astype(np.float32)


def gfloat_round(name: str, x: np.ndarray) -> np.ndarray:
    """The same by gfloat, saturating, ties to even."""
    with np.errstate(invalid="ignore"):
        return gfloat.round_ndarray(LIBRARY[name].gfloat, np.asarray(x, np.float64), sat=True).astype(np.float32)


def nvfp4_numpy(x: np.ndarray, block: int = 16) -> np.ndarray:
    """NVFP4 of float32 x [..., n], blocks along the last axis: the published formula, each step in float32."""
    f32 = np.float32
    largest = np.finfo(f32).max
    x = np.asarray(x, f32)
    absmax = np.abs(x).max()
    with np.errstate(all="ignore"):
        encode = f32(1) if absmax == 0 else np.fmin(f32(2688) / absmax, largest)
        rows = np.pad(x.reshape(-1, x.shape[-1]), ((0, 0), (0, -x.shape[-1] % block)))
        blocks = rows.reshape(rows.shape[0], -1, block)
        wanted = np.abs(blocks).max(-1, keepdims=True) * (encode * f32(f32(1) / f32(6)))
        sf = np.minimum(wanted, f32(448)).astype(ml_dtypes.float8_e4m3fn).astype(f32)
        inverse = np.minimum(f32(1) / (sf * (f32(1) / encode)), largest)
        element = np.clip(blocks * inverse, f32(-6), f32(6)).astype(ml_dtypes.float4_e2m1fn).astype(f32)
        y = (element * sf) * (absmax / f32(2688))
    return y.reshape(rows.shape)[:, : x.shape[-1]].reshape(x.shape)


def mx_scale_exponent(name: str, absmax: float, rule: str = "floor") -> int:
    """The E8M0 exponent by exact rational arithmetic, from FORMATS.md. absmax positive, finite."""
    from fractions import Fraction

    spec = LIBRARY[name]
    mantissa_bits = {"mxfp8": 3, "mxfp8_e5m2": 2, "mxfp6_e3m2": 2, "mxfp6_e2m3": 3, "mxfp4": 1, "mxint8": 6}
    mantissa_bits |= {"mxfp8_e4m3fnuz": 3, "mxfp8_e5m2fnuz": 2}
    value = Fraction(float(absmax))

    def floor_log2(v: Fraction) -> int:
        e = v.numerator.bit_length() - v.denominator.bit_length()
        return e if Fraction(2) ** e <= v else e - 1

    if rule == "even":
        value += Fraction(2) ** (floor_log2(value) - mantissa_bits[name] - 1)
    if rule == "rceil":
        value /= Fraction(spec.max)
    e = floor_log2(value)
    if rule in ("ceil", "rceil"):
        e += Fraction(2) ** e < value
    return max(-127, min(127, e if rule == "rceil" else e - spec.emax))


def mx_numpy(name: str, x: np.ndarray, rule: str = "floor", block: int = 32) -> np.ndarray:
    """An MX format of float32 x [n] in numpy, with the element cast of a library and exact scaling in float64."""
    padded = np.pad(np.asarray(x, np.float32), (0, -len(x) % block)).reshape(-1, block)
    out = np.empty_like(padded)
    for row, result in zip(padded, out, strict=True):
        absmax = np.abs(row).max()
        if not np.isfinite(absmax):
            result[:] = np.nan
            continue
        scale = 2.0 ** mx_scale_exponent(name, absmax, rule) if absmax else 2.0**-127
        with np.errstate(over="ignore"):
            scaled = (row.astype(np.float64) / scale).astype(np.float32)
            result[:] = (library_round(name, scaled).astype(np.float64) * scale).astype(np.float32)
    return out.reshape(-1)[: len(x)]
