"""Whether successive values have a trend: Kendall's τ among series without one.

Values that are recorded in training depend on those before. By how much cannot be estimated from a few points, and
tests that estimate it name trends that are not there. So the series have an AUTOCORRELATION that is as high as is
plausible.
tests/bench/bench_null.py counts what is named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

AUTOCORRELATION = 0.9  # between successive points
MOST_POINTS = 40  # more are averaged in blocks
DRAWS = 20_000  # series without a trend


def p_of_trend(values: Sequence[float]) -> float:
    """The p-value of a trend over successive values; of many, of the means of blocks."""
    series = np.array(values)
    if len(series) > MOST_POINTS:
        series = np.array([block.mean() for block in np.array_split(series, MOST_POINTS)])
    without = _without_trend(len(series))
    return float((1 + (without >= abs(taus_of(series[None])[0]) - 1e-12).sum()) / (1 + len(without)))


@cache
def _without_trend(points: int) -> np.ndarray:
    """|τ| of DRAWS stationary series of so many points with AUTOCORRELATION (AR(1)), the same in each process."""
    noise = np.random.default_rng(0).standard_normal((points, DRAWS))
    series = [noise[0]]
    for fresh in noise[1:]:
        series.append(AUTOCORRELATION * series[-1] + math.sqrt(1 - AUTOCORRELATION**2) * fresh)
    taus: np.ndarray = abs(taus_of(np.stack(series, axis=1)))
    return taus


def taus_of(series: np.ndarray) -> np.ndarray:
    """Kendall's τ over time of each row: pairs that rise minus pairs that fall, relative to all pairs."""
    points = series.shape[1]
    rising = sum(np.sign(series[:, lag:] - series[:, :-lag]).sum(axis=1) for lag in range(1, points))
    taus: np.ndarray = rising / (points * (points - 1) / 2)
    return taus
