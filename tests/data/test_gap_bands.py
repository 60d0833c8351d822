"""The band of bf16, against numpy and scipy on planted losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from binade.data.compare.gap_bands import LASTING, Band, PlainRun, band_of
from tests.data.null_cases import leaves, share

ITERATIONS = range(8)


def run(data: str, losses: np.ndarray, **more: Any) -> PlainRun:
    return PlainRun(data, [{"iteration": i, "loss": float(loss)} | more for i, loss in enumerate(losses)])


def repeats(seed: int, deviation: float = 0.004) -> dict[str, np.ndarray]:
    """Losses of two runs of the data "a", three of "b" and one of "c": [runs, iterations]."""
    rng, counts = np.random.default_rng(seed), {"a": 2, "b": 3, "c": 1}
    return {key: 5 + rng.normal() + deviation * rng.normal(size=(n, len(ITERATIONS))) for key, n in counts.items()}


def band(planted: dict[str, np.ndarray], iterations: range = ITERATIONS) -> Band:
    return band_of([run(key, losses) for key, runs in planted.items() for losses in runs], iterations)


def test_it_pools_the_runs_of_each_data():
    """As the residual of a one-way analysis of variance."""
    planted = repeats(1)
    found = band(planted)
    assert (found.runs, found.degrees) == (5, 3)
    for seeds, recipes in ((1, 1), (3, 5)):
        halves = found.halves(seeds, recipes)
        for at in ITERATIONS:
            residual = sum(np.var(planted[key][:, at], ddof=1) * n for key, n in (("a", 1), ("b", 2))) / 3
            limit = stats.t.ppf(1 - 0.025 / recipes, 3) * math.sqrt(2 * residual / seeds)
            assert halves[at] == pytest.approx(limit)


def test_without_a_repetition_it_is_unknown():
    found = band({"a": repeats(0)["c"]})
    assert not found.is_known and not found.halves(1, 1) and found.left_at({0: 9.0}, 1, 1) is None


def test_runs_that_agree_in_all_bits_are_one():
    planted = repeats(3)
    again = {key: np.concatenate([runs, runs]) for key, runs in planted.items()}
    assert band(again) == band(planted) and not band({"c": again["c"]}).is_known


def test_runs_without_one_of_the_iterations_do_not_count():
    planted = repeats(4)
    short = [run("c", planted["c"][0][:5]), *(run(key, each) for key, runs in planted.items() for each in runs)]
    assert band_of(short, ITERATIONS) == band(planted)


def test_runs_count_while_they_read_the_same_data():
    a, b = repeats(5)["a"]
    same = [run("a", a, data_sha256="x"), run("a", b, data_sha256="x")]
    assert band_of(same, ITERATIONS).is_known
    same[1].steps[3]["data_sha256"] = "y"
    assert not band_of(same, ITERATIONS).is_known and band_of(same, range(3)).is_known


def test_a_recipe_leaves_where_its_gap_stays_beyond_the_band():
    found = Band(4, 2, tuple((at, 0.01) for at in ITERATIONS))
    far, near = 1.01 * found.halves(2, 3)[0], 0.99 * found.halves(2, 3)[0]
    inside = dict.fromkeys(ITERATIONS, near)
    for start in ITERATIONS:
        lasting = len(ITERATIONS) - start >= LASTING
        gaps = inside | dict.fromkeys(range(start, 8), -far)
        assert found.left_at(gaps, 2, 3) == (start if lasting else None)
        assert found.left_at(gaps | {7: near}, 2, 3) is None  # it has come back
    assert found.left_at(dict.fromkeys(ITERATIONS, far), 1, 3) is None  # of one seed, the band is wider


@pytest.mark.parametrize("phi", [0.0, 0.9, 1.0])
@pytest.mark.parametrize(("seeds", "pairs"), [(1, 1), (3, 3), (5, 2)])
def test_recipes_that_round_nothing_seldom_leave(seeds: int, pairs: int, phi: float):
    """In at most 5% of the cases, of which each has five recipes; tests/bench/bench_null.py counts more cases."""
    cases = 100
    found = round(share(cases, leaves, seeds, pairs, phi) * cases / 100)
    assert stats.binomtest(found, cases, 0.05, alternative="greater").pvalue > 0.01, found


def test_a_large_gap_is_found():
    assert share(50, leaves, 5, 5, 0.9, 0.1) > 95
