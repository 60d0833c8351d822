"""The life of a run on one rank: it is created or continued, rows are published step by step, and it ends."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from binade.collector.capture.clock import Moment
from binade.collector.capture.curves import Curves
from binade.collector.capture.monitor import Monitor
from binade.collector.capture.options import Merge, Watch
from binade.collector.capture.policy import Policy
from binade.collector.capture.reduction import Reduction
from binade.collector.capture.rows import Draft, Drafts
from binade.collector.capture.writing import Description, Writing, signals_later
from binade.collector.probes.probe import Probes
from binade.collector.ranks import PeerLostError, Ranks
from binade.collector.settings import MergeRanks, Stats
from binade.data.run.directory import CANCELLED, DONE, FAILED, read_run
from binade.data.run.merge import merge_segments
from binade.data.run.run_writer import RunWriter
from binade.data.words.text import describe
from binade.quant.later import Later

STATUS_SECONDS = 1.0  # between two writes of the status of a run that records nothing


@dataclass(frozen=True)
class Continued:
    """A run to continue in the place of a new one.

    reopen     on rank 0: marks it as running, given the number of ranks and the process that it depends on
    segments   of this rank that stay
    recorded   tensors of this rank so far
    counts     as in the status
    """

    reopen: Callable[[int, int | None], RunWriter]
    segments: int
    recorded: int
    counts: Mapping[str, int]


def _create(root: Path, label: str, config: dict[str, Any], ranks: Ranks, continued: Continued | None) -> RunWriter:
    """The run's directory, made on rank 0. Raises RunError, PeerLostError."""
    if ranks.rank:
        run_id = ranks.share(None)
        if run_id is None:
            raise PeerLostError("rank 0 could not start the run")
        return RunWriter.join(root / run_id, ranks.rank, ranks.size)
    created: RunWriter | None = None
    try:
        if continued:
            created = continued.reopen(ranks.size, ranks.owner)
        else:
            created = RunWriter.create(root, label, config, ranks=ranks.size, owner=ranks.owner)
    finally:
        ranks.share(created.run_id if created else None)
    return created


