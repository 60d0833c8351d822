"""What several seeds say about recipes: their gaps, and the changes between them. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from binade.collector.recipes.recipe import BF16
from binade.data import evidence
from binade.data.evidence import GAP, Estimate

JUDGED = (
    "A change counts if Student’s t over the seeds, paired, and corrected for the number of changes (Holm), tells it "
    "from 0 at the 5% level. One seed tells nothing."
)
Gaps = Mapping[str, Mapping[Any, float]]
"""The mean gap to bf16 by recipe and seed."""


@dataclass(frozen=True)
class Judged:
    """A recipe compared with another: own gap over its seeds, change over those that both have (None without any),
    and whether the change can be told from 0. than: the other's name."""

    own: Estimate | None
    change: Estimate | None = None
    is_apart: bool = False
    than: str = ""

    @property
    def deviation(self) -> float:
        """The standard deviation of the own gaps; NaN for one seed."""
        return self.own.error * math.sqrt(self.own.n) if self.own else math.nan

    @property
    def verdict(self) -> str:
        """ "higher than bf16", "lower than bf16" or "not distinguishable from bf16"; "" if there is no change."""
        if self.change is None:
            return ""
        if not self.is_apart:
            return f"not distinguishable from {self.than}"
        return f"{'higher' if self.change.value > 0 else 'lower'} than {self.than}"


def judged(gaps: Gaps, pairs: Sequence[tuple[str, str]], titles: Mapping[str, str]) -> list[Judged]:
    """Each pair (recipe, the one it is compared with, "" for none) judged, all together. titles: of the recipes."""
    found: list[Judged] = []
    for recipe, against in pairs:
        own, other = gaps.get(recipe, {}), gaps.get(against, {})
        if against == BF16:
            other = dict.fromkeys(own, 0.0)
        estimate = evidence.mean(GAP, own.values()) if own else None
        change = evidence.paired(GAP, own, other) if own and other and against in titles else None
        change = change if change and change.n else None
        found.append(Judged(estimate, change, than=titles.get(against, "")))
    changes = [each.change for each in found if each.change]
    apart = iter(evidence.holm(changes))
    return [Judged(each.own, each.change, next(apart), each.than) if each.change else each for each in found]
