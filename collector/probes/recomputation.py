"""Activations that recomputation gives other values than the first pass had: gradients then belong to another function
than the loss, as with dropout and `preserve_rng_state=False`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from binade.collector.probes.probe import Finding, Hidden, Repeat
from binade.data.segment import TensorRow
from binade.quant.summary import Summary


class Recomputation:
    def __init__(self) -> None:
        self.named = False

    def see(self, rows: Sequence[TensorRow], repeats: Sequence[Repeat], hidden: Sequence[Hidden]) -> Iterator[Finding]:
        other = [repeat for repeat in repeats if not _same(repeat.first, repeat.second)]
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
