"""Results of `binade parity` on disk: the parity.json of a run of the kind PARITY, which records no tensors.

`binade parity --rollout` writes one for two recipes on a model, `binade parity FILE --save` one for dumps of a tool.
The file is written once, at the end, and ends with a checksum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from binade.data import evidence
from binade.data.continued import continued_run
from binade.data.effects import EffectGroup
from binade.data.evidence import Estimate, Measure, Sentence
from binade.data.json_files import MOST_BYTES, STRICT, Count, adapter_of, parse_json, sealed, unsealed
from binade.data.parity import MEASURES, Policies, Row, quantities
from binade.data.routing import Routing
from binade.data.runs import DONE, RunError, Whole
from binade.data.store import read_file, write_atomic

FILE = "parity.json"
PARITY = "parity"
SAME = ("kind", "measures")  # two measurements that agree in these fields of run.json are one run
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
CONFIG = ConfigDict(**STRICT, ser_json_inf_nan="constants")  # a χ² may be infinite
Numbers = tuple[float, ...]


def _known(name: str) -> str:
    if name not in MEASURES:
        raise ValueError(f"{name[:40]!r} is not a quantity of parity")
    return name


@dataclass(frozen=True, config=CONFIG)
class Value:
    """A quantity of data.parity: its name, and the values of its Row."""

    name: Annotated[str, AfterValidator(_known)]
    over_tokens: float | None
    over_sequences: float | None
    median_of_tokens: float | None
    median_of_sequences: float | None

    @staticmethod
    def of(row: Row) -> Value:
        values = row.over_tokens, row.over_sequences, row.median_of_tokens, row.median_of_sequences
        return Value(row.measure.name, *values)

    @property
    def main(self) -> float | None:
        """Over tokens; of a quantity of sequences, over sequences."""
        return self.over_sequences if self.over_tokens is None else self.over_tokens


@dataclass(frozen=True, config=CONFIG)
class ParityStep:
    """The quantities of one step of a dump, or of ALL tokens. left_out: tokens without a finite log-probability."""

    name: str
    sequences: Count
    tokens: Count
    left_out: Count
    values: tuple[Value, ...]

    @staticmethod
    def of(name: str, pair: Policies) -> ParityStep:
        values = tuple(Value.of(row) for row in quantities(pair))
        return ParityStep(name, pair.sequences, len(pair.rollout), pair.left_out, values)


@dataclass(frozen=True, config=CONFIG)
class GroupGap:
    """The gap that a group of products makes alone, as capture.parity.Gap; of all products, the whole gap.

    operand      the operand that differs or was changed; "" for both
    is_whole     whether all that differs in the group was changed
    changes      mean |Δ log-probability| of each sequence, in nats
    divergences  KL(R ‖ T) of the next token, the mean of each sequence; empty if only the log-probabilities of the
                 text's tokens are known
    """

    part: str
    layer_index: Whole | None
    module: str | None
    operand: str
    is_whole: bool
    changes: Annotated[Numbers, Field(min_length=1)]
    divergences: Numbers = ()

    @property
    def group(self) -> EffectGroup:
        return EffectGroup(self.part, self.layer_index, self.module)

    @property
    def name(self) -> str:
        """ "layer2 fc1 linear, weight"."""
        return f"{self.group}, {self.operand}" if self.operand else str(self.group)

    @property
    def is_product(self) -> bool:
        """Whether it is one product."""
        return self.layer_index is not None and self.module is not None

    @property
    def change(self) -> Estimate:
        """The mean of `changes`, with Student's interval over sequences."""
        return evidence.mean(CHANGE, self.changes, "sequences")

    @property
    def divergence(self) -> Estimate:
        """The mean of `divergences`, with Student's interval over sequences; NaN if there are none."""
        return evidence.mean(DIVERGENCE, self.divergences, "sequences")


@dataclass(frozen=True, config=CONFIG)
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
    steps: Annotated[tuple[ParityStep, ...], Field(min_length=1)]
    gaps: Annotated[tuple[GroupGap, ...], Field(min_length=1)]
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


def findings(gaps: Iterable[GroupGap]) -> list[Sentence]:
    """Which group changes the log-probabilities most, of those of one granularity, if sequences can tell. gaps: all
    products first."""
    whole, *others = gaps
    single = [gap for gap in others if gap.is_whole and (gap.layer_index is not None or gap.module)]
    if len(whole.changes) < 2 or len(single) < 2:
        return []
    kinds: dict[tuple[bool, bool], list[GroupGap]] = {}
    for gap in single:
        kinds.setdefault((gap.layer_index is None, gap.module is None), []).append(gap)
    return [
        evidence.largest({gap.name: dict(enumerate(gap.changes)) for gap in kind},
                         CHANGE, "The largest change of log-probabilities", "sequences")
        for kind in kinds.values() if len(kind) > 1
    ]  # fmt: skip


def replay(whole: GroupGap, routing: Routing) -> list[Replay]:
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


def routing_findings(whole: GroupGap, routing: Routing) -> list[Sentence]:
    """How many tokens flip, and whether the gap with replayed routes is another."""
    change, _ = replay(whole, routing)
    flips = evidence.say("Tokens whose experts differ in at least one layer: {share}.", share=routing.any)
    items = [("the gap with the rollout’s routes in training", change.difference)]
    return [flips, evidence.effects(items, "the gap with own routes")]


def save_parity(root: Path, label: str, facts: Mapping[str, Any], result: Parity) -> str:
    """Write a result as a run, or in place of that of the same measurement; returns the run's id. facts: of run.json,
    with `measures`, which tells measurements apart. Raises RunError, ReadOnlyError and OSError."""
    content = sealed(adapter_of(Parity).dump_json(result))
    if len(content) > MOST_BYTES:
        raise RunError(
            f"the result has {len(content):,} bytes, at most {MOST_BYTES:,} are kept: measure fewer groups (--by) or "
            "sequences"
        )
    described = {**facts, "kind": PARITY, "compares": result.title}
    with continued_run(root, label, described, SAME, "a parity is being saved") as (writer, _):
        write_atomic(writer.directory / FILE, content)
        writer.finish(DONE)
    return writer.run_id


def read_parity(directory: Path) -> Parity | None:
    """The result of a run; None if it has none. Raises RunError if it is damaged, and OSError."""
    path = directory / FILE
    try:
        return parse_json(Parity, unsealed(read_file(path, MOST_BYTES, directory)))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunError(f"its {FILE} is damaged: {error}") from None
