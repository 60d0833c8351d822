"""What tensors are followed by over iterations, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from binade import quant
from binade.quant.blocks import look
from binade.quant.quantizer import apply
from binade.quant.specs import Spec
from binade.quant.traces import (
    CHANCE_SAMPLE,
    EDGE_SAMPLE,
    SAMPLE,
    Sample,
    edge_by_chance,
    hot_channels_later,
    hot_count,
    positions,
    sample_later,
)
from binade.quant.transform import transform, untransformed
from tests.app.roots import odd_tensors

# TetraJet-v2's widths of the bins of E2M1, by magnitude.
E2M1_WIDTHS = {0: 0.5, 0.5: 0.5, 1: 0.5, 1.5: 0.5, 2: 0.75, 3: 1, 4: 1.5, 6: 2}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def sampled(x: torch.Tensor, fmt: str, dim: int = -1) -> Sample:
    spec = Spec.of(fmt)
    coded = transform(x, spec, dim, 0).to(x.dtype)
    q, scales = apply(coded, untransformed(spec), dim, want_scales=True)
    fetch = sample_later(coded, q, spec, scales, dim)
    assert fetch
    return fetch()


@pytest.mark.parametrize(("channels", "k"), [(3, 0), (4, 1), (32, 8), (64, 8), (2048, 20), (14336, 64)])
def test_hot_channels_are_those_with_the_largest_absmax(channels, k):
    x = normal(7, 5, channels)
    found, ratio = hot_channels_later(x)()
    absmax = np.abs(x.float().numpy()).reshape(-1, channels).max(0)
    assert hot_count(channels) == k and found.tolist() == np.argsort(-absmax, kind="stable")[:k].tolist()
    assert ratio == pytest.approx(absmax.max() / np.median(absmax))


def test_hot_channels_of_odd_tensors():
    x = normal(16, 64)
    x[3, 5], x[2, 9], x[:, 11] = torch.nan, torch.inf, 100
    assert set(hot_channels_later(x)()[0]) & {5, 9, 11} == {11}
    sparse = torch.zeros(16, 64)
    sparse[2, 7] = -3
    found, ratio = hot_channels_later(sparse)()
    assert found.tolist() == [7] and math.isnan(ratio)
    for name, odd in odd_tensors().items():
        assert len(hot_channels_later(odd)()[0]) <= 8, name
        sampled(odd, "mxfp4") if odd.numel() else None
    assert not len(hot_channels_later(torch.ones(5))()[0])


@pytest.mark.parametrize("shape", [(4096, 4096), (11008, 4096), (257, 300)])
def test_places_spread_over_rows_and_columns(shape):
    at = positions(math.prod(shape), SAMPLE)
    assert 0.98 * SAMPLE < len(at) <= SAMPLE and at.min() >= 0 and at.max() < math.prod(shape)
    for index, size in zip(np.unravel_index(at, shape), shape, strict=True):
        counts = np.histogram(index, 16, (0, size))[0]
        assert counts.min() > 0.6 * SAMPLE / 16 and counts.max() < 1.5 * SAMPLE / 16
    assert positions(20, SAMPLE).tolist() == list(range(20))


def test_a_sample_is_the_values_and_what_they_were_rounded_to():
    x = normal(200, 300)
    found, at = sampled(x.T, "mxfp4", 0), positions(x.numel(), SAMPLE)
    assert np.array_equal(found.values, x.T.contiguous().float().numpy().reshape(-1)[at])
    assert np.array_equal(
        found.rounded, quant.fake_quantize(x.T.contiguous(), "mxfp4", 0).float().numpy().reshape(-1)[at]
    )


@pytest.mark.parametrize(("fmt", "block"), [("mxfp4", 32), ("nvfp4", 16)])
def test_weights_at_the_edge_of_a_bin(fmt, block):
    x = normal(64, EDGE_SAMPLE // 64).float() * 1.01  # no ties
    wide = x.double().numpy().reshape(-1, block)
    largest = np.abs(wide).max(1, keepdims=True)
    if fmt == "mxfp4":
        scale = 2.0 ** (np.floor(np.log2(largest)) - 2)
    else:
        stored = quant.quantize(x, fmt)
        scale = stored.scales.view(torch.float8_e4m3fn).double().numpy() * np.abs(wide).max() / (448 * 6)
    v = np.abs(wide / scale)
    codes = np.array(list(E2M1_WIDTHS))
    nearest = np.abs(v[..., None] - codes).argmin(-1)
    edge = np.abs(v - codes[nearest]) > 0.495 * np.array(list(E2M1_WIDTHS.values()))[nearest]
    expected = edge & (v <= 6)  # the others are clipped
    assert sampled(x, fmt).at_bin_edge == pytest.approx(expected.mean(), abs=1e-6) and 0.02 < expected.mean() < 0.1


@pytest.mark.parametrize(
    "fmt", ["hifp8", "fp8_e4m3", "fp8_e4m3(scale=amax)", "fp8_e4m3(block=row)", "nvfp4(block=16x16)"]
)
@pytest.mark.parametrize("dim", [0, 1])
def test_the_edge_along_any_axis_and_block(fmt, dim):
    x, spec = normal(32, 64), Spec.of(fmt)
    looked = look(x, spec, dim)
    grid = np.array(spec.format.element.finite_values)
    v, code = (looked.x.double() / looked.scale).numpy()[looked.valid], looked.values.numpy()[looked.valid]
    near = np.abs(grid - code[:, None]).argmin(1)
    outer = np.concatenate([[2 * grid[0] - grid[1]], grid, [2 * grid[-1] - grid[-2]]])
    width = (outer[near + 2] - outer[near]) / 2
    edge = (np.abs(v - code) > 0.495 * width) & (v >= grid[0]) & (v <= grid[-1])
    assert sampled(x, fmt, dim).at_bin_edge == pytest.approx(edge.mean(), abs=1e-6)


@pytest.mark.parametrize("fmt", ["hifp8", "fp8_e4m3(scale=none)"])
def test_the_share_by_chance_is_that_of_the_normal_distribution(fmt):
    grid, deviation = np.array(Spec.of(fmt).format.element.finite_values), 2 ** (-87 / 16)
    outer = np.concatenate([[2 * grid[0] - grid[1]], grid, [2 * grid[-1] - grid[-2]]])
    low, high = (outer[:-2] + grid) / 2, (outer[2:] + grid) / 2
    inner = 0.495 * (high - low)
    below, above = np.maximum(low, grid - inner), np.minimum(high, grid + inner)  # what is not at the edge
    cdf = scipy.stats.norm(0, deviation).cdf
    expected = (cdf(high) - cdf(low) - cdf(above) + cdf(below)).sum()
    found = edge_by_chance(Spec.of(fmt), deviation * 1.01, 0.1, torch.float32, 4096)
    assert found == pytest.approx(expected, abs=4 * math.sqrt(expected / CHANCE_SAMPLE))


@pytest.mark.sampled(18)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "fmt",
    [
        *("mxfp4", "nvfp4", "nvfp4(block=16x16)", "nvfp4(hadamard=16)", "mxfp8", "hifp8"),
        *("fp8_e4m3(scale=amax)", "fp8_e4m3(block=row)", "fp8_e4m3(block=128x128, scale=pow2)"),
        "nvfp4(scale=headroom)",
    ],
)
def test_normally_distributed_weights_have_the_share_by_chance(fmt, dtype):
    excess = []
    for seed in range(1, 7):
        x = (torch.randn(512, 512, generator=torch.Generator().manual_seed(seed)) * 0.02 * 2 ** (seed / 8)).to(dtype)
        chance = edge_by_chance(Spec.of(fmt), float(x.float().std()), float(x.abs().max()), dtype, 512)
        excess.append(
            (sampled(x, fmt).at_bin_edge - chance) / math.sqrt(chance * (1 / EDGE_SAMPLE + 1 / CHANCE_SAMPLE))
        )
    assert np.abs(excess).max() < 3.5, excess


def test_where_there_is_no_edge_or_no_sample():
    assert math.isnan(sampled(normal(32, 64), "nvfp4(rounding=stochastic)").at_bin_edge)
    assert math.isnan(sampled(normal(32, 64), "hif4").at_bin_edge)
    x = normal(32, 64)
    assert sample_later(x, x, Spec.of("nvfp4(hadamard=16, signs=random)"), None, -1) is None
    assert sample_later(x[:0], x[:0], Spec.of("nvfp4"), None, -1) is None
