"""How the training of a run went, by its losses: whether it diverged, and where it ended.

A run has diverged at the first iteration from which its loss is not finite, or above GROWN times the first loss, up to
the last iteration. A loss that is not finite and comes back is no divergence; it is counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from binade.data.run.losses import is_lost
from binade.data.words.text import counted

GROWN = 2  # times the first loss
DEFINITION = f"the loss is NaN, infinite or above {GROWN} times the first one, up to the last iteration"
Steps = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """
    last      the last iteration with a line; None without lines
    spacing   iterations from the line before to the last one; 1 for a single line
    diverged  the iteration at which it diverged; None if it did not
    is_lost   whether it has diverged and its loss is not finite then
    odd       how many losses are not finite before the divergence, or at all if there is none
    """

    last: int | None = None
    spacing: int = 1
    diverged: int | None = None
    is_lost: bool = False
    odd: int = 0

    def ended_before(self, other: Outcome) -> bool:
        """Whether its lines end before those of another run, by more than the spacing of either."""
        if self.last is None or other.last is None:
            return False
        return self.last + max(self.spacing, other.spacing) <= other.last

    def text(self, reference: Outcome | None = None, name: str = "") -> str:
        """In words, in comparison with a reference of this name; "" if it trained as long as that and did not
        diverge."""
        said = []
        if self.diverged is not None:
            said.append(f"diverged at iteration {self.diverged}")
        if reference and reference.diverged is not None:
            said.append(f"{name} diverged at iteration {reference.diverged}")
        elif reference and self.diverged is None and self.ended_before(reference):
            said.append(f"ended after iteration {self.last} of {reference.last}")
        if self.odd:
            said.append(f"no finite loss in {counted(self.odd, 'iteration')}")
        return "; ".join(said)


def outcome_of(steps: Steps, grows: bool = True) -> Outcome:
    """steps: lines of loss.jsonl with `losses_of(lost=True)`. grows: whether a loss that has grown has diverged, as one
    in nats per token has."""
    if not steps:
        return Outcome()
    ordered = sorted(steps, key=lambda step: step["iteration"])
    first = next((step["loss"] for step in ordered if step["loss"] is not None), math.inf)
    limit = GROWN * first if grows and first > 0 else math.inf

    def out(step: Mapping[str, Any]) -> bool:
        return is_lost(step) or (step["loss"] is not None and step["loss"] > limit)

    tail = list(takewhile(out, reversed(ordered)))
    iterations = [step["iteration"] for step in ordered]
    return Outcome(
        iterations[-1],
        iterations[-1] - iterations[-2] if len(ordered) > 1 else 1,
        tail[-1]["iteration"] if tail else None,
        any(is_lost(step) for step in tail),
        sum(map(is_lost, ordered)) - sum(map(is_lost, tail)),
    )


def before_divergence(steps: Steps, outcome: Outcome) -> list[Mapping[str, Any]]:
    """The lines with a loss before a run diverged."""
    end = math.inf if outcome.diverged is None else outcome.diverged
    return [step for step in steps if step["loss"] is not None and step["iteration"] < end]
