"""The comparison every test of quant uses, inputs, and the devices; `libraries` has the oracles written by others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from binade.quant import reference
from binade.quant.formats import FORMATS, Format
from binade.quant.quantizer import outer_absmax
from binade.quant.specs import Spec

MX = ["mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "mxfp8_e4m3fnuz", "mxfp8_e5m2fnuz"]
RULES = ["floor", "ceil", "even", "rceil"]


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
