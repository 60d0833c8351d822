"""Every code of every element decodes as other libraries decode it, and encodes back to itself."""

from __future__ import annotations

import itertools

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch

from binade.quant import quantize
from binade.quant.codes import encode
from binade.quant.elements import E4M3, INT4, Element
from binade.quant.formats import FORMATS
from binade.quant.specs import Spec
from tests.quant.helpers import assert_same_bits, formats
from tests.quant.libraries import LIBRARY


def decoded(element: Element) -> np.ndarray:
    return np.array([element.decode(code) for code in range(1 << element.bits)], np.float64).astype(np.float32)


@pytest.mark.parametrize("name", [f for f in formats() if f != "mxint8"])
def test_decodes_as_ml_dtypes_or_en_dtypes(name):
    dtype = np.dtype(LIBRARY[name].dtype)
    codes = np.arange(1 << FORMATS[name].element.bits, dtype=np.uint16 if dtype.itemsize == 2 else np.uint8)
    want = codes.view(dtype).astype(np.float32)
    if FORMATS[name].element == INT4:
        assert want[8] == -8.0  # unused, so that the grid is symmetric
        want[8] = np.nan
    assert_same_bits(decoded(FORMATS[name].element), want)


@pytest.mark.parametrize("name", [f for f in formats() if LIBRARY[f].gfloat])
def test_decodes_as_gfloat(name):
    element = FORMATS[name].element
    codes = np.arange(1 << element.bits)
    want = gfloat.decode_ndarray(LIBRARY[name].gfloat, codes).astype(np.float32)
    if name == "mxint8":
        assert want[128] == -2.0  # named in formats.py: the grid is symmetric here, -128 is no value
        want[128] = np.nan
    assert_same_bits(decoded(element), want)


def test_mxint8_is_twos_complement():
    want = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32) / 64
    want[128] = np.nan
    assert_same_bits(decoded(FORMATS["mxint8"].element), want)


def test_hifloat8_named_codes():
    """arXiv 2409.16626, tables 1 to 3."""
    decode = FORMATS["hifp8"].element.decode
    assert (decode(0x00), decode(0x6E), decode(0x7E), decode(0x01)) == (0.0, 2.0**15, 2.0**-15, 2.0**-22)
    assert (decode(0x6F), decode(0xEF)) == (np.inf, -np.inf) and np.isnan(decode(0x80))
    assert len(FORMATS["hifp8"].element.finite_values) == 253


@pytest.mark.parametrize(
    ("name", "largest", "smallest", "emax", "bits"),
    [
        ("bf16", 3.3895313892515355e38, 2.0**-133, 127, 16),
        ("fp16", 65504.0, 2.0**-24, 15, 16),
        ("fp8_e4m3", 448.0, 2.0**-9, 8, 8),
        ("fp8_e5m2", 57344.0, 2.0**-16, 15, 8),
        ("fp8_e4m3fnuz", 240.0, 2.0**-10, 7, 8),
        ("fp8_e5m2fnuz", 57344.0, 2.0**-17, 15, 8),
        ("hifp8", 32768.0, 2.0**-22, 15, 8),
        ("mxfp8", 448.0, 2.0**-9, 8, 8.25),
        ("mxfp8_e5m2", 57344.0, 2.0**-16, 15, 8.25),
        ("mxfp6_e3m2", 28.0, 2.0**-4, 4, 6.25),
        ("mxfp8_e4m3fnuz", 240.0, 2.0**-10, 7, 8.25),
        ("mxfp8_e5m2fnuz", 57344.0, 2.0**-17, 15, 8.25),
        ("mxfp6_e2m3", 7.5, 0.125, 2, 6.25),
        ("mxfp4", 6.0, 0.5, 2, 4.25),
        ("mxint8", 127 / 64, 1 / 64, 0, 8.25),
        ("nvfp4", 6.0, 0.5, 2, 4.5),
        ("hif4", 1.75, 0.25, 0, 4.5),
        ("nvint4", 7.0, 1.0, 2, 4.5),
        ("mxint4", 7.0, 1.0, 2, 4.25),
    ],
    ids=formats(),
)
def test_derived_limits(name, largest, smallest, emax, bits):
    element, stored = FORMATS[name].element, Spec.of(name).bits_per_value
    assert (element.max, element.smallest, element.emax, stored) == (largest, smallest, emax, bits)


@pytest.mark.parametrize(
    "spec",
    ["nvfp4(scale=nvfp4_1x128)", "nvfp4(scale=float32)", "mxfp4(block=32x32)", "fp8_e4m3(block=1x128)", "hif4"],
)
def test_bits_per_value_are_those_of_the_stored_scales(spec):
    stored = quantize(torch.ones(64, 256), spec)
    scales = stored.nbytes - stored.codes.numel() * stored.codes.element_size()
    bits = Spec.of(spec).format.element.bits + 8 * scales / (64 * 256)
    assert Spec.of(spec).bits_per_value == bits


@pytest.mark.parametrize("name", formats())
def test_tiers_span_the_values(name):
    """The grid that the tiers state is exactly the set of values that the codes decode to."""
    element = FORMATS[name].element
    grid = {0.0}
    tiers = [*element.tiers, (element.emax + 1, 0)]
    for (lowest, bits), (end, _) in itertools.pairwise(tiers):
        for exponent in range(lowest, end):
            grid |= {np.ldexp(1.0 * m, exponent - bits) for m in range(1 << bits, 2 << bits)}
    grid |= {np.ldexp(1.0 * m, tiers[0][0] - tiers[0][1]) for m in range(1, 1 << tiers[0][1])}
    grid = {v for v in grid if v <= element.max}
    assert sorted(grid | {-v for v in grid if v}) == list(element.finite_values)


@pytest.mark.parametrize("name", formats())
def test_encode_inverts_decode(name):
    element = FORMATS[name].element
    codes = torch.arange(1 << element.bits)
    values = torch.tensor(decoded(element))
    again = encode(values, element)
    kept = ~values.isnan()
    assert torch.equal(again[kept], codes[kept])
    if values.isnan().any() and name != "mxint8":
        assert torch.isnan(values[again[values.isnan()]]).all()


def test_nvfp4_scale_is_ml_dtypes_e4m3():
    codes = np.arange(256, dtype=np.uint8)
    assert_same_bits(decoded(E4M3), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
