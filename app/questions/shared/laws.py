"""Laws fitted to a distribution, and how close they come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from scipy.optimize import minimize_scalar

from binade.app.questions.shared.distributions import Distribution, quantiles
from binade.data.words.text import number_text

LAWS = ("normal", "laplace", "student_t", "uniform")
FIT_POINTS = 199  # quantiles that Student's t is fitted to, 0.25% to 99.75%
MAX_FREEDOM = 200.0  # degrees of freedom beyond which t is called normal


@dataclass(frozen=True)
class Fit:
    """A law fitted to a distribution: value = location + scale · standard. freedom is Student's only.

    normal     mean and standard deviation
    laplace    median and mean absolute deviation from it (maximum likelihood)
    student_t  the degrees of freedom whose Q-Q plot is straightest (highest correlation) over FIT_POINTS quantiles;
               location and scale are that line's
    uniform    from the smallest to the largest value, location the middle, scale half the width
    """

    law: str
    location: float
    scale: float
    freedom: float | None = None

    @property
    def text(self) -> str:
        names = {
            "normal": ("μ", "σ"), "laplace": ("median", "b"), "student_t": ("location", "scale"),
            "uniform": ("middle", "half width"),
        }  # fmt: skip
        where, size = names[self.law]
        freedom = f"ν = {number_text(self.freedom)}, " if self.freedom is not None else ""
        return f"{freedom}{where} = {number_text(self.location)}, {size} = {number_text(self.scale)}"

    @property
    def _standard(self) -> Any:
        """The law at location 0 and scale 1, as scipy has it."""
        if self.freedom is not None:
            return stats.t(self.freedom)
        return {"normal": stats.norm, "laplace": stats.laplace, "uniform": stats.uniform(-1, 2)}[self.law]

    @property
    def kurtosis(self) -> float:
        """The law's: 3 for a normal one. Infinite for Student's t with 4 degrees of freedom or fewer."""
        if self.freedom is not None:
            return 3 + 6 / (self.freedom - 4) if self.freedom > 4 else math.inf
        return 3 + float(self._standard.stats(moments="k"))

    def tail(self, share: np.ndarray) -> np.ndarray:
        """The standard law's value above which a share of at most one half lies."""
        return 1 - 2 * share if self.law == "uniform" else np.asarray(self._standard.isf(share))

    def cdf(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(self._standard.cdf((values - self.location) / self.scale))


def nonzero(d: Distribution) -> Distribution:
    """The values other than 0, which no continuous law has. Of a sketch, its bin of 0 is left out."""
    keep = (d.low > 0) | (d.high < 0)
    n, kept = d.total, int(d.count[keep].sum())
    if kept == n or not kept:
        return d
    mean = d.mean * n / kept
    square = (d.std**2 + d.mean**2) * n / kept
    return replace(
        d, low=d.low[keep], high=d.high[keep], count=d.count[keep], mean=mean,
        std=math.sqrt(max(square - mean**2, 0.0)),
    )  # fmt: skip


def kurtosis_without(row: Mapping[Any, Any] | pd.Series, kept: int) -> float:
    """The kurtosis of a tensor's `kept` nonzero values, from mean, std, skewness and kurtosis of all finite ones."""
    n = int(row["numel"]) - int(row["nans"]) - int(row["infs"])
    mean, std = float(row["mean"]), float(row["std"])
    if not kept or not std > 0:
        return math.nan
    m = mean / std  # in units of the standard deviation
    raw2, raw3 = 1 + m**2, float(row["skewness"]) + 3 * m + m**3
    raw4 = float(row["kurtosis"]) + 4 * float(row["skewness"]) * m + 6 * m**2 + m**4
    one, two, three, four = (moment * n / kept for moment in (m, raw2, raw3, raw4))
    variance = two - one**2
    fourth = four - 4 * one * three + 6 * one**2 * two - 3 * one**4
    return fourth / variance**2 if variance > 0 else math.nan


def fit(d: Distribution, law: str) -> Fit | None:
    """The law fitted to a distribution; None if it has no spread. Raises ValueError for an unknown law."""
    if law not in LAWS:
        raise ValueError(f"unknown distribution {law!r}: expected one of {', '.join(LAWS)}")
    if not d.total or not d.std > 0:
        return None
    if law == "normal":
        return Fit(law, d.mean, d.std)
    if law == "uniform":
        low, high = float(d.low[0]), float(d.high[-1])
        return Fit(law, (low + high) / 2, (high - low) / 2)
    if law == "laplace":
        median = float(quantiles(d, np.array(0.5)))
        spread = float(d.count @ np.abs((d.low + d.high) / 2 - median)) / d.total
        return Fit(law, median, spread) if spread > 0 else None
    return _fit_student(d)


def _fit_student(d: Distribution) -> Fit | None:
    p = (np.arange(FIT_POINTS) + 0.5) / FIT_POINTS
    sample = quantiles(d, p)
    sample = sample / d.std  # so that squares neither overflow nor vanish
    if not np.ptp(sample) > 0:
        return None

    def bend(log_freedom: float) -> float:
        return float(-np.corrcoef(stats.t.ppf(p, math.exp(log_freedom)), sample)[0, 1])

    best = minimize_scalar(bend, bounds=(math.log(0.5), math.log(MAX_FREEDOM)), method="bounded")
    freedom = math.exp(best.x)
    slope, middle = np.polyfit(stats.t.ppf(p, freedom), sample, 1)
    return Fit("student_t", float(middle * d.std), float(slope * d.std), freedom) if slope > 0 else None


def distance_to(d: Distribution, fitted: Fit) -> float:
    """Kolmogorov-Smirnov distance sup|F - G| to a law; for binned values over the bins' edges, so never above the true
    one."""
    upto = np.cumsum(d.count) / d.total
    high = np.abs(upto - fitted.cdf(d.high))
    low = np.abs(upto - d.count / d.total - fitted.cdf(d.low))
    return float(np.maximum(low, high).max())


def laws_table(d: Distribution) -> pd.DataFrame:
    """How close each law comes: columns group, law, parameters, ks (see `distance_to`), closest first."""
    rows = [(d.group, law, fitted.text, distance_to(d, fitted)) for law in LAWS if (fitted := fit(d, law))]
    return pd.DataFrame(rows, columns=["group", "law", "parameters", "ks"]).sort_values("ks", ignore_index=True)
