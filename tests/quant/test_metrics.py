"""Every metric against numpy, scipy, or a value worked out by hand."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from scipy import stats

from binade.quant import FORMATS, compare, fake_quantize, quantize, score, usage
from binade.quant.backends.counts import counted
from binade.quant.blocks import look
from binade.quant.metrics import (
    METRICS,
    errors,
    errors_later,
    score_later,
    sqnr_db,
)
from binade.quant.quantizer import apply
from binade.quant.specs import Spec
from binade.quant.statistics import block_crest_factor, cell_absmax, channel_absmax, outlier_ratio, stable_rank
from tests.quant.helpers import MX, RULES, awkward, formats


def pair(n: int = 5000) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, generator=torch.Generator().manual_seed(0)) * 3 + 0.5
    x[::7] = 0.0
    return x, fake_quantize(x, "mxfp4")


def test_errors_against_numpy():
    x, q = pair()
    found = errors(x, q)
    a, b = x.double().numpy(), q.double().numpy()
    assert found.sqnr_db == pytest.approx(10 * np.log10((a**2).sum() / ((b - a) ** 2).sum()), rel=1e-12)
    assert found.mse == pytest.approx(((b - a) ** 2).mean(), rel=1e-12)
    assert found.relative_error == pytest.approx(np.linalg.norm(b - a) / np.linalg.norm(a), rel=1e-12)
    assert found.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-12)
    assert found.projection == pytest.approx(a @ b / (a @ a), rel=1e-12)
    assert found.max_abs_error == np.abs(b - a).max()
    assert found.flush_to_zero == ((a != 0) & (b == 0)).sum() / (a != 0).sum() > 0
    assert found.underflow_of_all == ((a != 0) & (b == 0)).sum() / a.size
    assert math.isnan(found.saturated)


def test_errors_span_chunks(monkeypatch):
    x, q = pair()
    whole = errors(x, q)
    monkeypatch.setattr("binade.quant.metrics.CHUNK", 777)
    for key, value in vars(errors(x, q)).items():
        assert value == pytest.approx(getattr(whole, key), rel=1e-12, nan_ok=True)


def test_errors_leave_out_what_is_not_finite_in_x():
    x, q = pair(100)
    bad_x, bad_q = torch.cat([x, torch.tensor([math.nan, math.inf])]), torch.cat([q, torch.tensor([math.nan, 1.0])])
    whole, found = errors(x, q), errors(bad_x, bad_q)
    assert (found.sqnr_db, found.mse, found.flush_to_zero) == (whole.sqnr_db, whole.mse, whole.flush_to_zero)
    assert math.isnan(errors(torch.ones(2), torch.tensor([1.0, math.nan])).max_abs_error)


def test_errors_where_nothing_is_defined():
    same = errors(torch.ones(4), torch.ones(4))
    assert same.sqnr_db == math.inf and same.mse == 0 and same.cosine == 1 and same.flush_to_zero == 0
    lost = score(torch.tensor([1e30, 1.0]), "fp16")  # 1e30 overflows to infinity
    assert lost.sqnr_db == -math.inf and lost.mse == lost.max_abs_error == math.inf
    zero = errors(torch.zeros(4), torch.zeros(4))
    assert all(math.isnan(v) for v in (zero.sqnr_db, zero.relative_error, zero.cosine, zero.projection))
    assert zero.mse == 0 and math.isnan(zero.flush_to_zero) and zero.underflow_of_all == 0
    empty = errors(torch.zeros(0), torch.zeros(0))
    assert all(math.isnan(v) for v in vars(empty).values())


def test_compare_holds_the_errors_and_the_distances():
    x, q = pair()
    found = compare(x, q)
    assert set(METRICS) == set(found)
    assert found["sqnr_db"] == errors(x, q).sqnr_db
    wide = x.double().numpy().ravel()
    assert found["relative_squared_error"] == pytest.approx(
        float((q.double() - x.double()).square().sum()) / (wide**2).sum(), rel=1e-12
    )
    assert found["kurtosis"] == pytest.approx(stats.kurtosis(wide, fisher=False), rel=1e-9)
    assert found["crest_factor"] == pytest.approx(np.abs(wide).max() / np.sqrt((wide**2).mean()), rel=1e-12)
    assert found["dynamic_range"] == pytest.approx(
        np.log2(np.abs(wide).max() / np.abs(wide[wide != 0]).min()), rel=1e-12
    )
    assert found["outlier_ratio"] == (np.abs(wide - wide.mean()) > 6 * wide.std()).mean()
    assert math.isnan(found["codes_used"])
    full = compare(x, q, "mxfp4")
    assert full["saturated"] == score(x, "mxfp4").saturated and full["codes_used"] == usage(x, "mxfp4").codes_used


# Saturated elements, by brute force: |x| above the largest value times the scale that quantize stored.
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MX)
def test_saturated_by_the_stored_scales(name, rule, dim):
    x = torch.randn(70, 90, generator=torch.Generator().manual_seed(1))
    scales = torch.exp2(quantize(x, name, dim, scale=rule).scales.double() - 127).reshape(x.shape[1 - dim], -1)
    each = scales.repeat_interleave(32, 1)[:, : x.shape[dim]]
    limit = each if dim == 1 else each.t()
    want = float((x.double().abs() > limit * FORMATS[name].max).double().mean())
    assert score(x, name, dim, scale=rule).saturated == want
    if rule in ("ceil", "rceil"):
        assert want == 0.0
    elif rule == "floor":
        assert want > 0.0


def test_saturated_with_a_block_size_of_its_own():
    x = torch.full((8,), 1.0)
    x[::4] = 3.9
    assert score(x, "mxfp4", block=4).saturated == 2 / 8  # 3.9 > 6 · 2^-1


def test_saturated_without_a_scale():
    assert score(torch.tensor([32768.0, 32769.0, 1.0, -4e4]), "hifp8").saturated == 0.5
    assert score(torch.tensor([448.0, 449.0]), "fp8_e4m3", scale="none").saturated == 0.5
    assert score(torch.tensor([65504.0, 65505.0]), "fp16").saturated == 0.5


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_a_tensor_scaled_by_its_absmax_has_no_saturation(name):
    for seed in range(20):
        x = torch.randn(100, generator=torch.Generator().manual_seed(seed)) * 10.0**seed
        assert score(x, name).saturated == 0.0


def test_saturated_nvfp4():
    """absmax 2688: block scales e4m3(blockmax / 6). 6.3/6 rounds to 1: 6.3 and 6.1 exceed 6, 5.9 does not."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17], x[0, 18] = 2688.0, 6.3, -6.1, 5.9
    assert score(x, "nvfp4").saturated == 2 / 32
    for seed in range(20):  # the block of the tensor's absmax has the scale 448 exactly
        x = torch.zeros(1, 16)
        x[0, 0] = 10.0 * torch.rand(1, generator=torch.Generator().manual_seed(seed))
        assert score(x, "nvfp4").saturated == 0.0
    x = torch.tensor([[2688.0] + [0.0] * 15 + [1e-3] * 16])
    assert score(x, "nvfp4").saturated == 0.0  # the second block's scale is 0: flushed


