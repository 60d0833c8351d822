"""Activations that recomputation gives other values than the first pass had: gradients then belong to another function
than the loss, as with dropout and `preserve_rng_state=False`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from binade.collector.capture.clock import Moment
from binade.collector.models.site import Site
from binade.collector.probes.probe import Finding, Observation, Probe, Recording
from binade.data.run.tensor_kinds import Product
from binade.quant.later import Later
from binade.quant.measurements import Summary


@dataclass(frozen=True, eq=False)
class Repeat:
    """An input of a product whose forward pass was recomputed: its site's name, and the statistics of both passes."""

    site: str
    iteration: int
    first: Later[Summary]
    second: Later[Summary]


class Recomputation(Probe):
    """Compares the first operand of each product that was recorded in full with the one of its recomputation."""

    observes = frozenset(("a",))

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.first: dict[tuple[Site, Product, Moment], Later[Summary]] = {}
        self.repeats: list[Repeat] = []
        self.named = False  # only the writer's thread writes it

    def observe(self, observed: Observation) -> None:
        site, moment = observed.layer.site, observed.moment
        key = site, observed.product, moment
        if moment.basic:
            return
        if not observed.again:
            if observed.summary:
                self.first[key] = observed.summary
        elif first := self.first.get(key):
            self.repeats.append(Repeat(site.name, moment.iteration, first, observed.summarize()))

    def end_iteration(self, iteration: int) -> None:
        repeats, self.repeats = self.repeats, []
        self.first.clear()
        if repeats:
            self.recording.report(lambda: self._compared(repeats))

    def _compared(self, repeats: Sequence[Repeat]) -> Iterator[Finding]:
        other = [repeat for repeat in repeats if not _same(repeat.first(), repeat.second())]
        if not other or self.named:
            return
        self.named = True
        first = other[0]
        more = f", and {len(other) - 1} more of {len(repeats)} inputs" * (len(other) > 1)
        text = (
            f"{first.site} input: the recomputed pass differs from the first{more}: gradients do not belong to the "
            "loss. Does it draw the same random numbers, as with preserve_rng_state=True?"
        )
        yield Finding(first.iteration, text, f"{first.site} input")


def _same(a: Summary, b: Summary) -> bool:
    """Whether the values may be the same: their extremes and all counts are."""
    ends = (a.numel, a.min, a.max, a.zeros) == (b.numel, b.min, b.max, b.zeros)
    return ends and np.array_equal(a.bins, b.bins) and np.array_equal(a.counts, b.counts)
