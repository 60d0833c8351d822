"""Student's t distribution, and its noncentral one: what few samples can show."""

from __future__ import annotations

import math
from functools import cache


def quantile(degrees: float, level: float = 0.05) -> float:
    """Half of a two-sided interval in standard errors: Student's t, which a larger value exceeds with this level."""
    from scipy.stats import t

    return float(t.ppf(1 - level / 2, degrees))


@cache
def noncentrality(degrees: float, level: float = 0.05, power: float = 0.8) -> float:
    """The difference from 0, in standard errors, that a two-sided t-test at this level finds with this probability.

    From the noncentral t distribution: with three seeds it is 5.7, where the normal distribution has 2.8.
    """
    from scipy.optimize import brentq
    from scipy.stats import nct, norm

    if math.isnan(degrees):
        return math.nan
    limit = quantile(degrees, level)

    def missed(shift: float) -> float:  # without the other side, whose share is below 1e-5 where the power is reached
        probability = norm.sf(limit - shift) if math.isinf(degrees) else nct.sf(limit, degrees, shift)
        return float(probability) - power

    return float(brentq(missed, 0.0, 10 * limit + 10))
