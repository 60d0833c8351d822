"""Merged segments hold the rows of those that they replace, whenever the process that merges is killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from binade.data import intake
from binade.data.catalog import Catalog
from binade.data.compact import compact
from binade.data.difference import difference
from binade.data.intake import Intake
from binade.data.runs import DONE, IMPORT, RunWriter, fingerprint, read_run, run_directories
from binade.data.segment import TABLES, manifest, read_manifest, read_tables
from binade.data.verify import verify
from tests.conftest import PROJECT
from tests.data.builder import add_segment, assorted, make_run, without_checksums

pytestmark = pytest.mark.slow

# Compacts copies of a root, each in a child process that is killed before it changes the disk for the n-th time. Prints
# how each ended.
KILLED = """
import os, signal, sys
from collections.abc import Callable
from pathlib import Path
from binade.data.compact import compact
left = 0
def hook(event, args):
    global left
    if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
for number in sys.argv[2:]:
    pid = os.fork()
    if not pid:
        left = int(number)
        sys.addaudithook(hook)
        compact(Path(sys.argv[1], number))
        os._exit(0)
    print(os.waitpid(pid, 0)[1])
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    for label in ("first", "second"):
        parts = [assorted(seed, layer_index=seed, raw=seed == 1) for seed in range(1, 5)]
        make_run(root, *parts, label=label)
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "runs")


def rows(root: Path) -> list[tuple[object, ...]]:
    """Every row of every table, from what Parquet files the runs list."""
    found: list[tuple[object, ...]] = []
    with duckdb.connect() as raw:
        for directory in run_directories(root):
            for table in TABLES:
                files = [
                    str(directory / "segments" / name / f"{table}.parquet") for name in read_run(directory).segments
                ]
                sql = "SELECT ?, rows::VARCHAR FROM read_parquet(?) AS rows ORDER BY ALL"
                found += raw.execute(sql, [directory.name + table, files]).fetchall()
    return found


def segments(root: Path) -> list[int]:
    return [len(list((directory / "segments").iterdir())) for directory in run_directories(root)]


def test_nothing_changes_but_the_files(root, monkeypatch):
    before, prints = rows(root), [fingerprint(run) for run in run_directories(root)]
    with Catalog.open(root) as catalog:
        totals = catalog.totals()
        found = compact(root, dry_run=True)
        assert (found.before, found.after) == (8, 2) and segments(root) == [4, 4]
        sketches = catalog.distribution(by="rank"), catalog.distribution(by="tensor_id")
        found = compact(root)
        assert (found.before, found.after, found.skipped) == (8, 2, []) and segments(root) == [1, 1]
        assert rows(root) == before and [fingerprint(run) for run in run_directories(root)] == prints
        monkeypatch.setattr(intake, "read_tables", None)  # the index has the rows: it reads nothing again
        for by, expected in zip(("rank", "tensor_id"), sketches, strict=True):  # the first finds its segments merged
            pd.testing.assert_frame_equal(catalog.distribution(by=by), expected)
        catalog.sync()
        assert catalog.totals() == totals and not catalog.refused
        monkeypatch.setattr(intake, "read_tables", read_tables)
        # The runs go on afterwards, and are merged again.
        writers = [RunWriter.reopen(directory) for directory in run_directories(root)]
        for writer in writers:
            add_segment(writer, assorted(9, raw=False), first=100)
        assert compact(root).before == 0 and segments(root) == [2, 2]
        for writer in writers:
            writer.finish(DONE)
        catalog.sync()
        grown = catalog.totals()
        assert grown.tensors == totals.tensors + 14
        assert (compact(root).after, segments(root)) == (2, [1, 1])
        catalog.sync()
        assert catalog.totals() == grown and not catalog.refused
    assert not verify(root).damaged
    (root / "index.duckdb").unlink()
    with Catalog.open(root) as catalog:
        assert catalog.totals() == grown and not catalog.refused


@pytest.mark.parametrize("linked", ["the segments", "the run", "the segments meanwhile"])
def test_links_are_not_followed(root, tmp_path, monkeypatch, linked):
    run = next(root.glob("*first*"))
    place = run if linked == "the run" else run / "segments"
    outside = shutil.copytree(place, tmp_path / "outside")
    before = sorted(outside.rglob("*"))

    def link(*_: object) -> None:
        place.rename(tmp_path / "moved")
        place.symlink_to(outside)

    if linked == "the segments meanwhile":
        monkeypatch.setattr("binade.data.compact._clean", link)  # once it has seen that there is no link
        compact(root)
        assert len(list((tmp_path / "moved").iterdir())) == 1
    else:
        link()
        (skipped,) = compact(root).skipped
        assert re.search(f"it is a symbolic link .*{place.name}", skipped)
    assert sorted(outside.rglob("*")) == before


def test_an_error_names_the_path(root):
    (run, *_) = root.glob("*first*")
    file = run / "segments" / "rank00-000002" / "manifest.json"
    file.unlink()
    file.symlink_to(file.name)
    (skipped,) = compact(root).skipped
    assert str(file) in skipped and "/proc" not in skipped


