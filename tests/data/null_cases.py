"""Cases without an effect, and with a planted one, for the sentences that infer: how often each names something.

The sentences are made by the functions that the pages call. tests/bench/bench_null.py prints the table of the docs,
test_null_cases.py counts fewer cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from scipy.signal import lfilter

from binade.data import evidence
from binade.data.fields import Field
from binade.data.held_out import HeldOut, differences, held_out_gap, held_out_sentence

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
