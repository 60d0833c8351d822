"""Oracles written by others, and the comparison every test of quant uses.

`library_round` rounds to an element with a published library (ml_dtypes, en_dtypes, numpy); `gfloat_round` is a second
opinion. `independent` builds a whole format on top of them in numpy, from FORMATS.md, without a line of quant.
"""

from __future__ import annotations

from types import SimpleNamespace

import en_dtypes
import gfloat
import gfloat.formats as gf
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from binade.quant import reference
from binade.quant.formats import FORMATS, Format
from binade.quant.quantizer import outer_absmax
from binade.quant.specs import Spec

MX = ["mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8"]
RULES = ["floor", "ceil", "even", "rceil"]

# What each element is in the libraries: the numpy dtype, gfloat's descriptor, the largest value, emax.
LIBRARY = {
    "bf16": SimpleNamespace(
        dtype=ml_dtypes.bfloat16, gfloat=gf.format_info_bfloat16, max=3.3895313892515355e38, emax=127
    ),
    "fp16": SimpleNamespace(dtype=np.float16, gfloat=gf.format_info_binary16, max=65504.0, emax=15),
    "fp8_e4m3": SimpleNamespace(dtype=ml_dtypes.float8_e4m3fn, gfloat=gf.format_info_ocp_e4m3, max=448.0, emax=8),
    "fp8_e5m2": SimpleNamespace(dtype=ml_dtypes.float8_e5m2, gfloat=gf.format_info_ocp_e5m2, max=57344.0, emax=15),
    "hifp8": SimpleNamespace(dtype=en_dtypes.hifloat8, gfloat=None, max=32768.0, emax=15),
    "mxfp8": SimpleNamespace(dtype=ml_dtypes.float8_e4m3fn, gfloat=gf.format_info_ocp_e4m3, max=448.0, emax=8),
    "mxfp8_e5m2": SimpleNamespace(dtype=ml_dtypes.float8_e5m2, gfloat=gf.format_info_ocp_e5m2, max=57344.0, emax=15),
    "mxfp6_e3m2": SimpleNamespace(dtype=ml_dtypes.float6_e3m2fn, gfloat=gf.format_info_ocp_e3m2, max=28.0, emax=4),
    "mxfp6_e2m3": SimpleNamespace(dtype=ml_dtypes.float6_e2m3fn, gfloat=gf.format_info_ocp_e2m3, max=7.5, emax=2),
    "mxfp4": SimpleNamespace(dtype=ml_dtypes.float4_e2m1fn, gfloat=gf.format_info_ocp_e2m1, max=6.0, emax=2),
    "mxint8": SimpleNamespace(dtype=None, gfloat=gf.format_info_ocp_int8, max=127 / 64, emax=0),
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
    mantissa_bits = {"mxfp8": 3, "mxfp8_e5m2": 2, "mxfp6_e3m2": 2, "mxfp6_e2m3": 3, "mxfp4": 1, "mxint8": 6}[name]
    value = Fraction(float(absmax))

    def floor_log2(v: Fraction) -> int:
        e = v.numerator.bit_length() - v.denominator.bit_length()
        return e if Fraction(2) ** e <= v else e - 1

    if rule == "even":
        value += Fraction(2) ** (floor_log2(value) - mantissa_bits - 1)
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


def bf16_patterns() -> np.ndarray:
    """All 65,536 bfloat16 values as float32, NaN and infinities included."""
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def ties(values: np.ndarray) -> np.ndarray:
    """The midpoints of neighbouring values, and one float32 ulp to either side of each."""
    values = np.unique(np.asarray(values, np.float64))
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    return np.concatenate(
        [np.nextafter(middle, -np.inf, dtype=np.float32), middle, np.nextafter(middle, np.inf, dtype=np.float32)]
    )


def by_reference(x: Tensor, fmt: str | Format, dim: int = -1, seed: int = 0, **options: object) -> Tensor:
    """x quantized and dequantized by the definition, `quant.reference`, alone."""
    spec = Spec.of(fmt, **options)
    return reference.quantize_dequantize(x, spec, dim, outer_absmax(x, spec, dim), seed)[0]


def assert_same_bits(got: Tensor | np.ndarray, want: Tensor | np.ndarray, x: Tensor | np.ndarray | None = None) -> None:
    """Equal to the bit, the sign of zero included; NaN must stand where NaN stands, its payload is free."""
    got, want = (torch.as_tensor(v).detach().cpu() for v in (got, want))
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    got, want = got.contiguous().reshape(-1), want.contiguous().reshape(-1)
    integer = torch.int32 if got.dtype == torch.float32 else torch.int16
    same = (got.view(integer) == want.view(integer)) | (got.isnan() & want.isnan())
    if not bool(same.all()):
        bad = (~same).nonzero().reshape(-1)[:5]
        source = "" if x is None else f" from {torch.as_tensor(x).reshape(-1)[bad].tolist()}"
        found, wanted = got[bad].tolist(), want[bad].tolist()
        raise AssertionError(f"{int((~same).sum())} of {same.numel()} differ: {found} instead of {wanted}{source}")


def awkward(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0, specials: bool = True) -> Tensor:
    """Values over the whole range of float32, ordinary ones, ties, signed zeros and subnormals; some NaN and Inf."""
    g = torch.Generator().manual_seed(seed)
    n = int(np.prod(shape))
    ordinary = torch.randn(n, generator=g)
    wide = (
        ordinary
        * torch.exp2(torch.randint(-140, 127, (n,), generator=g).float() / 2)
        * torch.exp2(torch.randint(-70, 60, (n,), generator=g).float())
    )
    near = ordinary * torch.exp2(torch.randint(-12, 4, (n,), generator=g).float())
    tie = torch.randint(-64, 64, (n,), generator=g).float() / 16
    pick = torch.randint(0, 16, (n,), generator=g)
    x = torch.where(pick < 8, near, torch.where(pick < 12, tie, ordinary))
    x = torch.where(pick == 12, wide, x)
    x = torch.where(pick == 13, -0.0, x)
    if specials and n >= 64:
        x[torch.randint(0, n, (max(1, n // 400),), generator=g)] = torch.nan
        x[torch.randint(0, n, (max(1, n // 400),), generator=g)] = -torch.inf
    return x.reshape(shape).to(dtype)


def devices() -> list:
    """Where the Triton kernels run in this process: on CUDA (marked gpu), else on the CPU through the interpreter."""
    return [pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"]


def formats() -> list[str]:
    return list(FORMATS)
