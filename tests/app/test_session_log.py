"""Sessions as logs: what operations do, in any order and from any number of writers; what is torn or damaged."""

from __future__ import annotations

import json
import os
import random
import zlib
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from binade.app.sessions import log, session, storage
from binade.app.sessions.log import Add, Caption, Delete, Move, Note, Operation, Rename, Restore
from binade.app.sessions.session import Pin, RunReference, Session, SessionError, View

pytestmark = pytest.mark.slow

VIEW = View("explore", {"quant_type": ["mxfp8"], "by": ["layer_index"]})
PINS = tuple(Pin("map", {}, name, name) for name in ("a", "b", "c"))


def started(root: Path, **more) -> Session:
    return storage.create(root, session.new("A finding", VIEW, **more)).session


def path_of(root: Path, one: Session) -> Path:
    return root / ".sessions" / f"{one.id}.jsonl"


def after(root: Path, one: Session, *operations: Operation) -> Session:
    for operation in operations:
        storage.append(root, one.id, operation)
    return storage.load(root, one.id).session


def captions(one: Session) -> list[str]:
    return [pin.caption for pin in one.pins]


def test_each_operation_is_a_line_with_its_checksum(tmp_path: Path):
    one = started(tmp_path)
    reference = RunReference("run", "0" * 64)
    added = Add(Pin("map", {}, "ranking", "look"), (reference,))
    now = after(tmp_path, one, added, Rename("Another name"), Note("Notes", ""), Caption(added.pin_id, "seen"))
    assert (now.id, now.created, now.view) == (one.id, one.created, one.view) and now.saved >= one.saved
    assert (now.name, now.notes, now.runs) == ("Another name", "Notes", (reference,))
    assert now.pins == (Pin("map", {}, "ranking", "seen"),)
    lines = path_of(tmp_path, one).read_bytes().splitlines()
    assert [json.loads(line).get("operation", {}).get("op") for line in lines] == [
        None, "add", "rename", "note", "caption"
    ]  # fmt: skip
    for line in lines:
        before, _, checksum = line.rpartition(b', "crc32": "')
        assert f'{zlib.crc32(before):08x}"}}'.encode() == checksum
    assert os.listdir(tmp_path / ".sessions") == [f"{one.id}.jsonl"]


def test_pins_are_moved_deleted_and_restored_in_their_place(tmp_path: Path):
    one = started(tmp_path, pins=PINS)
    assert captions(after(tmp_path, one, Move("2", "0"))) == ["c", "a", "b"]
    assert captions(after(tmp_path, one, Move("2", None))) == ["a", "b", "c"]
    assert captions(after(tmp_path, one, Delete("1"), Delete("0"))) == ["c"]
    last = storage.load(tmp_path, one.id).state.last_deleted
    assert last and last.pin.caption == "a"
    assert captions(after(tmp_path, one, Restore("0"))) == ["a", "c"]
    last = storage.load(tmp_path, one.id).state.last_deleted
    assert last and last.pin.caption == "b"
    assert captions(after(tmp_path, one, Restore("1"))) == ["a", "b", "c"]
    assert storage.load(tmp_path, one.id).state.last_deleted is None


def test_operations_of_two_tabs_fit_together_in_any_order(tmp_path: Path):
    """One deletes a pin that the other moves and writes at; both add one; nobody reads in between."""
    one = started(tmp_path, pins=PINS)
    first = [Delete("1"), Add(Pin("map", {}, "first", "of the first")), Rename("By the first")]
    second = [Caption("1", "written meanwhile"), Move("1", None), Add(Pin("map", {}, "second", "of the second"))]
    for seed in range(20):
        mixed = [*[first] * 3, *[second] * 3]
        random.Random(seed).shuffle(mixed)
        turns = [iter(first), iter(second)]
        state = storage.load(tmp_path, one.id).state
        for whose in mixed:
            state = log.applied(state, next(turns[whose is second]))
        assert {"a", "c", "of the first", "of the second"} == {*captions(state.session)}
        assert state.session.name == "By the first"
        assert "written meanwhile" in captions(log.applied(state, Restore("1")).session)
        assert log.applied(state, Delete("abc")).pins == log.applied(state, first[1]).pins == state.pins


