"""Q–Q plots: quantiles of the nonzero values against those of a law that is fitted to them, in the law's own units (for
a normal one: minus the mean, over σ), or against the same tensors in another run, over the standard deviation.

Not in units in which the quartiles agree: of a tensor most of whose values are tiny, the quartiles say nothing, and a
plot in their units reaches 10¹⁴.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from scipy import stats

from binade.app.questions.shared.distributions import Distribution, quantiles
from binade.app.questions.shared.laws import Fit, fit, nonzero

GRID = np.linspace(-5, 5, 81)  # where a plot has points, in quantiles of a normal law
BODY = (0.05, 0.95)  # quantiles between which a Q–Q plot shows the body of a distribution
LIMIT = 12.0  # the largest magnitude that a plot shows; how many values lie beyond is said
HEAVIER, LIGHTER, AS_LONG = "heavier", "lighter", "as long"


@dataclass(frozen=True)
class Quantiles:
    """The points of one group, and what they say.

    theoretical, sample, share   of each point: the quantile of the law, that of the values, the values below it
    above, below                 how many values lie beyond LIMIT and −LIMIT
    body                         the largest distance of a point between the 5th and the 95th percentile from the line
    reach                        the largest magnitude among the points
    expected                     between which two magnitudes the largest of as many independent values of the law lies
                                 in 99% of cases; None against another run
    problem                      why there are no points; then all of the above is empty
    """

    group: str
    theoretical: np.ndarray = field(default_factory=lambda: np.empty(0))
    sample: np.ndarray = field(default_factory=lambda: np.empty(0))
    share: np.ndarray = field(default_factory=lambda: np.empty(0))
    above: int = 0
    below: int = 0
    body: float = math.nan
    reach: float = math.nan
    expected: tuple[float, float] | None = None
    problem: str = ""

    @property
    def tails(self) -> str:
        """HEAVIER than those of the law, LIGHTER or AS_LONG; "" if that is not known."""
        if self.expected is None:
            return ""
        low, high = self.expected
        return HEAVIER if self.reach > high else LIGHTER if self.reach < low else AS_LONG


def standard_quantiles(fitted: Fit, share: np.ndarray) -> np.ndarray:
    """The quantiles of a law at location 0 and scale 1."""
    lower = np.minimum(share, 1 - share)
    return np.asarray(np.where(share < 0.5, -1.0, 1.0) * fitted.tail(lower))


def against_law(d: Distribution, law: str) -> Quantiles:
    """Quantiles of the nonzero values against those of the law that is fitted to them, which lies on the line y = x."""
    values = nonzero(d)
    fitted = fit(values, law) if values.total and values.std > 0 else None
    if fitted is None:
        return Quantiles(d.group, problem="all values are equal")
    share = _shares(values.total)
    theoretical = standard_quantiles(fitted, share)
    outside = np.array([-math.log(0.005), -math.log(0.995)]) / values.total / 2  # on each side
    low, high = fitted.tail(np.minimum(outside, 0.4))
    return _standardized(values, share, theoretical, fitted.location, fitted.scale, (float(low), float(high)))


def against_other(d: Distribution, other: Distribution | None, name: str) -> Quantiles:
    """Quantiles of the nonzero values against those of the same tensors in another run, both over the standard
    deviation of the first."""
    values = nonzero(d)
    other = nonzero(other) if other else None
    if other is None or not values.inner.any() or not other.inner.any():  # all zeros, or nothing
        return Quantiles(d.group, problem=f"{name} has no such tensor")
    if not values.std > 0:
        return Quantiles(d.group, problem="all values are equal")
    share = _shares(min(values.total, other.total))
    return _standardized(values, share, quantiles(other, share) / values.std, 0.0, values.std, None)


def _shares(count: int) -> np.ndarray:
    """The shares of the values at which a plot has points: those that so many values reach."""
    end = float(stats.norm.isf(min(0.5 / count, 0.4)))
    return np.asarray(stats.norm.cdf(np.unique(np.clip(GRID, -end, end))))


def _standardized(
    d: Distribution,
    share: np.ndarray,
    theoretical: np.ndarray,
    location: float,
    scale: float,
    expected: tuple[float, float] | None,
) -> Quantiles:
    sample = (quantiles(d, share) - location) / scale
    middle = ((d.low + d.high) / 2 - location) / scale
    above, below = (round(float(d.count[outside].sum())) for outside in (middle > LIMIT, middle < -LIMIT))
    body = (share >= BODY[0]) & (share <= BODY[1])
    off = float(np.abs(sample - theoretical)[body].max(initial=0.0))
    reach = float(np.abs([sample[0], sample[-1]]).max())
    return Quantiles(d.group, theoretical, sample, share, above, below, off, reach, expected)


def points_of(plots: Sequence[Quantiles]) -> pd.DataFrame:
    """Columns group, theoretical, sample, share of the points of several groups."""
    columns = ["group", "theoretical", "sample", "share"]
    tables = [pd.DataFrame({name: getattr(each, name) for name in columns}) for each in plots if len(each.share)]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)
