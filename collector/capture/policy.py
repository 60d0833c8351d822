"""What is recorded of a run: which iterations and micro-batches, and how much of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.capture.clock import Clock, Moment
from binade.collector.capture.watching import WatchOptions
from binade.collector.settings import Stats


@dataclass(eq=False)
class Policy:
    """Decides about the moments of a clock; see the arguments of `Recorder` of the same names.

    recording    False between the micro-batches that `Recorder.at` sets
    requested    whether `Recorder.at` was called with record=True
    first        the first iteration that was recorded
    latest       the last iterations of which a micro-batch was recorded in full
    capture      the iterations that are recorded in full since a trigger fired
    left_out     evaluations that were not recorded
    """

    clock: Clock
    watching: WatchOptions
    iterations: int | None
    micro_batches: int | None
    evaluation: bool
    enabled: bool
    recording: bool = True
    requested: bool = True
    first: int | None = None
    latest: deque[int] = field(default_factory=lambda: deque(maxlen=8))
    capture: range = range(0)
    left_out: int = 0

    def reset(self) -> None:
        """Reset all counts, as before the first run."""
        self.recording, self.requested, self.first, self.capture, self.left_out = True, True, None, range(0), 0
        self.latest.clear()

    def position(self, record: bool) -> None:
        """`Recorder.at` has set the position of the clock. record: whether the micro-batch is recorded in full."""
        self.requested, self.recording = record, record or self.measures
        if self._whole and self.enabled:
            self._note(self.clock.iteration)

    def begin(self) -> Moment:
        """The current moment, in which something is computed that would be recorded, or that depends on the moment.
        Raises InstrumentError while a CUDA graph captures it."""
        initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no annotations there
        if initialized and torch.cuda.is_current_stream_capturing():
            raise InstrumentError(
                "a CUDA graph captures a pass that is recorded, or rounded by a seed or by earlier passes, and its "
                "replays would repeat this one: capture the graph when recording is over (Recorder(iterations=...)), "
                "or without random and delayed rounding"
            )
        if self.first is None and not self.clock.positioned and self._possible:
            self.first = self.clock.iteration
        moment = self.moment()
        if moment.recording and not moment.basic:
            self._note(moment.iteration)
        return moment

    def moment(self) -> Moment:
        """The current iteration and micro-batch, and whether they are recorded."""
        clock = self.clock
        recording = self._possible and (clock.positioned or self._chosen or self.measures)
        return Moment(clock.iteration, clock.micro_batch, recording, clock.evaluating, recording and not self._whole)

    def moment_of_step(self) -> Moment:
        """The current iteration, and whether an optimizer step would be recorded now."""
        clock = self.clock
        recorded = bool(self.latest) and self.latest[-1] == clock.iteration
        return Moment(clock.iteration, clock.micro_batch, self.enabled and recorded)

    def _note(self, iteration: int) -> None:
        if not self.latest or self.latest[-1] != iteration:
            self.latest.append(iteration)

    @property
    def _possible(self) -> bool:
        return self.recording and self.enabled and not self.paused

    @property
    def _chosen(self) -> bool:
        """Whether this micro-batch is recorded in full because it is one of those requested."""
        if self.clock.positioned:
            return self.requested
        few = self.micro_batches is not None and self.clock.micro_batch >= self.micro_batches
        return not (self.is_over or few)

    @property
    def _whole(self) -> bool:
        """Whether this iteration is recorded in full, not only its basic statistics."""
        watching, clock = self.watching, self.clock
        watched = watching.stats == Stats.FULL and watching.watches(clock.iteration) and clock.micro_batch == 0
        return self._chosen or watched or clock.iteration in self.capture

    @property
    def measures(self) -> bool:
        """Whether this micro-batch is measured for a trigger or because its step is watched."""
        clock = self.clock
        if clock.iteration in self.capture:
            return True
        return clock.micro_batch == 0 and not clock.evaluating and self.watching.follows_step(clock.iteration)

    @property
    def paused(self) -> bool:
        """Whether this is an evaluation that is not to be recorded."""
        return self.clock.evaluating and not (self.evaluation or self.clock.positioned)

    @property
    def is_over(self) -> bool:
        """Whether all requested iterations have been recorded."""
        return self.iterations is not None and self.clock.iteration - (self.first or 0) >= self.iterations

    @property
    def over(self) -> bool:
        """Whether nothing more is recorded, unless `Recorder.at` or another run changes that."""
        if self.clock.positioned or not self.enabled:
            return not (self.recording and self.enabled)
        return self.first is not None and self.is_over and not self.measures

    @property
    def may_record(self) -> bool:
        """Whether something may be recorded, in this iteration or in one that follows."""
        return self.enabled and (self.clock.positioned or not self.over)

    @property
    def idle(self) -> bool:
        """Whether nothing of this iteration is recorded, in any micro-batch."""
        if self.paused or self.clock.twin or not self.enabled:
            return True
        return not self.clock.positioned and self.over