def test_notes_of_two_tabs_are_both_kept(tmp_path: Path):
    one = started(tmp_path, notes="before\nmore")
    now = after(tmp_path, one, Note("by the first\nmore", "before\nmore"), Note("before\nmore\nlast", "before\nmore"))
    assert now.notes == "by the first\nmore\nlast"
    assert after(tmp_path, one, Note("", now.notes)).notes == ""


def test_every_prefix_of_a_log_is_the_state_after_its_whole_lines(tmp_path: Path):
    """As a process leaves it that is killed while it writes a line; the next operation takes the place of the rest."""
    one = started(tmp_path, pins=PINS)
    operations = [Rename("Größe\u2028"), Delete("0"), Add(Pin("map", {}, "d", "d")), Note("a\nb", ""), Restore("0")]
    states = [storage.load(tmp_path, one.id)]
    path = path_of(tmp_path, one)
    ends = [path.stat().st_size]
    for operation in operations:
        states.append(storage.append(tmp_path, one.id, operation))
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    for size in range(ends[0], len(whole) + 1):
        path.write_bytes(whole[:size])
        expected = max(index for index, end in enumerate(ends) if end <= size)
        assert storage.load(tmp_path, one.id) == states[expected]
        if size % 7 == 0:
            assert storage.append(tmp_path, one.id, Rename("next")).problems == ()
            assert path.read_bytes().startswith(whole[: ends[expected]])
            assert storage.load(tmp_path, one.id).session.pins == states[expected].session.pins


def test_a_damaged_line_is_left_out_and_named(tmp_path: Path):
    one = started(tmp_path, pins=PINS)
    after(tmp_path, one, Rename("lost"), Delete("0"))
    path = path_of(tmp_path, one)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"lost"', b'"tost"'))
    saved = storage.load(tmp_path, one.id)
    assert saved.session.name == one.name and captions(saved.session) == ["b", "c"]
    said = f"Line 2 of {path.name} is damaged: this change is left out."
    assert saved.problems == (said,) and storage.list_sessions(tmp_path) == ([saved], [said])
    assert after(tmp_path, one, Rename("later")).name == "later"
    for damaged in (whole.replace(b'"A finding"', b'"B finding"'), b"", b"\n", b"[" * 100_000, whole[:40]):
        path.write_bytes(damaged)
        found, (problem,) = storage.list_sessions(tmp_path)
        assert not found and problem.startswith(f"{path.name} cannot be read: line 1 is damaged: ")
        with pytest.raises(SessionError, match="line 1 is damaged"):
            storage.append(tmp_path, one.id, Rename("x"))
        assert path.read_bytes() == damaged


def test_a_long_log_becomes_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(storage, "LONG", 5000)
    one = started(tmp_path, pins=PINS)
    now = after(tmp_path, one, Delete("1"))
    for turn in range(100):
        now = after(tmp_path, one, Note(f"{turn} " * 100, now.notes))
        assert path_of(tmp_path, one).stat().st_size < 6000
    assert now.notes == "99 " * 100 and captions(now) == ["a", "c"]
    assert captions(after(tmp_path, one, Move("2", "0"))) == ["c", "a"]  # the pins have the same ids


def test_what_cannot_be_changed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SessionError, match="cannot be saved: notes is longer"):
        started(tmp_path, notes="x" * 60_000)
    assert os.listdir(tmp_path) == []
    one = started(tmp_path, pins=PINS)
    before = path_of(tmp_path, one).read_bytes()
    for operation, words in (
        (Note("x" * 60_000, ""), "notes is longer than 50000"),
        (Rename(" "), "name does not have the expected form"),
        (Rename("a\nb"), "a control character"),
        (Rename("\ud800"), "not UTF-8"),
        (Caption("0", "x" * 2001), "longer than 2000"),
        (Caption("abc", "x" * 2001), "at most 2000"),
        (Add(Pin("map", {}, "NO")), "chart"),
    ):
        with pytest.raises(SessionError, match=words) as refused:
            storage.append(tmp_path, one.id, operation)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 400
    with pytest.raises(SessionError, match="There is no session 'absent'"):
        storage.append(tmp_path, "absent", Rename("x"))
    with pytest.raises(SessionError, match="already"):
        storage.create(tmp_path, one)
    monkeypatch.setenv("BINADE_READ_ONLY", "1")
    for change in (
        lambda: storage.append(tmp_path, one.id, Rename("x")),
        lambda: storage.create(tmp_path, session.new("n", VIEW)),
        lambda: storage.delete(tmp_path, one.id),
    ):
        with pytest.raises(ValueError, match="BINADE_READ_ONLY"):
            change()
    assert path_of(tmp_path, one).read_bytes() == before and len(os.listdir(tmp_path / ".sessions")) == 1


