"""By how much a cross-entropy can change: the bounds of predicted loss changes.

Let L be the loss without rounding and V the size of the vocabulary, both of the same tokens.

| bound | holds | because |
|---|---|---|
| change ≥ −L | always, for each token | a cross-entropy is not negative |
| change ≤ ln V − L | unless rounding is worse than to know nothing | the uniform distribution has ln V at each token |

The upper one is no law: a model may be confident and wrong. But ln V is the largest entropy (Cover and Thomas, Elements
of Information Theory, 2nd edition, theorem 2.6.4), any model reaches it by dividing its logits by a large temperature
(Guo et al. 2017, arXiv 1706.04599), and beyond it a quadratic in the rounding error no longer predicts anything. Each
token's change is bounded so, hence the mean over the tokens of a sequence, too. Tokens are not recorded, so sequences
are bounded, by the mean loss.
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
        return max(math.log(self.vocabulary) - self.loss, 0.0)

    def clip(self, change: float) -> float:
        return min(max(change, self.low), self.high)

    def total(self, change: float, by_sequence: Sequence[float] | np.ndarray) -> tuple[float, float]:
        """(a predicted change, its standard error over sequences), with the change of each sequence within the bounds:
        by_sequence, if the change is their mean. The error is NaN for one sequence or none."""
        clipped = np.clip(np.asarray(by_sequence, float), self.low, self.high)
        error = float(clipped.std(ddof=1) / math.sqrt(len(clipped))) if len(clipped) > 1 else math.nan
        if len(clipped) and math.isclose(float(np.mean(by_sequence)), change, rel_tol=1e-6, abs_tol=1e-12):
            change = float(clipped.mean())
        return self.clip(change), error