class RecordingSession:
    """A run while it is recorded, on this rank.

    merges        whether the ranks merge what they record in full
    curves        of rank 0, unless the training loop writes loss.jsonl itself
    """

    def __init__(
        self,
        root: Path,
        label: str,
        config: dict[str, Any],
        *,
        ranks: Ranks,
        max_bytes: int,
        watch: Watch,
        merge: Merge,
        policy: Policy,
        drafts: Drafts,
        probes: Probes,
        continued: Continued | None,
        curves: bool,
    ) -> None:
        self.ranks, self.watch, self.policy, self.drafts, self._probes = ranks, watch, policy, drafts, probes
        self.writer = _create(root, label, config, ranks, continued)
        counts = dict(continued.counts) if continued else {}
        if continued:
            self.writer.continue_after(continued.segments)
            self.writer.update(**counts)
        self.monitor = Monitor(watch, self.writer, probes)
        watches = bool(watch.every) and watch.stats == Stats.BASIC
        merges = MergeRanks(merge.when).applies(ranks.size)
        self._reduction = Reduction.of(ranks, watches, merges, ranks.rank in merge.unmerged)
        self.writing = Writing(self.writer, max_bytes, watch.sink, self.monitor, self._reduction, counts)
        self.curves = Curves(self.writer, self.writing.run, policy.latest) if curves and not ranks.rank else None
        self._published_at = 0.0
        self._done: int | None = None  # the last iteration that ended, without `at`
        self._captures = 0  # how many captures that triggers have requested were begun

    @property
    def run_id(self) -> str:
        return self.writer.run_id

    def offer(self, path: Path, x: Tensor, describe: Description, results: Sequence[Later[Any]]) -> bool:
        """As Writing.offer."""
        return self.writing.offer(path, x, describe, results)

    @property
    def merges(self) -> bool:
        return self._reduction is not None and self._reduction.merges

    def is_merged(self, moment: Moment) -> bool:
        """Whether what is measured now becomes part of rows of all ranks. What a trigger captures does not."""
        if self._reduction is None:
            return False
        if moment.basic:
            return self.watch.watches(moment.iteration)
        separate = self._reduction.keeps_own or moment.iteration in self.policy.capture
        return self.merges and self._reduction.works and not separate

    def begin_capture(self) -> None:
        """Record steps in full if a trigger has fired: from this step on, or the next if this one has begun."""
        if self._captures == self.monitor.requested:
            return
        self._captures = self.monitor.requested
        clock = self.policy.clock
        first = clock.iteration + (clock.micro_batch > 0)
        steps = self.policy.capture = range(first, first + self.watch.capture_steps)
        self.writing.run(lambda: self.monitor.captures(steps))

    def end_iteration(self) -> None:
        """The iteration has ended: publish what was recorded in it."""
        self.publish_reduced()
        self._done = self.policy.clock.iteration
        if self.drafts.drafts or time.monotonic() - self._published_at > STATUS_SECONDS:
            self.publish()

    def publish_reduced(self) -> None:
        """At the end of a step, or of a micro-batch if `at` is used, queue what was measured in it to be reduced over
        ranks. All ranks call this at the same time, even if they have measured nothing."""
        if self._reduction is None:
            return
        clock = self.policy.clock
        watched = self.watch.watches(clock.iteration) and not (clock.positioned and clock.micro_batch)
        if not watched and not (self.merges and (clock.positioned or not self.policy.is_over)):
            return
        drafts = self.drafts.take(merged=True)
        self.writing.publish_reduced(clock.iteration, self.drafts.freeze(drafts, self._in_ring))

    def publish_step(self) -> None:
        """Queue what was recorded of the optimizer's step, unless the end of the iteration does it."""
        if self.policy.clock.positioned:
            self.publish(self.drafts.take(merged=False))  # the others are published by the next `at` of all ranks

    def publish(self, drafts: list[Draft] | None = None) -> None:
        """Queue drafts, by default all, as a segment, and the run's progress. Raises the error of an earlier write."""
        if drafts is None:
            drafts = [*self.drafts.drafts]
            self.drafts.drafts.clear()
        rows = self.drafts.freeze(drafts, self._in_ring)
        self.drafts.forget(self.policy.clock.iteration)
        self._published_at = time.monotonic()
        done = {} if self._done is None else {"iteration": self._done}
        self.writing.publish(rows, **done)

    def _in_ring(self, moment: Moment) -> bool:
        return moment.basic and not self.watch.watches(moment.iteration)

    def close(self, error: BaseException | None, ended: Callable[[], object]) -> BaseException | None:
        """End the run. error: what ended it early, if anything. ended: called once all rows were seen, while events can
        still be written. Returns the error, or else why writing it failed."""
        failure: Exception | None = None
        later: Exception | None = None
        try:
            with signals_later():  # SIGTERM, if another rank was killed, finds this one ending already
                try:
                    self._probes.end_iteration()
                    if error is None and (self.merges or not self.policy.clock.positioned):
                        self.publish_reduced()
                    self.publish()
                    self.writing.settle()
                except Exception as refused:  # of an earlier write; the rest is still written
                    failure = refused
                ended()
                if self.curves:
                    self.curves.close()
                later = self.writing.close()
        except KeyboardInterrupt as cancelled:
            error = error or cancelled
        if self._reduction:
            self._reduction.close()
        failure = failure or later
        if error is None and failure is None:
            try:
                self.ranks.wait()  # until the others have written their rows
            except PeerLostError as lost:
                failure = lost
            except KeyboardInterrupt as cancelled:
                error = cancelled
        cause = error or failure
        state = DONE if cause is None else CANCELLED if isinstance(error, KeyboardInterrupt) else FAILED
        try:
            if state == DONE or not self.ranks.launcher_decides:
                self.writer.finish(state, describe(cause) if cause and state == FAILED else None)
        except OSError as refused:  # the disk has no room for a status: the run will be shown as crashed
            failure, cause = failure or refused, cause or refused
        if state == DONE and failure is None and self.ranks.rank == 0:
            try:
                merge_segments(read_run(self.writer.directory))
            except Exception as refused:  # the run is complete without it
                warnings.warn(f"segments were not merged: {describe(refused)}", stacklevel=3)
        return cause
