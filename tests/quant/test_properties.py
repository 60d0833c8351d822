"""Properties that hold for every input, searched for counterexamples."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp

from binade.quant import FORMATS, fake_quantize
from tests.quant.helpers import assert_same_bits, formats

pytestmark = pytest.mark.slow

NAMES = formats()
SCALED = [n for n in NAMES if n != "hif4"]  # whose scale of a rounded block may be another
BLOCKED = [n for n in NAMES if FORMATS[n].scale_rules[0] in ("floor", "rceil", "nvfp4")]
POWER_SCALED = [n for n in NAMES if FORMATS[n].scale_rules[0] in ("floor", "rceil")]
SEARCH = settings(max_examples=60)


def floats(low: float = 2.0**-40, high: float = 2.0**40) -> st.SearchStrategy[float]:
    """float32 values, zero and both signs included."""
    magnitude = st.floats(low, high, width=32)
    return st.one_of(st.just(0.0), magnitude, magnitude.map(lambda v: -v), st.integers(-512, 512).map(lambda n: n / 32))


def vectors(elements: st.SearchStrategy[float] | None = None) -> st.SearchStrategy[torch.Tensor]:
    return hnp.arrays(np.float32, st.integers(1, 70), elements=floats() if elements is None else elements).map(
        torch.from_numpy
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SCALED)
@given(x=vectors())
@SEARCH
def test_idempotent(name, x):
    """What is on the grid stays. A scale that saturation or rounding moved keeps its elements representable."""
    y = fake_quantize(x, name)
    if FORMATS[name].scale_rules[0] in ("none", "floor"):
        assert_same_bits(fake_quantize(y, name), y, x)
    else:  # the float32 tensor scale is rounded: the same elements, within a rounding of the product each
        again = fake_quantize(y, name)
        assert bool(((again - y).abs() <= y.abs() * 2.0**-21).all())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
@given(x=vectors())
@SEARCH
def test_odd(name, x):
    y, mirrored = fake_quantize(x, name), -fake_quantize(-x, name)
    if FORMATS[name].element.signed_zero:
        assert_same_bits(y, mirrored, x)
    else:
        assert torch.equal(y, mirrored)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
@given(x=vectors())
@SEARCH
def test_monotone_within_a_block(name, x):
    x = torch.sort(x[:16])[0]
    y = fake_quantize(x, name)
    assert bool((y[1:] >= y[:-1]).all())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", POWER_SCALED)
@given(x=vectors(floats(2.0**-20, 2.0**20)), shift=st.integers(-60, 60))
@SEARCH
def test_scales_with_powers_of_two(name, x, shift):
    factor = 2.0**shift
    assert_same_bits(fake_quantize(x * factor, name), fake_quantize(x, name) * factor, x)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "nvfp4"])
@given(x=vectors(floats(2.0**-6, 2.0**6)), shift=st.integers(-20, 20))
@SEARCH
def test_tensor_scales_follow_powers_of_two(name, x, shift):
    factor = 2.0**shift
    assert_same_bits(fake_quantize(x * factor, name), fake_quantize(x, name) * factor, x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", POWER_SCALED)
@given(x=vectors(), other=vectors())
@SEARCH
def test_blocks_are_independent(name, x, other):
    block = FORMATS[name].block_size
    x = torch.nn.functional.pad(x, (0, -len(x) % block))
    joined = fake_quantize(torch.cat([x, other]), name)
    assert_same_bits(joined, torch.cat([fake_quantize(x, name), fake_quantize(other, name)]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCALED)
@given(x=vectors())
@SEARCH
def test_nearest_of_all_values(name, x):
    """Half an ulp of error at most: no value of the element, times the block's scale, lies nearer."""
    fmt = FORMATS[name]
    x = x[: fmt.block_size or len(x)]
    values = torch.tensor(fmt.element.finite_values, dtype=torch.float64)
    if len(values) > 1000:
        values = values[values.abs() > 2.0**-60]
    if fmt.scale_rules[0] == "floor":
        exponent = np.frexp(float(x.abs().max()))[1] - 1 - fmt.element.emax if x.any() else -127
        values = values * 2.0**exponent
    elif fmt.scale_rules[0] == "rceil":
        mantissa, exponent = np.frexp(float(x.abs().max()) / fmt.max)
        values = values * 2.0 ** (exponent - (mantissa == 0.5)) if x.any() else values * 2.0**-127
    elif fmt.scale_rules[0] == "amax":
        values = values / (np.float32(fmt.max) / np.maximum(np.float32(x.abs().max()), np.float32(1e-12))).astype(
            np.float64
        )
    elif fmt.scale_rules[0] == "nvfp4":  # one block: its scale is 448, the tensor's absmax / (448 · max)
        values = values * (float(x.abs().max()) / fmt.max)
    distance = (x.double() - fake_quantize(x, name).double()).abs()
    at = torch.searchsorted(values, x.double())
    below, above = values[(at - 1).clamp(min=0)], values[at.clamp(max=len(values) - 1)]
    nearest = torch.minimum((x - below).abs(), (x - above).abs())
    slack = 0.0 if fmt.scale_rules[0] in ("none", "floor", "rceil") else 2.0**-21
    if name == "hifp8":  # the mantissa's width is taken from the input's exponent; a neighbour never lies nearer
        nearest = torch.where(x.abs() < 2.0**-22, torch.minimum(x.abs(), 2.0**-22 - x.abs()), nearest)
    if name == "fp16":
        inside = x.abs() < 65520
        distance, nearest = distance[inside], nearest[inside]
    assert bool((distance <= nearest + slack * x.abs().max()).all())


@given(count=st.integers(0, 90), block=st.integers(1, 40))
@SEARCH
def test_a_tail_is_a_block_of_its_own(count, block):
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    parts = [fake_quantize(part, "mxfp4", block=block) for part in x.split(block)] if count else [x]
    assert_same_bits(fake_quantize(x, "mxfp4", block=block), torch.cat(parts))


@pytest.mark.parametrize("name", BLOCKED)
def test_axes_are_transposes(name):
    x = torch.randn(50, 70, generator=torch.Generator().manual_seed(0))
    assert_same_bits(fake_quantize(x, name, 0), fake_quantize(x.t().contiguous(), name, 1).t().contiguous())
