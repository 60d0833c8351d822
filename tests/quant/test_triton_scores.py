"""The kernel that adds up errors and counts blocks, against NumPy on the values that the reference rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from binade.quant import reference
from binade.quant.blocks import look
from binade.quant.quantizer import apply, outer_absmax
from binade.quant.specs import TENSOR, Spec
from tests.quant.helpers import devices
from tests.quant.test_block_histograms import by_hand, counts

pytestmark = pytest.mark.slow

SPECS = (
    *("mxfp4", "mxfp8", "mxfp4(block=7)", "nvfp4", "nvfp4(block=16x16)", "nvfp4(scale=nvfp4_row)", "hif4", "hifp8"),
    *("hifp8(scale=amax8)", "fp8_e4m3(block=row)", "fp8_e4m3(block=128x128)", "mxfp4(scale=quest)"),
    "nvfp4(scale=headroom)",
    *("mxfp8(rounding=stochastic)", "mxfp4(scale=floor,block=5x7)"),
)
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def values(dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(130, 192, generator=g) * torch.exp2(torch.randn(130, 192, generator=g) * 3)
    x[16:32, :32] = 0
    x = x.clamp(-6e4, 6e4)
    x[3, 40], x[60, 90] = torch.inf, torch.nan
    return x.to(dtype)


def numbers(x: torch.Tensor, y: torch.Tensor) -> list[float]:
    a, b = (t.double().numpy().reshape(-1) for t in (x, y))
    finite = np.isfinite(a)
    a, b = a[finite], b[finite]
    with np.errstate(invalid="ignore"):
        sums = [a @ a, b @ b, a @ b, (b - a) @ (b - a), np.abs(b - a).max()]
    return [*sums, finite.sum(), (a != 0).sum(), ((a != 0) & (b == 0)).sum()]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", SPECS)
def test_numbers_and_blocks(text, dtype, dim, device):
    """Rounded by the kernel and given to it rounded; with NaN and Inf, and without."""
    from binade.quant.backends.triton_kernels import score

    spec, broken = Spec.of(text), values(DTYPES[dtype])
    has_blocks = spec.block not in (None, TENSOR)
    for x in (broken, torch.where(broken.isfinite(), broken, 1.0)):
        y, scales = reference.quantize_dequantize(x, spec, dim, outer_absmax(x, spec, dim), 3)
        given = y.to(device), None if scales is None else scales.to(device)
        if has_blocks:
            want, blocks = numbers(x, y), block_counts(x, y, spec, scales, dim)
        else:
            want, blocks = numbers(x, y), None
        looked = look(x, spec, dim, seed=3)
        clipped, lost = int(looked.clipped.sum()), by_cause(looked)
        for rounded, scale in ((None, None), given):
            found, counted = score(x.to(device), rounded, spec, dim, scale, seed=3, blocks=has_blocks)
            assert found[:8].tolist() == pytest.approx(want, rel=1e-12, nan_ok=True)
            assert float(found[8]) == clipped
            assert found[9:].tolist() == pytest.approx(lost, rel=1e-12)
            if counted is not None:
                assert sum(abs(counted.cpu().numpy() - blocks)) <= 2  # on the edge of a bin in float32


def by_cause(looked) -> list[float]:
    """The squared error of the values that become 0, and of those that saturate."""
    x, y, clipped = looked.x.double().numpy(), looked.y.double().numpy(), looked.clipped.numpy()
    finite = np.isfinite(x) & looked.valid.numpy()
    with np.errstate(invalid="ignore"):
        squares = np.square(y - x)
    return [squares[finite & (y == 0)].sum(), squares[finite & clipped & (y != 0)].sum()]


def block_counts(x, y, spec, scales, dim) -> np.ndarray:
    """As counted by the reference, which test_block_histograms compares with NumPy."""
    from binade.quant.block_histograms import BLOCK_MEASURES, block_histograms_later

    found = block_histograms_later(x, y, spec, scales, dim)()
    dense = []
    for name, (bins, number) in found.items():
        low, high = BLOCK_MEASURES[name].bins
        dense.append(np.bincount(bins - low, number, high - low))
    return np.concatenate(dense)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("text", ["mxfp4", "mxfp4(block=16x8)", "mxfp4(block=5x7)"])
@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_cut_by_hand(text, dim, device):
    from binade.quant.backends.triton_kernels import score
    from binade.quant.block_histograms import histograms

    spec = Spec.of(text)
    for exponent in (-126, -100, 0, 100):
        x = values(torch.float32).clamp(-(2.0**20), 2.0**20) * 2.0**exponent
        expected = by_hand(x.numpy() if dim else x.numpy().T, spec.block.rows or 1, spec.block.columns)
        _, found = score(x.to(device), None, spec, dim, blocks=True)
        assert counts(histograms(found.cpu().numpy())) == expected


@pytest.mark.parametrize("device", devices())
def test_one_launch_after_another_and_on_large_tensors(device):
    """The workspace is zero again after each; programs add up in one order."""
    from binade.quant.backends.triton_kernels import score

    x = torch.randn(300 if device == "cpu" else 9000, 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    first = score(x.to(device), None, Spec.of("mxfp4"), -1, blocks=True)
    for _ in range(3):
        again = score(x.to(device), None, Spec.of("mxfp4"), -1, blocks=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert float(first[1][-240:].sum()) == len(x) * 32
    assert first[0][:8].tolist() == pytest.approx(numbers(x, apply(x, Spec.of("mxfp4"))[0]), rel=1e-12)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dim", [0, 1])
def test_formats_that_share_a_launch(dim, device):
    """Each has the score that it has alone, and as many values saturate as in the reference; those whose scales the
    kernel does not find by itself are scored one by one."""
    from binade.quant.backends import triton_kernels

    texts = ("hifp8", "hifp8(scale=amax8)", "mxfp8", "mxfp4", "nvfp4", "fp8_e4m3(block=tensor)")
    texts = *texts, "nvfp4(block=16x16)", "nvfp4(scale=headroom)"
    specs, x = [Spec.of(text) for text in texts], values(torch.bfloat16)
    x = torch.where(x.isfinite(), x, 1.0)
    before = triton_kernels.launches
    found = triton_kernels.score_formats(x.to(device), specs, dim, blocks=True)
    assert triton_kernels.launches == before + 1 + 2 * 3  # the last two: largest magnitudes, scales, score
    for spec, (sums, blocks) in zip(specs, found, strict=True):
        y, scales = reference.quantize_dequantize(x, spec, dim, outer_absmax(x, spec, dim))
        assert sums[:8].tolist() == pytest.approx(numbers(x, y), rel=1e-12)
        assert float(sums[8]) == int(look(x, spec, dim).clipped.sum())
        if spec.block not in (None, TENSOR):
            assert sum(abs(blocks.cpu().numpy() - block_counts(x, y, spec, scales, dim))) <= 2
        else:
            assert blocks is None


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(
    "text", ["hifp8(scale=amax8)", "hifp8(scale=amax15)", "fp8_e4m3(block=tensor)", "fp8_e5m2(block=tensor)"]
)
def test_scale_of_a_tensor_in_the_kernel(text, device):
    """From zeros to values whose scale overflows, and with a NaN: the bits of the reference."""
    spec = Spec.of(text)
    for exponent in (-149, -127, -60, 0, 60, 127):
        for special in (1.0, 0.0, torch.inf, torch.nan):
            x = (torch.tensor([[1.0, -1.4, 0.3, 0.0]]) * 2.0**exponent).float()
            x[0, 2] = special if special != 1.0 else x[0, 2]
            x = x if special != 0.0 else torch.zeros_like(x)
            want = reference.quantize_dequantize(x, spec, -1, outer_absmax(x, spec, -1))[0]
            found = apply(x.to(device), spec, backend="triton")[0].cpu()
            torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(found.signbit()[~want.isnan()], want.signbit()[~want.isnan()])
