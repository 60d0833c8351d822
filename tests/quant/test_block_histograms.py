"""Histograms over blocks against NumPy on blocks that are cut and rounded one by one (ml_dtypes for the elements)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from binade.quant.block_histograms import BLOCK_MEASURES, block_histograms_later
from binade.quant.quantizer import apply
from binade.quant.specs import Spec
from tests.quant.helpers import devices


def by_hand(lines: np.ndarray, rows: int, columns: int) -> dict[str, dict[int, int]]:
    """MXFP4 of float32 [lines, axis] in tiles, by OCP MX 1.0 section 6.3: scale 2^(floor(log2 absmax) - 2)."""
    found: dict[str, list[float]] = {name: [] for name in BLOCK_MEASURES}
    for top in range(0, lines.shape[0], rows):
        for left in range(0, lines.shape[1], columns):
            block = lines[top : top + rows, left : left + columns].astype(np.float64)
            if not np.isfinite(block).all() or not block.any():
                continue
            exponent = np.floor(np.log2(np.abs(block).max())) - 2
            scaled = np.clip(block / 2.0**exponent, -6, 6)
            rounded = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float64) * 2.0**exponent
            signal, noise = (block**2).sum(), ((rounded - block) ** 2).sum()
            found["scale_exponent"].append(exponent)
            found["sqnr_db"].append(10 * np.log10(signal / noise) if noise else np.inf)
            found["crest_db"].append(10 * np.log10(np.abs(block).max() ** 2 * block.size / signal))
    result = {}
    for name, values in found.items():
        low, high = BLOCK_MEASURES[name].bins
        bins = np.clip(np.floor(np.array(values) / BLOCK_MEASURES[name].width), low, high - 1).astype(int)
        result[name] = dict(zip(*(each.tolist() for each in np.unique(bins, return_counts=True)), strict=True))
    return result


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("spec", ["mxfp4", "mxfp4(block=16x8)", "mxfp4(block=5x7)"])
@pytest.mark.parametrize("dim", [0, 1])
def test_against_blocks_cut_by_hand(spec, dim, device):
    torch.manual_seed(3)
    x = torch.randn(70, 96) * torch.exp2(torch.randn(70, 96).mul(3).round())
    x[16:32, :32] = 0
    x[3, 40], x[60, 90] = torch.inf, torch.nan
    found, parsed = x.to(device), Spec.of(spec)
    q, scales = apply(found, parsed, dim, want_scales=True)
    got = block_histograms_later(found, q, parsed, scales, dim)()
    lines = x.numpy() if dim else x.numpy().T
    expected = by_hand(lines, parsed.block.rows or 1, parsed.block.columns)
    assert {name: dict(zip(*(each.tolist() for each in bins), strict=True)) for name, bins in got.items()} == expected


def test_without_error_in_the_last_bin_and_without_blocks_refused():
    x = torch.tensor([[1.0, 2.0, 4.0, 0.5] * 8])
    q, scales = apply(x, Spec.of("mxfp4"), want_scales=True)
    assert torch.equal(x, q)
    bins, counts = block_histograms_later(x, q, Spec.of("mxfp4"), scales, -1)()["sqnr_db"]
    assert bins.tolist() == [BLOCK_MEASURES["sqnr_db"].bins[1] - 1] and counts.tolist() == [1]
    with pytest.raises(ValueError, match="hifp8 has no blocks"):
        block_histograms_later(x, q, Spec.of("hifp8"), scales, -1)
