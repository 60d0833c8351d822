"""Block edge cases with values derived by hand from FORMATS.md, and the bytes that quantize stores for them."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from binade.quant import FORMATS, fake_quantize, quantize
from binade.quant.elements import Element, FixedPoint
from tests.quant.helpers import MX, RULES, assert_same_bits, formats
from tests.quant.libraries import LIBRARY

FLOAT32_MAX = float(np.finfo(np.float32).max)
BELOW_4 = float(np.nextafter(np.float32(4), np.float32(0)))


def alone(name: str, value: float, **options) -> float:
    """What becomes of a value whose block holds nothing else."""
    x = torch.zeros(1, 32)
    x[0, 3] = value
    y = fake_quantize(x, name, **options)
    rest = torch.cat([y[0, :3], y[0, 4:]])
    assert rest.isnan().all() if math.isnan(y[0, 3]) else not rest.any()
    return y[0, 3].item()


@pytest.mark.parametrize("name", formats())
def test_zero_tensor_is_zero(name):
    x = torch.zeros(3, 40)
    assert_same_bits(fake_quantize(x, name), x)
    stored = quantize(x, name)
    assert not stored.codes.any() and (stored.scales is None or not stored.scales.any())
    assert_same_bits(stored.dequantize(), x)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4"])
def test_negative_zero_stays(name):
    assert fake_quantize(torch.tensor([-0.0, 1.0]), name)[0].signbit()


@pytest.mark.parametrize("name", ["hifp8", "mxint8"])
def test_negative_zero_becomes_zero_where_the_element_has_none(name):
    y = fake_quantize(torch.tensor([-0.0, -1e-30, 1.0]), name)
    assert y.tolist() == [0.0, 0.0, 1.0] and not y.signbit().any()


# A float32 subnormal absmax: the scale stops at 2^-127, so 2^-140 is 2^-13 of it and 2^-128 is a half.
@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("mxfp8", 2.0**-140, 0.0),  # E4M3's smallest is 2^-9
        ("mxfp8_e5m2", 2.0**-140, 2.0**-140),  # E5M2's smallest is 2^-16
        ("mxfp8", 1.0625 * 2.0**-128, 1.0 * 2.0**-128),  # a tie of E4M3, to even
        ("mxfp8", 1.1875 * 2.0**-128, 1.25 * 2.0**-128),
        ("mxfp6_e3m2", 2.0**-131, 2.0**-131),  # 2^-4, the smallest
        ("mxfp6_e2m3", 2.0**-131, 0.0),  # 2^-4 is a tie between 0 and 2^-3
        ("mxfp4", 2.0**-128, 2.0**-128),
        ("mxfp4", 2.0**-129, 0.0),  # a tie between 0 and a half
        ("mxfp4", 1.5 * 2.0**-129, 2.0**-128),
        ("mxint8", 2.0**-133, 2.0**-133),
        ("mxint8", 2.0**-134, 0.0),
        ("mxfp8", 2.0**-149, 0.0),
    ],
)
def test_subnormal_absmax(name, value, want):
    assert alone(name, value) == want


# absmax one float32 ulp below 4. floor keeps binade 1 and saturates; the others move up to 4.
@pytest.mark.parametrize(
    ("name", "rule", "want"),
    [
        ("mxfp8", "floor", 3.5),  # 448 · 2^-7
        ("mxfp8_e5m2", "floor", 3.5),  # 57344 · 2^-14
        ("mxfp6_e3m2", "floor", 3.5),  # 28 · 2^-3
        ("mxfp6_e2m3", "floor", 3.75),  # 7.5 · 2^-1
        ("mxfp4", "floor", 3.0),  # 6 · 2^-1
        ("mxint8", "floor", 127 / 32),  # 127/64 · 2
        *[(name, rule, 4.0) for name in MX for rule in RULES if rule != "floor"],
    ],
)
def test_just_below_a_power_of_two(name, rule, want):
    assert alone(name, BELOW_4, scale=rule) == want
    assert alone(name, -BELOW_4, scale=rule) == -want


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MX)
def test_a_power_of_two_is_exact(name, rule):
    for exponent in (-126, -30, 0, 1, 100):
        assert alone(name, 2.0**exponent, scale=rule) == 2.0**exponent


# 5/4·4 = 5 with E2M1 (max 6): floor and rceil scale by 1 (5 is a tie of 4 and 6, to even 4); ceil by 2 (2.5 -> 2).
@pytest.mark.parametrize(
    ("rule", "byte", "want"), [("floor", 127, 4.0), ("ceil", 128, 4.0), ("even", 127, 4.0), ("rceil", 127, 4.0)]
)
def test_scale_byte_of_five(rule, byte, want):
    x = torch.zeros(1, 32)
    x[0, 0] = 5.0
    stored = quantize(x, "mxfp4", scale=rule)
    assert stored.scales.tolist() == [[byte]] and stored.dequantize()[0, 0] == want


# 7 with E2M1: 7/4 is above E2M1's largest mantissa 1.5 and rounds up to 2 at one mantissa bit.
@pytest.mark.parametrize(
    ("rule", "byte", "want"), [("floor", 127, 6.0), ("ceil", 128, 8.0), ("even", 128, 8.0), ("rceil", 128, 8.0)]
)
def test_scale_byte_of_seven(rule, byte, want):
    x = torch.zeros(1, 32)
    x[0, 0] = 7.0
    stored = quantize(x, "mxfp4", scale=rule)
    assert stored.scales.tolist() == [[byte]] and stored.dequantize()[0, 0] == want  # 3.5 is a tie of 3 and 4: even


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("mxfp8", 1.75 * 2.0**127),
        ("mxfp8_e5m2", 1.75 * 2.0**127),
        ("mxfp6_e3m2", 1.75 * 2.0**127),
        ("mxfp6_e2m3", 1.875 * 2.0**127),
        ("mxfp4", 1.5 * 2.0**127),
        ("mxint8", 127 / 64 * 2.0**127),
        ("hifp8", 32768.0),
        ("fp16", math.inf),
        ("bf16", math.inf),
    ],
)
def test_float32_max(name, want):
    assert alone(name, FLOAT32_MAX) == want


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4"])
def test_float32_max_rounded_up_leaves_float32(name):
    """A larger scale lets absmax round up to 2^128, which float32 does not hold."""
    assert alone(name, FLOAT32_MAX, scale="ceil") == math.inf
    assert quantize(torch.full((32,), FLOAT32_MAX), name, scale="ceil").scales.item() > 0


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", MX)
def test_special_value_takes_its_block_and_no_other(name, special):
    x = torch.ones(1, 96)
    x[0, 40] = special
    y = fake_quantize(x, name)
    assert y[0, 32:64].isnan().all() and (y[0, :32] == 1).all() and (y[0, 64:] == 1).all()
    stored = quantize(x, name)
    assert (stored.scales == 255).flatten().tolist() == [False, True, False]
    assert_same_bits(stored.dequantize(), y)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["fp8_e4m3(scale=torchao)", "hifp8(scale=amax8)", "nvfp4"])
def test_special_value_takes_a_tensor_that_shares_its_scale(name, special):
    x = torch.ones(2, 48)
    x[1, 40] = special
    assert fake_quantize(x, name).isnan().all() and quantize(x, name).dequantize().isnan().all()


@pytest.mark.parametrize("name", ["bf16", "fp16", "hifp8"])
def test_special_values_without_a_scale(name):
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    kept = fake_quantize(x, name, overflow="inf")
    assert kept[0].isnan() and kept[1:].tolist() == [math.inf, -math.inf, 1.0]
    held = fake_quantize(x, name, overflow="saturate")
    largest = {"bf16": 3.3895313892515355e38, "fp16": 65504.0, "hifp8": 32768.0}[name]
    assert held[0].isnan() and held[1:].tolist() == [largest, -largest, 1.0]


def test_nvfp4_by_hand():
    """absmax 10.5 gives S = 256: block scales e4m3(10.5 · 256/6) = 448 and e4m3(5.25 · 256/6) = 224, decoded by 1/256.
    1.2 is 1.37 of the second block's 0.875: it rounds to 1.5."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 10.5, 5.25, 1.2
    stored = quantize(x, "nvfp4")
    assert stored.scales.tolist() == [[0x7E], [0x76]]  # 448 and 224 in E4M3
    assert stored.unpacked_codes()[0, 0] == 7 and stored.unpacked_codes()[1, :2].tolist() == [7, 3]
    assert stored.dequantize()[0, [0, 16, 17]].tolist() == [10.5, 5.25, 1.3125]


