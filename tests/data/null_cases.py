"""Cases without an effect, and with a planted one, for the sentences that infer: how often each names something.

The sentences are made by the functions that the pages call. tests/bench/bench_null.py prints the table of the docs,
test_null_cases.py counts fewer cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from scipy import stats
from scipy.signal import lfilter

from binade.app.questions.cost.compute import MeasuredCosts, verdict
from binade.data.compare import evidence
from binade.data.compare.gap_bands import PlainRun, band_of
from binade.data.compare.held_out import differences, held_out_gap, held_out_sentence
from binade.data.run.effects import CHANGE, measured_effects
from binade.data.run.evaluations import HeldOut
from binade.data.run.experiment import NONE, BatchResult, EffectGroup, TreatmentKey
from binade.data.words.fields import Field

Random = np.random.Generator
DB = Field("sqnr_db", "SQNR", "dB", format=".1f")
TOKENS = (1000, 2000, 4000, 8000)
SEQUENCES, SPREAD = 48, 0.02  # of an evaluation, and the deviation of their differences in nats


def share(cases: int, named: Callable[..., bool], *case: float) -> float:
    """In how many percent of the cases named(random numbers, *case) is true."""
    rng = np.random.default_rng(0)
    return 100 * sum(named(rng, *case) for _ in range(cases)) / cases


def held_out(rng: Random, seeds: int, deviation: float, gap: float = 0.0) -> str:
    """The sentence on the held-out losses of a recipe and bf16, whose runs differ by a gap, by chance in each sequence
    and by a drift: the deviation, in nats, of two trainings that differ in bits alone."""

    def evaluations(losses: Mapping[int, np.ndarray]) -> dict[int, HeldOut]:
        return {at: HeldOut(at, tuple(map(float, own)), "same", TOKENS[at]) for at, own in losses.items()}

    pairs = []
    for _ in range(seeds):
        plain = {at: 5 + rng.normal(0, 1, SEQUENCES) for at in range(len(TOKENS))}
        drift = dict(enumerate(np.cumsum(rng.normal(0, deviation / 2, len(TOKENS)))))  # it grows while training
        own = {at: losses + gap + drift[at] + rng.normal(0, SPREAD, SEQUENCES) for at, losses in plain.items()}
        pairs.append(differences(evaluations(own), evaluations(plain)))
    found = held_out_gap(pairs)
    return str(held_out_sentence([("mxfp8", found)], "bf16")) if found else ""


def names_gap(rng: Random, seeds: int, deviation: float, gap: float = 0.0) -> bool:
    return "loss than bf16" in held_out(rng, seeds, deviation, gap)


def names_slope(rng: Random, seeds: int, deviation: float) -> bool:
    return "changes when the tokens double" in held_out(rng, seeds, deviation)


def correlated(rng: Random, phi: float, shape: tuple[int, int]) -> np.ndarray:
    """Series of the AR(1) process with this autocorrelation and a deviation of 1, in rows."""
    long = lfilter([1.0], [1.0, -phi], rng.standard_normal((shape[0], shape[1] + 200)))
    series: np.ndarray = long[:, -shape[1] :] * math.sqrt(1 - phi**2)
    return series


def names_trend(rng: Random, points: int, phi: float, fall: float = 0.0, layers: int = 6) -> bool:
    """Whether the sentence names a trend in one of the layers, which fall by so many deviations in all."""
    rows = correlated(rng, phi, (layers, points)) - fall * np.linspace(0, 1, points)
    items = [(f"layer {at}", evidence.trend(DB, range(points), row, "iterations")) for at, row in enumerate(rows)]
    return "no trend over iterations" not in evidence.trends(items, "The SQNR", "over iterations", "layers")


ITERATIONS, RECIPES = 60, 5  # of the runs below


def leaves(rng: Random, seeds: int, pairs: int, phi: float, gap: float = 0.0) -> bool:
    """Whether any of RECIPES leaves bf16. Of the bf16 runs of so many seeds, so many are repeated with other bits, and
    the recipes are compared with the first of each seed. Each run differs from what its seed has in common by a series
    of this autocorrelation, 1 for a random walk, with a deviation of 0.01 nats at the end; recipes also by a gap, which
    grows until then."""
    noise = iter(_noise(rng, phi, seeds * (RECIPES + 1) + pairs))
    losses = rng.normal(3, 0.1, (seeds, ITERATIONS))
    plain = losses + [next(noise) for _ in range(seeds)]
    repeats = [losses[seed] + next(noise) for seed in range(pairs)]
    runs = [PlainRun(str(number % seeds), _steps(run)) for number, run in enumerate((*plain, *repeats))]
    band = band_of(runs, range(ITERATIONS))
    for _ in range(RECIPES):
        trained = losses + [next(noise) for _ in range(seeds)] + gap * np.linspace(0, 1, ITERATIONS)
        gaps = dict(enumerate((trained - plain).mean(axis=0)))
        if band.left_at(gaps, seeds, RECIPES) is not None:
            return True
    return False


def _steps(losses: np.ndarray) -> list[dict[str, float]]:
    return [{"iteration": at, "loss": loss} for at, loss in enumerate(losses.tolist())]


def _noise(rng: Random, phi: float, runs: int) -> np.ndarray:
    if phi < 1:
        return 0.01 * correlated(rng, phi, (runs, ITERATIONS))
    walks: np.ndarray = np.cumsum(rng.standard_normal((runs, ITERATIONS)), axis=1) * 0.01 / math.sqrt(ITERATIONS)
    return walks


def _measured(changes: Mapping[TreatmentKey, np.ndarray], exact: np.ndarray) -> MeasuredCosts:
    """What Runs › Cost shows of results with these changes of the loss by sequence."""
    passes = {NONE: exact} | {key: exact + change for key, change in changes.items()}
    results = [BatchResult(key, 0, tuple(x.tolist()), (1,) * len(x)) for key, x in passes.items()]
    return MeasuredCosts("run", CHANGE, tuple(measured_effects(results)))


def _noise_of_effects(rng: Random, shape: tuple[int, int], skewed: bool) -> np.ndarray:
    """With a deviation of 0.01 nats and a mean of 0."""
    return 0.01 * (rng.exponential(1, shape) - 1 if skewed else rng.standard_normal(shape))


def names_largest(rng: Random, groups: int, sequences: int, gap: float = 0.0, skewed: bool = False) -> bool:
    """Whether Runs › Cost names the group with the largest change of the loss. All have the same mean, but for the
    first, whose mean is larger by so many deviations of a group's noise. Sequences differ more than groups do."""
    common = rng.normal(0.1, 0.05, sequences)
    noise = common + _noise_of_effects(rng, (groups, sequences), skewed)
    noise[0] += 0.01 * gap
    keys = [TreatmentKey("mxfp4", "", EffectGroup("linear", layer, "fc1"), base=NONE) for layer in range(1, groups + 1)]
    measured = _measured(dict(zip(keys, noise, strict=True)), rng.normal(3, 1, sequences))
    return "is that of layer" in verdict(measured, "site")


