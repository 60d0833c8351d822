"""Finite values stay finite in every spec: all formats, scale rules, blocks and roundings of the registry, on gradients
whose rows differ by up to 2^60, on subnormal values and on values near the largest of float32."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from binade.quant.backends import cpu, native, triton_kernels
from binade.quant.elements import RoundingMode
from binade.quant.formats import FORMATS
from binade.quant.quantizer import apply
from binade.quant.scaling import has_kernel
from binade.quant.specs import Spec, SpecError
from tests.quant.helpers import by_reference

FLOAT32_MAX = float(np.finfo(np.float32).max)
BLOCKS = (None, "row", "tensor", "1x16", "1x128", "16x16")


def every_spec() -> list[Spec]:
    found = {}
    for name, fmt in FORMATS.items():
        for scale in fmt.scale_rules:
            for block in BLOCKS:
                for rounding in RoundingMode:
                    try:
                        found[Spec.of(name, scale=scale, block=block, rounding=rounding)] = None
                    except SpecError:
                        continue
    return [*found]


SPECS = every_spec()


def inputs() -> dict[str, Tensor]:
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    falling = x * torch.exp2(-4.0 * torch.arange(16.0))[:, None]  # rows of 1 to 2^-60 of the largest
    falling[8, :20] *= 2.0**-10
    flat = falling.sign() * falling.abs().amax(1, keepdim=True)
    alone = torch.zeros(16, 256)
    alone[3, 7] = 2.0**-149
    largest = x.clamp(-4, 4) * (FLOAT32_MAX / 4)
    outlier = x.clone()
    outlier[0, 0], outlier[1] = FLOAT32_MAX, outlier[1] * 2.0**-149
    return {
        "rows": falling,
        "equal values": flat,
        "subnormal": x * 2.0**-145,
        "subnormal rows": falling * 2.0**-100,
        "smallest": torch.full((16, 256), 2.0**-149),
        "smallest alone": alone,
        "large rows": falling * 2.0**120,
        "largest": largest,
        "largest of one sign": torch.full((16, 256), FLOAT32_MAX),
        "largest alone": outlier,
    }


INPUTS = inputs()


def infinite(x: Tensor, spec: Spec) -> Tensor:
    """Where a value may become Infinity: of a format without scales that has one, beyond its largest value. Else where
    it may round to 2^128, which float32 does not have. 4over6 multiplies by the largest magnitude first."""
    if spec.overflow == "inf":
        return x.abs() > spec.format.max
    if spec.scale == "4over6" and x.abs().max() > FLOAT32_MAX / (448 * 6):
        return torch.ones_like(x, dtype=torch.bool)
    return x.abs() > 2.0**126


def check(y: Tensor, x: Tensor, spec: Spec, what: str) -> None:
    assert not y.isnan().any(), f"{int(y.isnan().sum())} NaN of {what} in {spec}"
    unexpected = y.isinf() & ~infinite(x, spec)
    assert not unexpected.any(), f"{x[unexpected][:3].tolist()} of {what} became Infinity in {spec}"


@pytest.mark.parametrize("name", [*FORMATS])
def test_by_the_definition(name):
    for spec in SPECS:
        if spec.format.name == name:
            for what, x in INPUTS.items():
                check(by_reference(x, spec, seed=3), x, spec, what)


@pytest.mark.parametrize("transform", [{"hadamard": 128, "signs": "random"}, {"center": "tokens"}], ids=str)
def test_transformed(transform):
    """A rotation adds up to 128 values, and a difference of two may be beyond float32: not of the largest values."""
    for spec in SPECS:
        if spec.rounding == spec.format.rounding:
            for what in ("rows", "smallest alone"):
                x = INPUTS[what]
                check(apply(x, Spec.of(spec, **transform), seed=3)[0], x, spec, what)


WITH_KERNEL = [spec for spec in SPECS if has_kernel(spec) and spec.block == Spec.of(spec, block=None).block]
"""The backends share the code for blocks; test_spec_backends compares the bits of all of them with `reference`."""


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
def test_compiled():
    for spec in WITH_KERNEL:
        if spec.rounding == spec.format.rounding:
            run = cpu.kernel(cpu.unit_of(spec, torch.float32))
            assert run is not None
            for what, x in INPUTS.items():
                check(cpu.compiled(x, spec, -1, None, True, run, 3)[0], x, spec, what)


@pytest.mark.thorough
def test_interpreted_kernels():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for spec in WITH_KERNEL:
        if spec.rounding == spec.format.rounding:
            for what in ("rows", "subnormal", "largest"):
                x = INPUTS[what][:, :160]
                y = triton_kernels.quantize_dequantize(x.contiguous().to(device), spec, -1, None, True, 3)[0]
                check(y.cpu(), x, spec, what)


def test_ms_eden_flushes_a_block_whose_scale_underflows():
    """Its neighbors keep their values: quartet_2.py of Quartet II sets the scale of such a block to 1."""
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    x[1, :16] *= 2.0**-30
    y = apply(x, Spec.of("nvfp4(scale=eden)"), seed=1)[0]
    assert not y[1, :16].any()
    assert math.sqrt(float((y - x).square().sum() / x.square().sum())) < 0.15
