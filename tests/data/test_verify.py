"""Damage on disk: all of it is noticed, and no good run is called damaged, not even while it is written or killed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from binade.data.index import intake
from binade.data.index.catalog import Catalog
from binade.data.run.directory import CRASHED, DONE, RUNNING, RunError, RunInfo, read_run
from binade.data.run.losses import LOSS, read_losses
from binade.data.run.records import read_lines
from binade.data.run.run_writer import RunWriter
from binade.data.run.store import TensorFileError
from binade.data.run.verify import verify
from tests.collector.forked import forked, kill_at
from tests.conftest import RECIPES
from tests.data.builder import add_segment, assorted, make_run

pytestmark = pytest.mark.slow


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of three segments and another of one."""
    make_run(tmp_path, assorted(1), assorted(2), assorted(3), label="first")
    make_run(tmp_path, assorted(4), label="second")
    return tmp_path


def segments(root: Path) -> list[Path]:
    return sorted(next(root.glob("*first*/segments")).iterdir())


def left_out(root: Path) -> list[str]:
    """The runs that the index leaves out of every number."""
    with Catalog.open(root) as catalog:
        runs = catalog.runs(damaged=True).set_index("run_id")["damage"]
        damaged = runs.dropna().index.tolist()
        assert not {*catalog.tensors()["run_id"], *catalog.runs()["run_id"]} & {*damaged}
        assert len(catalog.refused) == len(damaged)
        return damaged


def test_every_byte_that_changes_is_noticed(collected: Path, tmp_path: Path):
    """In each kind of file of a real run: by `verify`, by the index for rows, and by `load` for values."""
    source = next(path for path in collected.iterdir() if f"_{RECIPES[3]}_" in path.name and path.is_dir())
    run = shutil.copytree(source, tmp_path / source.name)
    assert not verify(tmp_path).damaged and not left_out(tmp_path)
    chance = random.Random(0)
    tables = sorted(run.glob("segments/*/*.parquet"))
    values = sorted(run.glob("tensors/*/*.pt"))
    (tmp_path / "index.duckdb").unlink()
    with Catalog.open(tmp_path) as catalog:
        rows = catalog.tensors().dropna(subset="path").set_index("path")["tensor_id"]
        for file in chance.sample(values, 30):
            content = file.read_bytes()
            place = chance.randrange(len(content))
            changed = content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]
            file.write_bytes(changed)
            with pytest.raises(TensorFileError, match="is damaged: it has SHA-256"):
                catalog.load(rows[str(file.relative_to(run))])
            file.write_bytes(content)
            os.utime(file)
            catalog.load(rows[str(file.relative_to(run))])
    for number, file in enumerate(chance.choices(tables, k=60)):
        content = file.read_bytes()
        place = chance.randrange(len(content))
        file.write_bytes(content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :])
        written = read_run(run).manifest_of(file.parent.name)
        assert written is not None and list(written.differences(file.parent)) == [file.name]
        if not number % 15:
            (tmp_path / "index.duckdb").unlink(missing_ok=True)
            assert left_out(tmp_path) == [run.name]
            (line,) = verify(tmp_path).damaged
            assert line.startswith(f"{file.relative_to(tmp_path)} has SHA-256")
        file.write_bytes(content)
    assert not verify(tmp_path).damaged and not left_out(tmp_path)


def swap(root: Path) -> None:
    first, second, _ = segments(root)
    first.rename(root / "aside")
    second.rename(first)
    (root / "aside").rename(second)


def of_another_run(root: Path) -> None:
    shutil.rmtree(segments(root)[0])
    shutil.copytree(next(root.glob("*second*/segments/*")), segments(root)[0].with_name("rank00-000001"))


def cut(root: Path) -> None:
    file = segments(root)[1] / "block.parquet"
    file.write_bytes(file.read_bytes()[:-1])


def unlisted(root: Path) -> None:
    file = segments(root)[0] / "manifest.json"
    written = json.loads(file.read_text())
    del written["files"]["trace.parquet"]
    file.write_text(json.dumps(written))


def miscount(root: Path) -> None:
    status = segments(root)[0].parents[1] / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"tensors": 22}))


DAMAGE: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "swapped": (swap, 2, "it was written as segment rank00-00000[12]"),
    "deleted": (lambda root: shutil.rmtree(segments(root)[2]), 1, "contain 14 tensors, but status.json says 21"),
    "copied": (lambda root: shutil.copytree(segments(root)[0], segments(root)[0].with_name("r-4")), 1, "was copied"),
    "another run's": (of_another_run, 1, "it was written by run .*second"),
    "cut short": (cut, 1, r"block.parquet has \d+ bytes, expected \d+"),
    "a terabyte": (lambda root: os.truncate(segments(root)[1] / "score.parquet", 1 << 40), 1, "expected"),
    "a table less": (lambda root: (segments(root)[0] / "trace.parquet").unlink(), 1, "trace.parquet is missing"),
    "no manifest": (lambda root: (segments(root)[0] / "manifest.json").unlink(), 1, "manifest.json is missing"),
    "an odd manifest": (lambda root: (segments(root)[0] / "manifest.json").write_text("{}"), 1, "cannot be read"),
    "a table more": (unlisted, 1, "trace.parquet is not in manifest.json"),
    "another count": (miscount, 1, "status.json says 22"),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("indexed", [False, True])
