"""kill -9 before each change of the file system: what was there stays, what appears is whole, and the next start leaves
nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

from binade.app.sessions import storage
from binade.app.sessions.log import Rename
from binade.app.sessions.session import RunReference, Session, new
from binade.app.view.view import View
from binade.collector.imports import importer
from binade.collector.imports.files import walk
from binade.collector.imports.losses import find_logs, import_trainings, read_logs
from binade.collector.imports.readers.series import Columns
from binade.data.exchange import bundle
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import losses_of
from binade.data.run.directory import RunNotes, delete_run, fingerprint, list_runs
from binade.data.run.losses import read_losses
from binade.data.run.run_notes import change_notes, read_notes
from binade.data.run.run_writer import RunWriter
from binade.data.run.store import ABANDONED, HOST, locked, staging_directory, sweep, sweep_tree
from binade.data.run.verify import verify
from tests.collector.logs_made import read_here
from tests.data.builder import assorted, make_run
from tests.siege.steps import killed_before, steps

HIDDEN = re.compile(r"\..*\.(part|gone|old)")
TENSORS = assorted(1)[:2]
SESSION = new("mine", View("explore", {}))


def start(root: Path) -> None:
    """What `binade serve` does before it shows a page."""
    sweep_tree(root)
    storage.sweep_sessions(root)


def check_nothing_is_left(root: Path) -> None:
    """No temporary file, no empty folder, no run that cannot be read."""
    start(root)
    left = [path for path in root.rglob("*") if HIDDEN.fullmatch(path.name)]
    left += [path for path in (root / ".sessions").glob("*") if path.suffix != ".jsonl" and not any(path.iterdir())]
    assert left == []
    assert list_runs(root)[1] == [] and verify(root).damaged == [] and storage.list_sessions(root)[1] == []


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a run and a session, and a bundle of both beside it."""
    place = tmp_path_factory.mktemp("source")
    root = place / "root"
    run = make_run(root, TENSORS)
    shown = (RunReference(run.run_id, fingerprint(run.directory)),)
    session = Session(**{**vars(SESSION), "runs": shown})
    storage.create(root, session)
    with Catalog.open(root) as catalog:
        storage.export_bundle(catalog, session, place / "bundle.zip", "all")
    return place


@pytest.fixture
def root(source: Path, tmp_path: Path) -> Path:
    return shutil.copytree(source / "root", tmp_path / "root")


def again(source: Path, root: Path) -> None:
    """The root as it was."""
    shutil.rmtree(root)
    shutil.copytree(source / "root", root)


def test_deleting_a_run(source: Path, root: Path):
    (name,) = (path.parent.name for path in root.glob("*/run.json"))
    seen = set()
    for _ in steps(lambda: delete_run(root / name)):
        here = (root / name).exists()
        seen.add(here)
        check_nothing_is_left(root)
        assert (root / name).exists() == here
        again(source, root)
    assert seen == {True, False}


def test_changing_a_session(source: Path, root: Path):
    """A change is there as a whole or not at all."""
    before, names = storage.load(root, SESSION.id).session.name, set()
    for _ in steps(partial(storage.append, root, SESSION.id, Rename("newer"))):
        names.add(storage.load(root, SESSION.id).session.name)
        check_nothing_is_left(root)
    assert names == {before, "newer"}


def test_starting_a_session(tmp_path: Path):
    root, found = tmp_path / "root", set()
    for _ in steps(lambda: storage.create(root, SESSION)):
        sessions, problems = storage.list_sessions(root)
        assert problems == []
        found.add(len(sessions))
        if root.exists():
            check_nothing_is_left(root)
            shutil.rmtree(root)
    assert found == {0, 1}


def test_deleting_a_session(source: Path, root: Path):
    found = set()
    for _ in steps(lambda: storage.delete(root, SESSION.id)):
        found.add(tuple(saved.session.name for saved in storage.list_sessions(root)[0]))
        check_nothing_is_left(root)
        again(source, root)
    assert found == {(SESSION.name,), ()}


