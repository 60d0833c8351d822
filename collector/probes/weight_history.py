"""Since when a weight is not finite, and why: from checks when a pass begins and around the steps of optimizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from binade.data.words.text import and_more


@dataclass
class FiniteNote:
    """Whether a tensor is finite. extremes: its smallest and largest value, on its device. A mask may have -Inf."""

    extremes: tuple[Tensor, Tensor]
    mask: bool
    bad: bool = False
    absmax: float = math.inf

    def decide(self, low: float, high: float) -> None:
        self.absmax = max(-low, high)
        self.bad = math.isnan(low) or math.isinf(high) or (math.isinf(low) and not self.mask)


Notes = dict[str, FiniteNote]  # by the path of a parameter or buffer in the model


@dataclass
class WeightCheck:
    """The parameters of the model at one moment: when a pass begins, or around a step of an optimizer.

    optimizer  the class of the one that is about to step, or that runs this pass within its step; "" without one
    gradients  those that the optimizer gets; None if a pass begins
    after      the parameters once it has stepped, and when
    """

    order: int
    parameters: Notes
    optimizer: str = ""
    gradients: Notes | None = None
    after: tuple[int, Notes] | None = None


@dataclass
class BadWeight:
    """How long a parameter is not finite, by orders, and why."""

    since: int
    why: str
    until: float = math.inf


@dataclass
class WeightHistory:
    """What is known of each parameter, over all steps; only the writer's thread uses it.

    finite   where it was finite last, in words
    bad      when it was not finite last
    stepped  whether an optimizer has
    """

    finite: dict[str, str] = field(default_factory=dict)
    bad: dict[str, BadWeight] = field(default_factory=dict)
    stepped: bool = False

    def see(self, order: int, notes: Notes, when: str, why: str = "") -> list[str]:
        """The parameters were checked. when, why: when that was, and what made those that are not finite now, if that
        is known. Returns the names of these, if they were not known to be."""
        new = []
        for name, note in notes.items():
            known = self.bad.get(name)
            is_known = known is not None and known.until == math.inf
            if not note.bad:
                self.finite[name] = when
                if known and is_known:
                    known.until = order
            elif not is_known:
                self.bad[name] = BadWeight(order, why or self._cause(name))
                new.append(name)
        return new

    def _cause(self, name: str) -> str:
        if before := self.finite.get(name):
            return f"it was finite {before}, and no optimizer step was seen to change it: other code has written it"
        if self.stepped:
            return "it was not finite when it was checked first"
        return "it was so before the first optimizer step: it was loaded or initialized with it"

    def explained(self, names: Sequence[str]) -> str:
        """A sentence about parameters that are not finite."""
        return f"{names[0]}{and_more(names)} is not finite: {self.bad[names[0]].why}"

    def within(self, module: str, order: int) -> list[str]:
        """The parameters of a module and its parts that were not finite then."""
        start = f"{module}." if module else ""
        return [name for name, bad in self.bad.items() if bad.since <= order < bad.until and name.startswith(start)]