def misses_effect(rng: Random, sequences: int, skewed: bool = False) -> bool:
    """Whether the interval of a whole effect on Runs › Cost leaves the true one out, which is 0.1 nats."""
    change = 0.1 + _noise_of_effects(rng, (1, sequences), skewed)[0]
    (cost,) = _measured({TreatmentKey("mxfp4", base=NONE): change}, rng.normal(3, 1, sequences)).whole
    return not cost.change.low <= 0.1 <= cost.change.high


def power(groups: int, sequences: int, gap: float, cases: int = 4000) -> float:
    """How often, in percent, paired t-tests of the largest mean against all others with Holm's correction name one, by
    scipy and without the page; for two groups, by the noncentral t distribution."""
    if groups == 2:
        edge, center = stats.t.ppf(0.975, sequences - 1), gap / math.sqrt(2) * math.sqrt(sequences)
        found = stats.nct(sequences - 1, center)
        return 100 * float(found.sf(edge) + found.cdf(-edge))
    rng, count = np.random.default_rng(1), 0
    for _ in range(cases):
        noise = rng.standard_normal((groups, sequences))
        noise[0] += gap
        top, *others = noise[np.argsort(-noise.mean(1))]
        p = np.sort(stats.ttest_rel([top] * len(others), others, axis=1).pvalue)
        count += bool((p * np.arange(groups - 1, 0, -1) <= 0.05).all())
    return 100 * count / cases
