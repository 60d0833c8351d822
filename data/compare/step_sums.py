"""Steps that two runs divide into other micro-batches: what can be compared of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from binade.data.compare.matching import Key
from binade.data.index.whole_tensors import IDENTITY, IncompleteError, Row, WholeTensor
from binade.data.run.tensor_kinds import LINEAR, NORM, TENSOR_KINDS, Operation

if TYPE_CHECKING:
    from torch import Tensor

CLOSE = 2.0**-5  # the largest relative difference of sums that are the same times a number

# The places of fields in a key, and tensors of weights that depend on no micro-batch, or are added up over those of a
# step.
ITERATION, MICRO_BATCH, OPERATION, NAME = (
    IDENTITY.index(n) for n in ("iteration", "micro_batch", "operation", "tensor_name")
)
WEIGHTS = frozenset(kind.name for kind in TENSOR_KINDS if kind.observed == "b" and kind.product in (LINEAR, NORM))
GRADIENTS = frozenset(
    kind.name for kind in TENSOR_KINDS if kind.observed == "grad_b" and kind.product in (LINEAR, NORM)
)


@dataclass
class StepSum(WholeTensor):
    """A gradient of a weight, summed over the micro-batches of a step; rows: of the first. wholes: of all."""

    wholes: list[WholeTensor] = field(default_factory=list)

    def check(self) -> None:
        for whole in self.wholes:
            whole.check()
        if not self.has_values:
            raise IncompleteError("it is a sum over micro-batches, which needs values to compare")

    @property
    def every_row(self) -> list[Row]:
        return [row for whole in self.wholes for row in whole.rows]

    @property
    def has_values(self) -> bool:
        return all(whole.has_values for whole in self.wholes)

    def values(self) -> Tensor:
        total = self.wholes[0].values().double()
        for whole in self.wholes[1:]:
            total = total + whole.values().double()
        return total


def by_step(
    ours: dict[Key, WholeTensor], theirs: dict[Key, WholeTensor]
) -> tuple[dict[Key, WholeTensor], dict[Key, WholeTensor], list[str]]:
    """The tensors to compare of steps that the runs take in other micro-batches, and a sentence about them: gradients
    of weights as sums over the step, weights once, and what the optimizer has. Tensors of a single micro-batch are left
    out."""
    counts = [_micro_batches(run) for run in (ours, theirs)]
    shapes = [_inputs(run) for run in (ours, theirs)]
    steps = [
        step
        for step in counts[0].keys() & counts[1].keys()
        if len(counts[0][step]) != len(counts[1][step]) or _is_divided(shapes[0].get(step, {}), shapes[1].get(step, {}))
    ]
    if not steps:
        return ours, theirs, []
    first, chosen = min(steps), frozenset(steps)
    summed, left = zip(*(_summed(run, chosen) for run in (ours, theirs)), strict=True)
    several = (
        f"The steps of {len(steps)} iterations, from {first} on, have" if len(steps) > 1 else f"Iteration {first} has"
    )
    numbers = [len(count[first]) for count in counts]
    text = (
        f"{numbers[0]} and {numbers[1]} micro-batches" if numbers[0] != numbers[1] else "micro-batches of other sizes"
    )
    sentence = (
        f"{several} {text}: gradients of weights are compared as sums over the step, weights once; {left[0]:,} and "
        f"{left[1]:,} tensors of single micro-batches are not compared."
    )
    return summed[0], summed[1], [sentence]


def _micro_batches(run: Mapping[Key, WholeTensor]) -> dict[int, set[int]]:
    """Those of each iteration that train."""
    found: dict[int, set[int]] = {}
    for key in run:
        if key[MICRO_BATCH] is not None and key[ITERATION] is not None and key[OPERATION] != Operation.EVALUATION:
            found.setdefault(key[ITERATION], set()).add(key[MICRO_BATCH])
    return found


def _inputs(run: Mapping[Key, WholeTensor]) -> dict[int, dict[Key, list[tuple[int, ...]]]]:
    """The shapes of the inputs of linear layers in each iteration, by what they are."""
    found: dict[int, dict[Key, list[tuple[int, ...]]]] = {}
    for key, whole in run.items():
        if key[NAME] == "input" and key[OPERATION] == Operation.FORWARD and key[MICRO_BATCH] is not None:
            found.setdefault(key[ITERATION], {}).setdefault(_of_step(key), []).append(whole.shape)
    return found


def _is_divided(a: Mapping[Key, list[tuple[int, ...]]], b: Mapping[Key, list[tuple[int, ...]]]) -> bool:
    """Whether as many tokens are divided into micro-batches of other sizes."""

    def total(shapes: list[tuple[int, ...]]) -> int:
        return sum(map(math.prod, shapes))

    return any(a[key] != b[key] and total(a[key]) == total(b[key]) for key in a.keys() & b.keys())


def _of_step(key: Key) -> Key:
    """The key of what a tensor contributes to in its step: without micro-batch and call."""
    return (*key[:MICRO_BATCH], None, *key[MICRO_BATCH + 1 : -1], 0)


def _summed(run: Mapping[Key, WholeTensor], steps: Collection[int]) -> tuple[dict[Key, WholeTensor], int]:
    """(the tensors of a run, with those of these steps as `by_step` says; how many are left out)"""
    chosen: dict[Key, WholeTensor] = {}
    left = 0
    for key, whole in run.items():
        divided = key[ITERATION] in steps and key[MICRO_BATCH] is not None and key[OPERATION] != Operation.EVALUATION
        if not divided:
            chosen[key] = whole
        elif key[NAME] in GRADIENTS:
            step_sum = chosen.setdefault(_of_step(key), StepSum(whole.run, whole.reads, whole.rows))
            assert isinstance(step_sum, StepSum)
            step_sum.wholes.append(whole)
        elif key[NAME] in WEIGHTS:
            chosen.setdefault(_of_step(key), whole)
        else:
            left += 1
    return chosen, left


def factor_of_sums(
    ours: Mapping[Key, WholeTensor], theirs: Mapping[Key, WholeTensor], pairs: Mapping[Key, Key]
) -> Iterator[str]:
    """A sentence if the sums of one run are those of the other times a number, in the first layer and the last of the
    first of these steps."""
    sums = [key for key, whole in ours.items() if isinstance(whole, StepSum) and whole.has_values and key in pairs]
    sums = [key for key in sums if key[ITERATION] == sums[0][ITERATION]]
    factors = []
    for key in dict.fromkeys((*sums[:1], *sums[-1:])):
        other = theirs[pairs[key]]
        if not other.has_values or other.shape != ours[key].shape:
            return
        x, y = ours[key].values().double(), other.values().double()
        factor = float((x * y).sum() / (x * x).sum()) if x.any() else math.nan
        if not float((factor * x - y).norm()) <= CLOSE * float(y.norm()):
            return
        factors.append(factor)
    same = factors and all(abs(factor - factors[0]) <= CLOSE * abs(factors[0]) for factor in factors)
    if same and abs(factors[0] - 1) > CLOSE:
        yield (
            f"The sums of RUN_B are {factors[0]:.4g} times those of RUN_A in iteration {sums[0][ITERATION]}, as where "
            "one of them does not divide the loss by the number of its micro-batches."
        )
