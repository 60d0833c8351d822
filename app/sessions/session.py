"""A session: what was looked at, kept as one JSON file that another reader can open, trust and go on from.

It holds a view (a page and its parameters: filter, tensors, chart settings, what-if knobs, all as the address bar has
them), notes, pinned charts, and which runs it speaks of with their fingerprints. A session file is someone else's
input: `parse` takes it whole or says in one sentence why not, and SCHEMA is all that it may hold.

Saved as <root>/.sessions/<id>/0001.json, 0002.json ...: a save never touches a former one, and of two writers at once
each gets a number of its own. No Streamlit here.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from binade.app.params import TITLES
from binade.app.sessions.pins import Pin, runs_of
from binade.data.access import check_writable
from binade.data.catalog import Catalog
from binade.data.runs import RunError, fingerprint, now
from binade.data.store import remove_directory

VERSION = 1
FOLDER = ".sessions"
LONGEST_FILE = 2_000_000  # bytes
LONGEST_NOTES = 50_000  # characters
MOST_PINS = 200
MOST_VERSIONS = 9999
MOST_VALUES = 50_000  # texts, lists and objects in a file
REFUSED = "This is no session that can be opened"
PAGES = ("overview", "explore", "worst", "tensor", "recipes", "runs", "sql")
ID = r"^[a-z0-9]{1,40}(-[a-z0-9]{1,40}){0,9}\Z"
HASH = r"^[0-9a-f]{64}\Z"
TIME = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(\+00:00|Z)\Z"


def _text(longest: int, pattern: str = "", shortest: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string", "maxLength": longest, "minLength": shortest}
    return found | {"pattern": pattern} if pattern else found


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(of: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "maxItems": most, "items": of}  # checked in this order


_PARAMS = {
    "type": "object",
    "maxProperties": 64,
    "propertyNames": _text(40, r"^[a-z_]+\Z"),
    "additionalProperties": _list(_text(4000), 1000),
}
_PAGE = {"enum": list(PAGES)}
SCHEMA = _object(
    binade_session={"const": VERSION},
    id=_text(200, ID),
    name=_text(120, r"\S"),
    created=_text(40, TIME),
    saved=_text(40, TIME),
    view=_object(page=_PAGE, params=_PARAMS),
    notes=_text(LONGEST_NOTES),
    pins=_list(_object(page=_PAGE, params=_PARAMS, chart=_text(100, r"^[a-z0-9_]*\Z"), caption=_text(2000)), MOST_PINS),
    runs=_list(_object(run_id=_text(255, shortest=1), hash=_text(64, HASH)), 1000),
)
_VALIDATOR = Draft202012Validator(SCHEMA)


class SessionError(ValueError):
    """A session file or a saved session cannot be used. One sentence: what is wrong, what was expected."""

    exit_status = 1


@dataclass(frozen=True)
class View:
    """A page and its parameters, as its address has them, those at their default included."""

    page: str
    params: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunMark:
    """A run that a session speaks of, and its `data.runs.fingerprint` when the session was saved."""

    run_id: str
    hash: str


@dataclass(frozen=True)
class Session:
    """See the module. Times are ISO 8601 in UTC; notes are Markdown (see `app.notes`)."""

    id: str
    name: str
    created: str
    saved: str
    view: View
    notes: str = ""
    pins: tuple[Pin, ...] = ()
    runs: tuple[RunMark, ...] = ()

    @property
    def run_ids(self) -> tuple[str, ...]:
        return tuple(run.run_id for run in self.runs)

    @property
    def said(self) -> tuple[object, ...]:
        """All that its keeper wrote and chose: what a save changes beyond the time."""
        return self.name, self.view, self.notes, self.pins


@dataclass(frozen=True)
class Version:
    """A saved version: its number from 1, and the session, or why it cannot be read."""

    number: int
    session: Session | None
    problem: str = ""


@dataclass(frozen=True)
class Difference:
    """What two sessions differ in, in words."""

    what: str
    first: str
    second: str


def new(name: str, view: View, **more: Any) -> Session:
    """A session that is not saved yet, with an id of its own that begins like the name."""
    words = "-".join(re.findall(r"[a-z0-9]+", name.lower())[:8])[:32].strip("-")
    time = now()
    return Session(f"{words}-{secrets.token_hex(3)}".lstrip("-"), name, time, time, view, **more)


def copied(session: Session, name: str) -> Session:
    """The same under another name and an id of its own."""
    fresh = new(name, session.view)
    return replace(session, id=fresh.id, name=name, created=fresh.created)


# To and from JSON


def to_json(session: Session) -> str:
    """The file's content. Raises SessionError if the session itself is beyond the limits."""
    text = json.dumps(_content(session), indent=1, ensure_ascii=False) + "\n"
    try:
        parse(text.encode(errors="surrogatepass"))
    except SessionError as error:
        raise SessionError(str(error).replace(REFUSED, "The session cannot be saved")) from None
    return text


