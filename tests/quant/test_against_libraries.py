"""Rounding against implementations written by others: every bf16 pattern, every tie, every scale rule."""

from __future__ import annotations

import gfloat
import gfloat.formats as gf
import numpy as np
import pytest
import torch

from binade.quant import fake_quantize
from binade.quant.elements import E4M3
from binade.quant.formats import FORMATS
from tests.quant.helpers import MX, RULES, assert_same_bits, awkward, bf16_patterns, formats, ties
from tests.quant.libraries import LIBRARY, gfloat_round, library_round, mx_numpy, nvfp4_numpy

UNSCALED = ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz", "hifp8"]
GFLOAT_BLOCKS = {
    "mxfp8": gf.format_info_mxfp8_e4m3,
    "mxfp8_e5m2": gf.format_info_mxfp8_e5m2,
    "mxfp6_e3m2": gf.format_info_mxfp6_e3m2,
    "mxfp6_e2m3": gf.format_info_mxfp6_e2m3,
    "mxfp4": gf.format_info_mxfp4_e2m1,
    "mxint8": gf.format_info_mxint8,
}


def unscaled(name: str, x: np.ndarray, **options) -> torch.Tensor:
    rule = "none" if FORMATS[name].scale_rules[0] == "amax" else None
    return fake_quantize(torch.tensor(x), name, scale=rule, **options)


def with_scale_one(name: str, x: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
    """x's values below 2^(emax + 1), 31 to a block whose last element, 2^emax, makes the scale 1; and their results."""
    anchor = 2.0 ** LIBRARY[name].emax
    x = x[np.abs(x) < 2 * anchor]
    x = np.pad(x, (0, -len(x) % 31)).reshape(-1, 31)
    blocks = np.concatenate([x, np.full((len(x), 1), anchor, np.float32)], 1)
    return x, fake_quantize(torch.tensor(blocks), name)[:, :31].contiguous()


@pytest.mark.parametrize("name", UNSCALED)
@pytest.mark.parametrize("overflow", ["saturate", "inf"])
def test_every_bf16_pattern(name, overflow):
    if overflow == "inf" and not FORMATS[name].element.has_infinity:
        pytest.skip("the element has no infinity")
    x = bf16_patterns()
    assert_same_bits(unscaled(name, x, overflow=overflow), library_round(name, x, overflow == "saturate"), x)


@pytest.mark.parametrize("name", UNSCALED)
def test_every_bf16_pattern_as_bf16(name):
    x = torch.tensor(bf16_patterns()).bfloat16()
    rule = "none" if FORMATS[name].scale_rules[0] == "amax" else None
    got = fake_quantize(x, name, scale=rule)
    want = torch.tensor(library_round(name, bf16_patterns(), FORMATS[name].overflow == "saturate")).bfloat16()
    assert_same_bits(got, want, x)


@pytest.mark.parametrize("name", [n for n in UNSCALED if LIBRARY[n].gfloat])
def test_every_bf16_pattern_as_gfloat(name):
    x = bf16_patterns()
    assert_same_bits(unscaled(name, x, overflow="saturate"), gfloat_round(name, x), x)


@pytest.mark.parametrize("name", UNSCALED)
def test_ties(name):
    spec = LIBRARY[name]
    beyond = {"bf16": 2.0**128, "fp16": 65536.0, "fp8_e4m3": 480.0, "fp8_e5m2": 65536.0, "hifp8": 1.5 * 2**15}
    beyond |= {"fp8_e4m3fnuz": 256.0, "fp8_e5m2fnuz": 65536.0}
    values = [*list(FORMATS[name].element.finite_values), -beyond[name], beyond[name]]
    x = ties(np.array(values))
    x = x[np.isfinite(x)]
    assert len(x) >= 3 * (len(FORMATS[name].element.finite_values) - 1)
    assert_same_bits(unscaled(name, x, overflow="saturate"), library_round(name, x), x)
    if FORMATS[name].element.has_infinity:
        assert_same_bits(unscaled(name, x, overflow="inf"), library_round(name, x, saturate=False), x)
    if spec.gfloat is not None:
        assert_same_bits(unscaled(name, x, overflow="saturate"), gfloat_round(name, x), x)


@pytest.mark.parametrize("name", MX)
def test_every_bf16_pattern_at_scale_one(name):
    x, got = with_scale_one(name, bf16_patterns())
    assert x.size > 30000
    assert_same_bits(got, library_round(name, x), x)


@pytest.mark.parametrize("name", MX)
def test_ties_at_scale_one(name):
    top = 2.0 ** (LIBRARY[name].emax + 1)
    x, got = with_scale_one(name, ties(np.array([-top, *FORMATS[name].element.finite_values, top])))
    assert_same_bits(got, library_round(name, x), x)
    if LIBRARY[name].gfloat is None:
        return
    if name == "mxint8":  # named in formats.py: gfloat keeps -128, that is -2
        x, got = x[x > -127.5 / 64], got[torch.tensor(x > -127.5 / 64)]
    want = gfloat_round(name, x)
    assert_same_bits(got, want + 0.0 if name == "mxint8" else want, x)


@pytest.mark.parametrize("name", MX)
def test_every_bf16_pattern_scaled_by_its_binade(name):
    """In ascending order, each block of 32 lies in one binade e: its scale is 2^(e - emax), held at 2^-127."""
    x = bf16_patterns()
    x = np.concatenate([x[:0x7F80], x[0x8000:0xFF80]]).reshape(-1, 32)
    exponent = np.maximum(np.frexp(np.abs(x[:, 31:]).astype(np.float64))[1] - 1 - LIBRARY[name].emax, -127)
    scale = 2.0**exponent
    want = library_round(name, (x / scale).astype(np.float32)) * scale
    assert_same_bits(fake_quantize(torch.tensor(x), name), want.astype(np.float32), x)


@pytest.mark.parametrize("name", MX)
def test_nan_and_infinite_bf16_patterns_lose_their_block(name):
    special = bf16_patterns()[~np.isfinite(bf16_patterns())]
    blocks = torch.ones(len(special), 32)
    blocks[:, 5] = torch.tensor(special)
    assert fake_quantize(blocks, name).isnan().all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MX)
