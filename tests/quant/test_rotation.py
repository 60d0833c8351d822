"""The Hadamard rotation against scipy's matrix."""

from __future__ import annotations

import pytest
import torch
from scipy.linalg import hadamard

from binade.quant import fake_quantize, hadamard_rotate, score


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("block", [1, 2, 16, 32, 128])
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_is_scipys_matrix_along_the_axis(block, dim):
    shape = [3, 5, 7]
    shape[dim] = 256
    x = values(*shape)
    matrix = torch.from_numpy(hadamard(block)).double() / block**0.5
    rows = x.double().movedim(dim, -1)
    wanted = (rows.reshape(*rows.shape[:-1], -1, block) @ matrix).reshape(rows.shape).movedim(-1, dim)
    torch.testing.assert_close(hadamard_rotate(x, dim, block).double(), wanted, rtol=0, atol=2e-6)


def test_twice_is_nothing():
    x = values(64, 96).bfloat16()
    torch.testing.assert_close(hadamard_rotate(hadamard_rotate(x, 0), 0), x.float(), rtol=0, atol=1e-6)


def test_the_error_is_the_same_on_either_side():
    x = values(64, 128)
    x[:, 5] *= 40
    turned = hadamard_rotate(x)
    back = hadamard_rotate(fake_quantize(turned, "mxfp4"))
    noise, signal = (back - x).double().square().sum(), x.double().square().sum()
    assert float(10 * torch.log10(signal / noise)) == pytest.approx(score(turned, "mxfp4").sqnr_db, abs=1e-4)


def test_lifts_an_outlier_channel_out_of_the_way():
    """Four bits and one channel forty times the others: what a rotation is for."""
    x = values(256, 64)
    x[:, ::32] *= 40
    plain, turned = score(x, "mxfp4"), score(hadamard_rotate(x), "mxfp4")
    assert plain.flush_to_zero > 0.6 and turned.flush_to_zero < 0.2


@pytest.mark.parametrize(
    ("shape", "block", "message"), [((4, 32), 24, "power of two"), ((4, 40), 32, "does not divide")]
)
def test_says_what_cannot_be_rotated(shape, block, message):
    with pytest.raises(ValueError, match=message):
        hadamard_rotate(torch.zeros(shape), -1, block)


def test_a_scalar_and_an_empty_tensor():
    assert hadamard_rotate(torch.tensor(3.0), block=1) == 3.0
    assert hadamard_rotate(torch.zeros(0, 32)).shape == (0, 32)
