"""Held-out gaps: paired differences against scipy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import linregress, ttest_1samp, ttest_rel

from binade.data.compare.held_out import differences, held_out_gap, pairs_of
from binade.data.run.evaluations import HeldOut

TOKENS = {0: 1000, 10: 3000, 20: 5000, 40: 9000}


def evaluations(seed: int, gap: float = 0.0, sha: str = "a") -> dict[int, HeldOut]:
    """Losses of 12 sequences that differ far more between sequences than between runs."""
    base, noise = np.random.default_rng(0), np.random.default_rng(seed)
    losses = base.normal(5, 1, (len(TOKENS), 12)) + gap + noise.normal(0, 0.01, (len(TOKENS), 12))
    return {
        at: HeldOut(at, tuple(map(float, own)), sha, tokens)
        for (at, tokens), own in zip(TOKENS.items(), losses, strict=True)
    }


def test_the_interval_is_that_of_a_paired_t_test():
    run, reference = evaluations(1, 0.02), evaluations(2)
    found = held_out_gap([differences(run, reference)])
    assert found is not None and (found.iteration, found.tokens) == (40, 9000)
    expected = ttest_rel(run[40].losses, reference[40].losses)
    interval = expected.confidence_interval(0.95)
    assert found.gap.value == pytest.approx(np.mean(run[40].losses) - np.mean(reference[40].losses))
    assert (found.gap.low, found.gap.high) == pytest.approx((interval.low, interval.high))
    assert found.gap.p == pytest.approx(expected.pvalue) and found.gap.p < 0.05
    assert str(found.gap).endswith("12 sequences)")


def test_the_slope_is_that_of_each_sequence_over_doublings():
    run, reference = evaluations(1), evaluations(2)
    found = held_out_gap([differences(run, reference)])
    at = np.log2(list(TOKENS.values()))
    gaps = np.array([run[step].losses for step in TOKENS]) - np.array([reference[step].losses for step in TOKENS])
    slopes = [linregress(at, gaps[:, column]).slope for column in range(12)]
    assert found is not None and found.slope.value == pytest.approx(linregress(at, gaps.mean(1)).slope)
    assert found.slope.value == pytest.approx(np.mean(slopes)) and found.slope.n == 1  # one seed has no interval
    assert np.isinf(found.slope.high)
    alike = {step: replace(each, tokens=256) for step, each in run.items()}
    same = held_out_gap([differences(alike, reference)])
    assert same is not None and np.isfinite(same.gap.value) and np.isnan(same.slope.value)
    few = {step: each for step, each in run.items() if step < 20}
    short = held_out_gap([differences(few, reference)])
    assert short is not None and short.iteration == 10 and np.isnan(short.slope.value)


def test_of_several_seeds_the_interval_is_over_seeds():
    pairs = [differences(evaluations(2 * seed + 1, 0.02 * seed), evaluations(2 * seed + 2)) for seed in range(3)]
    del pairs[0][40]  # the last evaluation that all have counts
    found = held_out_gap(pairs)
    means = [np.mean(each[20][1]) for each in pairs]
    interval = ttest_1samp(means, 0).confidence_interval(0.95)
    assert found is not None and found.iteration == 20 and found.gap.of == "seeds"
    assert (found.gap.low, found.gap.high) == pytest.approx((interval.low, interval.high))


def test_what_has_no_pair():
    run = evaluations(1)
    assert differences(run, evaluations(2, sha="b")) == {}
    assert held_out_gap([{}, {}]) is None
    table = pd.DataFrame({"run_id": ["a", "b", "c"], "references": [("c", "b"), ("b",), ()]})
    few = {0: run[0]}
    every = {"a": run, "b": evaluations(2), "c": few}
    same = {"a": 39, "b": 39}
    assert [list(each) for each in pairs_of(table, ["a", "b", "c"], every, same)] == [list(TOKENS), [], []]
    assert [list(each) for each in pairs_of(table, ["a"], every, {"a": 38})] == [[0, 10, 20]]  # then it read other data
