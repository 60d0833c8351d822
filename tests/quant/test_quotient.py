"""`triton_arithmetic.quotient` divides without a division: the same bits as IEEE 754's quotient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from binade.quant.backends.triton_arithmetic import INTERPRETED, quotient, tl, triton
from tests.quant.helpers import assert_same_bits

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
N = 1 << 16


@triton.jit
def quotient_kernel(value_ptr, divisor_ptr, out_ptr, rows: tl.constexpr, columns: tl.constexpr):
    values = tl.load(value_ptr + tl.arange(0, rows))[:, None]
    divisors = tl.load(divisor_ptr + tl.arange(0, columns))[None, :]
    index = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
    tl.store(out_ptr + index, quotient(tl.broadcast_to(values, index.shape), divisors))


def quotients(values: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
    device = "cpu" if INTERPRETED else "cuda"
    out = torch.empty(len(values), len(divisors), device=device)
    quotient_kernel[(1,)](
        values.to(device), divisors.to(device), out, len(values), len(divisors), enable_fp_fusion=False
    )
    return out.cpu()


def floats(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def by_numpy(values: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values.numpy()[:, None] / divisors.numpy()[None, :])


@pytest.mark.slow
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.thorough)])
def test_every_significand_of_divisors(every):
    values = torch.arange(8, 16) / 8
    for first in range(0, 1 << 23, every * N):
        divisors = floats(0x3F800000 + first + np.arange(N))
        assert_same_bits(quotients(values, divisors), by_numpy(values, divisors))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("divisor", [1536.0, 2688.0])
def test_every_significand_of_values(divisor):
    """Four-over-six divides by 6 times its bound."""
    for first in range(0, 1 << 23, 8 * N):
        values = floats(0x3F800000 + first + np.arange(8 * N))
        divisors = torch.full((1,), divisor)
        assert_same_bits(quotients(values, divisors), by_numpy(values, divisors))


def test_range_and_zeros():
    powers = torch.exp2(torch.arange(-126, 65).float())
    divisors = torch.cat([powers, powers[:-1] * 1.7320508, powers[:-1] * 1.0000001])
    divisors = torch.nn.functional.pad(divisors, (0, 1024 - len(divisors)), value=3.0)
    values = torch.tensor([0.0, -0.0, 2.0**-22, -(2.0**-9), 0.3125, -1.5, 448.0, -57344.0])
    with np.errstate(over="ignore"):
        want = by_numpy(values, divisors)
    assert bool(want.isinf().any())
    assert_same_bits(quotients(values, divisors), want)