def test_nvfp4_block_scale_underflows_to_zero():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 2688.0, 1e-3  # 1e-3 / 6 is below half of E4M3's smallest, 2^-9
    y = fake_quantize(x, "nvfp4")
    assert y[0, 0] == 2688.0 and not y[0, 16:].any()


def test_nvfp4_of_a_tiny_tensor_holds_its_scale_in_float32():
    """absmax 2^-140: S stops at the largest float32 instead of becoming infinite; nothing turns NaN."""
    x = torch.zeros(1, 32)
    x[0, 0] = 2.0**-140
    assert fake_quantize(x, "nvfp4").isfinite().all()


def test_hifloat8_edges():
    x = torch.tensor([2.0**-23, 2.0**-23 * 0.9999999, 1.25 * 2**15, 1.2499999 * 2**15, 2.0**-22 * 1.5, 15.9999990])
    assert fake_quantize(x, "hifp8").tolist() == [2.0**-22, 0.0, 32768.0, 32768.0, 2.0**-21, 16.0]
    assert fake_quantize(x, "hifp8", overflow="inf").tolist()[2:4] == [math.inf, 32768.0]


def test_result_beyond_the_input_dtype_is_infinite():
    """float16 65504 under a scale: 'ceil' rounds it to 65536, which float16 does not hold."""
    x = torch.full((32,), 65504.0, dtype=torch.float16)
    assert fake_quantize(x, "mxfp4", scale="ceil").isinf().all()


