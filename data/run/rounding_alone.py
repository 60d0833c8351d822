"""What rounding alone does to the loss: the same sequences on the same weights, with and without it, in one run.

run.json has it as `rounding_alone`. It is not inferred from two runs, whose masks, labels or data may differ in what no
hash has seen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from binade.data.compare import evidence
from binade.data.compare.evidence import GAP, Estimate
from binade.data.run.json_files import STRICT, Finite, Whole, parse_json

FACT = "rounding_alone"


@dataclass(frozen=True, config=STRICT)
class RoundingAlone:
    """
    iteration  whose weights these are, before its step
    loss       without rounding, in nats per token, the mean over sequences
    change     the loss with rounding minus the loss without, the mean over sequences
    error      the standard error of the change over sequences; None for one sequence
    sequences  how many
    """

    iteration: Whole
    loss: Finite
    change: Finite
    error: Finite | None
    sequences: Annotated[int, Field(ge=1, lt=2**63)]

    @property
    def estimate(self) -> Estimate:
        """The change, with Student's interval over sequences."""
        error = math.nan if self.error is None else self.error
        return evidence.with_error(GAP, self.change, error, self.sequences, "sequences")

    def fact(self) -> dict[str, Any]:
        """The entry of run.json."""
        return {FACT: asdict(self)}


def interval_of(estimate: Estimate) -> str:
    """The 95% interval of a mean, and what it is over: "−0.0300 to +0.0100 (8 sequences)"; of one sequence, which has
    none, "one sequence"; "" if nothing is known."""
    if not estimate.n or math.isnan(estimate.value):
        return ""
    if estimate.n == 1:
        return f"one {estimate.of.removesuffix('s')}"
    low, high = (estimate.measure.text(end) for end in (estimate.low, estimate.high))
    return f"{low} to {high} ({estimate.n} {estimate.of})"


def rounding_alone(iteration: int, rounded: Sequence[float], exact: Sequence[float]) -> RoundingAlone | None:
    """From the losses of the same sequences with and without rounding; None without any, or if one is not finite."""
    changes = [loss - other for loss, other in zip(rounded, exact, strict=True)]
    if not changes or not all(map(math.isfinite, changes)):
        return None
    change = evidence.mean(GAP, changes, "sequences")
    error = change.error if math.isfinite(change.error) else None
    return RoundingAlone(iteration, math.fsum(exact) / len(exact), change.value, error, len(changes))


def rounding_alone_of(config: Mapping[str, Any]) -> RoundingAlone | None:
    """What a run has measured; None if it has not, or if the entry is not valid. config: its run.json."""
    with suppress(ValueError, TypeError):
        return parse_json(RoundingAlone, json.dumps(config[FACT]).encode()) if FACT in config else None
    return None
