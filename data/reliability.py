"""Whether predicted costs may be relied on: the one gate of Loss, Predictions, Advise and `binade advise`.

Costs of operands are means over sequences, of which a few can decide everything. They order operands if two halves of
the sequences do so alike. Their sum is known if its interval over sequences is short next to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from binade.data import evidence
from binade.data.evidence import GAP, Estimate, Measure, Sentence

AGREE = 0.8  # Spearman's ρ between two halves of the sequences, from which their order is relied on
WITHIN = 0.5  # half of a sum's interval, relative to the sum, up to which it is relied on: a factor of 1.5
FACTOR = Measure("factor", "Factor", format=".1f")
FEWEST_SEQUENCES = 4  # from which the costs may tell operands or recipes apart
PREDICTION = Sentence(
    "This is a prediction: 7 of 10 measured changes lay outside its 95% interval. Measure it: binade measure."
)
MORE = "record several sequences (--micro-batch-size, --collect-micro-batches)"


@dataclass(frozen=True)
class Reliability:
    """
    sequences  how many each operand's cost is a mean of
    halves     Spearman's ρ of the operands' costs between every other sequence and the rest; NaN for one sequence or
               fewer than four operands, without an interval for fewer than FEWEST_PAIRS
    total      the sum of the costs, with its interval over sequences, in nats
    """

    sequences: int
    halves: Estimate
    total: Estimate

    @property
    def orders(self) -> bool:
        """Whether the costs tell operands apart."""
        return self.sequences >= FEWEST_SEQUENCES and self.halves.value >= AGREE and self.halves.low > 0

    @property
    def sums(self) -> bool:
        """Whether their sum is known to a factor of 1 + WITHIN."""
        return self.total.high - self.total.value <= WITHIN * abs(self.total.value)

    @property
    def doubt(self) -> Sentence:
        """Why the costs do not tell operands apart; empty if they do."""
        if self.orders:
            return Sentence()
        if self.sequences < 2:
            return evidence.say("One sequence cannot tell operands apart: {more}.", more=MORE)
        if self.sequences < FEWEST_SEQUENCES:
            text = "{n} sequences cannot tell operands apart, at least {fewest} are needed: {more}."
            return evidence.say(text, n=self.sequences, fewest=FEWEST_SEQUENCES, more=MORE)
        if math.isinf(self.halves.low):
            text = "The costs cannot be checked: that takes two sequences and {fewest} operands."
            return evidence.say(text, fewest=evidence.FEWEST_PAIRS)
        text = "Two halves of the sequences rank the operands differently (Spearman’s ρ {rho}): {more}."
        return evidence.say(text, rho=self.halves, more=MORE)

    @property
    def doubt_of_sum(self) -> Sentence:
        """Why their sum is not known; empty if it is."""
        if self.sums:
            return Sentence()
        if self.sequences < 2:
            return evidence.say("One sequence gives the sum no interval: {more}.", more=MORE)
        text = "The sum of these costs is not known to a factor of {factor}: {total}."
        return evidence.say(text, factor=evidence.exact(FACTOR, 1 + WITHIN), total=self.total)


def reliability(costs: Iterable[Sequence[float]]) -> Reliability:
    """Of operands' costs, each given by sequence, in one order for all. Operands that lack some sequences are left out;
    the sum is not known then."""
    given = [np.asarray(cost, float) for cost in costs]
    most = max(map(len, given), default=0)
    complete = [cost for cost in given if len(cost) == most]
    even, odd = ([float(cost[half::2].mean()) for cost in complete] if most > 1 else [] for half in (0, 1))
    halves = evidence.correlation(even, odd, "operands")
    signed = replace(GAP, name="change", title="Change", format="+.3g")
    total = evidence.mean(signed, np.sum(complete, axis=0) if len(complete) == len(given) and most else (), "sequences")
    return Reliability(min(map(len, given), default=0), halves, total)
