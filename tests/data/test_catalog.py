"""The index against the Parquet as pandas reads it, and against the tensors themselves."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from _thread import interrupt_main
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from binade.data.index import cubes, intake, sketches
from binade.data.index import on_disk as run_on_disk
from binade.data.index.cache import ResultCache
from binade.data.index.catalog import GROUPABLE, Catalog, CatalogError, DamagedIndexError
from binade.data.index.opened import OutdatedError
from binade.data.run import segment
from binade.data.run.columns import ERROR_COLUMNS
from binade.data.run.directory import RUNNING, RunError, read_run
from binade.data.run.segment import TABLES
from binade.data.run.store import TensorFileError
from binade.data.words.filter import Filter
from tests.bench import make_root as bench
from tests.bench.make_root import make_root
from tests.conftest import PROJECT, until
from tests.data.builder import add_segment, assorted, make_run

pytestmark = pytest.mark.slow

STEMS = {name: TABLES[name] for name in ("tensor", "sketch", "score")}
KEYS = {"tensor": ["tensor_id"], "sketch": ["tensor_id", "bin"], "score": ["tensor_id", "format"]}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: one of two segments, one of one. Read only, and never opened."""
    root = tmp_path_factory.mktemp("template")
    make_run(root, assorted(1), assorted(2, layer_index=2), label="first")
    make_run(root, assorted(3, module="qkv"), label="second")
    return root


@pytest.fixture
def root(template: Path, tmp_path: Path) -> Path:
    """A copy of the template to do with as one likes."""
    return shutil.copytree(template, tmp_path / "runs")


@pytest.fixture(scope="module")
def catalog(template: Path, tmp_path_factory: pytest.TempPathFactory):
    """Open on another copy, for questions only."""
    with Catalog.open(shutil.copytree(template, tmp_path_factory.mktemp("asked") / "runs")) as opened:
        yield opened


def on_disk(root: Path, table: str) -> pd.DataFrame:
    """The rows of a table as pyarrow reads them from every published segment, ids as the index gives them."""
    parts = []
    for file in sorted(root.glob(f"[!.]*/segments/[!.]*/{table}.parquet")):
        run_id = file.relative_to(root).parts[0]
        part = pq.read_table(file).to_pandas()
        part["tensor_id"] = run_id + "/" + part["tensor_id"]
        if table == "tensor":
            part["run_id"] = run_id
        parts.append(part)
    return pd.concat(parts).sort_values(KEYS[table], ignore_index=True)


def in_index(catalog: Catalog, table: str) -> pd.DataFrame:
    return catalog.table(table).to_pandas().sort_values(KEYS[table], ignore_index=True)


def agree(catalog: Catalog, root: Path) -> None:
    """The index holds just what is on disk."""
    for table in STEMS:
        found, expected = in_index(catalog, table), on_disk(root, table)
        assert list(found.columns) == list(expected.columns)
        for frame in (found, expected):
            if table == "tensor":
                frame["shape"] = frame["shape"].map(tuple)
                frame["captured"] = frame["captured"].astype("datetime64[us]")
                frame["recomputed"] = frame["recomputed"].astype("boolean")
        pd.testing.assert_frame_equal(found, expected, check_dtype=False, check_exact=True)


