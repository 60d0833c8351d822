"""What the charts of Explore draw of each tensor or group, in few numbers: shares of its values by magnitude, and
quantiles. A browser keeps them for the tensors that are listed, so that it can draw another choice of these at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from binade.app.questions.explore.quantile_plots import Quantiles
from binade.app.questions.shared.distributions import Distribution, edge, half_binades, magnitudes

DIGITS = 5  # of a share


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
        first, counts = half_binades(nonzero.low, nonzero.high, nonzero.count)
        widths = np.diff(edge(np.arange(first, first + len(counts) + 1)))
        return first, counts / max(self.distribution.total, 1) / widths

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
