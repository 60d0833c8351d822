"""A session and its file format: one JSON object that other users can open and continue.

It holds a view (a page and its parameters: filter, tensors, chart settings, what-if options, all as the address bar has
them), notes, pinned charts, and the runs that it shows with their fingerprints. A session file is untrusted input:
`parse` accepts all of it or says in one sentence why not, and a file may hold only what the annotations of the
dataclasses allow. No Streamlit here.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from binade.app.aliases import set_current
from binade.app.params import TITLES
from binade.app.view import View
from binade.data import untrusted
from binade.data.runs import now
from binade.data.untrusted import LINE, LINES, Record, RefusedError, at_most

MARKER, VERSION = "binade_session", 1
LONGEST_FILE = 2_000_000  # bytes
LONGEST_NOTES = 50_000  # characters
MOST_PINS = 200
MOST_VALUES = 50_000  # texts, lists and objects in a file
REFUSED = "This session cannot be opened"
ID = "^[a-z0-9]{1,40}(-[a-z0-9]{1,40}){0,9}$"
TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(\+00:00|Z)$"


Time = Annotated[str, Field(max_length=40, pattern=TIME)]


class SessionError(ValueError):
    """A session file or a saved session cannot be used. The message is one sentence: what is wrong, and what was
    expected."""

    exit_status = 1


@dataclass(frozen=True)
class Pin(View):
    """A view that is kept: one of its charts by name, or all of it (""), and a caption."""

    chart: Annotated[str, Field(max_length=100, pattern="^[a-z0-9_]*$")] = ""
    caption: Annotated[str, Field(max_length=2000), LINES] = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "chart", set_current(self, self.chart))

    @property
    def uncaptioned(self) -> Pin:
        """The pin without its caption: equal for pins of the same chart."""
        return replace(self, caption="")

    def __str__(self) -> str:
        """One line: its page and chart, its parameters, and its caption."""
        params = ", ".join(f"{name} {'/'.join(texts)}" for name, texts in sorted(self.params.items()))
        return " · ".join(filter(None, (f"{self.page} {self.chart}".strip(), params, self.caption)))


@dataclass(frozen=True)
class RunReference(Record):
    """A run that a session shows, and its `data.runs.fingerprint` when the session was saved."""

    run_id: Annotated[str, Field(min_length=1, max_length=255), LINE]
    hash: Annotated[str, Field(max_length=64, pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Session(Record):
    """See the module. Times are ISO 8601 in UTC; notes are Markdown (see `app.sessions.notes`)."""

    id: Annotated[str, Field(max_length=200, pattern=ID)]
    name: Annotated[str, Field(max_length=120, pattern=r"\S"), LINE]
    created: Time
    saved: Time
    view: View
    notes: Annotated[str, Field(max_length=LONGEST_NOTES), LINES] = ""
    pins: Annotated[tuple[Pin, ...], at_most(MOST_PINS)] = ()
    runs: Annotated[tuple[RunReference, ...], at_most(1000)] = ()

    @property
    def run_ids(self) -> tuple[str, ...]:
        return tuple(run.run_id for run in self.runs)

    @property
    def content(self) -> tuple[object, ...]:
        """Everything that its author wrote and chose: what is saved besides the time and the runs."""
        return self.name, self.view, self.notes, self.pins


def new(name: str, view: View, **more: Any) -> Session:
    """A session that is not saved yet, with an id of its own that begins like the name."""
    words = "-".join(re.findall(r"[a-z0-9]+", name.lower())[:8])[:32].strip("-")
    time = now()
    return Session(f"{words}-{secrets.token_hex(3)}".lstrip("-"), name, time, time, view, **more)


def copied(session: Session, name: str) -> Session:
    """A copy with another name and its own id."""
    fresh = new(name, session.view)
    return replace(session, id=fresh.id, name=name, created=fresh.created)


class Change(NamedTuple):
    """What differs between two sessions, with the value in each, in words."""

    what: str
    first: str
    second: str


def differences(first: Session, second: Session) -> list[Change]:
    """The differences of two sessions in name, page, filter and parameters, notes, pins and runs. Empty if there are
    none."""
    changes = [Change("Name", first.name, second.name), Change("Page", first.view.page, second.view.page)]
    for name in sorted({**first.view.params, **second.view.params}, key=lambda name: (name not in TITLES, name)):
        title = f"Filter: {TITLES[name].lower()}" if name in TITLES else f"Parameter: {name}"
        texts = [", ".join(session.view.params.get(name, [])) or "–" for session in (first, second)]
        changes.append(Change(title, *texts))
    changes.append(Change("Notes", first.notes or "–", second.notes or "–"))
    pins = [[str(pin) for pin in session.pins] for session in (first, second)]
    for pin in dict.fromkeys(pins[0] + pins[1]):
        counts = [str(side.count(pin)) if side.count(pin) > 1 else "pinned" if pin in side else "–" for side in pins]
        changes.append(Change(f"Pin: {pin}", *counts))
    if sorted(pins[0]) == sorted(pins[1]):
        changes.append(Change("Order of the pins", *(" · ".join(side) for side in pins)))
    hashes = [{run.run_id: run.hash for run in session.runs} for session in (first, second)]
    for run_id in hashes[0] | hashes[1]:
        changes.append(Change(f"Run: {run_id}", *(side.get(run_id, "–")[:12] for side in hashes)))
    return [one for one in changes if one.first != one.second]


def to_json(session: Session) -> str:
    """The file's content. Raises SessionError if the session itself is beyond the limits."""
    text = json.dumps({MARKER: VERSION} | asdict(session), indent=1, ensure_ascii=False) + "\n"
    try:
        parse(text.encode(errors="surrogatepass"))
    except SessionError as error:
        raise SessionError(str(error).replace(REFUSED, "The session cannot be saved")) from None
    return text


def parse(content: bytes) -> Session:
    """A session from a file's content. For any content, it raises only SessionError."""
    try:
        if len(content) > LONGEST_FILE:
            raise RefusedError(f"it is {len(content):,} bytes long; the limit is {LONGEST_FILE:,}")
        return untrusted.parse(Session, content, MARKER, VERSION, MOST_VALUES)
    except RefusedError as error:
        raise SessionError(f"{REFUSED}: {error}.") from None
