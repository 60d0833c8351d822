"""By how much a cross-entropy can change: the bounds of predicted loss changes.

Let L be the loss without rounding and V the size of the vocabulary, both of the same tokens.

| bound | holds | because |
|---|---|---|
| change ≥ −L | always, for each token | a cross-entropy is not negative |
| change ≤ ln V − L | unless rounding is worse than to know nothing | the uniform distribution has ln V at each token |

The upper one is no law: a model may be confident and wrong. But ln V is the largest entropy (Cover and Thomas, Elements
of Information Theory, 2nd edition, theorem 2.6.4), any model reaches it by dividing its logits by a large temperature
(Guo et al. 2017, arXiv 1706.04599), and beyond it a quadratic in the rounding error no longer predicts anything. Before
training, where the loss is not below ln V, there is no upper bound. The bounds of tokens hold for their mean, too. Only
the mean loss is recorded: the change of one sequence, of which L is not known, is bounded by ln V.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bounds:
    """Of the change of a loss in nats per token. loss: without rounding; vocabulary: how many tokens it has."""

    loss: float
    vocabulary: int

    @property
    def low(self) -> float:
        return -self.loss

    @property
    def high(self) -> float:
        room = math.log(self.vocabulary) - self.loss
        return room if room > 0 else math.inf

    @property
    def of_sequence(self) -> float:
        """The upper bound of the change of one sequence."""
        return math.inf if math.isinf(self.high) else math.log(self.vocabulary)

    def clip(self, change: float) -> float:
        return min(max(change, self.low), self.high)

    def total(self, change: float, by_sequence: Sequence[float] | np.ndarray) -> tuple[float, float]:
        """(a predicted change, its standard error over sequences), with the change of each sequence within its bound:
        by_sequence, if the change is their mean. The error is NaN for one sequence or none."""
        bounded = np.minimum(np.asarray(by_sequence, float), self.of_sequence)
        error = float(bounded.std(ddof=1) / math.sqrt(len(bounded))) if len(bounded) > 1 else math.nan
        if len(bounded) and math.isclose(float(np.mean(by_sequence)), change, rel_tol=1e-6, abs_tol=1e-12):
            change = float(bounded.mean())
        return self.clip(change), error