class TestSync:
    def test_rows_are_those_of_the_parquet(self, root):
        with Catalog.open(root) as catalog:
            agree(catalog, root)
            assert catalog.refused == [] and not catalog.in_memory
            assert catalog.totals().tensors == len(catalog.tensors()) == 21 and catalog.totals().runs == 2

    def test_a_collected_root_too(self, collected, tmp_path):
        shutil.copytree(collected, tmp_path / "runs", ignore=shutil.ignore_patterns("index.duckdb*", "*.pt"))
        with Catalog.open(tmp_path / "runs") as catalog:
            agree(catalog, tmp_path / "runs")

    def test_again_adds_nothing(self, root):
        with Catalog.open(root) as catalog:
            assert catalog.sync() == catalog.sync() == 0
            agree(catalog, root)
        with Catalog.open(root) as catalog:
            assert not catalog.in_memory and catalog.sync() == 0
            agree(catalog, root)

    def test_new_segments_and_runs_appear(self, tmp_path):
        with Catalog.open(tmp_path) as catalog:
            assert catalog.totals().tensors == 0
            run = make_run(tmp_path, assorted(1))
            assert catalog.sync() == 1
            add_segment(run, assorted(2), first=100)
            make_run(tmp_path, assorted(3), assorted(4), label="other")
            assert catalog.sync() == 3
            agree(catalog, tmp_path)

    def test_the_iterations_of_a_run_are_those_it_trains(self, tmp_path):
        make_run(tmp_path, assorted(1), control_iter=3, train_iters=9)
        with Catalog.open(tmp_path) as catalog:
            assert catalog.runs()["iterations"].tolist() == [9]

    def test_a_deleted_run_disappears(self, root):
        with Catalog.open(root) as catalog:
            gone, kept = catalog.runs()["run_id"]
            shutil.rmtree(root / gone)
            assert catalog.sync() == 0
            assert catalog.runs()["run_id"].tolist() == [kept]
            agree(catalog, root)
        shutil.rmtree(root / kept)
        with Catalog.open(root) as catalog:
            assert catalog.totals().tensors == 0
            assert [len(in_index(catalog, table)) for table in STEMS] == [0, 0, 0]

    def test_a_replaced_segment_is_taken_in_anew(self, root):
        with Catalog.open(root) as catalog:
            run_id = catalog.runs()["run_id"][0]
            shutil.rmtree(root / run_id)
            other = make_run(root, assorted(9), label="replacement")
            other.directory.rename(root / run_id)
            catalog.sync()
            agree(catalog, root)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(
        "name", ["copy", "with space", "a[b]c*?", "model=foo", "size=3", 'it\'s "quoted"', "ünï-日本", "-rf", "%41"]
    )
    def test_a_copied_or_renamed_run_works(self, root, name):
        (first, *_) = sorted(p for p in root.iterdir() if p.is_dir())
        shutil.copytree(first, root / name)
        shutil.copytree(first, root / "abxc-")  # what the third name would match as a pattern
        with Catalog.open(root) as catalog:
            agree(catalog, root)
            assert catalog.refused == []
            copy, original = (catalog.tensors(Filter(run_id=[run_id])) for run_id in (name, first.name))
            same = [column for column in original.columns if column not in ("tensor_id", "run_id")]
            pd.testing.assert_frame_equal(copy[same], original[same])
            shutil.rmtree(first)
            catalog.sync()
            kept = copy[copy["path"].notna()]
            assert len(kept) == 12
            for tensor_id, shape in zip(kept["tensor_id"], kept["shape"], strict=True):
                assert tensor_id.startswith(f"{name}/")
                assert catalog.load(tensor_id).shape == tuple(shape)

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("stem", STEMS)
    @pytest.mark.parametrize("damage", ["cut short", "garbage", "missing", "another table"])
    def test_a_damaged_segment_is_named_and_its_run_left_out(self, root, stem, damage):
        segment = sorted(root.glob("*first*/segments/*"))[1]
        run = segment.parents[1]
        kept = shutil.copytree(segment, root.with_name("kept"))
        file = segment / f"{stem}.parquet"
        if damage == "cut short":
            file.write_bytes(file.read_bytes()[:-20])
        elif damage == "garbage":
            file.write_bytes(b"x" * 500)
        elif damage == "missing":
            file.unlink()
        else:
            table = pq.read_table(segment / f"{stem}.parquet")
            pq.write_table(table.rename_columns([f"{name}_" for name in table.column_names]), file)
        with Catalog.open(root) as catalog:
            assert len(catalog.refused) == 1 and f"/{segment.name} " in catalog.refused[0]
            assert segment.parts[-3] in catalog.refused[0] and "\n" not in catalog.refused[0]
            assert segment.name in catalog.runs(damaged=True).set_index("run_id").at[run.name, "damage"]
            assert run.name not in catalog.runs()["run_id"].tolist() and catalog.sync() == 0
            run.rename(root.with_name("aside"))
            agree(catalog, root)
            shutil.copytree(kept, root.with_name("aside") / "segments" / segment.name, dirs_exist_ok=True)
            root.with_name("aside").rename(run)
            catalog.sync()
            assert catalog.refused == []
            agree(catalog, root)

    def test_a_segment_that_repeats_a_tensor_is_named(self, tmp_path):
        run = make_run(tmp_path, assorted(1))
        add_segment(run, assorted(2))
        with Catalog.open(tmp_path) as catalog:
            assert catalog.totals().tensors == 0
            (refused,) = catalog.refused
            assert f"{run.run_id}/rank00-000002 " in refused and "occurs twice" in refused

    def test_a_settled_run_is_read_once(self, root, monkeypatch):
        monkeypatch.setattr(run_on_disk, "RECENT", 0.0)
        read = []
        monkeypatch.setattr(intake, "read_run", lambda directory: read.append(directory.name) or read_run(directory))
        time.sleep(0.01)
        with Catalog.open(root) as catalog:
            first, second = sorted(read)
            catalog.sync()
            assert len(read) == 2
            status = root / first / "status.json"
            status.write_text(status.read_text().replace('"done"', '"failed"'))
            file = next((root / second / "segments").glob("*/tensor.parquet"))
            file.rename(file.with_name("x"))
            file.with_name("x").rename(file)  # as a copy that replaces it does: only the segment's time changes
            catalog.sync()
            assert read[2:] == [first, second]
            assert catalog.runs().set_index("run_id")["state"].to_dict() == {first: "failed", second: "done"}
            agree(catalog, root)

    def test_a_crashed_run_is_read_once_and_dropped_when_it_is_deleted(self, tmp_path, monkeypatch):
        monkeypatch.setattr(run_on_disk, "RECENT", 0.0)
        read = []
        monkeypatch.setattr(intake, "read_run", lambda directory: read.append(directory.name) or read_run(directory))
        make_run(tmp_path, assorted(1))
        runs = [make_run(tmp_path, assorted(2), label=label) for label in ("crashed", "live")]
        runs[0].update(state=RUNNING, pid_started=-1.0)
        time.sleep(0.01)
        with Catalog.open(tmp_path) as catalog:
            catalog.sync()
            assert len(read) == 3
            runs[1].update(state=RUNNING)
            for run in runs:
                catalog.sync()
                shutil.rmtree(run.directory)
                catalog.sync()
                agree(catalog, tmp_path)

    def test_runs_that_come_and_go_disturb_nobody(self, root):
        source = next(root.glob("*second*"))
        stop = threading.Event()

        def churn() -> None:
            for _ in range(25):
                shutil.copytree(source, root / "copy", ignore=shutil.ignore_patterns("*.pt"))
                shutil.rmtree(root / "copy")
            stop.set()

        with Catalog.open(root) as catalog, ThreadPoolExecutor(1) as pool:
            churned = pool.submit(churn)
            while not stop.is_set():
                catalog.sync()
                assert catalog.totals(Filter(module=["fc1"])).tensors >= 12
                if churned.done():
                    break
            churned.result()
            catalog.sync()
            agree(catalog, root)
            assert catalog.refused == []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """Two indexes of one root: one with sums of most of the tensors, the other with none."""
    root = tmp_path_factory.mktemp("cubes") / "runs"
    steps = [
        assorted(step, iteration=step // 4, layer_index=1 + step % 4 // 2, rank=step % 2, raw=False)
        for step in range(12)
    ]
    gone = make_run(root, *steps[:6], label="gone")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(cubes, "TAIL", 40)
        summed = stack.enter_context(Catalog.open(root))
        kept = make_run(root, *steps, label="kept")
        summed.sync()
        make_run(root, *steps[::2], label="other", recipe="mxfp4")
        summed.sync()
        shutil.rmtree(gone.directory)
        add_segment(kept, assorted(50, iteration=9, raw=False), first=200)  # stays to be summed up
        summed.sync()
        assert summed._rows("SELECT upto FROM cube ORDER BY upto") == [(42 + 84 + 42,)] * 2
        assert summed._rows("SELECT max(key) FROM tensor") == [(42 + 84 + 42 + 6,)]
        patch.setattr(cubes, "TAIL", 1 << 30)
        copy = shutil.copytree(root, root.with_name("copy"), ignore=shutil.ignore_patterns("index.duckdb*"))
        plain = stack.enter_context(Catalog.open(copy))
        assert plain._rows("SELECT sum(upto) FROM cube") == [(0,)]
        agree(summed, root)
        yield summed, plain


class TestCubes:
    """What is summed up ahead gives the answers of an index of the same root that sums up nothing."""

    @pytest.mark.thorough
    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_every_answer_is_that_of_the_sketches(self, pair, data):
        summed, plain = pair
        values = plain.facets() | {"stage": ["before"]}
        chosen = data.draw(st.lists(st.sampled_from(sorted(values)), unique=True, max_size=4))
        where = Filter(
            **{name: data.draw(st.lists(st.sampled_from(values[name]), min_size=1, max_size=3)) for name in chosen}
        )
        by = data.draw(st.none() | st.sampled_from(GROUPABLE))
        pd.testing.assert_frame_equal(summed.distribution(where, by), plain.distribution(where, by))
        columns = data.draw(st.lists(st.sampled_from(GROUPABLE), unique=True, min_size=1, max_size=3))
        crossed = [c.crossed(where, tuple(columns)).sort_values([*columns, "bin"], ignore_index=True) for c in pair]
        pd.testing.assert_frame_equal(*crossed)
        assert summed.facets(where) == plain.facets(where)
        assert summed.totals(where) == plain.totals(where)

    def test_the_benchmarks_root(self, tmp_path):
        made = make_root(tmp_path, 600, runs=2, ranks=2)
        with Catalog.open(tmp_path) as catalog:
            assert catalog.totals().tensors == 600 and catalog.refused == []
            assert sorted(catalog.runs()["run_id"]) == sorted(directory.name for directory in made)
            assert catalog.distribution()["count"].sum() > 0 and catalog.table("score").num_rows > 0

    def test_sums_do_not_grow_with_the_iterations(self, tmp_path, monkeypatch):
        """Ten times the tensors: an answer by place reads as many rows as before."""
        monkeypatch.setattr(cubes, "TAIL", 1)
        monkeypatch.setattr(bench, "LAYERS", 2)
        tables = ("tensor", "score", "place_sketch")
        counts = []
        for iterations in (4, 40):
            root = tmp_path / str(iterations)
            make_root(root, iterations * 2 * len(bench.PLACES))
            with Catalog.open(root) as catalog:
                counts.append([catalog._rows(f"SELECT count(*) FROM {table}")[0][0] for table in tables])
                assert catalog._rows("SELECT upto FROM cube WHERE name = 'place'") == [(counts[-1][0],)]
        growth = [later / first for first, later in zip(*counts, strict=True)]
        assert growth[:2] == [10, 10] and growth[2] < 1.2

    def test_what_has_nothing_in_common_is_not_stored_twice(self, tmp_path, monkeypatch):
        monkeypatch.setattr(cubes, "TAIL", 1)
        make_run(tmp_path, assorted(1, raw=False))
        with Catalog.open(tmp_path) as catalog:
            assert catalog._rows("SELECT sum(upto) FROM cube") == [(0,)]
            assert len(catalog.ask("FROM place_sketch UNION ALL FROM history_sketch")) == 0


class TestSketches:
    """They are read from the segments when they are needed."""

    def sketches(self, catalog: Catalog, root: Path) -> None:
        expected = on_disk(root, "sketch").groupby(["tensor_id", "bin"])["count"].sum()
        found = catalog.distribution(by="tensor_id").set_index(["group", "bin"])["count"].sort_index()
        assert len(found) and found.to_dict() == expected.to_dict()

    @pytest.mark.parametrize(("group", "at_once"), [(7, 3), (1 << 20, 1 << 11)])
    def test_of_any_size_of_row_groups(self, tmp_path, monkeypatch, group, at_once):
        monkeypatch.setitem(segment.GROUP_ROWS, "sketch", group)
        monkeypatch.setattr(sketches, "AT_ONCE", at_once)
        make_run(tmp_path, assorted(1, raw=False), assorted(2, raw=False, layer_index=2))
        with Catalog.open(tmp_path) as catalog:
            self.sketches(catalog, tmp_path)
            rows = catalog.tensors()
            one = catalog.distribution(tensor_ids=rows["tensor_id"].tolist()[3:4])
            assert one["count"].sum() == (rows["numel"] - rows["nans"] - rows["infs"])[3]

    def test_of_a_run_that_was_deleted_since(self, root):
        with Catalog.open(root) as catalog:
            shutil.rmtree(root / catalog.runs()["run_id"][0])
            self.sketches(catalog, root)
            assert len(catalog.runs()) == 1

    def test_of_a_damaged_file(self, root):
        with Catalog.open(root) as catalog:
            file = next(root.glob("*/segments/*/sketch.parquet"))
            with open(file, "r+b") as opened:  # the segment's directory has the same time of modification
                opened.seek(20)
                opened.write(bytes(200))
            with pytest.raises(CatalogError, match=r"cannot be read.*binade verify"):
                catalog.distribution()
            with pytest.raises(CatalogError, match="cannot be read"):
                catalog.table("sketch")
            assert catalog.totals().runs == 2 and catalog.tensors().shape[0] == 21 and not catalog.notices


class TestIndexFile:
    def damage(self, index: Path, how: str) -> None:
        content = index.read_bytes()
        if how == "garbage":
            index.write_bytes(b"x" * 9000)
        elif how == "empty":
            index.write_bytes(b"")
        elif how == "cut short":
            index.write_bytes(content[: len(content) // 2])
        elif how == "overwritten inside":
            index.write_bytes(content[:8192] + bytes(255 - b for b in content[8192:]))
        elif how == "a broken log":
            index.with_name("index.duckdb.wal").write_bytes(b"garbage" * 999)
        elif how == "another version":
            with duckdb.connect(str(index)) as connection:
                connection.execute("ALTER TABLE tensor DROP COLUMN kurtosis")
                connection.execute("UPDATE origin SET schema = 'older'")
        elif how == "somebody else's":
            index.unlink()
            with duckdb.connect(str(index)) as connection:
                connection.execute("CREATE TABLE tensor AS SELECT 1 AS a")

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(
        "how",
        [
            "garbage",
            "empty",
            "cut short",
            "overwritten inside",
            "a broken log",
            "another version",
            "somebody else's",
        ],
    )
    def test_a_damaged_index_is_rebuilt(self, root, how):
        Catalog.open(root).close()
        self.damage(root / "index.duckdb", how)
        with Catalog.open(root) as catalog:
            assert not catalog.in_memory and catalog.refused == []
            agree(catalog, root)
        with Catalog.open(root) as catalog:
            assert not catalog.in_memory
            agree(catalog, root)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("name", ["index.duckdb", "index.duckdb.wal"])
    @pytest.mark.parametrize("kind", ["a directory", "a named pipe", "a socket", "a device"])
    def test_what_is_no_file_is_left_alone(self, root, kind, name):
        path = root / name
        if kind == "a directory":
            (path / "mine").mkdir(parents=True)
        elif kind == "a named pipe":
            os.mkfifo(path)
        elif kind == "a socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(os.path.relpath(path))  # a path may have 107 bytes
        else:
            path.symlink_to("/dev/zero")
        before = os.stat(path)
        with Catalog.open(root) as catalog:
            (notice,) = catalog.notices
            assert f"{path} is {kind}: move it away" in notice and catalog.in_memory and catalog.sync() == 0
            agree(catalog, root)
        assert os.stat(path).st_ino == before.st_ino and os.stat(path).st_mode == before.st_mode

    @pytest.mark.thorough
    def test_damaged_blocks_are_noticed_and_the_index_is_rebuilt(self, tmp_path):
        """Blocks that a query reads first, after the index was opened."""
        make_root(tmp_path, 400, runs=2)
        by = ("module", "operation")
        queries = [
            lambda catalog: catalog.tensors(),
            lambda catalog: catalog.crossed(Filter(layer_index=[1]), by).sort_values([*by, "bin"], ignore_index=True),
            lambda catalog: catalog.moments(by="layer_index"),
            lambda catalog: catalog.scores(),
            lambda catalog: pd.DataFrame([catalog.facets()]),
            lambda catalog: catalog.table("score").to_pandas(),
            lambda catalog: catalog.runs(),
            lambda catalog: pd.DataFrame([catalog.totals()]),
        ]
        index, chance = tmp_path / "index.duckdb", random.Random(0)
        with Catalog.open(tmp_path) as catalog:
            expected = [query(catalog) for query in queries]
        sound, damaged = index.read_bytes(), 0
        for number in range(6):
            index.write_bytes(sound)
            with Catalog.open(tmp_path) as catalog:
                narrow = catalog.restricted(catalog.runs()["run_id"])
                with open(index, "r+b") as file:
                    for _ in range(200):  # most of a small index is empty
                        file.seek(chance.randrange(12288, len(sound)))
                        file.write(bytes(999) if number % 3 else chance.randbytes(1))
                for query, answer in zip(queries, expected, strict=True):
                    pd.testing.assert_frame_equal(query(catalog), answer)
                pd.testing.assert_frame_equal(narrow.tensors(), expected[0])
                assert not catalog.in_memory and len(catalog.notices) <= 1
                damaged += len(catalog.notices)
        assert damaged >= 4

    def test_a_snapshot_stays_the_same_while_runs_come_and_go(self, tmp_path):
        """For the threads that compute for it, too; answers of two states are not mixed up in the cache."""
        first, second = (make_run(tmp_path, assorted(seed)).directory for seed in range(2))
        with Catalog.open(tmp_path) as catalog, ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as other:
            catalog.cache = ResultCache(1 << 20)
            before, newest = catalog.version, catalog.totals()
            with catalog.snapshot():
                assert catalog.totals() == newest
                shutil.rmtree(second)
                other.submit(catalog.sync).result()
                make_run(tmp_path, assorted(2), assorted(3))
                other.submit(catalog.sync).result()
                assert catalog.version == before and len(catalog.tensors()) == newest.tensors
                shared = catalog.cache.get(None, "x", lambda done: set(catalog.tensors()["run_id"]), pool)
                assert shared == set(catalog.runs()["run_id"]) == {first.name, second.name}
                assert other.submit(lambda: len(catalog.tensors())).result() == newest.tensors * 3 // 2
            assert catalog.version > before and len(catalog.tensors()) == newest.tensors * 3 // 2

    def test_a_state_between_two_versions_has_its_own(self, tmp_path, monkeypatch):
        """A large root is indexed in several transactions."""
        make_run(tmp_path, assorted(0))
        real, seen = intake.sum_up, []
        with Catalog.open(tmp_path) as catalog:
            catalog.cache = ResultCache(1 << 20)

            def sum_up(cursor, root):
                with catalog.snapshot():
                    seen.append((catalog.version, len(catalog.tensors())))
                real(cursor, root)

            monkeypatch.setattr(intake, "sum_up", sum_up)
            make_run(tmp_path, assorted(1))
            before = catalog.version
            catalog.sync()
            assert seen and all(before < version < catalog.version for version, _ in seen)
            assert {count for _, count in seen} == {len(catalog.tensors())}

    def test_files_that_a_snapshot_lacks_begin_it_again(self, tmp_path):
        first, second = (make_run(tmp_path, assorted(seed)).directory for seed in range(2))
        with Catalog.open(tmp_path) as catalog:
            with pytest.raises(OutdatedError, match="have changed"), catalog.snapshot():
                assert catalog.totals().runs == 2
                shutil.rmtree(second)
                catalog.distribution(by="tensor_id")
            with catalog.snapshot():
                assert catalog.distribution(by="run_id")["group"].unique().tolist() == [first.name]

    def test_nobody_sees_an_index_that_is_being_rebuilt(self, tmp_path, monkeypatch):
        """Also where one finds the damage who sees a part of the root, and answers are kept."""
        make_root(tmp_path, 500)
        with Catalog.open(tmp_path) as catalog:
            expected = catalog.totals()
        real, seen = intake.Intake.catch_up, []
        with Catalog.open(tmp_path) as catalog:
            catalog.cache = ResultCache(1 << 20)
            narrow, before = catalog.restricted(catalog.runs()["run_id"]), catalog.version
            other = threading.Thread(target=lambda: seen.append(catalog.totals()))

            def catch_up(self, cursor, changing):
                if not other.ident:
                    other.start()
                    other.join(0.5)
                return real(self, cursor, changing)

            monkeypatch.setattr(intake.Intake, "catch_up", catch_up)
            with open(tmp_path / "index.duckdb", "r+b") as file:
                file.seek(12288)
                file.write(bytes((tmp_path / "index.duckdb").stat().st_size - 12288))
            narrow.table("score")
            other.join()
            assert len(catalog.notices) == 1 and seen == [expected] and catalog.totals() == expected
            assert before < catalog.version == narrow.version

    def test_an_index_that_is_not_damaged_is_not_deleted(self, root):
        with Catalog.open(root) as catalog:
            before = (root / "index.duckdb").stat().st_ino
            with catalog._cursor() as cursor:
                cursor.execute("ALTER TABLE run RENAME TO other")  # another error than of a block that differs
            next(root.glob("*second*")).touch()
            catalog.sync()
            (notice,) = catalog.notices
            assert "index.duckdb cannot be used: Catalog Error" in notice and "damaged" not in notice
            assert catalog.in_memory and (root / "index.duckdb").stat().st_ino == before
            agree(catalog, root)

    def test_ctrl_c_in_a_query_is_a_keyboard_interrupt(self, tmp_path):
        """DuckDB makes a RuntimeError of it."""

        def interrupt() -> None:
            try:
                until(lambda: cursor.query_progress() >= 0, "the query to begin")
            finally:
                interrupt_main()

        other = threading.Thread(target=interrupt)
        with (
            Catalog.open(tmp_path) as catalog,
            pytest.raises(KeyboardInterrupt) as raised,
            catalog._index.cursor() as cursor,
        ):
            # Others see when the query has begun; it runs in this thread alone, which ends it at once.
            cursor.execute("SET enable_progress_bar = true; SET enable_progress_bar_print = false")
            cursor.execute("SET progress_bar_time = 0; SET threads = 1")
            other.start()
            cursor.execute("SELECT max(hash(range)) FROM range(100_000_000_000)")
        other.join()
        assert isinstance(raised.value.__cause__, RuntimeError)

    def test_ctrl_c_while_sketches_are_read_is_a_keyboard_interrupt(self, root, monkeypatch):
        """DuckDB, which reads them through Python, makes an error of its own of it."""

        def interrupted(*given):
            raise KeyboardInterrupt
            yield

        with Catalog.open(root) as catalog:
            monkeypatch.setattr(sketches, "_sums", interrupted)
            with pytest.raises(KeyboardInterrupt):
                catalog.crossed(Filter(layer_index=[1]), ("module", "operation"))

    def test_an_index_that_stays_damaged_is_refused(self, tmp_path, monkeypatch):
        make_root(tmp_path, 500)
        Catalog.open(tmp_path).close()
        with Catalog.open(tmp_path) as catalog:
            with open(tmp_path / "index.duckdb", "r+b") as file:
                file.seek(12288)
                file.write(bytes((tmp_path / "index.duckdb").stat().st_size - 12288))
            monkeypatch.setattr(catalog, "_repair", lambda error, generation: None)
            with pytest.raises(DamagedIndexError, match=r"index\.duckdb cannot be read even after a rebuild"):
                catalog.table("score")

    def test_a_deleted_index_is_rebuilt(self, root):
        Catalog.open(root).close()
        (root / "index.duckdb").unlink()
        with Catalog.open(root) as catalog:
            agree(catalog, root)

    @pytest.mark.thorough
    def test_a_second_process_answers_the_same_from_memory(self, root):
        code = (
            "import sys; from binade.data.index.catalog import Catalog\n"
            "with Catalog.open(sys.argv[1]) as c:\n"
            "    rows = c.tensors().to_csv(), c.distribution().to_csv()\n"
            "    answers = c.in_memory, c.totals(), *rows, c.sync(), c.refused\n"
            "print(*answers, sep=chr(0), end='')"
        )
        command = [sys.executable, "-c", code, str(root)]
        with Catalog.open(root) as first:
            before = (root / "index.duckdb").stat()
            second = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
            expected = [str(first.totals()), first.tensors().to_csv(), first.distribution().to_csv(), "0", "[]"]
            assert second.stdout.split("\0") == ["True", *expected]
            assert (root / "index.duckdb").stat().st_ino == before.st_ino
            agree(first, root)
        alone = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
        assert alone.stdout.split("\0") == ["False", *expected]

    def test_a_root_that_is_a_file_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        with pytest.raises(RunError, match="is a file"):
            Catalog.open(tmp_path / "file")
        assert (tmp_path / "file").read_text() == "mine"

    @pytest.mark.parametrize("name", ["nowhere", "nowhere/deeper"])
    def test_a_missing_root_is_empty_and_is_not_made(self, tmp_path, name):
        with Catalog.open(tmp_path / name) as catalog:
            self.is_empty(catalog)
        assert list(tmp_path.iterdir()) == []

    def test_an_empty_root_is_empty(self, tmp_path):
        with Catalog.open(tmp_path) as catalog:
            self.is_empty(catalog)
            assert catalog.refused == [] and not catalog.in_memory

    @staticmethod
    def is_empty(catalog: Catalog) -> None:
        assert catalog.runs().empty and catalog.tensors().empty and catalog.scores().empty
        assert list(catalog.tensors().columns) == TABLES["tensor"].names
        assert list(catalog.distribution().columns) == ["group", "bin", "count", "low", "high"]
        assert catalog.distribution(by="quant_type").empty and catalog.moments(by="layer_index").empty
        assert catalog.facets() == {} and catalog.totals().tensors == 0 and catalog.totals().elements == 0

    @pytest.mark.thorough
    def test_threads_share_a_catalog(self, root):
        with Catalog.open(root) as catalog, ThreadPoolExecutor(8) as pool:
            expected = catalog.tensors().to_csv(), catalog.distribution().to_csv(), catalog.moments().to_csv()

            def ask(number: int) -> tuple[str, ...]:
                if number % 4 == 0:
                    catalog.sync()
                return catalog.tensors().to_csv(), catalog.distribution().to_csv(), catalog.moments().to_csv()

            for answer in pool.map(ask, range(48)):
                assert answer == expected


def values(root: Path, rows: pd.DataFrame) -> np.ndarray:
    """Every value of some rows, float64, read from the files with torch."""
    parts = [torch.load(root / row.run_id / row.path, weights_only=True)["tensor"] for row in rows.itertuples()]
    return np.concatenate([part.double().numpy().reshape(-1) for part in parts])


KEPT = [
    Filter(quant_type=["mxfp8"], operation=["forward"], phase=["pre"], micro_batch=[0]),
    Filter(quant_type=["mxfp4"]),
    Filter(tensor_name=["output"]),
    Filter(tensor_name=["grad_input"]),
    Filter(quant_type=["hifp8"]),
    Filter(micro_batch=[0]),
]


@pytest.mark.parametrize("where", KEPT, ids=lambda where: where.sentence())
class TestStatistics:
    def test_distribution_counts_every_finite_value_in_its_bin(self, catalog, where):
        x = values(catalog.root, catalog.tensors(where))
        x = x[np.isfinite(x)]
        found = catalog.distribution(where)
        assert found["count"].sum() == x.size
        moments = catalog.moments(where)
        assert found["count"].sum() == moments["finite"][0]
        # numpy's own histogram over the bins' inner edges; -0 and +0 lie in two bins of one edge, so magnitudes apart
        for sign in (1, -1):
            side = found[(found["bin"] >= 2048) == (sign < 0)]
            chosen = np.abs(x[np.signbit(x) == (sign < 0)])
            inner = np.minimum(np.abs(side["low"]), np.abs(side["high"])).to_numpy()
            outer = np.maximum(np.abs(side["low"]), np.abs(side["high"])).to_numpy()
            counts = [int(((chosen >= low) & (chosen < high)).sum()) for low, high in zip(inner, outer, strict=True)]
            assert counts == side["count"].tolist()
        assert (found["low"].diff().dropna() >= 0).all()

    def test_moments_are_those_of_the_values_together(self, catalog, where):
        rows = catalog.tensors(where)
        x = values(catalog.root, rows)
        finite = x[np.isfinite(x)]
        (found,) = catalog.moments(where).to_dict("records")
        assert found["tensors"] == len(rows) and found["numel"] == x.size and found["finite"] == finite.size
        assert found["nans"] == np.isnan(x).sum() and found["infs"] == np.isinf(x).sum()
        assert found["zeros"] == (x == 0).sum()
        if not finite.size:
            assert all(pd.isna(found[name]) for name in ("mean", "std", "rms", "min", "max", "absmax", "absmin"))
            return
        for name, expected in {
            "mean": finite.mean(),
            "std": finite.std(),
            "rms": np.sqrt((finite**2).mean()),
            "min": finite.min(),
            "max": finite.max(),
            "absmax": np.abs(finite).max(),
        }.items():
            assert found[name] == pytest.approx(expected, rel=1e-9, abs=1e-300), name
        nonzero = np.abs(finite[finite != 0])
        assert found["absmin"] == nonzero.min() if nonzero.size else pd.isna(found["absmin"])

    @pytest.mark.sampled(4)
    def test_groups_add_up_to_the_whole(self, catalog, where):
        whole = catalog.moments(where)
        by_layer = catalog.moments(where, by="layer_index")
        assert by_layer["numel"].sum() == whole["numel"][0] and by_layer["tensors"].sum() == whole["tensors"][0]
        pairs = catalog.moments(where, by=("layer_index", "operation"))
        for pair in pairs.to_dict("records"):
            alone = replace(where, layer_index=[pair.pop("layer_index")], operation=[pair.pop("operation")])
            pd.testing.assert_frame_equal(catalog.moments(alone).drop(columns="group"), pd.DataFrame([pair]))
        assert pairs["tensors"].sum() == whole["tensors"][0] and len(pairs) >= len(by_layer)
        by_tensor = catalog.distribution(where, by="tensor_id").groupby("group")["count"].sum().to_dict()
        rows = catalog.tensors(where).set_index("tensor_id")
        finite = rows["numel"] - rows["nans"] - rows["infs"]
        assert by_tensor == finite[finite > 0].to_dict()


class TestErrors:
    """sqnr_db, flush_to_zero and saturated of several tensors: quantiles of their own, each counted once."""

    def moments(self, root: Path, *tensors: torch.Tensor, fmt: str) -> dict:
        make_run(root, [(x, {"format": fmt, "quant_type": fmt}) for x in tensors])
        with Catalog.open(root) as catalog:
            return catalog.moments(by="quant_type").to_dict("records")[0]

    def test_the_largest_tensor_does_not_decide(self, tmp_path):
        from binade.quant import fake_quantize

        scales = (1e6, 1.0, 1e-3, 1e-9, 30.0)
        tensors = [torch.randn(8 + index, 64) * scale for index, scale in enumerate(scales)]
        found = self.moments(tmp_path, *tensors, torch.zeros(2, 32), fmt="mxfp4")
        pairs = [(t.double().numpy(), fake_quantize(t, "mxfp4").double().numpy()) for t in tensors]
        own = {
            "sqnr_db": [10 * np.log10((x**2).sum() / ((q - x) ** 2).sum()) for x, q in pairs],
            "flush_to_zero": [((x != 0) & (q == 0)).sum() / (x != 0).sum() for x, q in pairs],
        }
        for name, values in own.items():
            expected = np.quantile(values, [0.1, 0.5, 0.9])
            assert [found[f"{name}_low"], found[name], found[f"{name}_high"]] == pytest.approx(expected, rel=1e-9)
        assert found["tensors"] == 6 and found["lost"] == 0

    def test_a_quantile_between_exact_tensors_is_infinite(self, tmp_path):
        exact, rounded = [torch.ones(4, 32)] * 2, [torch.randn(8, 32)] * 3
        found = self.moments(tmp_path, *exact, *rounded, fmt="mxfp8")
        assert found["sqnr_db_high"] == math.inf and math.isfinite(found["sqnr_db"])

    def test_sqnr_of_an_exact_format_is_infinite(self, tmp_path):
        assert self.moments(tmp_path, torch.ones(4, 32), torch.zeros(3), fmt="mxfp8")["sqnr_db"] == math.inf

    def test_sqnr_of_zeros_is_not_a_number(self, tmp_path):
        assert math.isnan(self.moments(tmp_path, torch.zeros(4, 32), fmt="mxfp8")["sqnr_db"])

    def test_a_block_lost_to_an_infinity_is_loud(self, tmp_path):
        broken = torch.randn(2, 32)
        broken[0, 0] = torch.inf
        found = self.moments(tmp_path, torch.randn(64, 32), broken, fmt="mxfp8")
        assert found["lost"] == 1 and math.isfinite(found["sqnr_db"])

    def test_operands_are_those_with_a_contracted_axis(self, root):
        frame = on_disk(root, "tensor")
        chosen = frame[frame["contracted_axis"].notna() & (frame["layer_index"] == 1)]
        expected = chosen.groupby(["component", "operation", "format"], dropna=False).agg(
            tensors=("tensor_id", "count"), numel=("numel", "sum"), nbytes=("nbytes", "sum")
        )
        with Catalog.open(root) as catalog:
            found = catalog.operands(Filter(layer_index=[1])).set_index(["component", "operation", "format"])
        pd.testing.assert_frame_equal(found, expected, check_index_type=False)
        assert len(found) == 3

    def test_operands_that_ran_as_they_are_have_none(self, tmp_path):
        make_run(tmp_path, [(torch.randn(8), {"quant_type": "bf16"})])
        with Catalog.open(tmp_path) as catalog:
            assert pd.isna(catalog.moments()["sqnr_db"][0])

    def test_scores_are_the_rows_of_the_parquet(self, root):
        with Catalog.open(root) as catalog:
            scores = catalog.scores(Filter(layer_index=[2]))
            rows = on_disk(root, "score")
            ids = catalog.tensors(Filter(layer_index=[2]))["tensor_id"]
            expected = rows[rows["tensor_id"].isin(ids)].reset_index(drop=True)
            columns = ["tensor_id", "format", *ERROR_COLUMNS]
            pd.testing.assert_frame_equal(scores[columns], expected[columns], check_exact=True)
            some = list(ids[:1])
            assert set(catalog.scores(tensor_ids=some)["tensor_id"]) <= set(some)


class TestQuestions:
    def test_order_and_limit(self, catalog):
        frame = on_disk(catalog.root, "tensor")
        found = catalog.tensors(order_by="-rms")["rms"].dropna()
        assert found.tolist() == sorted(frame["rms"].dropna(), reverse=True)
        assert catalog.tensors(order_by="-numel", limit=5)["numel"].tolist() == sorted(frame["numel"])[:-6:-1]
        assert catalog.tensors(order_by="numel")["numel"].tolist() == sorted(frame["numel"])
        assert catalog.tensors()["tensor_id"].tolist() == sorted(frame["tensor_id"])
        assert len(catalog.tensors(limit=0)) == 0

    @pytest.mark.parametrize("column", ["nothing", "numel; DROP TABLE tensor", "1", "", "-"])
    def test_unknown_columns_are_refused(self, catalog, column):
        with pytest.raises(CatalogError, match="no column"):
            catalog.tensors(order_by=column)
        for ask in (catalog.distribution, catalog.moments):
            with pytest.raises(CatalogError, match="cannot be grouped"):
                ask(by=column)
        for columns, said in ((("layer_index", column), "cannot be grouped"), ((), "no column to group by")):
            with pytest.raises(CatalogError, match=said):
                catalog.moments(by=columns)
        assert catalog.totals().tensors == 21

    def test_facets_are_what_the_other_fields_allow(self, catalog):
        frame = on_disk(catalog.root, "tensor")
        where = Filter(module=["fc1"], layer_index=[2], quant_type=["mxfp4"])
        facets, counts = catalog.facets(where), catalog.counts(where)
        assert {name: list(values) for name, values in counts.items()} == facets
        for name in ("module", "layer_index", "quant_type", "iteration"):
            chosen = frame
            for other, allowed in where.items():
                if other != name:
                    chosen = chosen[chosen[other].isin(allowed)]
            assert facets[name] == sorted(chosen[name].dropna().unique().tolist())
            assert counts[name] == chosen[name].value_counts().to_dict()
        assert "expert" not in catalog.facets(Filter(quant_type=["hifp8"]))

    def test_load_gives_the_values(self, catalog):
        run = catalog.tensors(Filter(dataset=["wikipedia"])).query("path.notna()")
        for row in run.itertuples():
            x = catalog.load(row.tensor_id)
            assert tuple(x.shape) == tuple(row.shape) and str(x.dtype) == f"torch.{row.dtype}"
            assert x.numel() * x.element_size() == row.nbytes
            assert catalog.path(row.tensor_id).is_file()

    def test_load_of_what_was_not_kept(self, catalog):
        (dropped, *_) = catalog.tensors().query("path.isna()")["tensor_id"]
        with pytest.raises(CatalogError, match="were not kept"):
            catalog.load(dropped)

    @pytest.mark.parametrize("tensor_id", ["", "nothing", "' OR 1=1 --", "../../etc/passwd"])
    def test_load_of_what_is_not_there(self, catalog, tensor_id):
        with pytest.raises(CatalogError, match="there is no tensor"):
            catalog.load(tensor_id)

    def test_load_of_a_file_that_went(self, root):
        with Catalog.open(root) as catalog:
            kept = catalog.tensors().query("path.notna()")["tensor_id"][0]
            os.unlink(catalog.path(kept))
            with pytest.raises(TensorFileError, match="missing"):
                catalog.load(kept)

    def test_no_tensor_ids_select_nothing(self, catalog):
        assert catalog.distribution(tensor_ids=[]).empty and catalog.scores(tensor_ids=[]).empty
        assert catalog.moments(tensor_ids=[]).empty

    def test_runs_are_newest_first_with_their_config(self, catalog):
        runs = catalog.runs()
        assert runs["started"].is_monotonic_decreasing
        for row in runs.itertuples():
            config = json.loads((catalog.root / row.run_id / "run.json").read_text())
            assert config.pop("crc32") and json.loads(row.config) == config
            assert row.tensors == len(catalog.tensors(Filter(run_id=[row.run_id])))
