"""Sentences that infer name nothing where there is nothing: fewer cases than tests/bench/bench_null.py."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.data.null_cases import (
    held_out,
    misses_effect,
    names_gap,
    names_largest,
    names_slope,
    names_trend,
    power,
    share,
)


@pytest.mark.parametrize("deviation", [0.0, 0.008, 0.015])
def test_one_seed_names_no_held_out_gap(deviation: float):
    assert share(20, names_gap, 1, deviation) == 0
    assert share(20, names_slope, 1, deviation) == 0


def test_one_seed_is_described_with_what_is_known_of_bits():
    said = held_out(np.random.default_rng(0), 1, 0.0, gap=0.5)
    assert (
        "Held-out gap to bf16 of one seed, which another seed may change: mxfp8 +0.4999 nats (mean of 48 sequences)."
        in said
    )
    assert "By how much two runs differ that differ in bits alone is unknown" in said


def test_several_seeds_name_held_out_gaps_at_five_percent():
    assert share(60, names_gap, 3, 0.015) <= 10  # 6 of 60: 3 in 100 by chance
    assert share(60, names_slope, 3, 0.015) <= 10
    assert share(10, names_gap, 6, 0.004, 0.05) == 100


@pytest.mark.parametrize(("points", "phi"), [(12, 0.0), (12, 0.5), (12, 0.8), (40, 0.8), (90, 0.9)])
def test_no_trend_is_named_in_autocorrelated_values(points: int, phi: float):
    assert share(60, names_trend, points, phi) <= 10


@pytest.mark.parametrize(("points", "fall"), [(12, 24.0), (40, 12.0), (400, 6.0)])
def test_a_planted_trend_is_named(points: int, fall: float):
    assert share(20, names_trend, points, 0.0, fall) == 100


def test_no_effect_is_named_the_largest_of_equal_ones():
    assert share(60, names_largest, 2, 8) <= 10 and share(60, names_largest, 8, 8) <= 10
    assert share(60, misses_effect, 8) <= 10


@pytest.mark.parametrize(("groups", "sequences", "gap"), [(2, 8, 2.0), (8, 16, 2.0)])
def test_a_planted_effect_is_named_as_often_as_the_power_says(groups: int, sequences: int, gap: float):
    expected = power(groups, sequences, gap, 500)
    deviation = 100 * math.sqrt(expected / 100 * (1 - expected / 100) / 60)
    assert abs(share(60, names_largest, groups, sequences, gap) - expected) <= 3 * deviation + 2
