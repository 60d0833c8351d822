"""Events of a run other than its losses: the records of events.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path

from pydantic.dataclasses import dataclass

from binade.data.run.json_files import STRICT, Whole
from binade.data.run.records import RecordKind, append_record, read_lines


class EventKind(StrEnum):
    """What happened."""

    TRIGGER = "trigger"  # a trigger's condition held
    WARNING = "warning"  # a condition held that only warns
    CAPTURE = "capture"  # steps are recorded in full because of it
    NON_FINITE = "non-finite"  # an operation produced the first NaN or Inf
    WEIGHTS = "weights"  # weights that oscillated were set to their rounded values


@dataclass(frozen=True, config=STRICT)
class Reached:
    """An operation whose result or gradient is not finite: the module, "forward" or "backward", and its order."""

    order: Whole
    place: str
    operation: str


@dataclass(frozen=True, config=STRICT)
class Event:
    """A line of events.jsonl.

    text     one sentence, with the reason
    time     ISO 8601 in UTC
    trigger  the condition that fired, as written
    place    the tensor or module: "layer1.fc1 input"
    until    of a capture, its last iteration
    order    of what is not finite: its place among the calls and gradients of the step, by which the events of all
             ranks are sorted
    layer, module   of what is not finite, as the index names them; None for what belongs to no module
    chain    of what is not finite: what it reached after that in the same step, in order
    """

    kind: EventKind
    iteration: Whole
    text: str
    time: str
    rank: Whole = 0
    trigger: str | None = None
    place: str | None = None
    until: Whole | None = None
    order: Whole | None = None
    layer: Whole | None = None
    module: str | None = None
    chain: tuple[Reached, ...] = ()

    def __str__(self) -> str:
        where = f"rank {self.rank}, " if self.rank else ""
        return f"{where}iteration {self.iteration}, {self.kind.value}: {self.text}"


EVENT = RecordKind("event", "events.jsonl", Event, "events")


def append_event(directory: Path, event: Event) -> None:
    """Add an event to a run, as the one writer of its rank. Raises OSError."""
    append_record(directory, EVENT, asdict(event), event.rank)


def read_events(directory: Path) -> list[Event]:
    """Return the events of the run in this directory, sorted by iteration. Within an iteration, events with an
    execution order come first, in that order, then the others by rank.

    Lines that are damaged or cut short are left out, and so are files that cannot be read.
    """
    events: list[Event] = []
    for name in EVENT.files(directory):
        with suppress(OSError):
            events += read_lines(EVENT, directory, name).values
    return in_order(events)


def in_order(events: Iterable[Event]) -> list[Event]:
    """The events of a run, sorted as `read_events` does."""
    return sorted(
        events, key=lambda event: (event.iteration, math.inf if event.order is None else event.order, event.rank)
    )
