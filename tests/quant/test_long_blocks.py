"""Blocks that are longer than their axis: cut to it, with the bits of the padded block."""

from __future__ import annotations

import math

import pytest
import torch

from binade.quant import reference
from binade.quant.blocks import look
from binade.quant.formats import FORMATS
from binade.quant.metrics import score
from binade.quant.quantizer import fake_quantize, outer_absmax
from binade.quant.reference import columns_of, quantize_blocks
from binade.quant.scaling import SCALINGS
from binade.quant.specs import Block, Spec, SpecError
from tests.quant.helpers import assert_same_bits, awkward

LONG = 512  # values; the axes below are shorter


def _specs() -> list[Spec]:
    """Every format with every scale, of blocks that are longer than an axis, and every error to choose by."""
    found = []
    for name, fmt in FORMATS.items():
        for scale in fmt.scale_rules:
            for block in (f"1x{LONG}", f"4x{LONG}"):
                for error in SCALINGS[scale].options.get("error", (None,)):
                    try:
                        found.append(Spec.of(name, scale=scale, block=block, error=error))
                    except SpecError:  # a scheme of fixed blocks
                        continue
    return found


@pytest.mark.sampled(138)
@pytest.mark.parametrize("spec", _specs(), ids=str)
@pytest.mark.parametrize("shape", [(6, 100), (5, 7), (3, 1)], ids=str)
def test_a_long_block_is_the_axis(spec: Spec, shape: tuple[int, int]) -> None:
    """The scale and values of a tensor that is padded with zeros to whole blocks by hand."""
    x = awkward(shape)
    rows = spec.block.rows
    padded = torch.nn.functional.pad(x, (0, LONG - shape[1], 0, -shape[0] % rows))
    absmax = outer_absmax(x, spec, -1)
    absmax = absmax[::rows, :1] if absmax.dim() else absmax
    _, scale, want = quantize_blocks(padded.reshape(-1, rows * LONG), spec, absmax)
    want = want.reshape(padded.shape)[: shape[0], : shape[1]]
    found = look(x, spec)
    assert found.x.shape[1] <= rows * max(shape[1], reference.FIXED)
    assert_same_bits(found.result, want, x)
    assert_same_bits(fake_quantize(x, spec), want, x)
    y, scales = reference.quantize_dequantize(x, spec, -1, outer_absmax(x, spec, -1))
    assert_same_bits(y, want, x)
    assert scales is not None
    assert_same_bits(scales.reshape(-1)[::rows][: len(scale)], scale[:, 0])


@pytest.mark.parametrize("block", ["1x999999999", "16x999999999"])
def test_memory_follows_from_the_axis(block: str) -> None:
    x, spec = torch.randn(40, 80), Spec.of("fp8_e4m3", block=block)
    found = look(x, spec)
    assert found.x.numel() <= 48 * 80
    assert score(x, spec).sqnr_db == pytest.approx(10 * math.log10(found.sums.signal / found.sums.noise), abs=1e-6)


def test_fixed_blocks_stay_whole() -> None:
    fixed = {block for one in SCALINGS.values() for block in one.blocks if isinstance(block, Block) and block.columns}
    assert fixed and all(columns_of(block, 1) == block.columns for block in fixed)
