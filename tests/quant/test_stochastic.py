"""Stochastic rounding: the two neighbours only, the right mean, the same by the same seed everywhere."""

from __future__ import annotations

import pytest
import torch

from binade.quant import FORMATS, fake_quantize
from binade.quant.rounding import noise
from binade.quant.specs import Spec
from tests.quant.helpers import assert_same_bits, awkward, by_reference, devices, formats

N = 1 << 14
NAMES = formats()


@pytest.mark.parametrize("name", NAMES)
def test_mean_is_the_value(name):
    """Of N draws the mean is within 5 standard errors of x; the values seen are x's two neighbours on the grid."""
    fmt = FORMATS[name]
    for value in (0.8125 + 2.0**-9, 0.3 * 2.0**-2, -0.7):
        x = torch.full((N, fmt.block_size or 2), value)
        x[:, 0] = torch.tensor(2.0**fmt.element.emax if fmt.scale_rules[0] == "floor" else 1.0)
        x = torch.where(x.abs() < 2.0**60, x, 1.0)
        y = fake_quantize(x, name, rounding="stochastic", seed=11)[:, 1].double()
        seen = y.unique()
        assert len(seen) <= 2 and float(seen[0]) <= value * (1 + 1e-6) + 1e-9
        error = float(y.mean()) - float(x[0, 1])
        spread = float(seen[-1] - seen[0])
        assert abs(error) <= 5 * spread / 2 / N**0.5 + 2e-7 * abs(value)
        if len(seen) == 2:
            assert float(seen[0]) <= float(x[0, 1]) <= float(seen[1])


SPECS = [
    Spec.of(name, scale=rule, rounding="stochastic")
    for name in ("nvfp4", "mxfp4")
    for rule in FORMATS[name].scale_rules
    if rule != "eden"  # which fixes the rounding
] + [Spec.of("hif4", rounding="stochastic")]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_spec_is_biased_where_the_largest_value_of_a_block_is_clipped(spec):
    """The mean of 800 draws, where clipping shows: it takes up to 1/17 of a block's largest value, or more."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    mean = fake_quantize(x.repeat(800, 1), spec).double().unflatten(0, (800, 16)).mean(0)
    blocks = x.reshape(-1, spec.block.columns)
    largest = blocks.abs().argmax(1, keepdim=True)
    share = (mean.reshape(blocks.shape).gather(1, largest) / blocks.gather(1, largest)).min().item()
    assert (share < 0.97) == spec.biased, share


def test_a_delayed_scale_clips_what_outgrows_it():
    assert Spec.of("fp8_e4m3(history=4, rounding=stochastic)").biased
    assert not Spec.of("fp8_e4m3(rounding=stochastic)").biased and not Spec.of("fp8_e4m3(history=4)").biased


@pytest.mark.parametrize("name", NAMES)
def test_grid_values_stay(name):
    x = awkward((8, 64), seed=1, specials=False)
    y = fake_quantize(x, name)
    if FORMATS[name].scale_rules[0] in ("none", "floor"):
        assert_same_bits(fake_quantize(y, name, rounding="stochastic", seed=3), y)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("name", NAMES)
def test_seed_decides(name, device):
    x = torch.randn(40, 66, generator=torch.Generator().manual_seed(0))
    first = fake_quantize(x, name, rounding="stochastic", seed=1)
    assert_same_bits(first, fake_quantize(x, name, rounding="stochastic", seed=1))
    assert_same_bits(first, fake_quantize(x.to(device), name, rounding="stochastic", seed=1, backend="triton"))
    assert not torch.equal(first, fake_quantize(x, name, rounding="stochastic", seed=2))
    for seed in (0, 2**31, 2**32 - 1):
        chosen = {"rounding": "stochastic", "seed": seed}
        assert_same_bits(
            fake_quantize(x.to(device), name, 0, backend="triton", **chosen), by_reference(x, name, 0, **chosen)
        )


def test_noise_is_uniform_and_a_function_of_the_index():
    u = noise(1 << 16, 5, torch.device("cpu"))
    assert float(u.min()) >= 0 and float(u.max()) < 1
    assert abs(float(u.double().mean()) - 0.5) < 5 * (1 / 12) ** 0.5 / 2**8
    counts = torch.histc(u, 256, 0, 1)
    chi_square = float(((counts - 256) ** 2 / 256).sum())
    assert 150 < chi_square < 380  # 255 degrees of freedom: mean 255, deviation 22.6
    assert torch.equal(u[:1000], noise(1000, 5, torch.device("cpu")))
    near = torch.corrcoef(torch.stack([u[1:], u[:-1]]))[0, 1]
    assert abs(float(near)) < 5 / 2**8


@pytest.mark.parametrize("distance", [1, 2, 3, 8, 16, 32, 64, 128, 1000, 1024, 3072, 4096, 8192, 14336, 65536])
def test_noise_of_neighbours_is_independent(distance):
    """Neighbours in a block, a row or a tile: all pairs of 16 × 16 cells are equally frequent."""
    cells = (noise((1 << 18) + distance, 5, torch.device("cpu")) * 16).long()
    counts = torch.bincount(cells[:-distance] * 16 + cells[distance:], minlength=256).double()
    chi_square = float(((counts - 1024) ** 2 / 1024).sum())
    assert 150 < chi_square < 380  # 255 degrees of freedom: mean 255, deviation 22.6


def largest_agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    """|mean exp(2πi (ka - mb))| over small k and m, shape (elements,): 1/√elements if a and b are independent."""
    pairs = [(1, 1), (2, 2), (3, 3), (1, -1), (2, -2), (1, 2), (2, 1), (1, 3), (3, 1)]
    angles = [2 * torch.pi * (k * a.double() - m * b.double()) for k, m in pairs]
    return max(float(torch.polar(torch.ones_like(t), t).mean().abs()) for t in angles)


@pytest.mark.parametrize("distance", [543140, 1086280, 3629777, 10346191, 13975968])
def test_noise_is_independent_where_the_first_product_is_almost_the_same(distance):
    """At these distances two indices' products with the first multiplier differ by 32 to 2456, modulo 2^32."""
    u = noise(distance + (1 << 16), 5, torch.device("cpu"))
    assert largest_agreement(u[: 1 << 16], u[distance:]) < 6 / 2**8


@pytest.mark.parametrize(("seed", "other", "distance"), [(298, 864, 4091), (912, 126, 12396), (299, 930, 17236)])
def test_noise_of_seeds_with_keys_close_together_is_independent(seed, other, distance):
    """The first keys of these seeds differ by `distance`: with one key, both had the same noise this far apart."""
    u, v = (noise(distance + (1 << 16), s, torch.device("cpu")) for s in (seed, other))
    assert largest_agreement(u[: 1 << 16], v[distance:]) < 6 / 2**8
    assert largest_agreement(u[distance:], v[: 1 << 16]) < 6 / 2**8
    assert largest_agreement(u[: 1 << 16], v[: 1 << 16]) < 6 / 2**8