def test_a_resumed_run_deletes_its_own_leftovers_only(root):
    segments = next(root.glob("*first*/segments"))
    for name in (".rank00-000005.host.1-1.part", ".merged-000006.0abc.gone", ".snapshots"):
        (segments / name / "inside").mkdir(parents=True)
    RunWriter.reopen(segments.parent)
    assert [path.name for path in segments.glob(".*")] == [".snapshots"]


def test_sizes(root):
    sizes = [sum(file.stat().st_size for file in segment.iterdir()) for segment in root.glob("*/segments/*")]
    assert compact(root, max(sizes) + 1).after == 4 and segments(root) == [2, 2]
    assert compact(root, max(sizes) + 1).after == 0


def test_tensors_keep_their_order(root):
    run = next(root.glob("*first*"))
    places = [row.tensor_id for row in difference(read_run(run), read_run(run)).rows]
    large = run / "segments" / "rank00-000002" / "manifest.json"
    large.write_bytes(large.read_bytes().ljust(1 << 20))
    assert compact(root, 1 << 20).before == 7 and len(read_run(run).segments) == 2
    assert [row.tensor_id for row in difference(read_run(run), read_run(run)).rows] == places


def test_a_column_of_a_later_version(root):
    name = next(root.glob("*first*/segments/rank00-000003"))
    table = pq.read_table(name / "tensor.parquet")
    written = read_manifest(name, None)
    pq.write_table(table.append_column("later", pa.nulls(len(table), pa.int8())), name / "tensor.parquet")
    files = {file: name / file for file in written.files}
    (name / "manifest.json").write_bytes(manifest(written.run_id, name.name, files))
    (skipped,) = compact(root).skipped
    assert "rank00-000003/tensor.parquet has the column 'later'" in skipped and segments(root) == [4, 1]


def test_killed_at_any_moment(template, tmp_path):
    root = shutil.copytree(template, tmp_path / "runs", ignore=shutil.ignore_patterns("*second*"))
    expected = rows(root)
    with Catalog.open(root) as catalog:
        totals = catalog.totals()
    names = [str(number) for number in (1, 2, 3, 4, 8, 15, 23, 30, 1000)]
    for name in names:
        shutil.copytree(root, tmp_path / name)
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", KILLED, str(tmp_path), *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=100)
    ends = list(map(int, done.stdout.split()))
    assert ends == sorted(ends, reverse=True) and set(ends) == {0, signal.SIGKILL}
    stages = set()
    for name in names:
        copy = tmp_path / name
        stages.update(segments(copy))
        with Catalog.open(copy) as catalog:
            assert catalog.totals() == totals and not catalog.refused
        assert rows(copy) == expected and not verify(copy).damaged
        assert not compact(copy).skipped
        assert rows(copy) == expected and segments(copy) == [1]
    assert {1, 2, 3, 4, 5} <= stages  # before, while the merged one is written, and while others are deleted


def test_a_reader_meanwhile(template, tmp_path):
    with Catalog.open(template) as catalog:
        expected = catalog.totals()
    for attempt in range(4):
        root = shutil.copytree(template, tmp_path / str(attempt), ignore=shutil.ignore_patterns("index.duckdb*"))
        thread = threading.Thread(target=lambda root=root: compact(root))
        with Catalog.open(root) as kept:
            thread.start()
            while thread.is_alive():
                kept.sync()
                assert kept.totals() == expected and not kept.refused
                with duckdb.connect() as memory:
                    memory.execute(intake.schema())
                    fresh = Intake(root)
                    fresh.catch_up(memory)
                    assert not fresh.refused
                    assert memory.execute("SELECT count(*) FROM tensor").fetchall() == [(expected.tensors,)]
            thread.join()
        assert segments(root) == [1, 1]


def test_what_is_left_as_it_is(tmp_path):
    parts = [assorted(seed, layer_index=seed, raw=False) for seed in (1, 2)]
    running = RunWriter.create(tmp_path, "running", {})
    for number, part in enumerate(parts):
        add_segment(running, part, first=100 * number)
    make_run(tmp_path, *parts, label="import", kind=IMPORT)
    without_checksums(make_run(tmp_path, *parts, label="older").directory)
    damaged = make_run(tmp_path, *parts, label="damaged").directory
    file = damaged / "segments" / "rank00-000002" / "score.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    before = rows(tmp_path / "none"), segments(tmp_path)
    # Runs of one second come in any order.
    skipped = sorted(compact(tmp_path).skipped, key=lambda line: "no checksums" in line)
    assert [(f"{file} has" in s, "no checksums" in s) for s in skipped] == [
        (True, False),
        (False, True),
    ]
    assert before == (rows(tmp_path / "none"), segments(tmp_path))


def test_the_command(root, command: Callable[..., int], capsys: pytest.CaptureFixture[str]):
    assert command("compact", str(root), "--dry-run") == 0 and segments(root) == [4, 4]
    assert re.fullmatch(r"8 segments of \d+ MB would be merged into 2\n", capsys.readouterr().out)
    assert command("compact", str(root)) == 0 and segments(root) == [1, 1]
    shutil.rmtree(next(root.glob("*first*")))
    without_checksums(next(root.glob("*second*")))
    assert command("compact", str(root)) == 1 and "has no checksums" in capsys.readouterr().err
    assert command("compact", str(root / "none")) == 1 and "does not exist" in capsys.readouterr().err