def test_scale_rules_in_exact_arithmetic(name, rule):
    x = awkward((240, 32), seed=3, specials=False).numpy()
    mantissas = np.nextafter(np.float32([1, 1.25, 1.5, 1.75, 1.875, 1.9375, 127 / 64, 2]), np.float32([[0], [9]]))
    x[:8, 0] = mantissas[0] * 2.0**20
    x[8:16, 0] = mantissas[1] * 2.0**20
    x[16:24, 0] = np.float32([1, 1.25, 1.5, 1.75, 1.875, 1.9375, 127 / 64, 2]) * 2.0**20
    x[24:48] *= 2.0**-130
    got = fake_quantize(torch.tensor(x), name, scale=rule)
    assert_same_bits(got.reshape(-1), mx_numpy(name, x.reshape(-1), rule), x)


@pytest.mark.parametrize("name", GFLOAT_BLOCKS)
def test_blocks_as_gfloat(name):
    """gfloat's own quantize_block with its compute_scale_amax, which stops at 2^-127 as E8M0 does."""
    x = awkward((40, 32), seed=11, specials=False).numpy()
    x[0], x[1, 1:], x[2] = 0.0, 0.0, x[2] * 2.0**-130
    want = np.stack(
        [gfloat.quantize_block(GFLOAT_BLOCKS[name], row.astype(np.float64), gfloat.compute_scale_amax) for row in x]
    ).astype(np.float32)
    got = fake_quantize(torch.tensor(x), name)
    if name == "mxint8":
        scale = np.array([[gfloat.compute_scale_amax(0, row)] for row in x])
        minus_two = want == -2 * scale  # named in formats.py
        assert_same_bits(got[torch.tensor(~minus_two)], want[~minus_two] + 0.0)
    else:
        assert_same_bits(got, want, x)


def test_gfloat_mxint8_keeps_minus_128_and_we_do_not():
    x = np.zeros(32)
    x[0] = -1.9999
    assert gfloat.quantize_block(GFLOAT_BLOCKS["mxint8"], x, gfloat.compute_scale_amax)[0] == -2.0
    assert fake_quantize(torch.tensor(x, dtype=torch.float32), "mxint8")[0] == -127 / 64


def test_ml_dtypes_overflows_where_we_saturate():
    x = np.float32([1e6, -1e6])
    assert np.isnan(x.astype(LIBRARY["fp8_e4m3"].dtype).astype(np.float32)).all()
    assert np.isinf(x.astype(LIBRARY["fp8_e5m2"].dtype).astype(np.float32)).all()
    assert unscaled("fp8_e4m3", x).tolist() == [448.0, -448.0]
    assert unscaled("fp8_e5m2", x).tolist() == [57344.0, -57344.0]
    assert unscaled("fp8_e5m2", x, overflow="inf").tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("scale", [1.0, 2.0**-40, 2.0**-100, 2.0**-140, 2.0**90, 3e-5, 0.7], ids=str)
def test_nvfp4_published_formula(scale):
    x = awkward((37, 16 * 5 + 3), seed=5, specials=False).clamp(-40, 40) * scale
    assert_same_bits(fake_quantize(x, "nvfp4"), nvfp4_numpy(x.numpy()), x)