@pytest.mark.parametrize(
    ("name", "numel", "nbytes"),
    [
        ("bf16", 64, 128),
        ("fp16", 64, 128),
        ("fp8_e4m3", 64, 64 + 4),
        ("hifp8", 64, 64),
        ("mxfp8", 64, 64 + 2),
        ("mxfp6_e3m2", 64, 48 + 2),
        ("mxfp6_e2m3", 64, 48 + 2),
        ("mxfp4", 64, 32 + 2),
        ("mxint8", 64, 64 + 2),
        ("nvfp4", 64, 32 + 4 + 4),
        ("mxfp4", 33, 32 + 2),  # padded to two blocks
    ],
)
def test_nbytes(name, numel, nbytes):
    assert quantize(torch.randn(numel), name).nbytes == nbytes


def test_codes_are_packed_low_nibble_first():
    stored = quantize(torch.tensor([0.5, -6.0] + [0.0] * 30), "mxfp4")
    assert stored.codes[:2].tolist() == [0xF1, 0x00] and stored.scales.tolist() == [[127]]


def test_six_bit_codes_fill_three_bytes_with_four():
    x = torch.zeros(32)
    x[:4] = torch.tensor([4.0, -7.5, 0.125, 1.0])  # E2M3 codes 0x18, 0x3F, 0x01, 0x08 at scale 1
    stored = quantize(x, "mxfp6_e2m3")
    word = 0x18 | 0x3F << 6 | 0x01 << 12 | 0x08 << 18
    assert stored.codes[:3].tolist() == [word & 255, word >> 8 & 255, word >> 16] and stored.scales.tolist() == [[127]]


DTYPES = {FORMATS[name].element: library.dtype for name, library in LIBRARY.items() if library.dtype}


def decoded(codes: np.ndarray, element: Element) -> np.ndarray:
    """float32 values of an element's codes by the library that has it; fixed point by numpy's two's complement."""
    if isinstance(element, FixedPoint):
        unused = 64 - element.bits
        return ((codes << unused) >> unused).astype(np.float32) / 2**element.fraction_bits
    return codes.astype(np.uint16 if element.bits == 16 else np.uint8).view(DTYPES[element]).astype(np.float32)


CODED = [n for n in formats() if isinstance(FORMATS[n].element, FixedPoint) or FORMATS[n].element in DTYPES]


@pytest.mark.parametrize("name", [*CODED, "nvfp4(scale=headroom)"])
def test_codes_and_scales_decode_by_another_library(name):
    """The stored bytes, read by ml_dtypes, give back dequantize()."""
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(4))
    stored = quantize(x, name)
    element, rule = stored.spec.format.element, stored.spec.scale
    values = decoded(stored.unpacked_codes().numpy(), element)
    if rule in RULES:
        values = values * stored.scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    elif rule in ("nvfp4", "headroom"):
        scales = stored.scales.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        values = values * scales * (stored.absmax.numpy() / np.float32(448 * stored.spec.format.max))
    elif rule == "hif4":  # E6M2 by hand, then a bit for each 8 and for each 4 values, lowest first
        scale = stored.scales[:, :1].numpy().astype(np.int64)
        scale = np.ldexp(1 + (scale & 3) / 4, (scale >> 2) - 48)
        micro = np.unpackbits(stored.scales[:, 1:].numpy(), axis=1, bitorder="little")
        values = values * 2.0 ** (micro[:, :8].repeat(8, 1) + micro[:, 8:].repeat(4, 1)) * scale
        values = values.astype(np.float32)
    elif rule == "amax":
        values = values / (np.float32(LIBRARY[name].max) / stored.absmax.numpy())
    assert_same_bits(values.reshape(6, 64), stored.dequantize())