def test_naming_a_run(root: Path):
    (run,) = (path.parent for path in root.glob("*/run.json"))
    names = set()
    for _ in steps(lambda: change_notes(run, RunNotes("a name"), read_notes(run))):
        names.add(read_notes(run).name)
        check_nothing_is_left(root)
        (run / "notes.json").unlink(missing_ok=True)
    assert names == {"", "a name"}


def test_creating_a_run(tmp_path: Path):
    root = tmp_path / "root"
    counts = set()
    for _ in steps(lambda: RunWriter.create(root, "made", {"recipe": "bf16"})):
        runs, refused = list_runs(root)
        assert refused == [] and len(runs) <= 1
        counts.add(len(runs))
        if root.exists():
            check_nothing_is_left(root)
            shutil.rmtree(root)
    assert counts == {0, 1}


def test_writing_a_bundle(source: Path, root: Path, tmp_path: Path):
    out = tmp_path / "out" / "bundle.zip"
    (run_id,) = (path.parent.name for path in root.glob("*/run.json"))

    def write() -> None:
        bundle.write(root, out, [run_id], None)

    for _ in steps(write, every=3):
        assert not out.exists() or bundle.import_runs(root, out).kept == (run_id,)
        out.unlink(missing_ok=True)
        write()  # which deletes what was left
        assert os.listdir(out.parent) == [out.name]
        out.unlink()


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(6))
def test_importing_a_bundle(source: Path, tmp_path: Path, first: int):
    """Each kill takes a second, since its tables are read in a process of their own: the cases share the steps."""
    packed, root = source / "bundle.zip", tmp_path / "root"

    def bring() -> None:
        storage.import_bundle(root, packed)

    step = first
    while killed_before(step, bring):
        runs, refused = list_runs(root)
        assert refused == [] and len(runs) <= 1
        if root.exists():
            check_nothing_is_left(root)
            assert len(list_runs(root)[0]) == len(runs)
            shutil.rmtree(root)
        step += 6
    assert step > 12 and len(list_runs(root)[0]) == len(storage.list_sessions(root)[0]) == 1
    check_nothing_is_left(root)


def test_an_import_of_a_bundle_that_fails_at_its_session_leaves_no_run(source: Path, tmp_path: Path):
    for place, make in (("new/root", lambda root: None), ("old", block_sessions), ("link", link_sessions)):
        root = tmp_path / place
        make(root)
        before = sorted(map(str, tmp_path.rglob("*")))
        packed = source / "bundle.zip"
        if place == "new/root":
            packed = tmp_path.parent / f"{tmp_path.name}.zip"
            full_history(source / "bundle.zip", packed)
        with pytest.raises((storage.SessionError, bundle.BundleError)):
            storage.import_bundle(root, packed)
        assert sorted(map(str, tmp_path.rglob("*"))) == before


def block_sessions(root: Path) -> None:
    root.mkdir()
    (root / ".sessions").write_text("a file")


def link_sessions(root: Path) -> None:
    root.mkdir()
    (root / ".sessions").symlink_to("/nowhere")


def full_history(packed: Path, target: Path) -> None:
    """A bundle whose session cannot be parsed."""
    shutil.copy(packed, target)
    subprocess.run(["python3", "-c", REWRITE, str(target)], check=True)


REWRITE = """
import sys, zipfile
old = zipfile.ZipFile(sys.argv[1])
entries = [(info, old.read(info)) for info in old.infolist()]
with zipfile.ZipFile(sys.argv[1], "w") as new:
    for info, content in entries:
        new.writestr(info.filename, b"{}" if info.filename == "session.json" else content)
"""


def test_importing_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logs, root = tmp_path / "logs", tmp_path / "root"
    logs.mkdir()
    for name in ("a", "b"):
        torch.save(torch.randn(4, 8), logs / f"{name}.pt")
    monkeypatch.setattr(importer, "scatter", read_here)

    def bring() -> None:
        importer.import_logs(logs, root, say=lambda line: None)

    for _ in steps(bring, every=5):
        bring()
        (run,), refused = list_runs(root)
        assert refused == [] and run.status.tensors == 2
        check_nothing_is_left(root)
        shutil.rmtree(root)


