"""HiFloat8's optional power-of-two scale for a whole tensor, against en_dtypes' cast of the scaled values."""

from __future__ import annotations

import en_dtypes
import numpy as np
import pytest
import torch

from binade.quant import FORMATS, fake_quantize, quantize, score


def by_en_dtypes(x: torch.Tensor) -> np.ndarray:
    values = x.double().numpy()
    k = np.frexp(np.abs(values).max())[1] - 1 - 3
    scaled = np.ldexp(values, -k).astype(np.float32)
    return np.ldexp(scaled.astype(en_dtypes.hifloat8).astype(np.float64), k)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("magnitude", [2.0**-100, 1e-6, 1.0, 3e4, 2.0**100], ids=lambda m: f"{m:.0e}")
def test_agrees_with_en_dtypes(backend: str, magnitude: float) -> None:
    x = torch.randn(37, 65, generator=torch.Generator().manual_seed(3)) * magnitude
    got = fake_quantize(x, "hifp8", scale="pow2", backend=backend)
    assert np.array_equal(got.double().numpy(), by_en_dtypes(x))
    assert torch.equal(quantize(x, "hifp8", scale="pow2").dequantize(), got)


def test_puts_the_largest_value_where_all_mantissa_bits_are() -> None:
    assert FORMATS["hifp8"].element.precise_emax == 3
    x = torch.tensor([2.0**20 * 1.875, 2.0**17 * 1.125])
    assert torch.equal(fake_quantize(x, "hifp8", scale="pow2"), x)
    assert fake_quantize(x, "hifp8").tolist() == [32768.0, 32768.0]


def test_zero_and_not_finite() -> None:
    assert fake_quantize(torch.zeros(5), "hifp8", scale="pow2").tolist() == [0.0] * 5
    assert fake_quantize(torch.tensor([1.0, float("nan")]), "hifp8", scale="pow2").isnan().all()
    assert fake_quantize(torch.tensor([1.1, -float("inf")]), "hifp8", scale="pow2").tolist() == [1.125, -32768.0]


def test_helps_small_gradients() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 2.0**-20
    assert score(x, "hifp8", scale="pow2").sqnr_db > score(x, "hifp8").sqnr_db + 10


def test_only_a_tapered_format_has_it() -> None:
    with pytest.raises(
        ValueError,
        match="scale=pow2 is not possible for mxfp8: expected floor, ceil, even, rceil, float32, e4m3, ue5m3",
    ):
        fake_quantize(torch.ones(4), "mxfp8", scale="pow2")