def test_saturated_leaves_out_nan_and_infinity():
    x = torch.ones(64)
    x[3], x[40] = math.inf, math.nan
    assert score(x, "mxfp8").saturated == 0.0 and score(x, "hifp8").saturated == 0.0


def test_a_format_means_its_defaults():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    decided = Spec.of("mxfp4")
    q, scales = apply(x, decided, -1, want_scales=True)
    assert errors_later(x, q, decided, scales, -1)() == score(x, "mxfp4")
    assert compare(x, q, FORMATS["mxfp4"])["saturated"] == score(x, "mxfp4").saturated


@pytest.mark.parametrize("name", formats())
def test_usage_counts_each_element_once(name):
    x = torch.randn(7, 45, generator=torch.Generator().manual_seed(3))
    used = usage(x, name)
    assert used.code_counts.sum() == x.numel()
    assert used.code_entropy_bits == pytest.approx(stats.entropy(used.code_counts, base=2), rel=1e-12)
    assert (
        used.code_entropy_bits <= math.log2(used.codes_used) + 1e-12
        and used.codes_total == 1 << FORMATS[name].element.bits
    )


def test_usage_by_hand():
    """Two blocks of MXFP4: [4, 2, 2, 0, ...] at 2^0 and all 1/8 at 2^-5; a zero block and one of NaN are left out."""
    x = torch.zeros(1, 128)
    x[0, :3] = torch.tensor([4.0, 2.0, 2.0])
    x[0, 32:64] = 0.125
    x[0, 96] = math.nan
    used = usage(x, "mxfp4")
    assert dict(zip(used.codes.tolist(), used.code_counts.tolist(), strict=True)) == {0: 29 + 32, 4: 2, 6: 1 + 32}
    assert used.scale_exponents.tolist() == [-5, 0] and used.scale_counts.tolist() == [1, 1]
    assert (used.scale_exponent_min, used.scale_exponent_max, used.codes_used) == (-5.0, 0.0, 3)


