"""What the charts of Explore draw of each tensor or group, in few numbers: shares of its values by magnitude, and
quantiles. A browser keeps them for the tensors that are listed, so that it can draw another choice of these at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from binade.app.questions.explore.quantile_plots import Quantiles
from binade.app.questions.shared.distributions import Distribution, magnitudes, merged

# log₂ of where the bins of a binade begin. A bin of a sketch ends there, so that counts of raw values are exact.
STEPS = 0.0, math.log2(1.5)
HALF = STEPS[1]
DIGITS = 5  # of a share


def edge(index: np.ndarray) -> np.ndarray:
    """log₂ of the magnitude at which the bin of this number begins: two bins per binade, 1 to 1.5 and 1.5 to 2."""
    whole, half = np.divmod(index, 2)
    return np.asarray(whole + np.array(STEPS)[np.asarray(half, int)])


def _index(log2: np.ndarray) -> np.ndarray:
    """The number of the bin of a log₂, with a fraction."""
    whole = np.floor(log2)
    part = log2 - whole
    within = np.where(part < HALF, part / HALF, 1 + (part - HALF) / (1 - HALF))
    return np.asarray((2 * whole + within).round(9))


@dataclass(frozen=True)
class Curve:
    """A distribution and its Q–Q plot."""

    distribution: Distribution
    quantiles: Quantiles

    @property
    def group(self) -> str:
        return self.distribution.group

    @cached_property
    def bins(self) -> tuple[int, np.ndarray]:
        """(the number of the first bin, the share of all values in each bin, per binade)."""
        nonzero = magnitudes(self.distribution)
        if not nonzero.total:
            return 0, np.empty(0)
        edges, counts = merged(_index(nonzero.low), _index(nonzero.high), nonzero.count.astype(float), 1)
        if not counts[-1]:  # the largest value ends a bin
            counts = counts[:-1]
        first = int(edges[0])
        widths = np.diff(edge(np.arange(first, first + len(counts) + 1)))
        return first, counts / self.distribution.total / widths

    @property
    def bins_as_json(self) -> dict[str, Any]:
        """For the browser: the number of the `first` bin and the `shares`."""
        first, shares = self.bins
        return {"first": first, "shares": shares.round(DIGITS).tolist()}

    @property
    def quantiles_as_json(self) -> dict[str, Any]:
        """For the browser: `x`, `y` and `below` of the points of the Q–Q plot, the counts beyond its ends, and its
        tails."""
        points = self.quantiles
        return {
            "x": points.theoretical.round(2).tolist(), "y": _short(points.sample),
            "below": points.share.round(4).tolist(), "beyond": [points.above, points.below],
            "tails": points.tails, "problem": points.problem,
        }  # fmt: skip


def _short(values: np.ndarray) -> list[float]:
    """Values of a plot that ends at ±12: two decimals, and no more of those that lie far beyond."""
    result: list[float] = values.clip(-1e3, 1e3).round(2).tolist()
    return result


def bins_of(curves: Iterable[Curve]) -> pd.DataFrame:
    """Columns group, low (log₂), share (per binade), count, with a last row of each group at which its line ends."""
    tables = []
    for curve in curves:
        first, shares = curve.bins
        low = edge(np.arange(first, first + len(shares) + 1))
        width = np.diff(low, append=low[-1])
        table = pd.DataFrame({"group": curve.group, "low": low, "share": np.append(shares, 0.0), "high": low + width})
        table["count"] = table["share"] * width * curve.distribution.total
        tables.append(table)
    columns = ["group", "low", "share", "high", "count"]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)
