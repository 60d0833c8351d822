"""The time and memory that one answer may take, estimated from sizes before anything is computed.

Everything that an address can make the server round is checked here: the format of a tensor's page, the formats of
*What if*, and the operands of a Map that was not scored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from binade.quant.blocks import GROUP
from binade.quant.reference import columns_of
from binade.quant.specs import Spec

SECONDS = 90.0  # of a processor
BYTES = 1 << 30  # at once
ROTATED = 32  # a rotation may take this many times as long as the rounding after it


class BudgetError(ValueError):
    """The answer would take too long or too much memory. The message says what to reduce, in one line."""


@dataclass(frozen=True)
class Rate:
    """What rounding a value takes: seconds of a processor, and bytes until the tensor is done."""

    seconds: float
    nbytes: int


BLOCKS = Rate(2e-6, 300)  # `blocks.look`, which keeps codes, scales and errors, and what charts are drawn from
SCORE = Rate(2e-7, 40)  # `metrics.score`, which keeps three numbers


@dataclass(frozen=True)
class RoundingCost:
    """A tensor of this shape that is rounded to a spec, blocks along dim, or `most` values of it."""

    spec: Spec
    shape: tuple[int, ...]
    dim: int
    most: int | None = None

    @property
    def values(self) -> int:
        """How many values are rounded, with those that pad short blocks."""
        lengths = list(self.shape) or [1]
        axis = lengths.pop(self.dim)
        lines = math.prod(lengths)
        if self.most is not None and lines * axis > self.most:  # whole lines
            lines = max(1, self.most // max(axis, 1))
        block = self.spec.block if self.spec.has_blocks else GROUP
        assert block
        rows, columns = block.rows or 1, columns_of(block, axis)
        return -(-lines // rows) * rows * -(-axis // columns) * columns


def check(roundings: Iterable[RoundingCost], rate: Rate = BLOCKS) -> None:
    """Raise BudgetError if these, one after another, take more than SECONDS or any of them more than BYTES."""
    every = list(roundings)
    if not every:
        return
    rotated = ROTATED if rate is SCORE else 1
    seconds = rate.seconds * sum(rounding.values * (rotated if rounding.spec.hadamard else 1) for rounding in every)
    largest = max(every, key=lambda rounding: rounding.values)
    nbytes = largest.values * rate.nbytes
    if seconds <= SECONDS and nbytes <= BYTES:
        return
    specs = list(dict.fromkeys(str(rounding.spec) for rounding in every))
    shape = " x ".join(map(str, largest.shape))
    less = ["choose fewer formats"] * (len(specs) > 1) + ["narrow the filter"] * (len(every) > len(specs))
    if largest.values > 2 * math.prod(largest.shape):
        less.append(f"choose a block that fits into {shape}, unlike {largest.spec.block}")
    what = specs[0] if len(specs) == 1 else f"{len(specs)} formats"
    raise BudgetError(
        f"Not computed: rounding {sum(rounding.values for rounding in every):,} values to {what} would take about "
        f"{seconds:,.0f} s and {nbytes / 1e9:.1f} GB. At most {SECONDS:.0f} s and {BYTES / 1e9:.1f} GB are allowed: "
        f"{' or '.join(less) or 'choose a smaller tensor'}."
    )
