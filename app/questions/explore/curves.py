"""What the charts of Explore draw of each tensor or group, in few numbers: shares of its values by magnitude, and
quantiles. A browser keeps them for the tensors that are listed, so that it can draw another choice of these at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from binade.app.questions.shared.distributions import Distribution, magnitude_bins
from binade.app.questions.shared.quantile_plots import Quantiles

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
        return magnitude_bins(self.distribution)

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
