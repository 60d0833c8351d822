"""What a sketch says of a sample, held against the sample itself: each stated error bound is a test."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as hnp
from scipy import stats
from scipy.spatial.distance import jensenshannon

from binade.quant import Sketch, sketch, summarize

SEARCH = settings(max_examples=80)
VALUES = st.one_of(st.floats(allow_nan=False, allow_infinity=False, width=32), st.floats(-8, 8, width=32), st.just(0.0))
SAMPLES = hnp.arrays(np.float32, st.integers(1, 60), elements=VALUES)


def of(x: np.ndarray) -> Sketch:
    return summarize(torch.tensor(np.asarray(x, np.float32))).sketch


def dense(v: np.ndarray) -> np.ndarray:
    """Counts by the top 12 bits, the two bins at zero taken as one."""
    bins = (v.view(np.uint32) >> 20).astype(np.int64)
    return np.bincount(np.where(bins == 2048, 0, bins), minlength=4096)


def sample(seed: int, n: int = 4000) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.3, 2.0, n).astype(np.float32)


@given(x=SAMPLES, p=st.floats(0, 1))
@SEARCH
def test_quantile_bound(x, p):
    want = np.quantile(x.astype(np.float64), p, method="inverted_cdf")
    assert abs(float(sketch.quantiles(of(x), p)) - want) <= max(abs(want) / 8, 2.0**-129)


def test_quantile_bound_on_a_large_sample():
    x = sample(0, 100_000)
    p = np.linspace(0, 1, 1001)
    want = np.quantile(x.astype(np.float64), p, method="inverted_cdf")
    got = sketch.quantiles(of(x), p)
    assert (np.abs(got - want) <= np.abs(want) / 8).all() and (np.diff(got) >= 0).all()
    assert np.median(np.abs(got - want) / np.abs(want)) < 1 / 64  # much better than the bound: bins are well filled


def test_quantiles_reject_what_is_no_probability():
    with pytest.raises(ValueError, match=r"1\.5"):
        sketch.quantiles(of(sample(0)), [0.5, 1.5])
    with pytest.raises(ValueError, match="nan"):
        sketch.quantiles(of(sample(0)), math.nan)
    assert np.isnan(sketch.quantiles(of(np.zeros(0)), [0.5])).all()


@given(x=SAMPLES, y=SAMPLES)
@SEARCH
def test_ks_bound(x, y):
    a, b = of(x), of(y)
    values = np.unique(np.concatenate([x, y]))
    exact = max(abs((x <= v).mean() - (y <= v).mean()) for v in values)
    widest = max(dense(x).max() / len(x), dense(y).max() / len(y))
    assert exact - widest - 1e-9 <= sketch.ks(a, b) <= exact + 1e-9


@given(
    x=hnp.arrays(np.float32, 40, elements=st.floats(-1e6, 1e6, width=32)),
    y=hnp.arrays(np.float32, 30, elements=st.floats(-9, 9, width=32)),
)
@SEARCH
def test_wasserstein_bound(x, y):
    exact = stats.wasserstein_distance(x.astype(np.float64), y.astype(np.float64))
    bound = (np.abs(x.astype(np.float64)).mean() + np.abs(y.astype(np.float64)).mean()) / 16
    assert abs(sketch.wasserstein(of(x), of(y)) - exact) <= bound * (1 + 1e-9) + 2.0**-128


@given(x=SAMPLES, y=SAMPLES)
@SEARCH
def test_js_against_scipy(x, y):
    want = jensenshannon(dense(x), dense(y), base=2) ** 2
    assert sketch.js(of(x), of(y)) == pytest.approx(0.0 if math.isnan(want) else want, abs=1e-9)


def test_distances_of_equal_and_of_disjoint_samples():
    x = sample(4)
    assert sketch.ks(of(x), of(x)) == sketch.js(of(x), of(x)) == sketch.wasserstein(of(x), of(x)) == 0
    low, high = of(np.full(5, -4.0)), of(np.full(9, 4.0))
    assert sketch.ks(low, high) == sketch.js(low, high) == 1.0
    assert sketch.wasserstein(low, high) == 8.5  # 4 lies in [4, 4.5), taken at 4.25
    empty = of(np.zeros(0))
    assert (
        math.isnan(sketch.ks(low, empty))
        and math.isnan(sketch.js(empty, low))
        and math.isnan(sketch.wasserstein(empty, empty))
    )


@given(x=SAMPLES, y=SAMPLES)
@SEARCH
def test_merge_is_the_sketch_of_both(x, y):
    merged, want = sketch.merge([of(x), of(y)]), of(np.concatenate([x, y]))
    assert np.array_equal(merged.bins, want.bins) and np.array_equal(merged.counts, want.counts)


def test_bins_in_any_order_ascend_by_value():
    s = Sketch(np.array([2049, 3, 2048, 0, 5]), np.array([1, 2, 3, 4, 0]))
    assert s.bins.tolist() == [2049, 2048, 0, 3] and s.counts.tolist() == [1, 3, 4, 2]
    low, high = s.edges
    assert (np.diff(low) > 0).all() and (low < high).all()
    with pytest.raises(ValueError, match="the same length"):
        Sketch(np.arange(3), np.arange(2))
