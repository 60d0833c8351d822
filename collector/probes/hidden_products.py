"""Layers that an autograd function calls in its forward method and whose gradients it computes itself: these products
are neither rounded nor recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from binade.collector.probes.probe import Finding, Hidden, Repeat
from binade.data.segment import TensorRow


class HiddenProducts:
    def __init__(self) -> None:
        self.named: set[str] = set()

    def see(self, rows: Sequence[TensorRow], repeats: Sequence[Repeat], hidden: Sequence[Hidden]) -> Iterator[Finding]:
        new = {each.site: each for each in hidden if each.site not in self.named}
        if not new:
            return
        self.named |= new.keys()
        first, more = next(iter(new.values())), f" and {len(new) - 1} more" * (len(new) > 1)
        text = (
            f"{first.site} weight{more} has a gradient, but no backward product of the layer was seen: an autograd "
            "function that calls the layer computes it. Its dgrad and wgrad are neither rounded nor recorded: leave "
            "the layer out with `exclude`, or call it outside of that function"
        )
        yield Finding(first.iteration, text, f"{first.site} weight")
