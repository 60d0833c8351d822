"""The scales of DeepSeek-V4's inference kernels, as bits of a float32 product, against the specs of its recipe."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from binade.quant import fake_quantize

F32 = np.float32


def power_of_two_at_least(x: np.ndarray) -> np.ndarray:
    """`fast_round_scale`: the exponent of positive float32, plus one if any bit of the mantissa is set."""
    bits = x.view(np.uint32)
    return (((bits >> 23) + ((bits & 0x7FFFFF) != 0)).astype(np.uint32) << 23).view(F32)


def rounded(x: np.ndarray, block: int, dtype: type, largest: float, least: float) -> np.ndarray:
    blocks = x.reshape(len(x), -1, block)
    amax = np.maximum(np.abs(blocks).max(-1, keepdims=True), F32(least))
    scale = power_of_two_at_least(amax * F32(1 / largest))
    codes = np.clip(blocks / scale, -largest, largest).astype(dtype).astype(F32)
    return (codes * scale).reshape(x.shape)


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        ("fp8_e4m3(block=1x128, scale=pow2)", (128, ml_dtypes.float8_e4m3fn, 448, 1e-4)),
        ("mxfp4(scale=rceil)", (32, ml_dtypes.float4_e2m1fn, 6, 6 * 2.0**-126)),
    ],
)
def test_the_specs_of_deepseek_v4_are_its_kernels_rules(spec, rule):
    generator = np.random.default_rng(0)
    x = generator.standard_normal((256, 1024)) * np.exp2(generator.integers(-6, 6, (256, 1)))
    x = x.astype(ml_dtypes.bfloat16).astype(F32)
    assert np.array_equal(fake_quantize(torch.from_numpy(x), spec).numpy(), rounded(x, *rule))


@pytest.mark.parametrize("largest", [6, 448])
def test_a_product_with_the_rounded_reciprocal_gives_the_exact_scale(largest):
    """For all mantissas of an absmax."""
    amax = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(0x3F800000)).view(F32)
    exact = np.exp2(np.ceil(np.log2(amax.astype(np.float64) / largest)))
    assert np.array_equal(power_of_two_at_least(amax * F32(1 / largest)), exact)
