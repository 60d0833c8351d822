"""Cases without an effect, and with a planted one, for the sentences that infer: how often each names something.

The sentences are made by the functions that the pages call. tests/bench/bench_null.py prints the table of the docs,
test_null_cases.py counts fewer cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from scipy.signal import lfilter

from binade.data.compare import evidence
from binade.data.compare.gap_bands import PlainRun, band_of
from binade.data.run.held_out import HeldOut, differences, held_out_gap, held_out_sentence
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
