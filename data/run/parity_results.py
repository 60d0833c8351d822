"""Parity of two policies, a reading of the results of an experiment (data/run/experiment.py).

Of two recipes on a model, the base is the training policy, and treatments are the rollout policy, all products of it or
one group at a time. Of dumps of a tool, the base has its trainer's log-probabilities and the treatment those of its
rollout engine; a batch is a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from binade.data.compare import evidence
from binade.data.compare.evidence import Estimate, Measure, Sentence
from binade.data.compare.parity import Policies, Row, joined, quantities
from binade.data.compare.routing import Routing, read_routing
from binade.data.run.directory import RunError, read_run
from binade.data.run.effects import Measured, largest_of
from binade.data.run.experiment import (
    NONE,
    BatchResult,
    EffectGroup,
    Floats,
    Place,
    TreatmentKey,
    read_logprobs,
    read_results,
)

UNROUNDED = "bf16"  # the name of the base without rounding
TRAINER = TreatmentKey("trainer")
"""The base of imported log-probabilities."""
ALL = "all"  # the step of all tokens
CHANGE = Measure(
    "abs_logprob", "|Δ log-probability|", "nats", "|d| of the text's tokens, mean within each sequence, then over these"
)
DIVERGENCE = Measure(
    "divergence",
    "KL(R‖T)",
    "nats",
    "of the next token over the whole vocabulary, mean within each sequence, then over these",
)


@dataclass(frozen=True)
class ParityStep:
    """The quantities of one step of a dump, or of ALL tokens. left_out: tokens without a finite log-probability."""

    name: str
    sequences: int
    tokens: int
    left_out: int
    values: tuple[Row, ...]

    @staticmethod
    def of(name: str, pair: Policies) -> ParityStep:
        return ParityStep(name, pair.sequences, len(pair.rollout), pair.left_out, tuple(quantities(pair)))


@dataclass(frozen=True)
class Parity:
    """A result.

    rollout, training  the recipes; of dumps, the tool and "trainer"
    tool               that wrote the dumps; "" for two recipes
    steps              ALL first, then each step if there are several
    gaps               of all products first, then of groups, the largest first; of dumps, only the first
    routing            of two recipes on a model with experts
    """

    rollout: str
    training: str
    tool: str
    steps: tuple[ParityStep, ...]
    gaps: tuple[Measured, ...]
    routing: Routing | None = None

    @property
    def title(self) -> str:
        """ "mxfp4 against bf16"."""
        return f"dumps of {self.tool}" if self.tool else f"{self.rollout} against {self.training}"


class Replay(NamedTuple):
    """The gap with each policy's own routes, that with the rollout's routes in the training policy, and the second
    minus the first, paired by sequence."""

    own: Estimate
    replayed: Estimate
    difference: Estimate

    @property
    def disappears(self) -> float:
        """The share of the gap that disappears; NaN for a gap of 0."""
        return 1 - self.replayed.value / self.own.value if self.own.value else math.nan


def findings(gaps: Sequence[Measured]) -> list[Sentence]:
    """Which group changes the log-probabilities most, of those of one granularity, if sequences can tell."""
    kinds = dict.fromkeys(gap.group.kind for gap in gaps if gap.group.kind not in ("all", "part"))
    groups = ([gap for gap in gaps if gap.group.kind == kind and gap.key.is_whole] for kind in kinds)
    return [said for own in groups if (said := largest_of(own, "The largest change of log-probabilities"))]


def replay(whole: Measured, routing: Routing) -> list[Replay]:
    """What the routes contribute to the gap, by its change of log-probabilities and its divergence."""
    of = ((CHANGE, whole.changes, routing.changes), (DIVERGENCE, whole.divergences, routing.divergences))
    return [
        Replay(
            evidence.mean(measure, gaps, "sequences"),
            evidence.mean(measure, replayed, "sequences"),
            evidence.paired(measure, dict(enumerate(replayed)), dict(enumerate(gaps)), "sequences"),
        )
        for measure, gaps, replayed in of
    ]


def routing_findings(whole: Measured, routing: Routing) -> list[Sentence]:
    """How many tokens flip, and whether the gap with replayed routes is another."""
    change, _ = replay(whole, routing)
    flips = evidence.say("Tokens whose experts differ in at least one layer: {share}.", share=routing.any)
    items = [("the gap with the rollout’s routes in training", change.difference)]
    return [flips, evidence.effects(items, "the gap with own routes")]


@dataclass(frozen=True, eq=False)
class Gap:
    """A treatment against its base, token by token.

    steps        the two policies by batch: of the rollout, the treatment; of the training, its base
    divergences  KL(R ‖ T) of the next token over the whole vocabulary, the mean of each sequence in nats
    """

    key: TreatmentKey
    steps: tuple[Policies, ...]
    divergences: tuple[float, ...]

    @property
    def policies(self) -> Policies:
        return joined(self.steps)

    @property
    def measured(self) -> Measured:
        """The gap by sequence."""
        pair = self.policies
        changes = tuple(pair.means(np.abs(pair.d)).tolist())
        return Measured(self.key, changes, self.divergences, of_change=CHANGE, of_divergence=DIVERGENCE)


def gaps_of(results: Sequence[BatchResult], logprobs: dict[Place, list[Floats]]) -> list[Gap]:
    """The gaps of the treatments with log-probabilities: that of all products first, then those of groups, the largest
    change of the log-probabilities first. Replayed routes are not among them. Raises ValueError where a base is missing
    or no token counts."""
    by_key: dict[TreatmentKey, list[BatchResult]] = {}
    for result in results:
        if result.key.base and not result.key.replays and result.place in logprobs:
            by_key.setdefault(result.key, []).append(result)
    found = [_gap(key, sorted(own, key=lambda result: result.batch), logprobs) for key, own in by_key.items()]
    whole = [gap for gap in found if gap.key.group == EffectGroup() and gap.key.is_whole]
    others = [gap for gap in found if gap not in whole]
    return [*whole, *sorted(others, key=lambda gap: float(np.mean(gap.measured.changes)), reverse=True)]


def _gap(key: TreatmentKey, results: Sequence[BatchResult], logprobs: dict[Place, list[Floats]]) -> Gap:
    assert key.base is not None
    steps, divergences = [], list[float]()
    for result in results:
        if (key.base.id, result.batch) not in logprobs:
            raise ValueError(f"batch {result.batch} of {key.base.text or UNROUNDED} is missing")
        steps.append(Policies.by_sequence(logprobs[result.place], logprobs[key.base.id, result.batch]))
        pairs = zip(result.kl_reversed, result.tokens, strict=bool(result.kl_reversed))
        divergences += [value for value, tokens in pairs if tokens]
    return Gap(key, tuple(steps), tuple(divergences))


def read_gaps(directory: Path) -> list[Gap]:
    """`gaps_of` the experiment of a run; [] without one. Raises RunError if it is damaged, and OSError."""
    try:
        return gaps_of(read_results(directory), read_logprobs(directory))
    except (ValueError, KeyError) as error:
        raise error if isinstance(error, RunError) else RunError(f"its experiment is damaged: {error}") from None


def read_parity(directory: Path) -> Parity | None:
    """The parity of the two policies of a run; None if it has none. Raises RunError if it is damaged, and OSError."""
    gaps = read_gaps(directory)
    if not gaps:
        return None
    whole, base = gaps[0], gaps[0].key.base
    steps = [ParityStep.of(ALL, whole.policies)]
    each = tuple(gap.measured for gap in gaps)
    if base == TRAINER:
        names: Any = read_run(directory).config.get("steps", [])
        if len(whole.steps) > 1:
            steps += [ParityStep.of(str(name), pair) for name, pair in zip(names, whole.steps, strict=False)]
        return Parity("rollout engine", "trainer", whole.key.text, tuple(steps), each)
    training = UNROUNDED if base is None or base == NONE else base.text
    return Parity(whole.key.text, training, "", tuple(steps), each, read_routing(directory))
