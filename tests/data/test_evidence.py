"""Estimates against scipy, and what sentences say of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from binade.data.compare import evidence
from binade.data.compare.evidence import GAP, Measure, Sentence, say
from binade.data.compare.student import noncentrality
from binade.data.compare.trends import taus_of

DB = Measure("sqnr_db", "SQNR", "dB", low_is_bad=True, format=".1f", resolution=0.1)
SHARE = Measure("flush_to_zero", "Flushed", "%")


class TestEstimates:
    def test_a_mean_over_seeds_has_students_interval(self):
        values = [0.012, 0.034, 0.02, 0.051]
        found = evidence.mean(GAP, values)
        expected = stats.ttest_1samp(values, 0)
        low, high = expected.confidence_interval(0.95)
        assert found.value == pytest.approx(np.mean(values)) and found.n == 4
        assert (found.low, found.high, found.p) == pytest.approx((low, high, expected.pvalue))

    def test_paired_seeds(self):
        own, other = {1: 0.5, 2: 0.7, 3: 0.65, 9: 4.0}, {1: 0.4, 2: 0.65, 3: 0.6}
        found, expected = evidence.paired(GAP, own, other), stats.ttest_rel([0.5, 0.7, 0.65], [0.4, 0.65, 0.6])
        assert found.n == 3 and found.p == pytest.approx(expected.pvalue)

    def test_two_means_differ_as_by_welch(self):
        rng = np.random.default_rng(0)
        a, b = rng.normal(0.1, 0.02, 6), rng.normal(0.02, 0.05, 4)
        found = evidence.mean(GAP, a).minus(evidence.mean(GAP, b))
        expected = stats.ttest_ind(a, b, equal_var=False)
        assert (found.p, found.degrees) == pytest.approx((expected.pvalue, expected.df))

    def test_a_trend_is_theil_and_sens(self):
        at, values = range(12), [30.0, 29.5, 29.7, 29.1, 28.8, 28.9, 28.2, 28.0, 27.9, 27.2, 27.4, 26.9]
        found, slope = evidence.trend(DB, at, values, "iterations"), stats.theilslopes(values, at)[0]
        assert found.value == pytest.approx(slope) and math.isinf(
            found.high - found.low
        )  # it depends on what is unknown
        assert taus_of(np.array([values]))[0] == pytest.approx(stats.kendalltau(at, values).statistic)
        assert found.measure.quantity(found.value) == f"−{abs(slope):.3g} dB per iteration"
        assert stats.kendalltau(at, values).pvalue < found.p < 0.05
        assert evidence.trend(DB, at[::-1], values[::-1], "iterations") == found  # in any order

    def test_four_points_are_no_trend(self):
        assert math.isnan(evidence.trend(DB, range(4), [4.0, 3.0, 2.0, 1.0], "layers").value)
        assert math.isnan(evidence.trend(DB, range(5), [4.0, math.nan, 3.0, 2.0, 1.0], "layers").value)

    def test_holm(self):
        """R: p.adjust(c(0.001, 0.2, 0.012, 0.03, 0.004), "holm") is 0.005, 0.2, 0.036, 0.06, 0.016."""
        values = (0.001, 0.2, 0.012, 0.03, 0.004)
        items = [evidence.Estimate(GAP, 1.0, 0.0, 2.0, 5, "seeds", "mean", 0.1, p) for p in values]
        assert evidence.holm(items) == [True, False, True, False, True]
        assert evidence.holm([evidence.mean(GAP, [3.0])]) == [False]  # one seed


class TestSentences:
    def test_a_number_needs_evidence(self):
        with pytest.raises(TypeError, match=r"gap=0.5 is a bare number"):
            say("The gap is {gap}.", gap=0.5)
        found = say("The gap of {n} runs is {gap}.", n=1200, gap=evidence.mean(GAP, [0.1, 0.2]))
        assert found == "The gap of 1,200 runs is +0.1500 nats (95% interval −0.4853 to +0.7853, 2 seeds)."
        assert [each.n for each in found.evidence] == [2]

    def test_exact_values_within_the_resolution_are_equal(self):
        items = [("a", evidence.exact(DB, 16.93)), ("b", evidence.exact(DB, 16.99)), ("c", evidence.exact(DB, 20.0))]
        said = evidence.extreme(items, "SQNR in mxfp4", lowest=True)
        assert said == "Lowest SQNR in mxfp4: a and b, 16.9 to 17.0 dB; highest: c, 20.0 dB."
        items[1] = ("b", evidence.exact(DB, 17.2))
        said = evidence.extreme(items, "SQNR in mxfp4", lowest=True)
        assert said == "Lowest SQNR in mxfp4: a, 16.9 dB; highest: c, 20.0 dB."
        equal = [(name, evidence.exact(DB, 8.0)) for name in "abcdef"]
        assert evidence.extreme(equal, "SQNR", lowest=True) == "SQNR: a, b, c and 3 more, 8.0 dB."

    def test_what_was_measured_whole_is_described_without_a_test(self):
        """All tensors of both groups are known: however their values are spread, one median is lower."""
        wide = [("a", evidence.spread_of(DB, [1.0, 20.0, 40.0])), ("b", evidence.spread_of(DB, [2.0, 20.5, 41.0]))]
        said = evidence.extreme(wide, "SQNR", lowest=True)
        assert said.startswith("Lowest SQNR: a, 20.0 dB (10th to 90th percentile 1.0 to 40.0, 3 tensors); highest: b, ")
        kurtosis = [("a", evidence.exact(Measure("kurtosis", "Kurtosis"), 1.72)), *wide[:0]]
        kurtosis += [("b", evidence.spread_of(Measure("kurtosis", "Kurtosis"), [3.0, 18_200.0, 90_000.0]))]
        assert "told apart" not in evidence.extreme(kurtosis, "kurtosis", lowest=False)

    def test_what_was_sampled_is_not_ranked_without_one(self):
        near = [(name, evidence.mean(DB, values, "seeds")) for name, values in (("a", [20, 24]), ("b", [21, 24]))]
        assert "cannot be told apart" in evidence.extreme(near, "SQNR", lowest=True)

    def test_a_group_with_tensors_without_error_has_no_error(self):
        """Some of its tensors are exact in the format, so that its 90th percentile is infinite."""
        some = evidence.spread_of(DB, [20.0, 21.0, 22.0, math.inf, math.inf])
        assert some.is_larger(evidence.spread_of(DB, [19.0, 20.0, 21.0]))
        assert evidence.spread_of(DB, [math.inf] * 3).is_larger(some)

    @pytest.mark.thorough
    @pytest.mark.slow
    def test_equal_groups_are_seldom_told_apart(self):
        """In at most 5% of sentences about many, although the data choose the extreme."""
        rng, named = np.random.default_rng(5), 0
        for _ in range(200):
            items = [(str(at), evidence.with_error(GAP, rng.normal(), 1.0, 10**6, "values")) for at in range(20)]
            named += len(evidence.leaders(items, lowest=False)) < len(items)
        assert stats.binomtest(named, 200, 0.05, alternative="greater").pvalue > 0.01, named

    def test_what_is_unknown_is_not_compared(self):
        one, unknown = ("a", evidence.exact(DB, 12.0)), ("c", evidence.exact(DB, math.nan))
        assert evidence.extreme([one, unknown], "SQNR", lowest=True) == "SQNR: a 12.0 dB."
        equal = [one, ("b", evidence.exact(DB, 12.0)), unknown]
        assert evidence.extreme(equal, "SQNR", lowest=True) == "SQNR: a and b, 12.0 dB."
        lost = evidence.mean(GAP, [0.1, math.inf, 0.2])
        assert math.isnan(lost.value) and lost.n == 3

    def test_one_seed_separates_nothing(self):
        items = [(name, evidence.mean(GAP, [gap])) for name, gap in (("PV", 0.0066), ("QK", 0.001))]
        said = evidence.effects(items, "bf16")
        assert said == "One seed cannot tell these from bf16: PV +0.0066 nats; QK +0.0010 nats."

    def test_that_one_seed_gives_no_interval_is_said_once(self):
        items = [("a", evidence.mean(GAP, [0.1])), ("b", evidence.mean(GAP, [-0.2]))]
        assert str(evidence.each_of(items, "Gap")) == "Gap: a +0.1000 nats; b −0.2000 nats (1 seed each: no interval)."
        assert str(evidence.each_of(items[:1], "Gap")) == "Gap: a +0.1000 nats (1 seed: no interval)."
        mixed = [*items, ("c", evidence.mean(GAP, [0.1, 0.2]))]
        assert str(evidence.each_of(mixed, "Gap")).count("(1 seed: no interval)") == 2

    def test_a_loss_that_is_nan_is_named_as_such(self):
        said = evidence.effects([("a", evidence.mean(GAP, [math.nan] * 4, "sequences"))], "bf16")
        assert str(said) == "Compared with bf16, a loss is NaN or Inf: a."

    def test_effects_are_judged_together(self):
        items = [
            ("mxfp4", evidence.mean(GAP, [0.5, 0.52, 0.49, 0.51])),
            ("PV", evidence.mean(GAP, [0.01, -0.02, 0.012, 0.003])),
        ]
        said = evidence.effects(items, "bf16")
        assert said.startswith("Higher than bf16: mxfp4 +0.5050 nats (95% interval +0.4845 to +0.5255, 4 seeds).")
        assert "Not distinguishable from bf16: PV (4 seeds; a difference of 0.0399 nats would" in said

    @pytest.mark.parametrize(("n", "comparisons"), [(2, 1), (3, 1), (3, 2), (4, 5), (12, 1)])
    def test_a_difference_that_would_have_shown_is_found_in_four_of_five_experiments(self, n, comparisons):
        rng = np.random.default_rng(n)
        shift = noncentrality(n - 1, evidence.LEVEL / comparisons)
        values = rng.normal(shift / np.sqrt(n), 1.0, (20_000, n))
        found = stats.ttest_1samp(values, 0, axis=1).pvalue <= evidence.LEVEL / comparisons
        assert found.mean() == pytest.approx(0.8, abs=0.01)

    def test_what_would_have_shown_counts_the_comparisons_of_its_sentence(self):
        values = [0.01, -0.02, 0.012]
        own, error = evidence.mean(GAP, values), stats.sem(values)
        assert own.detectable() == pytest.approx(5.653 * error, rel=1e-3)
        both = [("PV", own), ("QK", evidence.mean(GAP, [0.001, -0.001, 0.0005]))]
        assert f"a difference of {own.detectable(2):.4f} nats would" in evidence.effects(both, "bf16")
        assert own.detectable(2) == pytest.approx(8.01 * error, rel=1e-2)
        assert math.isnan(evidence.mean(GAP, [0.3]).detectable())

    @pytest.mark.thorough
    @pytest.mark.slow
    def test_false_alarms_stay_below_the_level(self):
        """Of 1,000 sentences about five recipes without an effect, at most 5% may name one (95% of such samples have at
        most 61)."""
        rng = np.random.default_rng(2)
        named = sum(
            "igher than" in said or "ower than" in said
            for _ in range(1000)
            if (said := evidence.effects([(n, evidence.mean(GAP, rng.normal(0, 1, 4))) for n in "abcde"], "bf16"))
        )
        assert named <= 61

    def test_together_keeps_the_evidence(self):
        first, second = say("{a}", a=evidence.exact(SHARE, 0.5)), say("{b}", b=evidence.exact(SHARE, 0.25))
        both = evidence.together(first, "", second)
        assert isinstance(both, Sentence) and both == "50% 25%" and len(both.evidence) == 2
