"""A session as a log: its first line is a state, each further line an operation, and each line ends with its CRC-32.

Operations name pins by an id, so that those of two browser tabs fit together in any order. A deleted pin stays in the
state and can be restored; what another tab does to it meanwhile is not lost. If whole sessions were saved instead, one
tab would overwrite the other's pins. No Streamlit here.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from binade.app.sessions.session import LONGEST_CAPTION, Pin, RunReference, Session, Time
from binade.data.exchange.untrusted import LINES, Record, at_most
from binade.data.run.directory import now
from binade.data.run.json_files import parse_json, sealed, unsealed
from binade.data.words.text import describe

PinId = Annotated[str, Field(pattern="^[0-9a-f]{1,16}$")]
CaptionText = Annotated[str, Field(max_length=LONGEST_CAPTION), LINES]


@dataclass(frozen=True, kw_only=True)
class _Timed(Record):
    time: Time = field(default_factory=now)


@dataclass(frozen=True)
class Add(_Timed):
    """Pin a chart, at the end. runs: those that it shows."""

    pin: Pin
    runs: Annotated[tuple[RunReference, ...], at_most(1000)] = ()
    pin_id: PinId = field(default_factory=lambda: secrets.token_hex(4))
    op: Literal["add"] = "add"


@dataclass(frozen=True)
class Move(_Timed):
    """Move a pin in front of another one, or to the end."""

    pin_id: PinId
    before: PinId | None
    op: Literal["move"] = "move"


@dataclass(frozen=True)
class Caption(_Timed):
    """Change the note on a pin, its caption."""

    pin_id: PinId
    text: CaptionText
    op: Literal["caption"] = "caption"


@dataclass(frozen=True)
class Note(_Timed):
    """Change the session's notes, which were `before` where they were edited."""

    text: str
    before: str
    op: Literal["note"] = "note"


@dataclass(frozen=True)
class Delete(_Timed):
    """Delete a pin."""

    pin_id: PinId
    op: Literal["delete"] = "delete"


@dataclass(frozen=True)
class Restore(_Timed):
    """Undo the deletion of a pin."""

    pin_id: PinId
    op: Literal["restore"] = "restore"


@dataclass(frozen=True)
class Rename(_Timed):
    """Rename the session."""

    name: str
    op: Literal["rename"] = "rename"


Operation = Add | Move | Caption | Note | Delete | Restore | Rename


@dataclass(frozen=True)
class _Line(Record):
    operation: Annotated[Operation, Field(discriminator="op")]


@dataclass(frozen=True)
class KeptPin(Record):
    """A pin with its id. deleted: when it was, or None."""

    pin_id: PinId
    pin: Pin
    deleted: Time | None = None


@dataclass(frozen=True)
class State(Record):
    """A session, and its pins in their order, with the deleted ones."""

    session: Session
    pins: tuple[KeptPin, ...]

    @property
    def shown(self) -> list[KeptPin]:
        """The pins of the session."""
        return [kept for kept in self.pins if not kept.deleted]

    @property
    def last_deleted(self) -> KeptPin | None:
        return max((kept for kept in self.pins if kept.deleted), key=lambda kept: kept.deleted or "", default=None)


def state_of(session: Session) -> State:
    """The state of a session whose pins have no ids yet: they are numbered."""
    return State(session, tuple(KeptPin(str(number), pin) for number, pin in enumerate(session.pins)))


def applied(state: State, operation: Operation) -> State:
    """The state after an operation. One that names an unknown pin, or adds a known one, changes nothing."""
    session, pins = state.session, state.pins
    known = {kept.pin_id for kept in pins}
    match operation:
        case Rename():
            session = replace(session, name=operation.name)
        case Note():
            session = replace(session, notes=_merged(operation, session.notes))
        case Add() if operation.pin_id not in known:
            runs = {run.run_id: run for run in (*session.runs, *operation.runs)}
            session = replace(session, runs=tuple(runs.values()))
            pins = (*pins, KeptPin(operation.pin_id, operation.pin))
        case Move() if operation.pin_id in known:
            pins = _moved(pins, operation)
        case Caption() | Delete() | Restore():
            pins = tuple(_changed(kept, operation) if kept.pin_id == operation.pin_id else kept for kept in pins)
    return _with_pins(replace(session, saved=operation.time), pins)


def _with_pins(session: Session, pins: tuple[KeptPin, ...]) -> State:
    return State(replace(session, pins=tuple(kept.pin for kept in pins if not kept.deleted)), pins)


def _moved(pins: tuple[KeptPin, ...], move: Move) -> tuple[KeptPin, ...]:
    others = [kept for kept in pins if kept.pin_id != move.pin_id]
    (moved,) = (kept for kept in pins if kept.pin_id == move.pin_id)
    at = next((index for index, kept in enumerate(others) if kept.pin_id == move.before), len(others))
    return (*others[:at], moved, *others[at:])


def _changed(kept: KeptPin, operation: Caption | Delete | Restore) -> KeptPin:
    if isinstance(operation, Caption):
        return replace(kept, pin=replace(kept.pin, caption=operation.text))
    return replace(kept, deleted=operation.time if isinstance(operation, Delete) else None)


def _merged(note: Note, present: str) -> str:
    """The notes after an edit. If someone else has changed them meanwhile, the lines that are new follow theirs."""
    if present == note.before:
        return note.text
    others = {*note.before.splitlines(), *present.splitlines()}
    return "\n".join([present, *(line for line in note.text.splitlines() if line not in others)])


def without_deleted(state: State) -> State:
    return State(state.session, tuple(state.shown))


def to_line(entry: State | Operation) -> bytes:
    """A line of a log. Raises ValueError for an operation that could not be read."""
    if isinstance(entry, State):  # its pins are those of the session
        return _line_of(asdict(replace(entry, session=replace(entry.session, pins=()))))
    line = _line_of({"operation": asdict(entry)})
    parse_json(_Line, unsealed(line))
    return line


def _line_of(record: dict[str, Any]) -> bytes:
    return sealed(json.dumps(record, ensure_ascii=False).encode()) + b"\n"


def read(content: bytes) -> tuple[State, list[int]]:
    """(the state after all of a log, the numbers of the damaged lines, which are left out). What follows the last line
    break was not written completely and is ignored. Raises ValueError if the first line is damaged."""
    lines, damaged = content.split(b"\n")[:-1], []
    try:
        first = parse_json(State, unsealed(lines[0] if lines else b""))
    except ValueError as error:
        raise ValueError(f"line 1 is damaged: {describe(error)}") from None
    state = _with_pins(first.session, first.pins)
    for number, line in enumerate(lines[1:], 2):
        try:
            state = applied(state, parse_json(_Line, unsealed(line)).operation)
        except ValueError:
            damaged.append(number)
    return state, damaged
