"""`identify` against tensors that other code quantized: ml_dtypes, en_dtypes and gfloat round, numpy scales."""

from __future__ import annotations

import random
import re

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from binade.quant.identification.faults import other_absmax
from binade.quant.identification.pair import Pair
from binade.quant.identification.search import identify
from binade.quant.specs import Spec
from tests.quant.helpers import MX, RULES
from tests.quant.libraries import LIBRARY, gfloat_round, library_round, mx_numpy, mx_scale_exponent, nvfp4_numpy

SHAPE = (48, 96)
CASES = 12


def values(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Normal values in lines of other sizes."""
    generator = np.random.default_rng(seed)
    sizes = np.exp2(generator.integers(-5, 5, (shape[0], 1)))
    return (generator.standard_normal(shape) * sizes).astype(np.float32)


def by_lines(function, x: np.ndarray, dim: int) -> np.ndarray:
    """A function of one line applied along an axis."""
    return np.apply_along_axis(function, dim, x).astype(np.float32)


def mx(name: str, x: np.ndarray, rule: str, block: int, dim: int = -1) -> np.ndarray:
    return by_lines(lambda line: mx_numpy(name, line, rule, block), x, dim)


def named(x: np.ndarray, q: np.ndarray, **options):
    return identify(torch.from_numpy(np.array(x)), torch.from_numpy(np.array(q)), **options)


def matches(found) -> set[tuple[str, int | None]]:
    return {(str(outcome.spec), outcome.dim) for outcome in found.matches if not outcome.words}


def words(found) -> str:
    return "; ".join(word for outcome in found.matches for word in outcome.words)


def random_mx(seed: int) -> tuple[str, str, int, int]:
    choose = random.Random(seed)
    rules = ["floor"] if (name := choose.choice(MX)) == "mxint8" else RULES  # mx_numpy's rules assume 1.x · 2^emax
    return name, choose.choice(rules), choose.choice((16, 32, 64)), choose.choice((0, 1))


@pytest.mark.parametrize("seed", range(CASES))
def test_an_mx_tensor_of_numpy_is_named(seed):
    name, rule, block, dim = random_mx(seed)
    x = values(seed)
    found = named(x, mx(name, x, rule, block, dim))
    assert (str(Spec.of(name, scale=rule, block=block)), dim) in matches(found), str(found)
    assert all(outcome.exact for outcome in found.matches)


@pytest.mark.parametrize("dim", [0, 1])
def test_nvfp4_of_numpy_is_named(dim):
    x = values(1)
    q = nvfp4_numpy(x) if dim else np.ascontiguousarray(nvfp4_numpy(np.ascontiguousarray(x.T)).T)
    found = named(x, q)
    assert found.spec == Spec.of("nvfp4")
    assert ("nvfp4", dim) in matches(found)


@pytest.mark.parametrize("name", ["bf16", "fp16", "hifp8"])
def test_a_plain_cast_is_named(name):
    found = named(x := values(2), library_round(name, x))
    assert found.spec == Spec.of(name)


def test_gfloat_is_named():
    x = values(3)
    found = named(x, gfloat_round("fp8_e5m2", x))
    assert ("fp8_e5m2(scale=none)", None) in matches(found)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_current_scaling_is_named(name):
    x = values(4)
    scale = np.float32(LIBRARY[name].max) / np.abs(x).max()
    found = named(x, library_round(name, x * scale) / scale)
    assert (name, None) in matches(found)


def test_ambiguity_is_said():
    """Without ties nobody can know how they are rounded; the report says which input would show it."""
    x = values(5, (96, 128))
    found = named(x, mx("mxfp8", x, "rceil", 32))
    others = {str(outcome.spec): found.apart[outcome] for outcome in found.matches[1:]}
    assert "midpoints" in others["mxfp8(scale=rceil, rounding=half_away)"]
    assert "told apart" in str(found)


@pytest.mark.parametrize(("scale", "packed"), [("uint8", True), ("float32", False)])
def test_codes_and_scales_are_read(scale, packed):
    x = values(6)
    exponents = np.array([[mx_scale_exponent("mxfp4", np.abs(b).max()) for b in line.reshape(-1, 32)] for line in x])
    scaled = (x / np.exp2(exponents).repeat(32, 1)).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
    codes = scaled.view(np.uint8) & 15
    codes = codes[:, ::2] | codes[:, 1::2] << 4 if packed else codes
    scales = (exponents + 127).astype(np.uint8) if scale == "uint8" else np.exp2(exponents).astype(np.float32)
    found = named(x, codes, scales=torch.from_numpy(scales))
    assert found.spec == Spec.of("mxfp4")


def test_zeros_with_a_sign_are_told_from_ties():
    """INT4 has no -0; numpy's rint keeps the sign."""
    x = values(11, (64, 128))
    scale = np.exp2(np.ceil(np.log2(np.abs(x.reshape(64, -1, 32)).max(-1) / 7))).repeat(32, 1)
    found = named(x, (np.rint(x / scale) * scale).astype(np.float32))
    assert words(found).count("0 keeps the sign of x") and "ties" not in words(found)


def test_division_by_the_scale_is_told_from_its_reciprocal():
    x = values(12, (128, 512)).astype(ml_dtypes.bfloat16).astype(np.float32)  # with values near midpoints
    scale = (np.abs(x.reshape(128, -1, 128)).max(-1) / np.float32(448)).repeat(128, 1)
    q = library_round("fp8_e4m3", x / scale) * scale
    assert not np.array_equal(q, library_round("fp8_e4m3", x * (np.float32(1) / scale)) * scale)
    assert "divided by its scale" in words(named(x, q))


def test_a_cast_without_saturation_is_named():
    x = values(13) * 8
    found = named(x, x.astype(ml_dtypes.float8_e4m3fnuz).astype(np.float32))
    assert "becomes NaN" in words(found), str(found)


def every_second_row(x):
    q = mx("mxfp4", x, "rceil", 32)
    q[1::2] *= np.float32(1.25)
    return q


def last_block(x):
    q = mx("mxfp4", x, "rceil", 32)
    q[:, -32:] = x[:, -32:]
    return q


def one_tile(x):
    q = mx("mxfp4", x, "rceil", 32)
    q[:, 32:64] *= np.float32(0.75)
    return q


def shifted(by):
    def fault(x):
        e = np.array(
            [[mx_scale_exponent("mxfp4", np.abs(b).max(), "rceil") for b in line.reshape(-1, 32)] for line in x]
        )
        scale = np.exp2(e + by).repeat(32, 1).astype(np.float32)
        return library_round("mxfp4", x / scale) * scale

    return fault


def swapped(x):
    return mx("mxfp4", x, "floor", 32).reshape(-1, 2)[:, ::-1].reshape(x.shape)


def transposed(x):
    e = np.array([[mx_scale_exponent("mxfp4", np.abs(b).max()) for b in line.reshape(-1, 32)] for line in x])
    scale = np.exp2(e).astype(np.float32)
    codes = library_round("mxfp4", x / scale.repeat(32, 1))
    return codes * scale.T.reshape(scale.shape).repeat(32, 1)


def of_another_tensor(x):
    scale = np.float32(448) / (7 * np.abs(x).max())
    return library_round("fp8_e4m3", x * scale) / scale


def truncated(x):
    e = np.array([[mx_scale_exponent("mxfp4", np.abs(b).max(), "rceil") for b in line.reshape(-1, 32)] for line in x])
    scale = np.exp2(e).repeat(32, 1)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    size = grid[np.searchsorted(grid, np.abs(x) / scale, side="right") - 1]
    return (np.copysign(size, x) * scale).astype(np.float32)


def divided(x):
    """With a value on a midpoint between two codes, which the reciprocal leaves on one side of it."""
    scale = np.abs(x).reshape(len(x), -1, 32)[..., 1:].max(-1) / np.float32(448)
    x.reshape(len(x), -1, 32)[..., 0] = np.float32(1.0625) * scale
    scale = scale.repeat(32, 1)
    return library_round("fp8_e4m3", x / scale) * scale


def transposed_of_8_bits(x):
    """Many elements and rules can give one factor for each block."""
    largest = np.abs(x.reshape(len(x), -1, 32)).max(-1)
    scale = np.exp2(np.ceil(np.log2(largest)) - 15).astype(np.float32)
    codes = library_round("mxfp8_e5m2", x / scale.repeat(32, 1))
    return codes * scale.T.reshape(scale.shape).repeat(32, 1)


def one_factor(x):
    """Current scaling as in compressed-tensors."""
    scale = np.abs(x).max() / np.float32(448)
    return library_round("fp8_e4m3", x / scale) * scale


def two_scales(x, largest, encode, absmax=None):
    """NVFP4 with codes times the product of both scales. absmax: that of another tensor."""
    outer = (np.abs(x).max() if absmax is None else absmax) / np.float32(448 * 6)
    stored = largest(np.abs(x.reshape(len(x), -1, 16)).max(-1) / np.float32(6), outer)
    stored = stored.astype(ml_dtypes.float8_e4m3fn).astype(np.float32).repeat(16, 1)
    codes = encode(x, stored, outer).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return codes * (stored * outer)


def as_torchao(x):
    """nvfp4_quantize with a tensor scale; one block is so small that its scale is raised to 2^-6."""
    x[0, :16] *= np.float32(1e-4)
    return two_scales(
        x,
        lambda largest, outer: (largest / outer).clip(np.float32(2**-6), np.float32(448)),
        lambda x, stored, outer: x * ((np.float32(1) / outer) / stored),
    )


def of_another_nvfp4_tensor(x, factor=1.35):
    """Of bfloat16 values, whose block scales are often tied: with an absmax one unit off they fall otherwise."""
    x[...] = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    multiplied = lambda x, stored, outer: x * (np.float32(1) / outer / stored)  # noqa: E731
    return two_scales(x, lambda largest, outer: largest / outer, multiplied, np.abs(x).max() * np.float32(factor))


@pytest.mark.parametrize("factor", [1.3, 3.3])
def test_the_absmax_of_another_nvfp4_tensor_is_found_among_its_float32_neighbors(factor):
    x = values(8, (256, 256)) * np.float32(0.02)
    q = of_another_nvfp4_tensor(x, factor)
    assert "another tensor" in words(named(x, q, dim=1, among=[Spec.of("nvfp4")]))


def by_division(x):
    return two_scales(x, lambda largest, outer: largest / outer, lambda x, stored, outer: x / (stored * outer))


FAULTS = {
    "transposed scales of E5M2": (transposed_of_8_bits, "transposed"),
    "one factor": (one_factor, "one factor, absmax / max, by which x is divided"),
    "NVFP4 as torchao": (as_torchao, "as in torchao"),
    "NVFP4 with a division": (by_division, "the product of both scales, by which x is divided"),
    "x divided by its scale": (divided, "divided by its scale"),
    "bfloat16 first": (lambda x: mx("mxfp8", x.astype(ml_dtypes.bfloat16).astype(np.float32), "floor", 32), "bfloat16"),
    "rounded twice": (lambda x: mx("mxfp4", mx("mxfp8", x, "floor", 32), "floor", 32), "rounded twice"),
    "scale up": (shifted(1), "one binade higher"),
    "scale down": (shifted(-1), "one binade lower"),
    "swapped nibbles": (swapped, "swapped"),
    "transposed scales": (transposed, "transposed"),
    "absmax of another tensor": (of_another_tensor, "another tensor"),
    "absmax of another NVFP4 tensor": (of_another_nvfp4_tensor, "another tensor"),
    "truncated": (truncated, "truncated"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault):
    plant, expected = FAULTS[fault]
    x = values(7, (96, 160))
    found = named(x, plant(x))
    assert found.spec is None
    assert expected in words(found), str(found)


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.5])
def test_the_absmax_of_a_tensor_scale_is_not_taken_for_another_power_of_two(factor):
    """Block scales take up a power of two of the tensor scale, so that many of them give the same values."""
    x = values(11, (96, 128))
    absmax = np.float32(np.abs(x).max()) * np.float32(factor)
    absmax = np.nextafter(absmax, np.float32(0)) if factor == 1 else absmax  # one unit in the last place
    outer = np.float32(absmax / np.float32(448 * 6))
    largest = np.abs(x).reshape(96, -1, 16).max(-1)
    stored = (largest / np.float32(6) / outer).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scale = (stored * outer).repeat(16, 1)
    q = (x / scale).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    found = other_absmax(Pair.of(torch.from_numpy(x), torch.from_numpy(q), 1), Spec.of("nvfp4"))
    assert found is not None
    said = float(re.search(r"an absmax of (\S+) instead", found[1]).group(1))
    assert said == pytest.approx(float(absmax) / (2 if factor > 2 else 1), rel=2e-6)
    assert ("as of another tensor" in found[1]) == (factor != 1)


