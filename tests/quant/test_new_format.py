"""A format of a known family is one entry in FORMATS, a scale scheme one class: nothing else needs a change."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch

from binade.quant import FORMATS, Format, compare, fake_quantize, look, quantize, score, usage
from binade.quant.elements import E2M1, E5M2, FixedPoint, Minifloat, Overflow, Rounding
from binade.quant.formats import MX_RULES
from binade.quant.rounding import round_to_element
from binade.quant.scaling import SCALINGS, Scaling
from binade.quant.specs import Spec
from tests.quant.helpers import assert_same_bits, awkward, by_reference, devices

E3M4 = Format("fp8_e3m4", "FP8 E3M4", Minifloat("e3m4", 3, 4, "ieee"))
MXE3M4 = Format("mx_e3m4", "E3M4 in blocks of 8", Minifloat("e3m4", 3, 4, "ieee"), MX_RULES, 8)
MXINT4 = Format("mxint4_coarse", "INT4 in blocks of 32", FixedPoint("int4", 4, 2), MX_RULES, 32)
NEW = [E3M4, MXE3M4, MXINT4]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("fmt", NEW, ids=lambda f: f.name)
def test_runs_on_every_backend(fmt, device):
    x = awkward((50, 70), seed=1)
    for dim in (0, 1):
        want = by_reference(x, fmt, dim)
        assert_same_bits(fake_quantize(x, fmt, dim, backend="torch"), want)
        assert_same_bits(fake_quantize(x.to(device), fmt, dim, backend="triton"), want)
        assert_same_bits(quantize(x, fmt, dim).dequantize(), want)
    assert usage(x, fmt).codes_used <= 1 << fmt.element.bits


def test_rounds_as_ml_dtypes():
    x = awkward((4000,), seed=2, specials=False)
    want = x.numpy().astype(ml_dtypes.float8_e3m4).astype(np.float32)
    want = np.where(np.isinf(want), np.copysign(15.5, want), want).astype(np.float32)
    assert E3M4.max == 15.5
    assert_same_bits(fake_quantize(x, E3M4), want)


def test_int4_by_hand():
    x = torch.zeros(32)
    x[:4] = torch.tensor([1.0, 1.9, -1.9, 0.375])  # steps of 1/4, ±7/4; 0.375 is a tie, to even
    assert fake_quantize(x, MXINT4)[:4].tolist() == [1.0, 1.75, -1.75, 0.5]
    assert quantize(x, MXINT4).unpacked_codes()[0, :4].tolist() == [4, 7, 9, 2]


@dataclass(frozen=True)
class BlockE5M2(Scaling):
    """A scheme without a kernel: absmax / max of each block as E5M2, values divided by it."""

    stored = E5M2
    shares = "an E5M2 scale for every {block} values"

    def of_largest(self, largest: torch.Tensor, spec: Spec, absmax: torch.Tensor) -> torch.Tensor:
        scale = (largest / spec.format.max).clamp(min=E5M2.smallest)
        return round_to_element(scale, E5M2, Rounding.NEAREST, Overflow.SATURATE)


def block_e5m2_numpy(x: np.ndarray, block: int) -> np.ndarray:
    """The same by ml_dtypes: float32 [n], n a multiple of block."""
    blocks = x.reshape(-1, block)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(6)
    scale = np.clip(scale, np.float32(2.0**-16), np.float32(57344)).astype(ml_dtypes.float8_e5m2).astype(np.float32)
    scaled = np.clip(blocks * (np.float32(1) / scale), -6, 6)
    return (scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale).reshape(-1)


def found_by_every_function(x: torch.Tensor, fmt: str, want: torch.Tensor) -> None:
    """x [n] rounded to fmt is `want` in fake_quantize, quantize, compare, score, look and usage."""
    assert_same_bits(fake_quantize(x, fmt), want)
    stored = quantize(x, fmt)
    assert_same_bits(stored.dequantize(), want)
    blocks = len(x) // FORMATS[fmt].block_size
    assert stored.nbytes == stored.codes.numel() + blocks == len(x) * Spec.of(fmt).bits_per_value / 8
    seen = look(x, fmt)
    assert_same_bits(seen.y.reshape(-1), want)
    errors, metrics, used = score(x, fmt), compare(x, want, fmt), usage(x, fmt)
    assert errors.sqnr_db == pytest.approx(metrics["sqnr_db"]) and metrics["sqnr_db"] > 10
    assert errors.saturated == metrics["saturated"] == float(seen.saturated.mean())
    assert used.codes_used == metrics["codes_used"] and used.scale_counts.sum() == blocks
    assert used.scale_exponent_max == seen.scale_exponents.max()


def test_a_block_format_is_one_entry(monkeypatch):
    monkeypatch.setitem(FORMATS._formats, "mxint4_coarse", MXINT4)
    assert "mxint4_coarse" in list(FORMATS)
    x = torch.randn(320, generator=torch.Generator().manual_seed(3))
    steps = 4 / 2.0 ** np.floor(np.log2(x.reshape(-1, 32).abs().amax(1, keepdim=True).numpy()))
    want = np.clip(np.rint(x.numpy().reshape(-1, 32) * steps), -7, 7) / steps + 0.0
    found_by_every_function(x, "mxint4_coarse", torch.tensor(want.reshape(-1), dtype=torch.float32))


def test_a_scale_scheme_is_one_class(monkeypatch):
    monkeypatch.setitem(SCALINGS, "e5m2", BlockE5M2("e5m2"))
    monkeypatch.setitem(FORMATS._formats, "fp4_e5m2", Format("fp4_e5m2", "FP4, E5M2 scales", E2M1, ("e5m2",), 16))
    x = torch.randn(320, generator=torch.Generator().manual_seed(4)) * 10
    found_by_every_function(x, "fp4_e5m2", torch.tensor(block_e5m2_numpy(x.numpy(), 16)))
    assert_same_bits(fake_quantize(x, "fp4_e5m2", backend="triton"), fake_quantize(x, "fp4_e5m2"))
    with pytest.raises(ValueError, match=r"floor.*fp4_e5m2: expected e5m2"):
        fake_quantize(x, "fp4_e5m2", scale="floor")