def test_usage_leaves_out_padding():
    used = usage(torch.ones(3, 5), "mxfp8", 1)
    assert used.codes.tolist() == [0x78] and used.code_counts.tolist() == [15] and used.code_entropy_bits == 0.0  # 256
    assert used.scale_exponents.tolist() == [-8] and used.scale_counts.tolist() == [3]


def test_usage_nvfp4_scale_exponents():
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 16], x[0, 32] = 2688.0, 6.0, 1e-4  # scales 448, 1 and 0; the last block is all zero
    used = usage(x, "nvfp4")
    assert used.scale_exponents.tolist() == [0, 8] and used.scale_counts.tolist() == [1, 1]


def test_usage_of_nothing():
    used = usage(torch.zeros(0), "mxfp8")
    assert used.codes_used == 0 and math.isnan(used.code_entropy_bits) and math.isnan(used.scale_exponent_min)
    assert math.isnan(usage(torch.ones(3), "hifp8").scale_exponent_max)


def test_outlier_ratio():
    x = torch.zeros(1000)
    x[0], x[1] = 1000.0, math.nan
    assert outlier_ratio(x) == 1 / 999 and outlier_ratio(x, k=40.0) == 0.0
    y = torch.randn(20000, generator=torch.Generator().manual_seed(4))
    want = (np.abs(y.double().numpy() - y.double().numpy().mean()) > 2 * y.double().numpy().std()).mean()
    assert outlier_ratio(y, k=2.0) == want
    assert math.isnan(outlier_ratio(torch.zeros(0)))


def test_channel_absmax():
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(5))
    assert torch.equal(channel_absmax(x), torch.tensor(np.abs(x.numpy()).max((0, 1))))
    with pytest.raises(ValueError, match="channel"):
        channel_absmax(torch.tensor(1.0))


def test_block_crest_factor():
    x = torch.zeros(1, 40)
    x[0, 0] = 8.0  # absmax 8, rms 8 / sqrt(32)
    x[0, 32:] = -2.0
    assert block_crest_factor(x).tolist() == pytest.approx([32**0.5, 1.0], rel=1e-12)


def test_stable_rank():
    a = torch.randn(20, 30, generator=torch.Generator().manual_seed(6))
    want = np.linalg.norm(a.double().numpy()) ** 2 / np.linalg.norm(a.double().numpy(), 2) ** 2
    assert stable_rank(a) == pytest.approx(want, rel=1e-10)
    assert stable_rank(torch.eye(7)) == pytest.approx(7) and stable_rank(torch.ones(4, 9)) == pytest.approx(1)
    assert math.isnan(stable_rank(torch.zeros(2, 2)))
    with pytest.raises(ValueError, match=r"\(3,\)"):
        stable_rank(torch.ones(3))
    with pytest.raises(ValueError, match="NaN"):
        stable_rank(torch.full((2, 2), math.nan))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", [name for name in formats() if Spec.of(name).format.block_size is None])
def test_a_score_by_distinct_values_is_the_score(name, dtype):
    """Also of tensors that hold NaN or Inf, only zeros, or saturate."""
    own = awkward((300, 70), dtype, seed=8)
    for x in (
        own,
        own.nan_to_num(1.0, 2.0, -2.0),
        torch.randn(300, 70).to(dtype) * 3e4,
        torch.zeros(9, 9, dtype=dtype),
    ):
        want, found = vars(score(x, name)), vars(score_later(x, Spec.of(name), codes=counted(x))())
        for key in ("flush_to_zero", "underflow_of_all", "saturated", "max_abs_error"):
            assert found[key] == want[key] or want[key] != want[key] != found[key], key
        assert found == pytest.approx(want, rel=1e-12, nan_ok=True)


