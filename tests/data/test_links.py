"""A link inside a run or among sessions is not followed: nothing outside the root is read, copied or changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from zlib import crc32

import pyarrow.parquet as pq
import pytest

from binade.app.sessions import storage
from binade.app.sessions.log import Rename
from binade.app.sessions.session import SessionError, new
from binade.app.view.view import View
from binade.data.exchange import bundle
from binade.data.exchange.bundle import BundleError
from binade.data.index.catalog import Catalog
from binade.data.run.directory import RunError, RunNotes, fingerprint, list_runs, read_run
from binade.data.run.events import EVENT as EVENTS
from binade.data.run.events import Event, EventKind, append_event, read_events
from binade.data.run.experiment import EXPERIMENT_TABLES, read_results
from binade.data.run.losses import LOSS, first_step, read_losses
from binade.data.run.records import append_record, read_records
from binade.data.run.run_notes import change_notes, read_notes
from binade.data.run.store import append_to
from binade.data.run.verify import verify
from tests.data.builder import assorted, make_run

EVENT = Event(EventKind.TRIGGER, 3, "seen", "2026-01-02T03:04:05+00:00")
SEGMENT = "segments/rank00-000001"


def read_event_records(run: Path) -> list[Event]:
    return read_records(EVENTS, run)


def verified(run: Path) -> None:
    """Raise what `verify` reports."""
    if damaged := verify(run.parent).damaged:
        raise RunError(damaged[0])


EMPTY = BytesIO()
pq.write_table(EXPERIMENT_TABLES["results"].empty_table(), EMPTY)
RESULTS = f"experiment/results-00000-{crc32(EMPTY.getvalue()):08x}.parquet"
# A file of a run, and functions that read or write it.
FILES: dict[str, tuple[Callable[[Path], object], ...]] = {
    "run.json": (read_run, fingerprint),
    "status.json": (read_run,),
    "notes.json": (read_notes, lambda run: change_notes(run, RunNotes("new"), RunNotes())),
    "loss.jsonl": (read_losses, lambda run: append_record(run, LOSS, {"iteration": 1})),
    "events.jsonl": (read_event_records, lambda run: append_event(run, EVENT)),
    RESULTS: (read_results,),
    f"{SEGMENT}/manifest.json": (verified,),
    f"{SEGMENT}/tensor.parquet": (verified, fingerprint),
    f"{SEGMENT}/sketch.parquet": (verified, fingerprint),
    SEGMENT: (verified, fingerprint),
    "segments": (read_run,),
    "tensors": (read_run,),
    "tensors/0001.pt": (verified,),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = make_run(tmp_path / "root", assorted(1)).directory
    append_record(run, LOSS, {"iteration": 0, "loss": 4.0})
    append_event(run, EVENT)
    change_notes(run, RunNotes("a name"), RunNotes())
    (run / RESULTS).parent.mkdir()
    (run / RESULTS).write_bytes(EMPTY.getvalue())
    return run


def put_link(place: Path, outside: Path) -> Path:
    """Move a file or folder out of the root, and link to it. The target, which must not change."""
    outside.mkdir()
    target = outside / place.name
    shutil.move(place, target)
    place.symlink_to(target)
    return target


def content(target: Path) -> dict[str, bytes]:
    files = [target] if target.is_file() else [path for path in target.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_a_run_is_refused_and_what_it_leads_to_stays(name: str, run: Path, tmp_path: Path):
    target = put_link(run / name, tmp_path / "outside")
    before = content(target)
    for use in FILES[name]:
        with pytest.raises((OSError, ValueError), match="a symbolic link, which is not followed"):
            use(run)
    with Catalog.open(run.parent) as catalog:
        if not name.startswith("tensors/"):
            assert any("a symbolic link, which is not followed" in line for line in catalog.refused)
        if name.startswith(("run", "status", "seg")):
            assert catalog.totals().tensors == 0
    if name.startswith("tensors/"):  # as any value that is not in its run's directory
        written = bundle.write(run.parent, tmp_path / "bundle.zip", [run.name], None)
        assert written.left_out == 1
    else:
        with pytest.raises(BundleError, match="a symbolic link, which is not followed"):
            bundle.write(run.parent, tmp_path / "bundle.zip", [run.name], None)
        assert not (tmp_path / "bundle.zip").exists()
    assert content(target) == before


@pytest.mark.parametrize("target", ["nothing", "itself", "/dev/zero", "a copy inside the root"])
def test_any_target_is_refused(target: str, run: Path):
    for name in ("loss.jsonl", "notes.json", "events.jsonl"):
        copy = run / f"copy-{name}"
        shutil.move(run / name, copy)
        (run / name).symlink_to({"itself": name, "a copy inside the root": copy.name}.get(target, target))
    for use in (read_losses, read_notes, read_event_records):
        with pytest.raises(OSError, match="a symbolic link, which is not followed"):
            use(run)
    assert read_events(run) == [] and first_step(run) is None  # what is shown besides is empty


def test_a_log_that_is_a_link_is_not_written(run: Path, tmp_path: Path):
    (run / "log.txt").write_text("before")
    target = put_link(run / "log.txt", tmp_path / "outside")
    with pytest.raises(OSError, match="a symbolic link, which is not followed"):
        append_to(run / "log.txt")
    assert target.read_text() == "before"


def test_events_of_ranks_are_not_read_from_elsewhere(run: Path, tmp_path: Path):
    (run / "ranks").mkdir()
    append_event(run, Event(**{**vars(EVENT), "rank": 1}))
    put_link(run / "ranks" / "rank01.events.jsonl", tmp_path / "outside")
    with pytest.raises(OSError, match="a symbolic link"):
        read_event_records(run)
    assert len(read_events(run)) == 1
    put_link(run / "ranks", tmp_path / "other")
    (problem,) = list_runs(run.parent)[1]
    assert "its ranks is a symbolic link" in problem


def test_a_run_may_be_a_link_itself(run: Path, tmp_path: Path):
    """A user puts it there, to see a run in several roots."""
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / run.name).symlink_to(run)
    with Catalog.open(tmp_path / "second") as catalog:
        assert catalog.totals().tensors == 7
        first = catalog.tensors()["tensor_id"].iloc[0]
        assert catalog.load(first).numel()
    bundle.write(tmp_path / "second", tmp_path / "bundle.zip", [run.name], None)


@pytest.mark.parametrize("place", [".sessions", ".sessions/ID.jsonl"])
def test_a_link_among_sessions_is_refused(place: str, tmp_path: Path):
    root = tmp_path / "root"
    session = new("mine", View("explore", {}))
    storage.create(root, session)
    target = put_link(root / place.replace("ID", session.id), tmp_path / "outside")
    before = content(target)
    uses: list[Callable[[], object]] = [
        lambda: storage.load(root, session.id),
        lambda: storage.append(root, session.id, Rename("x")),
    ]
    if "json" not in place:
        uses.append(lambda: storage.delete(root, session.id))
    (problem,) = storage.list_sessions(root)[1]
    assert "a symbolic link, which is not followed" in problem
    for use in uses:
        with pytest.raises(SessionError, match="a symbolic link, which is not followed"):
            use()
    assert content(target) == before and os.path.islink(root / place.replace("ID", session.id))


def test_a_bundle_holds_no_file_of_another_folder(run: Path, tmp_path: Path):
    """Not even one that looks like a run's own."""
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"name": "secret", "color": "", "note": ""}))
    (run / "notes.json").unlink()
    (run / "notes.json").symlink_to(secret)
    with pytest.raises(BundleError, match=r"a symbolic link, which is not followed \(.*notes.json\)"):
        bundle.write(run.parent, tmp_path / "bundle.zip", [run.name], None)
