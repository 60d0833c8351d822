"""Bands of gaps, against numpy and scipy on planted losses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from binade.data import evidence, gap_bands
from binade.data.evidence import GAP
from binade.data.gap_bands import Band, BandKind, PlainRun, own_bands

ITERATIONS = range(8)
# Loss of each seed, and the noise that reordering adds.
SEEDS = {"a": 0.0, "b": 0.03, "c": -0.02}


def run(key: str, losses: np.ndarray, **more: Any) -> PlainRun:
    return PlainRun(key, key, [{"iteration": i, "loss": float(loss)} | more for i, loss in enumerate(losses)])


def repeats(seed: int, deviation: float = 0.004) -> dict[str, np.ndarray]:
    """Losses of two runs of "a", three of "b" and one of "c": [runs, iterations]."""
    rng = np.random.default_rng(seed)
    counts = {"a": 2, "b": 3, "c": 1}
    return {key: 5 + SEEDS[key] + deviation * rng.normal(size=(n, len(ITERATIONS))) for key, n in counts.items()}


def bands(planted: dict[str, np.ndarray], iterations: range = ITERATIONS) -> tuple[Band, Band]:
    return own_bands([run(key, losses) for key, runs in planted.items() for losses in runs], iterations)


class TestOwnBands:
    def test_seeds_have_the_prediction_interval_of_their_newest_runs(self):
        planted = repeats(0)
        band, _ = bands(planted)
        means = [runs[-1].mean() for runs in planted.values()]
        low, high = stats.t.interval(0.95, 2, 0, math.sqrt(2) * np.std(means, ddof=1))
        assert (band.kind, band.gap.n, band.gap.of) == (BandKind.SEEDS, 3, "seeds")
        assert (band.gap.low, band.gap.high) == pytest.approx((low, high))
        at = np.std([runs[-1] for runs in planted.values()], axis=0, ddof=1)
        assert dict(band.by_iteration) == pytest.approx(dict(enumerate(stats.t.ppf(0.975, 2) * math.sqrt(2) * at)))

    def test_reordering_pools_the_runs_of_each_start(self):
        """As the residual of a one-way analysis of variance."""
        planted = repeats(1)
        _, band = bands(planted)
        means = [planted[key].mean(1) for key in ("a", "b")]
        residual = sum(((each - each.mean()) ** 2).sum() for each in means) / 3
        assert (band.gap.n, band.gap.degrees) == (5, 3)
        assert band.gap.high == pytest.approx(stats.t.ppf(0.975, 3) * math.sqrt(2 * residual))
        at = math.sqrt(2 * sum(np.var(planted[key][:, 4], ddof=1) * n for key, n in (("a", 1), ("b", 2))) / 3)
        assert band.by_iteration[4] == (4, pytest.approx(stats.t.ppf(0.975, 3) * at))

    def test_it_holds_95_percent_of_the_gaps_between_two_further_runs(self):
        rng, held, tries = np.random.default_rng(2), 0, 600
        for _ in range(tries):
            losses = rng.normal(5, 0.01, (5, 1, len(ITERATIONS)))
            band, _ = bands(dict(zip("abc", losses, strict=False)))
            held += abs(losses[3].mean() - losses[4].mean()) <= band.gap.high
        assert stats.binomtest(held, tries, 0.95).pvalue > 0.01, held

    def test_one_seed_and_no_repetition_give_no_band_but_a_reason(self):
        for band in bands({"a": repeats(0)["a"][:1]}):
            assert math.isinf(band.gap.high) and band.gap.n == 1 and not band.by_iteration
            assert band.missing.startswith(f"No {band.kind.value.removesuffix('s')} baseline: record ")
        assert not bands(repeats(0))[0].missing
        assert gap_bands.missing([*bands({}), *bands({})]) == [band.missing for band in bands({})]

    def test_one_seed_with_other_weights_is_one_seed(self):
        planted = {key: runs[-1:] for key, runs in repeats(6).items()}
        runs = [run(key, losses) for key, (losses,) in planted.items()]
        other = replace(run("a", planted["a"][0] + 1), data="other weights")
        assert own_bands([other, *runs], ITERATIONS)[0] == bands(planted)[0]

    def test_runs_that_agree_in_all_bits_are_one(self):
        planted = repeats(3)
        again = planted | {key: np.concatenate([runs, runs]) for key, runs in planted.items()}
        assert bands(again)[1] == bands(planted)[1]
        assert bands({"a": again["c"]})[1].missing

    def test_runs_without_one_of_the_iterations_do_not_count(self):
        planted = repeats(4)
        short = [run("d", planted["a"][0][:5]), *(run(key, each) for key, runs in planted.items() for each in runs)]
        assert own_bands(short, ITERATIONS) == bands(planted)
        assert own_bands(short, range(5))[0].gap.n == 4

    def test_runs_count_while_they_read_the_same_data(self):
        a, b = repeats(5)["a"]
        same = [run("a", a, data_sha256="x"), run("a", b, data_sha256="x")]
        assert not own_bands(same, ITERATIONS)[1].missing
        same[1].steps[3]["data_sha256"] = "y"
        assert own_bands(same, ITERATIONS)[1].missing
        assert not own_bands(same, range(3))[1].missing


class TestPlaces:
    def test_by_interval_and_one_seed_by_its_value(self):
        _, band = bands(repeats(1))
        half, rng = band.gap.high, np.random.default_rng(0)
        spread = 0.05 * half * rng.normal(size=6)
        recipes = {
            "fine": evidence.mean(GAP, 0.3 * half + spread),
            "far": evidence.mean(GAP, -4 * half + spread),
            "edge": evidence.mean(GAP, half + spread),
            "wide": evidence.mean(GAP, 40 * spread),
            "one in": evidence.mean(GAP, [0.9 * half]),
            "one out": evidence.mean(GAP, [3 * half]),
        }
        (sentence,) = gap_bands.placed((name, gap, (band,)) for name, gap in recipes.items())
        assert sentence == (
            f"Band of reordering ({band.gap.interval}): fine and one in inside; far and one out outside; edge and wide "
            "not distinguishable from its edge."
        )
        assert sentence.evidence == (band.gap, *recipes.values())

    def test_each_band_has_its_recipes_and_an_unknown_one_none(self):
        known, other = bands(repeats(1)), bands(repeats(2))
        gap = evidence.mean(GAP, [0.0])
        said = gap_bands.placed([("a", gap, known), ("b", gap, known), ("c", gap, other), ("d", gap, bands({}))])
        assert [sentence.rpartition(": ")[2] for sentence in said] == ["a and b inside."] * 2 + ["c inside."] * 2

    def test_reordering_alone_is_seldom_outside(self):
        """Of 300 sentences about three recipes of one seed, whose gaps are those of reordered runs, at most 5%."""
        rng, named = np.random.default_rng(7), 0
        for _ in range(300):
            runs = rng.normal(5, 0.01, (6, len(ITERATIONS)))
            _, band = bands({"a": runs[:3]})
            gaps = [(str(at), evidence.mean(GAP, [(runs[at] - runs[0]).mean()])) for at in (3, 4, 5)]
            named += " outside" in band.place(gaps)
        assert stats.binomtest(named, 300, 0.05, alternative="greater").pvalue > 0.01, named