def test_what_is_missing_or_in_another_place_is_noticed(root: Path, name: str, indexed: bool):
    """By `verify`, and by the index even if it has taken the run in before."""
    damage, count, expected = DAMAGE[name]
    if indexed:
        assert left_out(root) == []
    (run,) = (path.name for path in root.glob("*first*"))
    damage(root)
    lines: list[str] = []
    found = verify(root, damaged=lines.append)
    assert len(found.damaged) == count and found.damaged == lines and found.runs == 2
    for line in found.damaged:
        assert run in line and re.search(expected, line)
    if not indexed or name in ("swapped", "deleted", "copied", "another run's", "another count"):
        assert left_out(root) == [run]


def test_values_that_are_swapped_or_missing(root: Path, tmp_path: Path):
    first, second, third = sorted(root.glob("*second*/tensors/*.pt"))[:3]
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    third.unlink()
    found = verify(root, [first.parents[1].name])
    assert found.runs == 1 and len(found.damaged) == 3 and found.damaged[2].endswith(f"{third.name} is missing")
    assert hashlib.sha256(other).hexdigest()[:12] in found.damaged[0]
    assert left_out(root) == []  # its rows are sound
    assert not verify(root, [next(root.glob("*first*")).name]).damaged


def test_a_run_that_is_being_recorded(root: Path):
    run = make_run(root, assorted(5), label="live")
    run.update(state=RUNNING, finished=None)
    add_segment(run, assorted(6), first=50)
    run.update(tensors=99)  # as another rank may have counted since
    assert not verify(root).damaged and left_out(root) == []


def test_a_run_that_ends_while_it_is_looked_at(root: Path, monkeypatch: pytest.MonkeyPatch):
    run = make_run(root, assorted(5), label="live")
    run.update(state=RUNNING, finished=None)

    def read_at_its_end(directory: Path) -> RunInfo:
        if directory == run.directory and run.status.state == RUNNING:
            add_segment(run, assorted(6), first=50)
            run.finish(DONE)
        return read_run(directory)

    monkeypatch.setattr(intake, "read_run", read_at_its_end)
    assert left_out(root) == [] and run.status.state == DONE


def test_a_renamed_run_that_goes_on(root: Path):
    run = next(root.glob("*second*")).rename(root / "renamed")
    writer = RunWriter.reopen(run)
    add_segment(writer, assorted(6), first=50)
    writer.finish(DONE)
    run.rename(root / "again")
    assert not verify(root).damaged and left_out(root) == []


@pytest.mark.parametrize("flushes", [8, 14, 28])
def test_a_run_that_was_killed(tmp_path: Path, flushes: int):
    """While a tensor, a table, a manifest and a status were written."""

    def write() -> None:
        kill_at("fsync", flushes)
        make_run(tmp_path, assorted(1), assorted(2))

    assert forked(write, {}) == [-signal.SIGKILL]
    (run,) = (path for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert read_run(run).status.state == CRASHED
    assert not verify(tmp_path).damaged and left_out(tmp_path) == []
    if flushes == 28:  # two segments, of which the status counts one
        shutil.rmtree(run / "segments" / "rank00-000001")
        assert "rank00-000001 is missing, although" in verify(tmp_path).damaged[0]
        assert left_out(tmp_path) == [run.name]


def test_a_segment_that_could_not_be_written_leaves_no_gap(tmp_path: Path):
    run = make_run(tmp_path, assorted(1))
    assert run.next_segment_name() == run.next_segment_name()
    add_segment(run, assorted(2), first=50)
    assert not verify(tmp_path).damaged


def test_flipped_bits_in_the_configuration_and_the_losses(tmp_path: Path):
    """Each is noticed, or has changed nothing but the name of the checksum."""
    run = make_run(tmp_path, assorted(1)).directory
    writer = RunWriter.reopen(run)
    for iteration in range(3):
        writer.append_loss({"iteration": iteration, "loss": 5.0 - iteration})
    writer.finish(DONE)
    config, losses = dict(read_run(run).config), read_losses(run)
    chance, noticed = random.Random(0), 0
    for file in (run / "run.json", run / "loss.jsonl"):
        content = file.read_bytes()
        for place in range(len(content)):
            changed = content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :]
            file.write_bytes(changed)
            try:
                found = read_run(run).config
                if problem := read_lines(LOSS, run, "loss.jsonl").problem:
                    raise RunError(problem)
            except RunError:
                noticed += 1
                if not place % 200:
                    (line,) = verify(tmp_path).damaged
                    assert run.name in line
                    with Catalog.open(tmp_path) as catalog:
                        assert [run.name in line for line in catalog.refused] == [True]
            else:
                assert config.items() <= found.items()
                assert all(old.items() <= new.items() for old, new in zip(losses, read_losses(run), strict=True))
        file.write_bytes(content)
    assert noticed > 300 and not verify(tmp_path).damaged


def test_the_command(root: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]):
    assert command("verify", str(root)) == 0
    assert capsys.readouterr().out == f"2 runs, {verify(root).files} files read: none damaged\n"
    file = segments(root)[0] / "score.parquet"
    file.write_bytes(b"x")
    assert command("verify", str(root), segments(root)[0].parents[1].name) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"damaged: {file.relative_to(root)} has 1 bytes, expected ") and len(lines) == 2
    assert lines[1].endswith(": 1 damaged")
    assert command("verify", str(root), "nowhere") == 2 and "has no run 'nowhere'" in capsys.readouterr().err
    with pytest.raises(RunError, match="does not exist"):
        verify(root / "nowhere")
    (run,) = root.glob("*second*")
    shutil.rmtree(run / "segments")
    (run / "segments").mkdir()
    assert command("verify", str(root), run.name) == 1
    assert capsys.readouterr().out.endswith("1 run, 0 files read: 1 damaged\n")