def test_importing_logs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whenever it is killed, the run has all rows of the import before, or all of the new one."""
    logs, root = tmp_path / "logs", tmp_path / "root"
    logs.mkdir()
    monkeypatch.setattr(importer, "scatter", read_here)

    def bring() -> None:
        importer.import_logs(logs, root, say=lambda line: None)

    def found() -> set[str]:
        with Catalog.open(root) as catalog:
            assert catalog.refused == []
            return {*catalog.tensors()["tensor_id"]}

    for name in ("a", "b"):
        torch.save(torch.randn(4, 8), logs / f"{name}.pt")
    bring()
    before = found()
    shutil.copytree(root, tmp_path / "before")
    for name in ("b", "c"):
        torch.save(torch.randn(4, 8), logs / f"{name}.pt")
    seen = set()
    for _ in steps(bring, every=3):
        rows = found()
        seen.add(frozenset(rows))
        bring()
        after = found()
        assert len(after) == 3 and len(after & before) == 1 and rows in (before, after)
        check_nothing_is_left(root)
        assert len([*root.glob("*/segments/*")]) == len(list_runs(root)[0]) == 1
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "before", root)
    assert len(seen) == 2


def test_importing_losses_again(tmp_path: Path):
    """Whenever it is killed, the run has losses and settings of the import before, or those of the new one."""
    log, root = tmp_path / "losses.csv", tmp_path / "root"

    def bring(loss: float, recipe: str) -> None:
        log.write_text("step,loss\n" + "".join(f"{step},{loss}\n" for step in range(9)))
        found = find_logs(walk(log, root))
        import_trainings(read_logs(found, Columns()).trainings, root, recipe=recipe, start={"model": recipe})

    def found() -> tuple[object, ...]:
        (run,), refused = list_runs(root)
        assert refused == []
        with Catalog.open(root) as catalog:
            (shown,) = catalog.runs().to_dict("records")
            (losses,) = losses_of(catalog, [run.run_id]).values()
            assert catalog.refused == [] and losses == read_losses(run.directory)
        assert (shown["recipe"], shown["model"]) == (run.config["recipe"], run.config["model"])
        return shown["recipe"], shown["model"], *{step["loss"] for step in losses}

    bring(4.0, "mxfp4")
    shutil.copytree(root, tmp_path / "before")
    seen = set()
    for _ in steps(lambda: bring(8.0, "mxfp8")):
        seen.add(found())
        bring(8.0, "mxfp8")
        assert found() == ("mxfp8", "mxfp8", 8.0)
        check_nothing_is_left(root)
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "before", root)
    assert seen == {("mxfp4", "mxfp4", 4.0), ("mxfp8", "mxfp8", 8.0)}


def test_what_is_being_written_or_deleted_stays(tmp_path: Path):
    """By this machine while it is locked; by another one until it is a day old, since its lock may not be seen."""
    with staging_directory(tmp_path / "mine") as mine:
        sweep(tmp_path)
        assert mine.exists()
    gone = tmp_path / f".run.{HOST}.00ff.gone"
    gone.mkdir()
    with locked(gone):
        sweep(tmp_path)
        assert gone.exists()
    sweep(tmp_path)
    assert not gone.exists()
    (tmp_path / ".run.elsewhere.00ff.gone").mkdir()
    theirs = tmp_path / ".run.elsewhere.00ff.part"
    theirs.mkdir()
    (theirs / "file").touch()
    os.utime(theirs, (0, 0))
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [theirs.name]  # a file in it is new
    os.utime(theirs / "file", (0, 0))
    os.utime(theirs, (0, 0))
    sweep(tmp_path)
    assert not theirs.exists() and ABANDONED == 24 * 3600


@pytest.mark.parametrize(
    "name", [".part", ".snapshots", ".a.part", ".git", ".run.gone", ".x.y.zz.part", "run.h.00ff.part"]
)
def test_other_hidden_names_stay(name: str, tmp_path: Path):
    (tmp_path / name).mkdir()
    sweep(tmp_path)
    assert (tmp_path / name).exists()


def test_a_link_that_was_to_be_deleted_goes_and_its_target_stays(tmp_path: Path):
    (tmp_path / "target").mkdir()
    (tmp_path / f".run.{HOST}.00ff.gone").symlink_to(tmp_path / "target")
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
