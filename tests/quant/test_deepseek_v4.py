"""The specs for what DeepSeek-V4 and V4.1 round, against the rules of their inference kernels."""

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
    x = values(256, 1024)
    assert np.array_equal(fake_quantize(torch.from_numpy(x), spec).numpy(), rounded(x, *rule))


def values(rows: int, columns: int) -> np.ndarray:
    """bfloat16 values whose rows differ in scale."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((rows, columns)) * np.exp2(generator.integers(-6, 6, (rows, 1)))
    return x.astype(ml_dtypes.bfloat16).astype(F32)


def hadamard(x: np.ndarray) -> np.ndarray:
    """Rows of 128 by Sylvester's matrix, each entry ± 1/√128, in bfloat16."""
    matrix = np.ones((1, 1), F32)
    while len(matrix) < 128:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (x @ matrix * F32(128**-0.5)).astype(ml_dtypes.bfloat16).astype(F32)


def test_queries_and_keys_of_the_indexer_are_rotated_by_128():
    """`rotate_activation`, then `fp4_act_quant`. Whole numbers, so that no order of a sum matters."""
    x = np.random.default_rng(1).integers(-128, 129, (512, 128)).astype(F32)
    expected = hadamard(rounded(hadamard(x), 32, ml_dtypes.float4_e2m1fn, 6, 6 * 2.0**-126))
    found = fake_quantize(torch.from_numpy(x).bfloat16(), "mxfp4(scale=rceil, hadamard=128)")
    assert np.array_equal(found.float().numpy(), expected)


def latents(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(values, scales) of V4.1's compressed latents: `_rope_quant_insert_nvfp4_kernel` of vLLM."""
    blocks = x.reshape(len(x), -1, 16)
    scale = np.clip(np.abs(blocks).max(-1, keepdims=True) * F32(1 / 6), F32(2.0**-9), F32(448))
    scale = scale.astype(ml_dtypes.float8_e4m3fn).astype(F32)
    codes = np.clip(blocks / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(F32)
    return (codes * scale).reshape(x.shape), np.repeat(scale, 16, -1).reshape(x.shape)


def test_compressed_latents_of_v4_1_have_scales_of_blocks_alone():
    """Equal but for halves: nvfp4(scale=e4m3) multiplies by float32(1 / scale), the kernel divides."""
    x = values(1024, 512)
    expected, scale = latents(x)
    differs = fake_quantize(torch.from_numpy(x), "nvfp4(scale=e4m3)").numpy() != expected
    assert 0 < differs.mean() < 1e-3
    assert set(np.abs(x[differs] / scale[differs])) <= {1.25, 2.5, 5}
    assert set(np.frexp(scale[differs])[0]) == {1.875 / 2}
    exact = np.random.default_rng(2).standard_normal((1024, 512)).astype(F32)
    assert np.array_equal(fake_quantize(torch.from_numpy(exact), "nvfp4(scale=e4m3)").numpy(), latents(exact)[0])


def test_a_latent_of_every_absmax_has_the_scale_of_the_kernel():
    """Blocks of one value; below 6 · 2^-10, where the scale underflows here, the kernel has 2^-9."""
    x = np.zeros((1 << 15, 16), F32)
    x[:, 0] = (np.arange(1 << 15, dtype=np.uint32) << 16).view(F32)
    x = x[np.isfinite(x[:, 0])]
    found, expected = fake_quantize(torch.from_numpy(x), "nvfp4(scale=e4m3)").numpy(), latents(x)[0]
    large = x[:, 0] > 6 * 2.0**-10
    assert np.array_equal(found[large], expected[large])
    assert not found[~large].any() and expected[~large].any()


@pytest.mark.parametrize("largest", [6, 7.5, 28, 448, 57344])
def test_a_product_with_the_rounded_reciprocal_gives_the_exact_scale(largest):
    """For all mantissas of an absmax."""
    amax = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(0x3F800000)).view(F32)
    exact = np.exp2(np.ceil(np.log2(amax.astype(np.float64) / largest)))
    assert np.array_equal(power_of_two_at_least(amax * F32(1 / largest)), exact)
