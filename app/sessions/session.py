"""A session, and the JSON object in which it travels to other users.

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
from typing import Annotated, Any

from pydantic import Field

from binade.app.view.view import View
from binade.data.exchange import untrusted
from binade.data.exchange.untrusted import LINE, LINES, Record, RefusedError, at_most
from binade.data.run.directory import now

MARKER, VERSION = "binade_session", 1
LONGEST_FILE = 2_000_000  # bytes
LONGEST_NOTES = 50_000  # characters
LONGEST_CAPTION = 2000
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


class UnknownSessionError(SessionError):
    """There is no such session."""

    exit_status = 2


@dataclass(frozen=True)
class Pin(View):
    """A view that is kept: one of its charts by name, or all of it (""), and a caption."""

    chart: Annotated[str, Field(max_length=100, pattern="^[a-z0-9_]*$")] = ""
    caption: Annotated[str, Field(max_length=LONGEST_CAPTION), LINES] = ""

    @property
    def uncaptioned(self) -> Pin:
        """The pin without its caption: equal for pins of the same chart."""
        return replace(self, caption="")


@dataclass(frozen=True)
class RunReference(Record):
    """A run that a session shows, and its `data.run.directory.fingerprint` when it was pinned last."""

    run_id: Annotated[str, Field(min_length=1, max_length=255), LINE]
    hash: Annotated[str, Field(max_length=64, pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Session(Record):
    """See the module. saved: when it changed last. Times are ISO 8601 in UTC; notes are Markdown (see
    `app.sessions.notes`)."""

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


def new(name: str, view: View, **more: Any) -> Session:
    """A session that is not on disk yet, with an id of its own that begins like the name."""
    time = now()
    return Session(new_id(name), name, time, time, view, **more)


def new_id(name: str) -> str:
    words = "-".join(re.findall(r"[a-z0-9]+", name.lower())[:8])[:32].strip("-")
    return f"{words}-{secrets.token_hex(3)}".lstrip("-")


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
