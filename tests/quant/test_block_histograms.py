"""Histograms over blocks against NumPy on blocks that are cut and rounded one by one (ml_dtypes for the elements)."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from binade.quant.backends import cpu, native
from binade.quant.block_histograms import BLOCK_MEASURES, Histogram, block_histograms_later
from binade.quant.metrics import errors_later, score_blocks_later
from binade.quant.quantizer import apply
from binade.quant.specs import Spec
from tests.quant.helpers import devices

pytestmark = [pytest.mark.slow, pytest.mark.compiler]


def by_hand(lines: np.ndarray, rows: int, columns: int) -> dict[str, dict[int, int]]:
    """MXFP4 of float32 [lines, axis] in tiles, by OCP MX 1.0 section 6.3: scale 2^(floor(log2 absmax) - 2)."""
    found: dict[str, list[float]] = {name: [] for name in BLOCK_MEASURES}
    for top in range(0, lines.shape[0], rows):
        for left in range(0, lines.shape[1], columns):
            block = lines[top : top + rows, left : left + columns].astype(np.float64)
            if not np.isfinite(block).all() or not block.any():
                continue
            exponent = max(np.floor(np.log2(np.abs(block).max())) - 2, -127)
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


def values() -> torch.Tensor:
    torch.manual_seed(3)
    x = torch.randn(70, 96) * torch.exp2(torch.randn(70, 96).mul(3).round())
    x[16:32, :32] = 0
    x[3, 40], x[60, 90] = torch.inf, torch.nan
    return x


def counts(found: dict[str, Histogram]) -> dict[str, dict[int, int]]:
    return {name: dict(zip(*(each.tolist() for each in bins), strict=True)) for name, bins in found.items()}


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("spec", ["mxfp4", "mxfp4(block=16x8)", "mxfp4(block=5x7)"])
@pytest.mark.parametrize("dim", [0, 1])
def test_against_blocks_cut_by_hand(spec, dim, device):
    x, parsed = values().to(device), Spec.of(spec)
    q, scales = apply(x, parsed, dim, want_scales=True)
    lines = x.cpu().numpy() if dim else x.cpu().numpy().T
    expected = by_hand(lines, parsed.block.rows or 1, parsed.block.columns)
    assert counts(block_histograms_later(x, q, parsed, scales, dim)()) == expected


@pytest.mark.parametrize("exponent", [-126, -100, 100])
@pytest.mark.parametrize("dim", [0, 1])
def test_tiny_and_huge_blocks_are_counted(exponent: int, dim: int):
    """Values near 1e-38, 1e-30 and 1e30, whose squares float32 does not have."""
    x, parsed = values() * 2.0**exponent, Spec.of("mxfp4")
    expected = by_hand(x.numpy() if dim else x.numpy().T, 1, 32)
    q, scales = apply(x, parsed, dim, want_scales=True)
    assert counts(block_histograms_later(x, q, parsed, scales, dim)()) == expected
    if native.compiler() is not None:
        for given in ((), (q, scales)):
            assert counts(score_blocks_later(x, parsed, dim, *given)[1]()) == expected


@pytest.mark.sampled(1)
@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("spec", ["mxfp4", "mxfp4(block=7)"])
def test_the_compiled_pass_against_blocks_cut_by_hand(spec, dtype):
    """By rows and by columns, of a tensor that is rounded in this pass and of one that was."""
    x, parsed = values().to(dtype), Spec.of(spec)
    assert cpu.kernel(cpu.unit_of(parsed, dtype)) is not None
    for dim in (0, 1):
        expected = by_hand(x.float().numpy() if dim else x.float().numpy().T, 1, parsed.block.columns)
        q, scales = apply(x, parsed, dim, want_scales=True)
        for given in ((), (q, scales)):
            errors, blocks = score_blocks_later(x, parsed, dim, *given)
            assert counts(blocks()) == expected
            assert repr(errors()) == repr(errors_later(x, q, parsed, scales, dim)())


@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
def test_the_compiled_pass_in_threads_against_torch():
    """Wider than a strip, in two threads, with scales that are no powers of two."""
    torch.set_num_threads(2)
    x, spec = torch.randn(512, 700) * torch.exp2(torch.randn(512, 700) * 4), Spec.of("nvfp4")
    for dim in (0, 1):
        q, scales = apply(x, spec, dim, want_scales=True)
        expected = block_histograms_later(x, q, spec, scales, dim)()
        for name, (bins, counts) in score_blocks_later(x, spec, dim)[1]().items():
            low, high = BLOCK_MEASURES[name].bins
            found, want = np.zeros((2, high - low), int)
            found[bins - low], want[expected[name][0] - low] = counts, expected[name][1]
            assert found.sum() == want.sum()
            assert abs(found - want).sum() <= 4, name  # a sum that is rounded otherwise may pass the edge of a bin


def test_without_error_in_the_last_bin_and_without_blocks_refused():
    x = torch.tensor([[1.0, 2.0, 4.0, 0.5] * 8])
    q, scales = apply(x, Spec.of("mxfp4"), want_scales=True)
    assert torch.equal(x, q)
    bins, counts = block_histograms_later(x, q, Spec.of("mxfp4"), scales, -1)()["sqnr_db"]
    assert bins.tolist() == [BLOCK_MEASURES["sqnr_db"].bins[1] - 1] and counts.tolist() == [1]
    with pytest.raises(ValueError, match="hifp8 has no blocks"):
        block_histograms_later(x, q, Spec.of("hifp8"), scales, -1)
