"""Merged segments hold the rows of those that they replace, whenever the process that merges is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from binade.data.compare.difference import difference
from binade.data.index import intake
from binade.data.index.catalog import Catalog
from binade.data.index.intake import Intake
from binade.data.run import merge
from binade.data.run.directory import fingerprint, read_run, run_directories
from binade.data.run.merge import merge_segments
from binade.data.run.segment import MANIFEST, OPTIONAL, TABLES, Replaced, SegmentError, manifest, read_manifest
from binade.data.run.verify import verify
from tests.conftest import PROJECT
from tests.data.builder import assorted, make_run

pytestmark = pytest.mark.slow

# Merges the run in copies of a root, each in a child process that is killed before it changes the disk for the n-th
# time. Prints how each ended.
KILLED = """
import os, signal, sys
from collections.abc import Callable
from pathlib import Path
from binade.data.run import merge
from binade.data.run.directory import read_run, run_directories
left = 0
def hook(event, args):
    global left
    if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
merge.MANY = 2
for number in sys.argv[2:]:
    (run,) = run_directories(Path(sys.argv[1], number))
    pid = os.fork()
    if not pid:
        left = int(number)
        sys.addaudithook(hook)
        merge.merge_segments(read_run(run))
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


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "MANY", 2)


def merge_all(root: Path) -> None:
    for directory in run_directories(root):
        merge_segments(read_run(directory))


def segments(root: Path) -> list[int]:
    return [len(list((directory / "segments").iterdir())) for directory in run_directories(root)]


def test_nothing_changes_but_the_files(root, monkeypatch):
    before, prints = rows(root), [fingerprint(run) for run in run_directories(root)]
    with Catalog.open(root) as catalog:
        totals = catalog.totals()
        sketches = catalog.distribution(by="rank"), catalog.distribution(by="tensor_id")
        merge_all(root)
        assert segments(root) == [1, 1]
        assert rows(root) == before and [fingerprint(run) for run in run_directories(root)] == prints
        with monkeypatch.context() as patch:
            patch.setattr(intake, "read_tables", None)  # the index has the rows: it reads nothing again
            for by, expected in zip(("rank", "tensor_id"), sketches, strict=True):  # the first finds them merged
                pd.testing.assert_frame_equal(catalog.distribution(by=by), expected)
            catalog.sync()
        assert catalog.totals() == totals and not catalog.refused
        merge_all(root)  # merged segments stay as they are
        assert segments(root) == [1, 1]
    assert not verify(root).damaged
    (root / "index.duckdb").unlink()
    with Catalog.open(root) as catalog:
        assert catalog.totals() == totals and not catalog.refused


def test_sizes(root, monkeypatch):
    sizes = [sum(file.stat().st_size for file in segment.iterdir()) for segment in root.glob("*/segments/*")]
    monkeypatch.setattr(merge, "SIZE", max(sizes) + 1)
    merge_all(root)
    assert segments(root) == [2, 2]


def test_tensors_keep_their_order(root, monkeypatch):
    run = next(root.glob("*first*"))
    places = [row.tensor_id for row in difference(read_run(run), read_run(run)).rows]
    large = run / "segments" / "rank00-000002" / "manifest.json"
    large.write_bytes(large.read_bytes().ljust(1 << 20))
    monkeypatch.setattr(merge, "SIZE", 1 << 20)
    merge_all(root)
    assert len(read_run(run).segments) == 2
    assert [row.tensor_id for row in difference(read_run(run), read_run(run)).rows] == places


def test_segments_that_are_damaged_or_of_another_version_stay(root):
    name = next(root.glob("*first*/segments/rank00-000003"))
    table = pq.read_table(name / "tensor.parquet")
    written = read_manifest(name, None)
    pq.write_table(table.append_column("later", pa.nulls(len(table), pa.int8())), name / "tensor.parquet")
    with pytest.raises(SegmentError, match=r"rank00-000003/tensor.parquet has \d+ bytes"):
        merge_all(root)
    (name / "manifest.json").write_bytes(manifest(written.run_id, name.name, {f: name / f for f in written.files}))
    with pytest.raises(ValueError, match="has a column 'later', which this version does not know"):
        merge_all(root)
    assert segments(root) == [4, 4]