def _content(session: Session) -> dict[str, Any]:
    return {
        "binade_session": VERSION,
        "id": session.id,
        "name": session.name,
        "created": session.created,
        "saved": session.saved,
        "view": {"page": session.view.page, "params": session.view.params},
        "notes": session.notes,
        "pins": [{"page": p.page, "params": p.params, "chart": p.chart, "caption": p.caption} for p in session.pins],
        "runs": [{"run_id": run.run_id, "hash": run.hash} for run in session.runs],
    }


def parse(content: bytes) -> Session:
    """A session from a file's content. Raises SessionError, and nothing else, for whatever it is."""
    if len(content) > LONGEST_FILE:
        _refuse(f"it has {len(content):,} bytes; at most {LONGEST_FILE:,} are read")
    try:
        text = content.decode()
        given = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except UnicodeDecodeError:
        _refuse("it is not UTF-8 text")
    except RecursionError:
        _refuse("it is nested too deeply")
    except SessionError:
        raise
    except ValueError:  # no JSON, or an integer of thousands of digits
        _refuse("it is not JSON")
    if not isinstance(given, dict) or "binade_session" not in given:
        _refuse('it has no "binade_session": it is some other file')
    version = given["binade_session"]
    if type(version) is not int:
        _refuse("its version is not a whole number")
    if version != VERSION:
        _refuse(
            f"its version is {str(version)[:20]}, and this Binade reads version {VERSION}: use the Binade that wrote it"
        )
    if _values(given) > MOST_VALUES:
        _refuse(f"it holds more than {MOST_VALUES:,} values")
    try:
        problem = next(_VALIDATOR.iter_errors(given), None)  # the first: there may be as many as values
    except RecursionError:
        _refuse("it is nested too deeply")
    if problem is not None:
        _refuse(_sentence(problem))
    _check_letters(given)
    return Session(
        given["id"],
        given["name"],
        given["created"],
        given["saved"],
        View(**given["view"]),
        given["notes"],
        tuple(Pin(**pin) for pin in given["pins"]),
        tuple(RunMark(**run) for run in given["runs"]),
    )


def _values(given: Any) -> int:
    """How many values a document holds, as far as MOST_VALUES."""
    count, left = 0, [given]
    while left and count <= MOST_VALUES:
        count += 1
        inner = left.pop()
        if isinstance(inner, dict | list):
            left += inner.values() if isinstance(inner, dict) else inner
    return count