def test_nvfp4_every_bf16_pattern_in_its_binade():
    x = bf16_patterns()
    x = np.concatenate([x[:0x7F80], x[0x8000:0xFF80]]).reshape(-1, 16)
    for low in range(0, len(x), 512):  # a tensor of 64 binades each
        part = x[low : low + 512]
        assert_same_bits(fake_quantize(torch.tensor(part), "nvfp4"), nvfp4_numpy(part), part)


@pytest.mark.parametrize("absmax", [1.0, 0.7, 3.3e-5, 117.0, 2688.0, 1e30], ids=str)
def test_nvfp4_ties(absmax):
    """Block maxima that land on the midpoints of E4M3, and elements on those of E2M1, with an ulp to either side: where
    another order of the formula's roundings would show."""
    f32 = np.float32
    factor = (f32(2688) / f32(absmax)) * (f32(1) / f32(6))
    scales = np.array([v for v in E4M3.finite_values if v >= 0])
    maxima = ties(scales / np.float64(factor))
    maxima = maxima[(maxima > 0) & (maxima < absmax)]
    blocks = np.zeros((len(maxima) + 1, 16), f32)
    blocks[0, 0] = absmax
    blocks[1:, 0] = maxima
    blocks[1:, 1:] = maxima[:, None] * (ties(np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0])) / 6)[None, :]
    assert_same_bits(fake_quantize(torch.tensor(blocks), "nvfp4"), nvfp4_numpy(blocks), blocks)


def test_nvfp4_scale_is_not_clamped_from_below():
    """Named in formats.py: a block 2^-14 below the tensor's maximum keeps a subnormal E4M3 scale; torchao's is 2^-6."""
    x = torch.zeros(2, 16)
    x[0, 0], x[1, 0] = 2688.0, 6.0 * 2.0**-9
    assert fake_quantize(x, "nvfp4")[1, 0] == 6.0 * 2.0**-9


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 2.0**-140, 1e30, 0.3], ids=str)
def test_tensor_scale(name, scale):
    x = awkward((50, 40), seed=8, specials=False).clamp(-30, 30).numpy() * np.float32(scale)
    f32 = np.float32
    with np.errstate(over="ignore"):
        s = min(f32(LIBRARY[name].max) / np.abs(x).max(), np.finfo(f32).max)
    want = library_round(name, x * s) / s
    assert_same_bits(fake_quantize(torch.tensor(x), name), want, x)


@pytest.mark.parametrize("name", [n for n in formats() if n not in ("hifp8", "hif4")])
def test_half_away_differs_from_even_only_in_ties(name):
    spec = FORMATS[name]
    x = awkward((64, 32), seed=2, specials=False).clamp(-100, 100)
    even = fake_quantize(x, name, rounding="nearest")
    away = fake_quantize(x, name, rounding="half_away")
    moved = even != away
    assert bool((away.abs() >= even.abs()).all())
    if spec.scale_rules[0] in ("none", "floor"):  # the distances of a tie are exactly equal
        assert bool(((x - even).abs() == (away - x).abs())[moved].all()) and (
            moved.any() or spec.name in ("bf16", "fp16")
        )


@pytest.mark.parametrize("name", MX)
def test_the_nearest_exponent_in_float64(name):
    """As MLX computes it: the exponent is round(log2(absmax / max))."""
    x = awkward((240, 32), seed=4, specials=False).numpy()
    largest = np.abs(x).max(1, keepdims=True).astype(np.float64)
    largest[largest == 0] = 2.0**-149
    scale = 2.0 ** np.clip(np.round(np.log2(largest / FORMATS[name].max)), -127, 127)
    want = library_round(name, (x / scale).astype(np.float32)) * scale
    assert_same_bits(fake_quantize(torch.tensor(x), name, scale="nearest"), want.astype(np.float32), x)


def test_the_standard_deviation_as_scale_in_float64():
    x = np.random.default_rng(0).normal(size=(500, 32)).astype(np.float32)
    scale = (x.astype(np.float64).std(1, keepdims=True).astype(np.float32) * np.float32(2.92247856 / 6)).astype(
        np.float32
    )
    want = library_round("mxfp4", x * (np.float32(1) / scale)) * scale
    assert_same_bits(fake_quantize(torch.tensor(x), "mxfp4", scale="deviation"), want, x)


def test_quest_with_the_nearest_exponent_in_float64():
    x = np.random.default_rng(0).normal(size=(500, 32)).astype(np.float32)
    x *= np.exp2(np.random.default_rng(1).uniform(-8, 8, size=(500, 1))).astype(np.float32)
    scale = 2.0 ** np.round(np.log2(x.astype(np.float64).std(1, keepdims=True) * (2.92247856 / 6)))
    want = library_round("mxfp4", (x / scale).astype(np.float32)) * scale
    assert_same_bits(fake_quantize(torch.tensor(x), "mxfp4", scale="quest_nearest"), want.astype(np.float32), x)
