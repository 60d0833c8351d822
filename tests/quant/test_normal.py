"""The SQNR of normal values against published numbers, closed forms, and rounding written in NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from binade.quant.formats import FORMATS
from binade.quant.normal import normal_sqnr
from binade.quant.specs import Spec

# Of 2048² values of N(0,1), computed with other random numbers.
SIMULATED = {
    "bf16": 55.59, "fp16": 73.65, "fp8_e4m3": 31.55, "fp8_e5m2": 25.57, "hifp8": 31.52, "mxfp8": 30.65,
    "mxfp8_e5m2": 25.37, "mxfp6_e2m3": 30.94, "mxfp6_e3m2": 25.37, "mxint8": 41.66, "mxfp4": 18.78, "nvfp4": 20.44,
    "hif4": 21.62, "nvint4": 21.28, "mxint4": 17.56, "mxint4(scale=rceil)": 16.84,
}  # fmt: skip


def decibels(x: np.ndarray, q: np.ndarray) -> float:
    return 10 * np.log10((x**2).sum() / ((q - x) ** 2).sum())


@pytest.fixture(scope="module")
def normal() -> np.ndarray:
    return np.random.default_rng(7).standard_normal((2048, 2048)).astype(np.float32)


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", SIMULATED)
def test_it_is_that_of_a_plain_simulation(name):
    assert normal_sqnr(name) == pytest.approx(SIMULATED[name], abs=0.02)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_it_is_that_of_rounding_written_in_numpy(normal, name):
    size, element = (32 if name == "mxfp4" else 16), ml_dtypes.float4_e2m1fn
    blocks = normal.reshape(-1, size)
    absmax = np.abs(blocks).max(1, keepdims=True)
    if name == "mxfp4":  # OCP MX 1.0
        scale = 2.0 ** (np.floor(np.log2(absmax)) - 2)
    else:  # E4M3 block scales below a float32 scale of the tensor
        whole = np.float32(np.abs(normal).max() / (448 * 6))
        scale = (absmax / 6 / whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * whole
    rounded = np.clip(blocks / scale, -6, 6).astype(element).astype(np.float64) * scale
    assert normal_sqnr(name) == pytest.approx(decibels(blocks.astype(float), rounded), abs=0.02)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)])
def test_it_is_that_of_a_cast(normal, name, dtype):
    x = normal.astype(float)
    assert normal_sqnr(name) == pytest.approx(decibels(x, normal.astype(dtype).astype(float)), abs=0.02)


def test_a_delayed_scale_is_that_of_the_values_and_no_state_is_kept():
    assert normal_sqnr("fp8_e4m3(history=16)") == pytest.approx(normal_sqnr("fp8_e4m3"), abs=1e-9)
    assert normal_sqnr(Spec.of("mxfp4")) == normal_sqnr("mxfp4")


@pytest.mark.slow
def test_every_format_has_one():
    assert all(np.isfinite(normal_sqnr(name)) for name in FORMATS)