def test_columns_that_earlier_versions_did_not_have_are_null(root):
    """As when a run was resumed after an update."""
    name = next(root.glob("*first*/segments/rank00-000003"))
    written = read_manifest(name, None)
    for stem in ("tensor", "score"):
        table = pq.read_table(name / f"{stem}.parquet")
        missing = sorted(OPTIONAL & {*table.column_names})
        assert missing and all(table[column].null_count == len(table) for column in missing)
        table = table.drop_columns(missing)
        pq.write_table(table, name / f"{stem}.parquet")
    (name / MANIFEST).write_bytes(manifest(written.run_id, name.name, {f: name / f for f in written.files}))
    prints = [fingerprint(run) for run in run_directories(root)]
    with Catalog.open(root) as catalog:
        columns = "SELECT * EXCLUDE (run_id, key, sketch_start, sketch_stop) FROM tensor ORDER BY tensor_id"
        before, totals = catalog.ask(columns), catalog.totals()
        merge_all(root)
    assert segments(root) == [1, 1] and [fingerprint(run) for run in run_directories(root)] == prints
    (root / "index.duckdb").unlink()
    with Catalog.open(root) as catalog:
        assert catalog.totals() == totals and not catalog.refused
        pd.testing.assert_frame_equal(catalog.ask(columns), before)


def test_a_run_that_an_earlier_version_merged_twice(root, monkeypatch):
    """It was killed before it deleted what it had replaced: segments, and a merged one."""
    before, prints = rows(root), [fingerprint(run) for run in run_directories(root)]
    with Catalog.open(root) as catalog:
        totals = catalog.totals()
    monkeypatch.setattr(merge, "remove_directory", lambda path: None)
    merge_all(root)
    for segment in root.glob("*/segments/merged-000005"):
        written = read_manifest(segment, None)
        replaces = {segment.name: Replaced.of(segment)}
        again = shutil.copytree(segment, segment.with_name("merged-000006"))
        files = {file: again / file for file in written.files}
        (again / MANIFEST).write_bytes(manifest(written.run_id, again.name, files, replaces, written.digests))
    assert segments(root) == [6, 6] and {*read_run(next(root.glob("*first*"))).segments} == {"merged-000006"}
    assert rows(root) == before and [fingerprint(run) for run in run_directories(root)] == prints
    with Catalog.open(root) as catalog:
        assert catalog.totals() == totals and not catalog.refused
    assert not verify(root).damaged


def test_killed_at_any_moment(template, tmp_path):
    root = shutil.copytree(template, tmp_path / "runs", ignore=shutil.ignore_patterns("*second*"))
    expected = rows(root)
    with Catalog.open(root) as catalog:
        totals = catalog.totals()
    names = [str(number) for number in (1, 2, 5, 12, 22, 26, 34, 42, 50, 1000)]
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
        assert rows(copy) == expected and not verify(copy).damaged
        with Catalog.open(copy) as catalog:  # its index has the rows
            assert catalog.totals() == totals and not catalog.refused
        (copy / "index.duckdb").unlink()
        with Catalog.open(copy) as catalog:
            assert catalog.totals() == totals and not catalog.refused
    assert {1, 2, 3, 4, 5} <= stages  # before, while the merged one is written, and while others are deleted


@pytest.mark.thorough
def test_a_reader_meanwhile(template, tmp_path):
    with Catalog.open(template) as catalog:
        expected = catalog.totals()
    for attempt in range(4):
        root = shutil.copytree(template, tmp_path / str(attempt), ignore=shutil.ignore_patterns("index.duckdb*"))
        thread = threading.Thread(target=lambda root=root: merge_all(root))
        with Catalog.open(root) as kept:
            thread.start()
            while thread.is_alive():
                kept.sync()
                assert kept.totals() == expected and not kept.refused
                with duckdb.connect() as memory:
                    memory.execute(intake.schema())
                    fresh = Intake(root)
                    fresh.catch_up(memory, lambda: None)
                    assert not fresh.refused
                    assert memory.execute("SELECT count(*) FROM tensor").fetchall() == [(expected.tensors,)]
            thread.join()
        assert segments(root) == [1, 1]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_merge_while_the_root_is_verified(root, damaged):
    """The merged segment is verified, too."""

    def end(count: int, of: int) -> None:
        if count == 1:
            merge_all(root)
            if damaged:
                file = next(root.glob("*second*/segments/merged-*/score.parquet"))
                file.write_bytes(file.read_bytes()[:-1])

    lines = verify(root, done=end).damaged
    assert segments(root) == [1, 1]
    assert ["merged-000005/score.parquet has" in line for line in lines] == [True] * damaged