@pytest.mark.parametrize(
    ("plant", "place"),
    [(every_second_row, "every second line"), (last_block, "the last block"), (one_tile, "block 1 ")],
)
def test_the_place_of_differences_is_named(plant, place):
    x = values(8)
    found = named(x, plant(x))
    assert not found.matches
    nearest = found.nearest[0]
    assert (str(nearest.spec), nearest.dim) == ("mxfp4(scale=rceil)", 1)
    assert any(place in word for word in nearest.common), str(found)


def test_ties_that_differ_are_named():
    """Values on a fine grid have ties; some are rounded down, so that neither rounding to nearest fits."""
    x = (np.random.default_rng(9).integers(-64, 64, SHAPE) / 64).astype(np.float32)
    x[:, ::32] = 1.75
    grid = np.arange(-7, 8, dtype=np.float32) / 4
    low = grid[np.searchsorted(grid, x, side="right") - 1]
    q = np.where(x - low == 0.125, low, np.rint(x * 4) / 4).astype(np.float32)
    q = np.where(x - low == 0.125, np.where(np.arange(96) % 2 == 0, low, q), q).astype(np.float32) + 0.0
    found = named(x, q)
    assert not found.spec
    assert any("ties" in word for outcome in found.nearest for word in outcome.common) or "ties" in words(found)


