"""The gate of predicted costs, against scipy and made sequences whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from binade.data.reliability import WITHIN, reliability


def test_halves_and_sum_are_those_of_scipy():
    costs = np.random.default_rng(0).lognormal(size=(9, 7)) + np.arange(9)[:, None]
    found = reliability(costs.tolist())
    assert found.halves.value == pytest.approx(stats.spearmanr(costs[:, ::2].mean(1), costs[:, 1::2].mean(1)).statistic)
    whole = costs.sum(0)
    interval = stats.ttest_1samp(whole, 0).confidence_interval(0.95)
    assert (found.total.value, found.total.low, found.total.high) == pytest.approx((whole.mean(), *interval))
    assert found.sequences == 7 and found.total.n == 7


def test_operands_that_every_sequence_orders_alike_are_told_apart():
    random = np.random.default_rng(1)
    found = reliability(np.arange(1, 21)[:, None] * random.uniform(0.9, 1.1, (20, 8)))
    assert found.orders and found.sums and not found.doubt and not found.doubt_of_sum


def test_operands_of_equal_cost_are_not():
    """Of 200 recordings of equal operands, few may pass: ρ of unrelated halves is not near 1."""
    random = np.random.default_rng(2)
    passed = sum(reliability(random.exponential(size=(12, 8))).orders for _ in range(200))
    assert passed <= 4


def test_one_sequence_decides_nothing():
    found = reliability([[0.1], [0.2], [0.3], [0.9], [0.05]])
    assert not found.orders and not found.sums and found.sequences == 1
    assert found.doubt.startswith("One sequence cannot tell operands apart: record several sequences")
    assert found.doubt_of_sum and math.isnan(found.halves.value)


def test_too_few_operands_or_none_cannot_be_checked():
    for costs in ([[0.1, 0.2], [0.2, 0.1], [0.3, 0.3]], []):
        assert not reliability(costs).orders and reliability(costs).doubt
    assert not reliability([]).sums


def test_a_sum_that_one_sequence_decides_is_not_known():
    """Ranks agree, since the operands keep their order in each sequence: the sum alone is in doubt."""
    by_sequence = np.array([1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 60.0])
    found = reliability(np.arange(1, 11)[:, None] * by_sequence)
    assert found.orders and not found.sums
    assert "not known to a factor of 1.5: +" in found.doubt_of_sum and "8 sequences" in found.doubt_of_sum


def test_operands_that_lack_sequences_give_no_sum():
    found = reliability([[1.0, 1.1], [2.0, 2.1], [3.0, 3.1], [4.0, 4.1], [5.0]])
    assert math.isnan(found.total.value) and not found.sums and found.sequences == 1
    assert not found.orders


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sequences", [3, 8])
def test_a_sum_that_is_called_known_is_within_the_factor(sequences: int):
    """Of sums of normal sequences that pass, at most 5% are further from the truth than the factor allows."""
    random = np.random.default_rng(3)
    far = passed = 0
    for _ in range(2000):
        found = reliability(random.normal(1.0, 0.3, (1, sequences)))
        passed += found.sums
        far += found.sums and abs(found.total.value - 1) > WITHIN * abs(found.total.value)
    assert passed > 200 and stats.binomtest(far, passed, 0.05, alternative="greater").pvalue > 0.01
