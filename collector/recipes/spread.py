"""Statistics of a figure over seeds: mean, spread, and whether the spread separates two recipes. No torch."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Two-sided 95% quantiles of Student's t, for 1 to 10 degrees of freedom. For more, the last is a little too wide."""

SEPARATED = (
    "Two means are separated if their 95% intervals over seeds (mean ± t·sd/√n, Student’s t) do not overlap. One seed "
    "separates nothing."
)


@dataclass(frozen=True)
class Spread:
    """values: one for each seed, at least one."""

    values: tuple[float, ...]

    @property
    def seeds(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """The sample standard deviation; NaN for one seed."""
        return statistics.stdev(self.values) if self.seeds > 1 else math.nan

    @property
    def margin(self) -> float:
        """Half the 95% interval of the mean; infinite for one seed."""
        if self.seeds == 1:
            return math.inf
        return T95[min(self.seeds - 1, len(T95)) - 1] * self.deviation / math.sqrt(self.seeds)

    @property
    def low(self) -> float:
        return self.mean - self.margin

    @property
    def high(self) -> float:
        return self.mean + self.margin

    def separated(self, other: Spread) -> bool:
        return self.low > other.high or self.high < other.low


def verdict(own: Spread, other: Spread, name: str) -> str:
    """How a mean compares: "higher than bf16", "lower than bf16" or "not separated from bf16". name is the other's."""
    if not own.separated(other):
        return f"not separated from {name}"
    return f"{'higher' if own.mean > other.mean else 'lower'} than {name}"


def no_gap(seeds: int) -> Spread:
    """The gap of bf16 to itself."""
    return Spread((0.0,) * seeds)
