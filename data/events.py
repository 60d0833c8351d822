"""What happened in a run beside its losses, one JSON line each in events.jsonl.

Each rank but 0 has a file of its own in ranks/, so that each has one writer.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path

from pydantic.dataclasses import dataclass

from binade.data.json_files import STRICT, parse_json


class EventKind(StrEnum):
    """What happened."""

    TRIGGER = "trigger"  # a trigger's condition held
    CAPTURE = "capture"  # steps are recorded whole because of it
    NON_FINITE = "non-finite"  # an operation made the first NaN or Inf
    SCHEDULE = "schedule"  # what is quantized has changed


@dataclass(frozen=True, config=STRICT)
class Event:
    """A line of events.jsonl.

    text     one sentence, with the reason
    time     ISO 8601 in UTC
    trigger  the condition that fired, as written
    place    the tensor or module: "layer1.fc1 input"
    until    of a capture, its last iteration
    order    of what is not finite: its place among the calls and gradients of the step, which tells ranks apart
    """

    kind: EventKind
    iteration: int
    text: str
    time: str
    rank: int = 0
    trigger: str | None = None
    place: str | None = None
    until: int | None = None
    order: int | None = None

    def __str__(self) -> str:
        where = f"rank {self.rank}, " if self.rank else ""
        return f"{where}iteration {self.iteration}, {self.kind.value}: {self.text}"


def append_event(directory: Path, event: Event) -> None:
    """Add an event to a run, as the one writer of its rank. Raises OSError."""
    name = "events.jsonl" if event.rank == 0 else f"ranks/rank{event.rank:02d}.events.jsonl"
    with open(directory / name, "a") as file:
        file.write(json.dumps(asdict(event)) + "\n")


def read_events(directory: Path) -> list[Event]:
    """A run's events by iteration, those with an order first, and rank. A line that is damaged or cut short ends
    those of its file. Raises OSError for a file that cannot be read."""
    found = []
    for path in (directory / "events.jsonl", *sorted(directory.glob("ranks/rank*.events.jsonl"))):
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                found.append(parse_json(Event, line))
            except ValueError:
                break
    return sorted(
        found, key=lambda event: (event.iteration, math.inf if event.order is None else event.order, event.rank)
    )
