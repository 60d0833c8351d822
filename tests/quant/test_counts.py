"""Counting by code: compiled and by torch, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from binade.quant.backends import counts, native
from tests.quant.helpers import awkward

compiled_or_not = pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(
            True,
            marks=[pytest.mark.compiler, pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")],
        ),
        False,
    ],
    ids=["compiled", "torch"],
)


@pytest.fixture
def built(compiled, monkeypatch):
    if compiled:
        assert native.built(counts.UNIT) is not None
    else:
        monkeypatch.setattr(native, "_loaded", {counts.UNIT: None})


def value_counts(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    found = counts.counted(x)
    assert found is not None and found.dtype == x.dtype
    return found.values, found.counts


def codes_of(x: torch.Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy().view(np.uint16)


@pytest.mark.sampled(12)
@compiled_or_not
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [0, 1, 3, 1001, (1 << 21) + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_values_are_counted_as_numpy_counts_them(built, dtype, size, threads):
    torch.set_num_threads(threads)
    x = awkward((size,), dtype, seed=size)
    for _ in range(2):  # tables are kept between calls
        values, found = value_counts(x)
        used, want = np.unique(codes_of(x), return_counts=True)
        assert np.array_equal(codes_of(torch.from_numpy(values).to(dtype)), used) or np.isnan(values).any()
        assert found.dtype == np.int64 and np.array_equal(found, want)


@compiled_or_not
def test_every_code_and_one_code(built):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert np.array_equal(value_counts(x.repeat(3))[1], np.full(1 << 16, 3))
    values, found = value_counts(torch.full((200_003,), -1.5, dtype=torch.bfloat16))
    assert values.tolist() == [-1.5] and found.tolist() == [200_003]


@compiled_or_not
def test_upper_halves_of_float32(built):
    x = awkward((70_001,), torch.float32, seed=5)
    used, found = counts.upper_counts(x)
    want = np.unique(x.numpy().view(np.uint32) >> 16, return_counts=True)
    assert np.array_equal(used, want[0]) and np.array_equal(found, want[1])


@compiled_or_not
def test_a_view_is_counted_as_it_stands(built):
    x = torch.randn(400, 500).bfloat16()
    values, found = value_counts(x[::2, 3:77].T)
    want = value_counts(x[::2, 3:77].contiguous())
    assert np.array_equal(values, want[0]) and np.array_equal(found, want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_without_a_16_bit_code_are_not_counted(dtype):
    assert counts.counted(torch.ones(6, dtype=dtype)) is None