def test_saturation_is_told_in_the_formats_own_precision():
    """65,536 is the bfloat16 after fp16's largest value, 65,504, to which that rounds in bfloat16."""
    x = torch.tensor([65536.0, -65536.0, 65280.0, 1.0], dtype=torch.bfloat16)
    assert score(x, "fp16").saturated == 0.5


@pytest.mark.parametrize(
    ("signal", "noise", "want"),
    [
        (100.0, 1.0, 20.0),
        (1.0, 0.0, math.inf),
        (1.0, math.inf, -math.inf),
        (1.0, math.nan, math.nan),
        (0.0, 0.0, math.nan),
        (0.0, math.inf, math.nan),
    ],
)
def test_sqnr_of_power_sums(signal, noise, want):
    assert sqnr_db(signal, noise) == pytest.approx(want, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("shape", "height", "width"),
    [((1, 300_000), 1, 751), ((700, 500), 700, 1), ((700, 500), 2, 3), ((5, 7), 9, 9), ((200_000, 2), 501, 1)],
)
def test_cells_are_those_of_numpy(shape, height, width, dtype):
    """More values than one piece, and the last strip, piece and cell are short."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    x[0, 0], x[-1, -1] = -torch.inf, torch.nan
    padded = np.zeros([-(-n // cell) * cell for n, cell in zip(shape, (height, width), strict=True)])
    padded[: shape[0], : shape[1]] = np.abs(x.double().numpy())
    cells = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width).max((1, 3))
    found = cell_absmax(x, height, width)
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), cells.astype(np.float32))
    assert torch.equal(cell_absmax(x.T, width, height).isnan(), found.T.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", ["mxfp4", "mxfp4(scale=ceil)", "nvfp4", "hifp8", "fp8_e4m3(scale=none)", "hif4"])
def test_the_shares_of_the_error_by_cause(text, dtype):
    """Flushed, saturated and the rest are one partition of the squared error, by NumPy in float64."""
    x = torch.randn(96, 320, generator=torch.Generator().manual_seed(5))
    x = (x * 2.0 ** torch.linspace(-26, 13.5, 96)[:, None]).to(dtype)
    spec, looked = Spec.of(text), look(x, text)
    a, b = looked.x.double().numpy(), looked.y.double().numpy()
    squares, clipped = np.square(b - a), looked.clipped.numpy()
    found = score(x, spec)
    flushed, saturated = (squares[cause].sum() for cause in ((a != 0) & (b == 0), clipped & (b != 0)))
    assert found.flushed_error_share == pytest.approx(flushed / squares.sum(), rel=1e-9)
    assert found.saturated_error_share == pytest.approx(saturated / squares.sum(), rel=1e-9)
    within = squares[~((a != 0) & (b == 0)) & ~(clipped & (b != 0))].sum()
    assert 1 - found.flushed_error_share - found.saturated_error_share == pytest.approx(
        within / squares.sum(), abs=1e-9
    )
    if text in ("hifp8", "fp8_e4m3(scale=none)"):
        assert min(flushed, saturated) > 0
    if dtype is torch.bfloat16 and not spec.has_blocks:
        by_code = score_later(x, spec, codes=counted(x))()
        assert asdict(by_code) == pytest.approx(asdict(found), rel=1e-12)


def test_the_shares_of_no_error_and_of_an_infinite_one():
    exact = score(torch.ones(32), "mxfp4")
    assert math.isnan(exact.flushed_error_share) and math.isnan(exact.saturated_error_share)
    lost = score(torch.tensor([2.0**-100, 1e30]), "fp8_e5m2(scale=none, overflow=inf)")
    assert (lost.flushed_error_share, lost.saturated_error_share) == (0, 1)
    without = errors(torch.tensor([1.0, 0.25]), torch.tensor([1.0, 0.0]))
    assert without.flushed_error_share == 1 and math.isnan(without.saturated_error_share)
