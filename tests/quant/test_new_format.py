"""A format of a known family is one descriptor: no kernel, no branch, no registration is needed to run it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from binade.quant import Format, fake_quantize, quantize, usage
from binade.quant.elements import FixedPoint, Minifloat
from binade.quant.formats import MX
from tests.quant.helpers import assert_same_bits, awkward, by_reference, devices

E3M4 = Format("fp8_e3m4", "FP8 E3M4", Minifloat("e3m4", 3, 4, "ieee"))
MXE3M4 = Format("mx_e3m4", "E3M4 in blocks of 8", Minifloat("e3m4", 3, 4, "ieee"), MX, 8)
MXINT4 = Format("mxint4", "INT4 in blocks of 32", FixedPoint("int4", 4, 2), MX, 32)
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
