"""Moments and counts against numpy and scipy, the sketch against numpy's histogram, the Triton pass against both."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from binade.quant import Summary, summarize
from binade.quant.backends import moments, native
from binade.quant.sketch import BINS, bin_edges
from binade.quant.summary import summarize_later
from tests.quant.helpers import awkward, bf16_patterns, devices

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def samples() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "normal": torch.randn(300, 700, generator=g),
        "far from zero": torch.randn(5000, generator=g) + 100,
        "skewed": torch.randn(5000, generator=g).exp(),
        "outliers": torch.cat([torch.randn(5000, generator=g), torch.tensor([1e4, -3e4])]),
        "one value": torch.tensor([-3.0]),
    }


def check_moments(found: Summary, x: torch.Tensor, rel: float = 1e-9) -> None:
    v = x.double().numpy().reshape(-1)
    v = v[np.isfinite(v)]
    want = stats.describe(v, ddof=0)
    assert (found.min, found.max) == want.minmax
    near = {"rel": rel, "nan_ok": True}
    spread = float(np.sqrt(want.variance))
    assert found.mean == pytest.approx(want.mean, rel=rel, abs=rel * spread)
    assert found.std == pytest.approx(spread, **near)
    assert found.rms == pytest.approx(np.sqrt((v**2).mean()), **near)
    assert (found.absmax, found.absmin) == (np.abs(v).max(), np.abs(v[v != 0]).min())
    if len(v) > 1:
        assert found.skewness == pytest.approx(want.skewness, rel=1e-6, abs=1e-6)
        assert found.kurtosis == pytest.approx(want.kurtosis + 3, rel=1e-6)
    else:
        assert math.isnan(found.skewness) and math.isnan(found.kurtosis)
    assert found.crest_factor == pytest.approx(found.absmax / found.rms)
    assert found.dynamic_range == pytest.approx(np.log2(found.absmax / found.absmin))


def check_counts(found: Summary, x: torch.Tensor) -> None:
    v = x.double().numpy().reshape(-1)
    assert found.numel == v.size
    assert (found.zeros, found.nans, found.infs) == ((v == 0).sum(), np.isnan(v).sum(), np.isinf(v).sum())
    v = v[np.isfinite(v)]
    dense = np.zeros(BINS, np.int64)
    dense[found.bins.astype(int)] = found.counts
    assert dense.sum() == v.size and (found.counts > 0).all()
    bins = np.arange(2040)  # of +0 and up to the largest finite; numpy's bins are closed below, as ours are
    low, high = bin_edges(bins)
    assert (low[1:] == high[:-1]).all()
    positive = v[~np.signbit(v)]
    assert np.array_equal(dense[:2040], np.histogram(positive, np.append(low, high[-1]))[0])
    negative = -v[np.signbit(v)]
    assert np.array_equal(dense[2048 : 2048 + 2040], np.histogram(negative, np.append(low, high[-1]))[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", samples())
def test_moments(kind, dtype):
    x = samples()[kind].to(DTYPES[dtype])
    check_moments(summarize(x), x)
    check_counts(summarize(x), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_over_the_whole_range(dtype):
    for x in (awkward((200, 300), DTYPES[dtype]), torch.tensor(bf16_patterns()).to(DTYPES[dtype])):
        check_counts(summarize(x), x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_pass(dtype, device):
    for x in (*samples().values(), awkward((200, 300)), torch.tensor(bf16_patterns()), torch.full((3,), math.nan)):
        x = x.to(DTYPES[dtype])
        found, want = summarize(x.to(device), backend="triton"), summarize(x, backend="torch")
        assert np.array_equal(found.bins, want.bins) and np.array_equal(found.counts, want.counts)
        for key in ("numel", "zeros", "nans", "infs", "min", "max", "absmax", "absmin"):
            assert getattr(found, key) == pytest.approx(getattr(want, key), rel=0, abs=0, nan_ok=True), key
        if want.absmax < 1e6:
            check_moments(found, x)


def test_several_chunks_are_one(monkeypatch):
    x = awkward((100, 100), seed=4) + 3
    for dtype in DTYPES.values():
        whole = summarize(x.to(dtype))
        with monkeypatch.context() as patch:
            patch.setattr("binade.quant.summary.CHUNK", 999)
            parts = summarize(x.to(dtype))
        assert np.array_equal(whole.bins, parts.bins) and np.array_equal(whole.counts, parts.counts)
        assert (whole.min, whole.max, whole.absmin, whole.zeros) == (parts.min, parts.max, parts.absmin, parts.zeros)
        assert whole.std == pytest.approx(parts.std, rel=1e-9)


def test_a_first_chunk_without_a_finite_value(monkeypatch):
    monkeypatch.setattr("binade.quant.summary.CHUNK", 64)
    x = torch.cat([torch.full((64,), math.nan), torch.randn(200, generator=torch.Generator().manual_seed(1)) + 1e4])
    check_moments(summarize(x), x, rel=1e-6)


@pytest.mark.sampled(5)
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_without_the_sketch(compiled, dtype, monkeypatch):
    """Every moment, whatever the strides, in several parts on two threads, and with values that are not finite."""
    torch.set_num_threads(2)
    monkeypatch.setattr(moments, "PART", 1 << 16)
    unit = moments.UNITS.get(DTYPES[dtype])
    if compiled and unit and native.compiler():
        assert native.built(unit) is not None
    else:
        monkeypatch.setattr(native, "_loaded", dict.fromkeys(moments.UNITS.values()))
    whole = samples()["normal"].to(DTYPES[dtype])
    broken = whole.clone()
    broken[::7, ::3], broken[5], broken[6] = math.nan, math.inf, -math.inf
    late = torch.cat((torch.full((300, 700), math.nan).to(whole.dtype), whole + 100))
    strided = whole.reshape(30, 10, 700).transpose(0, 2), whole[:, 5:650:3]
    for x in (whole, broken, late, *strided, *(sample.to(whole.dtype) for sample in samples().values())):
        found = summarize_later(x, sketch=False)()
        check_moments(found, x.contiguous(), rel=1e-9 if x is not late else 1e-6)
        v = x.double().numpy()
        assert (found.zeros, found.nans, found.infs) == ((v == 0).sum(), np.isnan(v).sum(), np.isinf(v).sum())
        assert (found.numel, found.bins.size, found.counts.size) == (v.size, 0, 0)
    for x in (torch.zeros(70), torch.full((5,), math.nan), torch.zeros(0)):
        found, want = summarize_later(x.to(whole.dtype), sketch=False)(), summarize(x.to(whole.dtype))
        assert repr(found) == repr(want.__class__(**vars(want) | {"bins": found.bins, "counts": found.counts}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_to_summarize(dtype):
    for x, nans in ((torch.zeros(0), 0), (torch.full((5,), math.nan), 5)):
        found = summarize(x.to(DTYPES[dtype]))
        assert (found.numel, found.nans, found.zeros, len(found.bins)) == (x.numel(), nans, 0, 0)
        assert all(math.isnan(v) for v in (found.min, found.max, found.mean, found.std, found.absmax, found.absmin))
        assert all(math.isnan(v) for v in (found.skewness, found.kurtosis, found.rms))


@pytest.mark.parametrize("device", devices())
def test_a_constant_has_no_spread(device):
    x = torch.full((3001,), 0.1)
    for found in (summarize(x), summarize(x.to(device), backend="triton")):
        assert (found.mean, found.std) == (float(x[0]), 0.0) and math.isnan(found.kurtosis)


def test_zeros():
    found = summarize(torch.tensor([0.0, -0.0, 2.0**-149]))
    assert (found.zeros, found.absmin, found.bins.tolist(), found.counts.tolist()) == (2, 2.0**-149, [0, 2048], [2, 1])
    assert math.isnan(summarize(torch.zeros(3)).dynamic_range) and summarize(torch.zeros(3)).std == 0.0


def test_views_of_any_stride():
    x = torch.randn(40, 50, generator=torch.Generator().manual_seed(2))
    for view in (x.t(), x[::3, 1::2], torch.tensor(2.0)):
        for dtype in DTYPES.values():
            check_counts(summarize(view.to(dtype)), view.to(dtype))
