"""Follows the measurements of a Recorder on the writer's thread: it keeps the last steps in a ring, evaluates triggers,
and writes events. The training loop reads only `requested`, and never waits.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from binade.collector.capture.triggers import LAST_BIN, LOSS, NAN, ZERO_RESULT, Triggers
from binade.collector.capture.watching import WatchOptions
from binade.collector.models.site import Site
from binade.collector.probes.probe import Finding, Probes
from binade.data.run.columns import ERROR_COLUMNS, MOMENTS, TensorRow
from binade.data.run.directory import now
from binade.data.run.events import Event, EventKind, append_event
from binade.data.run.run_writer import RunWriter
from binade.data.run.tensor_kinds import OPERANDS, PRODUCT_KINDS, Operation, Other, Product

LOG = logging.getLogger("binade")
ROW_BYTES = 2048  # approximate size of a row of the ring


class Monitor:
    """The ring, triggers and events of one rank of a run.

    requested   how many captures have been requested
    """

    def __init__(self, options: WatchOptions, writer: RunWriter, probes: Probes) -> None:
        self.requested = 0
        self._options, self._writer, self._probes = options, writer, probes
        self._triggers = Triggers(options.triggers, options.cooldown)
        self._warnings = Triggers(options.warnings, cooldown=None)
        # One step more than requested: the step whose loss fires a trigger may already be in the ring.
        self._ring: deque[tuple[int, list[TensorRow]]] = deque(maxlen=options.ring + 1)
        self._trigger = self._reason = ""  # of the last one that fired
        self._capture = range(0)
        self._non_finite: int | None = None  # the iteration of the last one that was announced
        self._bad_loss = False  # whether one was announced
        self._captured_bytes = 0
        self._fired: int | None = None  # the iteration of a trigger whose ring is not written yet

    def see(self, rows: list[TensorRow], ring: list[TensorRow]) -> list[TensorRow]:
        """Evaluate the triggers on the rows of a step. ring: the rows that are kept in memory only. Returns the rows to
        write: the others and, if a trigger fires, those in the ring. Without rows, returns those that a trigger on the
        loss left to write."""
        kept = {id(row) for row in ring}
        written = [row for row in rows if id(row) not in kept]
        if self._options.trigger or self._options.warn:
            self._judge(rows)
        if rows:
            self.report(self._probes.see(rows))
        if self._fired is not None:  # by these rows, or by the loss since the last ones
            first = self._fired - self._options.ring
            before = [row for iteration, step_rows in self._ring if iteration >= first for row in step_rows]
            self._ring.clear()
            self._fired = None
            return [*before, *rows]
        if ring:
            self._ring.append((ring[0].identity.iteration or 0, ring))
            while sum(len(step_rows) for _, step_rows in self._ring) * ROW_BYTES > self._options.ring_bytes:
                self._ring.popleft()
        return written

    def _judge(self, rows: list[TensorRow]) -> None:
        rows = [row for row in rows if not row.identity.micro_batch and row.identity.operation != Operation.EVALUATION]
        measured: dict[str, dict[str, float]] = {}
        zero = _zero_results(rows)
        for row in rows:
            name = f"{_site(row).name} {row.identity.tensor_name}"
            values = {column: float(getattr(row.summary, column)) for column in MOMENTS}
            values |= {column: float(getattr(row.error, column)) for column in ERROR_COLUMNS} if row.error else {}
            measured[name] = values | {NAN: row.summary.nans + row.summary.infs, ZERO_RESULT: row.tensor_id in zero}
            measured |= {f"{name} in {fmt}": {LAST_BIN: share} for fmt, share in row.last_bin.items()}
        if rows:
            self._fire(rows[-1].identity.iteration or 0, measured)

    def report(self, findings: Iterable[Finding]) -> None:
        """Announce what a probe has found; of what is not finite, the first in a cool-down."""
        for finding in findings:
            non_finite, last = finding.kind is EventKind.NON_FINITE, self._non_finite
            if non_finite and last is not None and finding.iteration <= last + self._options.cooldown:
                continue
            self.announce(finding.kind, finding.iteration, finding.text, place=finding.place, **finding.more)
            if non_finite:
                self._non_finite = finding.iteration
                self._fire(finding.iteration, {finding.place or "": {NAN: math.inf}})

    def see_loss(self, iteration: int, loss: float) -> None:
        """Evaluate the triggers on the loss of an iteration. Warns of the first that is not finite, unless that is
        watched for."""
        is_bad = not math.isfinite(loss)
        self._fire(iteration, {LOSS: {LOSS: loss, NAN: is_bad}})
        watched = self._options.find_nan or any(trigger.quantity == NAN for trigger in self._options.triggers)
        if is_bad and self._options.warn and not watched and not self._bad_loss:
            self._bad_loss = True
            self.announce(EventKind.WARNING, iteration, "the loss that was logged is NaN or Inf", place=LOSS)

    def _fire(self, iteration: int, measured: dict[str, dict[str, float]]) -> None:
        for fired in self._warnings.see(iteration, measured):
            self.announce(EventKind.WARNING, iteration, fired.reason, fired.trigger.text, fired.place)
        firings = self._triggers.see(iteration, measured)
        full = self._captured_bytes >= self._options.capture_bytes
        for fired in firings:
            left = ", but nothing is captured, because the capture budget is used up" if full else ""
            before = [number for number, _ in self._ring if iteration - self._options.ring <= number < iteration]
            ring = f"; before it, iterations {before[0]} to {before[-1]} are kept" if before else ""
            self.announce(EventKind.TRIGGER, iteration, fired.reason + left + ring, fired.trigger.text, fired.place)
            self._fired, self._trigger = iteration, fired.trigger.text
            self._reason = f"{fired.trigger.text} in iteration {iteration}: {fired.reason}"
        if firings and not full and self._options.capture_steps:
            self.requested += 1

    def captures(self, steps: range) -> None:
        """Announce that these iterations are recorded in full, as requested."""
        self._capture = steps
        text = f"iterations {steps[0]} to {steps[-1]} are recorded in full because of {self._reason}"
        self.announce(EventKind.CAPTURE, steps[0], text, self._trigger, until=steps[-1])

    def captured(self, rows: Sequence[TensorRow]) -> bool:
        """Whether any of these rows is one of the latest capture."""
        return any(row.identity.iteration in self._capture for row in rows)

    def wrote(self, segment: Path, rows: Sequence[TensorRow]) -> None:
        """A segment with these rows has been written to disk."""
        if self.captured(rows):
            files = [*segment.iterdir(), *(self._writer.directory / row.path for row in rows if row.path)]
            self._captured_bytes += sum(file.stat().st_size for file in files)

    def announce(
        self,
        kind: EventKind,
        iteration: int,
        text: str,
        trigger: str | None = None,
        place: str | None = None,
        until: int | None = None,
        **more: Any,
    ) -> None:
        """Write an event of this rank, and log it as a warning."""
        event = Event(kind, iteration, text, now(), self._writer.rank, trigger, place, until, **more)
        append_event(self._writer.directory, event)
        LOG.warning("%s", event)


def _site(row: TensorRow) -> Site:
    return Site(row.identity.layer_index or 0, row.identity.module or "", row.identity.expert)


def _zero_results(rows: Sequence[TensorRow]) -> set[str]:
    """The ids of the results of GEMMs that are all zero although their operands, in each recorded call, are not."""
    calls: dict[tuple[Site, Product | Other, str], list[TensorRow]] = {}
    for row in rows:
        if kind := PRODUCT_KINDS.get((row.identity.layer_type, row.identity.tensor_name or "")):
            calls.setdefault((_site(row), kind.product, kind.observed), []).append(row)
    zero = {key for key, of_tensor in calls.items() if any(row.summary.zeros == row.summary.numel for row in of_tensor)}
    ids: set[str] = set()
    for site, product, observed in zero:
        operands = {(site, product, name) for name in OPERANDS.get(observed, ())}
        if operands and operands <= calls.keys() - zero:
            ids |= {row.tensor_id for row in calls[site, product, observed]}
    return ids
