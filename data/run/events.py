"""Events of a run other than its losses, one JSON line per event in events.jsonl.

Each rank but 0 has a file of its own in ranks/, so that each has one writer.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path

from pydantic.dataclasses import dataclass

from binade.data.run.directory import Whole
from binade.data.run.json_files import STRICT, parse_json
from binade.data.run.store import inside, read_file


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


def events_file(directory: Path, rank: int) -> Path:
    """The file of events that a rank of a run writes."""
    return directory / ("events.jsonl" if rank == 0 else f"ranks/rank{rank:02d}.events.jsonl")


def append_event(directory: Path, event: Event) -> None:
    """Add an event to a run, as the one writer of its rank. Raises OSError."""
    with open(events_file(directory, event.rank), "a", encoding="utf-8", opener=inside(directory)) as file:
        file.write(json.dumps(asdict(event)) + "\n")


def read_events(directory: Path) -> list[Event]:
    """Return the events of the run in this directory, sorted by iteration. Within an iteration, events with an
    execution order come first, in that order, then the others by rank.

    A file is read up to the first line that is damaged or cut short. A file that cannot be read is skipped;
    `check_events` raises an error for it.
    """
    events = []
    for path in _files(directory):
        with suppress(OSError, ValueError):
            for line in read_file(path, base=directory).splitlines():
                events.append(parse_json(Event, line))
    return sorted(
        events, key=lambda event: (event.iteration, math.inf if event.order is None else event.order, event.rank)
    )


def check_events(directory: Path) -> None:
    """Raise OSError for a file of events that cannot be read."""
    for path in _files(directory):
        with suppress(FileNotFoundError):
            read_file(path, base=directory)


def _files(directory: Path) -> list[Path]:
    return [directory / "events.jsonl", *sorted(directory.glob("ranks/rank*.events.jsonl"))]
