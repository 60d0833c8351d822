"""Runs an experiment: one loop over batches and treatments, whose results are kept at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from binade.collector.errors import ConfigError
from binade.collector.experiment.evaluator import Evaluator
from binade.collector.experiment.treatments import Treatment, part_of
from binade.data.run.directory import DONE, RUN_FILE
from binade.data.run.experiment import OPERAND_VALUES, BatchResult, ExperimentWriter, Place, read_blocks, read_results
from binade.data.run.run_writer import RunWriter

Say = Callable[[str], None]
Progress = Callable[[int, int], None]


def run_treatments(
    evaluator: Evaluator, batches: Iterable[Any], treatments: Sequence[Treatment], done: Collection[Place] = ()
) -> Iterator[BatchResult]:
    """The results of the treatments and their bases, batch by batch, so that all treatments have the same sequences.
    done: what is known already. A base is evaluated again if one of its treatments is missing."""
    bases = dict.fromkeys(_base(treatment) for treatment in treatments)
    for number, batch in enumerate(batches):
        for base in bases:
            own = [treatment for treatment in treatments if treatment.base == base]
            left = [treatment for treatment in own if (treatment.key.id, number) not in done]
            if not left:
                continue
            exact = evaluator.begin(base, batch, number)
            if exact.place not in done:
                yield exact
            for treatment in left:
                yield evaluator.evaluate(treatment)


def _base(treatment: Treatment) -> Treatment:
    if treatment.base is None:
        raise ConfigError(f"{treatment.key.text} has no base: give treatments, whose bases are evaluated with them")
    return treatment.base


def record(
    writer: RunWriter,
    evaluator: Evaluator,
    batches: Sequence[Any],
    treatments: Sequence[Treatment],
    *,
    sizes: Sequence[int] = (),
    say: Say = lambda text: None,
    progress: Progress = lambda count, of: None,
) -> list[BatchResult]:
    """Measure what the run does not have yet, and add it. Returns the results of these treatments and of their bases.
    sizes: how many sequences each batch has, where the last one of an earlier call may have had fewer and is then
    measured again; () if the batches of a run are always the same. Raises OSError, RunError."""
    results = ExperimentWriter(writer.directory)
    if not any(treatment.keeps_tokens for treatment in treatments):
        _describe_values(writer, evaluator, batches)
    kept = {treatment.key.id for treatment in treatments if treatment.keeps_blocks}
    with_blocks = read_blocks(writer.directory) if kept else {}
    ids = {key.id for treatment in treatments for key in (treatment.key, _base(treatment).key)}
    known = [
        result
        for result in read_results(writer.directory)
        if result.key.id in ids and result.batch < len(batches)
        if not sizes or len(result.losses) == sizes[result.batch]
        if result.key.id not in kept or len(with_blocks.get(result.place, ())) >= len(result.losses)
    ]
    clock = _Clock(evaluator, treatments, len(batches), say, progress)
    clock.count = sum(result.key.base is not None for result in known)
    for result in run_treatments(evaluator, batches, treatments, {result.place for result in known}):
        results.add(result)
        writer.update()  # the heartbeat
        known.append(result)
        if result.key.base is not None:
            clock.add(result)
    writer.finish(DONE)
    return known


def _describe_values(writer: RunWriter, evaluator: Evaluator, batches: Iterable[Any]) -> None:
    """Add to run.json how many values the operands of each product have in the first batch, which advice weighs."""
    if OPERAND_VALUES not in json.loads((writer.directory / RUN_FILE).read_text()):
        found: dict[tuple[str, int, str], tuple[int, int]] = {}  # experts of a layer are one product here
        for key, (a, b) in evaluator.operand_values(next(iter(batches))).items():
            place = part_of(key), key[0].layer_index, key[0].module
            known = found.get(place, (0, 0))
            found[place] = known[0] + a, known[1] + b
        writer.describe({OPERAND_VALUES: [[*place, *values] for place, values in found.items()]})


def estimate(evaluator: Evaluator, batches: Sequence[Any], treatments: Sequence[Treatment]) -> tuple[int, float]:
    """(how many passes an experiment takes, about how many seconds), from a pass without rounding and one with."""
    evaluator.begin(_base(treatments[0]), batches[0], 0)
    whole = evaluator.evaluate(treatments[0]).seconds
    return len(treatments) * len(batches), len(batches) * _seconds(evaluator, treatments, whole)


def _seconds(evaluator: Evaluator, treatments: Sequence[Treatment], whole: float) -> float:
    """About how long these treatments take for one batch, from the time of a whole pass. Where outputs of blocks are
    kept, a pass takes the time of the blocks that it computes and of what follows them."""
    rest = min(evaluator.rest, whole)
    return sum(rest + (whole - rest) * evaluator.cost(treatment) for treatment in treatments)


@dataclass(eq=False)
class _Clock:
    """Reports progress, and how long it will take once the first pass has ended."""

    evaluator: Evaluator
    treatments: Sequence[Treatment]
    batches: int
    say: Say
    progress: Progress
    count: int = 0
    said: bool = False

    def add(self, result: BatchResult) -> None:
        self.count += 1
        of = len(self.treatments) * self.batches
        if not self.said:
            self.said = True
            treatment = next(treatment for treatment in self.treatments if treatment.key.id == result.key.id)
            share = self.evaluator.cost(treatment)
            whole = self.evaluator.rest + (result.seconds - self.evaluator.rest) / max(share, 0.05)
            seconds = _seconds(self.evaluator, self.treatments, whole) / len(self.treatments) * (of - self.count)
            self.say(f"{of - self.count:,} of {of:,} passes to go, {duration(seconds)}")
        self.progress(self.count, of)


def duration(seconds: float) -> str:
    """About a time, in the unit that fits."""
    if seconds < 90:
        return f"about {max(seconds, 1):.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"