def test_stochastic_rounding_of_others_is_named():
    x = values(10, (96, 128))
    e = np.array([[mx_scale_exponent("mxfp4", np.abs(b).max(), "rceil") for b in line.reshape(-1, 32)] for line in x])
    scale = np.exp2(e).repeat(32, 1)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    size = np.abs(x) / scale
    at = np.searchsorted(grid, size, side="right") - 1
    low, high = grid[at], grid[np.minimum(at + 1, 7)]
    up = np.random.default_rng(0).random(x.shape) < (size - low) / np.where(high > low, high - low, 1)
    q = (np.where(up, high, low) * np.sign(x) * scale).astype(np.float32)
    assert named(x, q).spec is None
    assert "mxfp4(scale=rceil, rounding=stochastic)" in {str(outcome.spec) for outcome in named(x, q).matches}


@pytest.mark.parametrize(
    ("x", "q", "error", "part"),
    [
        (torch.ones(4), torch.ones(5), ValueError, "shape"),
        (torch.ones(4, dtype=torch.float64), torch.ones(4), TypeError, "float64"),
        (torch.ones(0), torch.ones(0), ValueError, "no values"),
        (torch.ones(4), torch.ones(5, dtype=torch.uint8), ValueError, "codes packed"),
    ],
    ids=["shape", "dtype", "empty", "codes"],
)
def test_bad_input_is_one_sentence(x: Tensor, q: Tensor, error, part):
    with pytest.raises(error, match=part):
        identify(x, q)