def _refuse(reason: str) -> NoReturn:
    raise SessionError(f"{REFUSED}: {reason}.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        _refuse("a name occurs twice in one of its objects")
    return found


def _no_constant(name: str) -> NoReturn:
    _refuse(f"it holds {name}, which is no JSON")


def _sentence(error: ValidationError) -> str:
    """What is wrong and where, without repeating what may be enormous."""
    where = ascii(".".join(str(part)[:40] for part in error.absolute_path))[1:-1] or "it"
    limit: Any = error.validator_value
    match error.validator:
        case "type":
            kind = {"string": "a text", "array": "a list", "object": "an object"}[limit]
            return f"{where} is not {kind}"
        case "required":
            return f"{where} lacks {', '.join(name for name in limit if name not in error.instance)}"
        case "additionalProperties":
            return f"{where} has a name that is not known"
        case "enum":
            return f"{where} is none of {', '.join(limit)}"
        case "maxLength":
            return f"{where} is longer than {limit} characters"
        case "minLength":
            return f"{where} is empty"
        case "maxItems":
            return f"{where} has more than {limit} entries"
        case "maxProperties":
            return f"{where} has more than {limit} names"
    return f"{where} is not of the form that is expected"


MANY_LINES = ("notes", "params", "caption")  # texts that may have line breaks


def _check_letters(given: Any, where: str = "it") -> None:
    """No letter that cannot be written or seen: halves of letters (lone surrogates), control characters."""
    if isinstance(given, str):
        allowed = "\n\t\r" if where in MANY_LINES else ""
        if any((c < " " and c not in allowed) or c == "\x7f" or "\ud800" <= c <= "\udfff" for c in given):
            _refuse(f"{where} holds a control character or half a letter")
    elif isinstance(given, Mapping):
        for name, value in given.items():
            _check_letters(value, where if where == "params" else name)
    elif isinstance(given, list):
        for value in given:
            _check_letters(value, where)


# On disk


def folder(root: Path) -> Path:
    return root / FOLDER


def save(root: Path, session: Session) -> tuple[Session, int]:
    """Save as the next version: (the session with its time of saving, its number). Former versions stay.

    Raises SessionError if it is beyond the limits or the disk refuses, ReadOnlyError where nothing may be changed; then
    nothing is left behind.
    """
    check_writable("Saving a session")
    session = replace(session, saved=now())
    content = to_json(session).encode()
    directory = folder(root) / session.id
    aside = directory / f".{secrets.token_hex(8)}.part"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(aside, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        for number in range(max(_numbers(directory), default=0) + 1, MOST_VERSIONS + 1):
            with suppress(FileExistsError):  # another writer took the number
                os.link(aside, directory / f"{number:04d}.json")
                return session, number
    except OSError as error:
        with suppress(OSError):
            directory.rmdir()
        raise SessionError(f"The session cannot be saved in {directory}: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):
            aside.unlink()
    raise SessionError(f"The session has {MOST_VERSIONS} versions, which is the most: save it as a new one.")


def bring_in(root: Path, session: Session) -> int:
    """Save a session that came from elsewhere: its version's number. Where a version says the same already, that one's;
    where the id is taken, the next, so that nothing is lost. Raises as `save`."""
    for version in history(root, session.id):
        if version.session and replace(version.session, saved="") == replace(session, saved=""):
            return version.number
    return save(root, session)[1]


def load(root: Path, session_id: str, number: int | None = None) -> Version:
    """A saved session: the newest version, or the one of that number. Raises SessionError if it is not there or cannot
    be read."""
    if not isinstance(session_id, str) or not re.fullmatch(ID, session_id):
        raise SessionError(f"{str(session_id)[:40]!a} is no session's id.")
    directory = folder(root) / session_id
    numbers = _numbers(directory)
    if not numbers:
        raise SessionError(f"There is no session {session_id!r} in {root}: it was deleted, or belongs to another root.")
    if number is not None and number not in numbers:
        raise SessionError(f"The session {session_id!r} has no version {number}.")
    version = _read(directory, max(numbers) if number is None else number)
    if version.session is None:
        raise SessionError(version.problem)
    return version


def history(root: Path, session_id: str) -> list[Version]:
    """All versions, newest first, those that cannot be read with the reason."""
    directory = folder(root) / session_id
    return [_read(directory, number) for number in sorted(_numbers(directory), reverse=True)]


def list_sessions(root: Path) -> tuple[list[Version], list[str]]:
    """(the newest version of every session, latest saved first; a sentence for each that cannot be read)."""
    found, problems = [], []
    directory = folder(root)
    for entry in sorted(directory.iterdir()) if directory.is_dir() else []:
        if not re.fullmatch(ID, entry.name):
            continue
        try:
            found.append(load(root, entry.name))
        except SessionError as error:
            problems.append(str(error))
    found.sort(key=lambda version: version.session.saved if version.session else "", reverse=True)
    return found, problems


def delete(root: Path, session_id: str) -> int:
    """Delete a session with its history; how many versions went. Raises SessionError, ReadOnlyError."""
    check_writable("Deleting a session")
    if not re.fullmatch(ID, session_id):
        raise SessionError(f"{session_id[:40]!a} is no session's id.")
    directory = folder(root) / session_id
    count = len(_numbers(directory))
    try:
        remove_directory(directory)
    except OSError as error:
        raise SessionError(f"The session {session_id!r} cannot be deleted: {error.strerror or error}.") from error
    return count


def _numbers(directory: Path) -> list[int]:
    try:
        names = [entry.name for entry in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [int(name[:4]) for name in names if re.fullmatch(r"[0-9]{4}\.json", name)]


def _read(directory: Path, number: int) -> Version:
    path = directory / f"{number:04d}.json"
    try:
        with open(path, "rb") as file:
            session = parse(file.read(LONGEST_FILE + 1))
    except (OSError, SessionError) as error:
        return Version(number, None, f"Version {number} of {directory.name} cannot be read: {error}")
    if session.id != directory.name:
        return Version(number, None, f"Version {number} of {directory.name} says that it is {session.id}.")
    return Version(number, session)


# What it says


def marked(catalog: Catalog, session: Session, before: Session | None = None) -> Session:
    """The session with the runs it speaks of as they are now. Those it spoke of that are not here stay as they were.

    before: the session as it was saved last. What it said already, its view and pins, goes on speaking of its runs
    alone; what is new speaks of any that are here.
    """
    said, new = _views(session), []
    among = before.run_ids if before else ()
    if among and before:
        former = [replace(pin, caption="") for pin in _views(before)]
        new = [pin for pin in said if replace(pin, caption="") not in former]
        said = [pin for pin in said if pin not in new]
    found = {*runs_of(catalog, said, among), *(runs_of(catalog, new) if new else ())}
    ids = [run_id for run_id in catalog.runs()["run_id"] if run_id in found]
    absent = [run for run in session.runs if not _is_here(catalog.root, run.run_id)]
    marks = [RunMark(run_id, fingerprint(catalog.root / run_id)) for run_id in ids]
    return replace(session, runs=(*marks, *absent))


def _views(session: Session) -> list[Pin]:
    return [Pin(session.view.page, session.view.params), *session.pins]


def strangers(catalog: Catalog, session: Session) -> list[str]:
    """The runs that the session's view shows here, beyond those that it was saved with: they came later, or are of
    another root."""
    shown = runs_of(catalog, _views(session)[:1]) if session.runs else []
    return [run for run in shown if run not in session.run_ids]


def missing_runs(root: Path, session: Session) -> list[str]:
    """A sentence for each run that the session speaks of and that is absent here, or differs from what it was."""
    problems = []
    for run in session.runs:
        if not _is_here(root, run.run_id):
            problems.append(f"Run {run.run_id[:80]} is not here: what the session shows of it is left out.")
            continue
        try:
            same = fingerprint(root / run.run_id) == run.hash
        except RunError as error:
            problems.append(f"Run {run.run_id[:80]} cannot be read: {error}.")
            continue
        if not same:
            problems.append(
                f"Run {run.run_id[:80]} is not as it was when the session was saved: it was recorded further, or is "
                "another run of the same name."
            )
    return problems


def _is_here(root: Path, run_id: str) -> bool:
    """Whether a run's directory is there. The id may be anyone's text: it must be a plain name."""
    plain = run_id not in (".", "..") and not run_id.startswith(".") and "/" not in run_id and "\0" not in run_id
    try:
        return plain and (root / run_id / "run.json").is_file()
    except OSError:  # a name too long
        return False


def compare(first: Session, second: Session) -> list[Difference]:
    """What two sessions differ in: name, page, filter and parameters, notes, pins, runs. Empty if in nothing."""
    found = [Difference("Name", first.name, second.name), Difference("Page", first.view.page, second.view.page)]
    names = sorted(set(first.view.params) | set(second.view.params), key=lambda n: (n not in TITLES, n))
    for name in names:
        title = f"Filter: {TITLES[name].lower()}" if name in TITLES else f"Parameter: {name}"
        texts = [", ".join(session.view.params.get(name, [])) or "–" for session in (first, second)]
        found.append(Difference(title, *texts))
    found.append(Difference("Notes", first.notes or "–", second.notes or "–"))
    pins = [[pin_text(pin) for pin in session.pins] for session in (first, second)]
    for pin in dict.fromkeys(pins[0] + pins[1]):
        counts = [str(side.count(pin)) if side.count(pin) > 1 else "pinned" if pin in side else "–" for side in pins]
        found.append(Difference(f"Pin: {pin}", *counts))
    if sorted(pins[0]) == sorted(pins[1]) and pins[0] != pins[1]:
        found.append(Difference("Order of the pins", " · ".join(pins[0]), " · ".join(pins[1])))
    hashes = [{run.run_id: run.hash for run in session.runs} for session in (first, second)]
    for run_id in dict.fromkeys([*hashes[0], *hashes[1]]):
        shown = [side[run_id][:12] if run_id in side else "–" for side in hashes]
        found.append(Difference(f"Run: {run_id}", *shown))
    return [one for one in found if one.first != one.second]


def pin_text(pin: Pin) -> str:
    """A pin in a line: its page and chart, what it is of, and its caption."""
    words = ", ".join(f"{name} {'/'.join(texts)}" for name, texts in sorted(pin.params.items()))
    place = f"{pin.page} {pin.chart}".strip()
    return " · ".join(part for part in (place, words, pin.caption) if part)