def test_an_imported_session_replaces_none(tmp_path: Path):
    one = session.new("From elsewhere", VIEW, pins=PINS)
    assert storage.import_session(tmp_path, one).session == one == storage.import_session(tmp_path, one).session
    mine = after(tmp_path, one, Rename("Mine"))
    copy = storage.import_session(tmp_path, one).session
    assert copy.id != one.id and replace(copy, id=one.id) == one
    assert storage.import_session(tmp_path, one).session == copy
    assert [saved.session.name for saved in storage.list_sessions(tmp_path)[0]] == ["Mine", "From elsewhere"]
    assert storage.load(tmp_path, one.id).session == mine


WRITERS, TURNS = 4, 25


def write(root: Path, session_id: str, who: int) -> None:
    for turn in range(TURNS):
        added = Add(Pin("map", {}, f"chart_{who}", f"{who}/{turn}"))
        storage.append(root, session_id, added)
        if turn % 3 == 0:
            storage.append(root, session_id, Move(added.pin_id, None))
        if turn % 5 == 0:
            storage.append(root, session_id, Delete(added.pin_id))
            storage.append(root, session_id, Restore(added.pin_id))


def test_processes_at_once_lose_nothing(tmp_path: Path):
    one = started(tmp_path)
    writers = [get_context("fork").Process(target=write, args=(tmp_path, one.id, who)) for who in range(WRITERS)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert storage.load(tmp_path, one.id).problems == ()
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    found = [caption for caption in captions(storage.load(tmp_path, one.id).session) if "/" in caption]
    assert sorted(found) == sorted(f"{who}/{turn}" for who in range(WRITERS) for turn in range(TURNS))


def rename_endlessly(root: Path, session_id: str, done: Connection) -> None:
    for turn in count():
        storage.append(root, session_id, Rename(f"{turn} " + "x" * 100))
        done.send(turn)


def test_a_killed_process_loses_nothing_that_it_has_confirmed(tmp_path: Path):
    one = started(tmp_path)
    for turns in (1, 17, 40, 90):
        received, done = get_context("fork").Pipe(duplex=False)
        process = get_context("fork").Process(target=rename_endlessly, args=(tmp_path, one.id, done))
        process.start()
        done.close()
        for _ in range(turns):
            confirmed = received.recv()
        process.kill()
        process.join()
        with suppress(EOFError):
            while True:
                confirmed = received.recv()
        saved = storage.load(tmp_path, one.id)
        assert int(saved.session.name.split()[0]) - confirmed in (0, 1) and saved.problems == ()
        assert os.listdir(tmp_path / ".sessions") == [f"{one.id}.jsonl"]


def test_a_log_holds_nothing_but_the_limits_of_a_session(tmp_path: Path):
    """A line with a right checksum is checked as a file from elsewhere is."""
    one = started(tmp_path)
    path = path_of(tmp_path, one)
    start = path.read_bytes()
    for record in (
        {"operation": asdict(Rename("x")) | {"op": "format"}},
        {"operation": asdict(Rename("x")) | {"extra": 1}},
        {"operation": {"op": "rename", "name": "x"}},
        {"operation": asdict(Add(Pin("map", {}, "a"))) | {"pin_id": "../x"}},
        {"else": 1},
    ):
        before = json.dumps(record).encode()[:-1]
        path.write_bytes(start + before + f', "crc32": "{zlib.crc32(before):08x}"}}\n'.encode())
        saved = storage.load(tmp_path, one.id)
        assert saved.session == one and len(saved.problems) == 1
