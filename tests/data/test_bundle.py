"""Bundles: another root explores the same runs; whatever is hostile is refused in a sentence and changes nothing."""

from __future__ import annotations

import hashlib
import io
import json
import os
import posixpath
import random
import shutil
import socket
import stat
import struct
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from binade.data.exchange import bundle
from binade.data.exchange.bundle import BundleError
from binade.data.index.catalog import Catalog, CatalogError
from binade.data.run.directory import RUNNING, RunNotes, fingerprint
from binade.data.run.events import Event, EventKind, append_event, read_events
from binade.data.run.experiment import EXPERIMENT
from binade.data.run.losses import LOSS as LOSSES
from binade.data.run.losses import first_step, read_losses
from binade.data.run.records import append_record, read_lines
from binade.data.run.run_notes import change_notes, read_notes
from binade.data.run.segment import MANIFEST, OPTIONAL
from binade.data.run.store import process_start
from binade.data.words.filter import Filter
from tests.data.builder import assorted, make_run, reseal, with_column

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("source")
    make_run(root, assorted(1), assorted(2, layer_index=2), label="first")
    make_run(root, assorted(3), label="second", recipe="mxfp4")
    return root


def run_ids(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("*/run.json"))


def everything(root: Path) -> dict[str, str]:
    """Every path under a root with its content's hash (a link's target): what must not change."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        found[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "directory"
    return found


def tables(root: Path) -> list[pd.DataFrame]:
    with Catalog.open(root) as catalog:
        return [
            catalog.tensors().drop(columns="path"),
            catalog.distribution(by="tensor_id"),
            catalog.scores(),
            catalog.runs().drop(columns=["tensors", "tensors_without_raw", "bytes", "config"]),
        ]


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both runs, the values of two tensors of the first, and a session."""
    with Catalog.open(source) as catalog:
        chosen = catalog.tensors(Filter(run_id=run_ids(source)[:1]))["tensor_id"].tolist()[:2]
    target = tmp_path_factory.mktemp("bundle") / "bundle.zip"
    bundle.write(source, target, run_ids(source), chosen, {"session.json": b'{"a": 1}'})
    return target


def test_another_root_explores_the_same(source: Path, packed: Path, tmp_path: Path):
    root = tmp_path / "new" / "root"
    steps: list[tuple[int, int]] = []
    taken = bundle.import_runs(root, packed, done=lambda count, of: steps.append((count, of)))
    assert sorted(taken.added) == run_ids(source) and not taken.kept and taken.extras == {"session.json": b'{"a": 1}'}
    assert steps[-1][0] == steps[-1][1] == len(steps)
    for ours, theirs in zip(tables(source), tables(root), strict=True):
        pd.testing.assert_frame_equal(ours, theirs)
    for run_id in run_ids(source):
        assert fingerprint(root / run_id) == fingerprint(source / run_id)
    with Catalog.open(source) as ours, Catalog.open(root) as theirs:
        there = theirs.tensors()
        assert there["path"].notna().sum() == 2
        for tensor_id in there["tensor_id"][there["path"].notna()]:
            assert torch.equal(ours.load(tensor_id), theirs.load(tensor_id))
        with pytest.raises(CatalogError, match="were not kept"):
            theirs.load(there["tensor_id"][there["path"].isna()].iloc[0])
        runs = theirs.runs().set_index("run_id").loc[run_ids(source)]
        assert (runs["tensors"] - runs["tensors_without_raw"]).tolist() == [2, 0]
        raw = [sum(path.stat().st_size for path in (root / run / "tensors").rglob("*.pt")) for run in run_ids(source)]
        assert runs["bytes"].tolist() == raw
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


@pytest.mark.thorough
def test_a_run_of_an_earlier_version_opens_unchanged_and_travels(tmp_path: Path):
    """Its table of errors lacks a column that was added since."""
    root = tmp_path / "root"
    run = make_run(root, assorted(0, format="mxfp8"))
    for file in run.directory.glob("segments/*/score.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.drop_columns(sorted(OPTIONAL & {*table.column_names})), file)
    reseal(run.directory)
    with Catalog.open(root) as catalog:
        assert not catalog.refused and len(catalog.table("score").to_pandas())
    bundle.write(root, tmp_path / "old.zip", [run.run_id], None)
    bundle.import_runs(tmp_path / "other", tmp_path / "old.zip")
    with Catalog.open(tmp_path / "other") as catalog:
        assert not catalog.refused and len(catalog.table("score").to_pandas())


def test_all_values_or_none(source: Path, tmp_path: Path):
    with Catalog.open(source) as catalog:
        rows, with_values = len(catalog.tensors()), catalog.totals().with_values
    assert with_values < rows
    whole = bundle.write(source, tmp_path / "all.zip", run_ids(source), None)
    bare = bundle.write(source, tmp_path / "none.zip", run_ids(source), [])
    assert (whole.runs, whole.tensors, whole.with_values, whole.left_out) == (2, rows, with_values, 0)
    assert (bare.with_values, bare.left_out) == (0, 0) and bare.nbytes < whole.nbytes
    bundle.import_runs(tmp_path / "again", tmp_path / "all.zip")
    bundle.write(tmp_path / "again", tmp_path / "second.zip", run_ids(source), None)
    bundle.import_runs(tmp_path / "third", tmp_path / "second.zip")  # a bundle of a bundle
    assert tables(tmp_path / "third")[0].equals(tables(source)[0])


def test_notes_and_the_events_of_every_rank_come_along(tmp_path: Path):
    run = make_run(tmp_path, assorted(1))
    (run.directory / "ranks").mkdir()
    for rank in (1, 0, 2):
        append_event(run.directory, Event(EventKind.TRIGGER, 3, f"seen on {rank}", "2026-01-02T03:04:05+00:00", rank))
    change_notes(run.directory, RunNotes("a", "#123456", "b"), RunNotes())
    bundle.write(tmp_path, tmp_path / "bundle.zip", [run.run_id], None)
    bundle.import_runs(tmp_path / "new", tmp_path / "bundle.zip")
    assert read_notes(tmp_path / "new" / run.run_id) == RunNotes("a", "#123456", "b")
    events = read_events(tmp_path / "new" / run.run_id)
    assert events == read_events(run.directory) and [event.rank for event in events] == [0, 1, 2]


def test_damaged_records_and_notes_are_left_out_and_stated(tmp_path: Path):
    """The other records keep the numbers of their lines; the first step, if it is unknown, stays unknown."""
    run = make_run(tmp_path, assorted(1))
    for iteration in range(4):
        append_record(run.directory, LOSSES, {"iteration": iteration, "loss": float(iteration)})
    file = run.directory / LOSSES.file
    file.write_bytes(file.read_bytes().replace(b": 0.0", b": 9.0").replace(b": 2.0", b": 9.0"))
    (run.directory / "notes.json").write_text("{")
    written = bundle.write(tmp_path, tmp_path / "bundle.zip", [run.run_id], None)
    records, notes = written.damaged
    assert records.startswith(f"{run.run_id}: line 1 of its loss.jsonl is damaged") and "notes.json" in notes
    bundle.import_runs(tmp_path / "new", tmp_path / "bundle.zip")
    taken = tmp_path / "new" / run.run_id
    assert read_losses(taken) == read_losses(run.directory) and len(read_losses(taken)) == 2
    assert read_lines(LOSSES, taken, LOSSES.file).numbers == [2, 4]
    assert first_step(taken) is first_step(run.directory) is None


def test_a_damaged_experiment_is_not_bundled(tmp_path: Path):
    run = make_run(tmp_path, assorted(1))
    (run.directory / EXPERIMENT).mkdir()
    (run.directory / EXPERIMENT / "results-00000-00000000.parquet").write_bytes(b"x")
    with pytest.raises(BundleError, match=r"cannot be written.*results-00000-00000000.parquet is damaged"):
        bundle.write(tmp_path, tmp_path / "bundle.zip", [run.run_id], None)


def test_a_run_that_is_here_is_kept_or_refused(source: Path, packed: Path, tmp_path: Path):
    root = tmp_path / "root"
    shutil.copytree(source, root)
    before = everything(root)
    taken = bundle.import_runs(root, packed)
    assert not taken.added and sorted(taken.kept) == run_ids(source)
    assert everything(root) == before
    changed = root / run_ids(source)[1] / "run.json"
    changed.write_text(changed.read_text().replace("mxfp4", "mxfp9"))
    shutil.rmtree(root / run_ids(source)[0])
    before = everything(root)
    with pytest.raises(BundleError, match="already exists with different content"):
        bundle.import_runs(root, packed)
    assert everything(root) == before  # the run that is absent was not added either


def test_what_cannot_be_written(source: Path, tmp_path: Path):
    writer = make_run(tmp_path / "live", assorted(5))
    writer.update(state=RUNNING, finished=None)
    with pytest.raises(BundleError, match="is running"):
        bundle.write(tmp_path / "live", tmp_path / "a.zip", [writer.run_id], None)
    with pytest.raises(BundleError, match="cannot be bundled"):
        bundle.write(source, tmp_path / "a.zip", ["absent"], None)
    with pytest.raises(BundleError, match="cannot be bundled"):
        bundle.write(source, tmp_path / "a.zip", ["../up"], None)
    damaged = tmp_path / "damaged"
    shutil.copytree(source, damaged)
    next(damaged.glob("*/segments/*/sketch.parquet")).unlink()
    with pytest.raises(BundleError, match="cannot be written"):
        bundle.write(damaged, tmp_path / "a.zip", run_ids(damaged), [])
    assert not list(tmp_path.glob("*.zip")) and not list(tmp_path.glob(".*"))


def test_values_outside_the_run_are_left_out_and_counted(source: Path, tmp_path: Path):
    root = tmp_path / "root"
    shutil.copytree(source, root)
    rows = sorted(root.glob("*/segments/*/tensor.parquet"))[0]
    table = pq.read_table(rows)
    place = table.schema.get_field_index("path")
    paths = ["/etc/hostname", "../../x.pt", *table["path"].to_pylist()[2:]]
    pq.write_table(table.set_column(place, table.schema.field("path"), pa.array(paths)), rows)
    reseal(rows.parents[2])
    written = bundle.write(root, tmp_path / "a.zip", run_ids(root), None)
    assert written.left_out == 2
    names = zipfile.ZipFile(tmp_path / "a.zip").namelist()
    assert not [name for name in names if ".." in name or "hostname" in name]


# What is hostile


class Archive:
    """A good bundle in parts, to be made bad."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            self.files = {info.filename: archive.read(info) for info in archive.infolist()}
        self.infos: dict[str, zipfile.ZipInfo] = {}
        self.claims: dict[str, int] = {}  # sizes that the archive's directory states
        self.packed = zipfile.ZIP_STORED

    def put(self, name: str, content: bytes) -> None:
        self.files[name] = content

    def reseal(self) -> None:
        """Write checksums that agree with the files, as who makes a hostile bundle would."""
        for name in [name for name in self.files if name.endswith(f"/{MANIFEST}")]:
            folder = name.removesuffix(MANIFEST)
            sums = {
                path.removeprefix(folder): {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                for path, content in self.files.items()
                if path.startswith(folder) and path != name
            }
            self.put(name, json.dumps(json.loads(self.files[name]) | {"files": sums}).encode())
        for name in [name for name in self.files if name.endswith("/run.json")]:
            with suppress(ValueError, RecursionError):
                content = json.loads(self.files[name])
                self.put(name, json.dumps({key: value for key, value in content.items() if key != "crc32"}).encode())

    def write(self, path: Path, twice: str = "") -> Path:
        with zipfile.ZipFile(path, "w", self.packed) as archive:
            for name, content in self.files.items():
                archive.writestr(self.infos.get(name, name), content)
            if twice:
                archive.writestr(twice, b"again")
        raw = bytearray(path.read_bytes())
        for name, size in self.claims.items():
            struct.pack_into("<I", raw, raw.rfind(name.encode()) - 46 + 24, size)
        path.write_bytes(raw)
        return path


def segment(archive: Archive, name: str) -> str:
    return next(path for path in archive.files if path.endswith(f"{name}.parquet"))


def every_row(column: str, value: str | int) -> Callable[[Archive], None]:
    """Rows that all have this value."""

    def change(archive: Archive) -> None:
        name = segment(archive, "tensor")
        archive.put(name, with_column(archive.files[name], column, value))

    return change


def repath(path: str) -> Callable[[Archive], None]:
    return every_row("path", path)


def run_json(**changes: Any) -> Callable[[Archive], None]:
    def change(archive: Archive) -> None:
        name = f"{run_of(archive)}/run.json"
        archive.put(name, json.dumps(json.loads(archive.files[name]) | changes).encode())

    return change


def losses(content: bytes) -> Callable[[Archive], None]:
    return lambda archive: archive.put(f"{run_of(archive)}/loss.jsonl", content)


def put(name: str, content: bytes = b"x") -> Callable[[Archive], None]:
    return lambda archive: archive.put(name, content)


def link(archive: Archive) -> None:
    name = next(path for path in archive.files if path.endswith(".pt"))
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive.infos[name] = info
    archive.put(name, b"/etc/passwd")


def bomb(archive: Archive) -> None:
    archive.packed = zipfile.ZIP_DEFLATED
    archive.put(f"{run_of(archive)}/log.txt", bytes(50 << 20))


def run_of(archive: Archive) -> str:
    return next(name for name in archive.files if name.endswith("/run.json")).removesuffix("/run.json")


def claim(size: int) -> Callable[[Archive], None]:
    """The archive's directory says that run.json has this size."""
    return lambda archive: archive.claims.update({f"{run_of(archive)}/run.json": size})


def drop(ending: str) -> Callable[[Archive], None]:
    def change(archive: Archive) -> None:
        name = next(path for path in archive.files if path.endswith(ending))
        del archive.files[name]

    return change


def status(**changes: Any) -> Callable[[Archive], None]:
    def change(archive: Archive) -> None:
        name = f"{run_of(archive)}/status.json"
        archive.put(name, json.dumps(json.loads(archive.files[name]) | changes).encode())

    return change


def long_texts(archive: Archive) -> None:
    """2.7 GB of them in memory, in a file of 1 MB."""
    table = pq.read_table(io.BytesIO(archive.files[segment(archive, "tensor")])).take(pa.array([0] * 3000))
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), ["x" * 900_000])
    rewrite(archive, table.set_column(table.schema.get_field_index("dtype"), "dtype", texts))


def many_rows(archive: Archive) -> None:
    """Three million equal rows, which take a few kilobytes in the file."""
    table = pq.read_table(io.BytesIO(archive.files[segment(archive, "tensor")])).slice(0, 1)
    columns = [
        pa.DictionaryArray.from_arrays(pa.repeat(0, 3_000_000).cast(pa.int32()), c.combine_chunks())
        if not pa.types.is_list(c.type) and not c.null_count
        else pa.nulls(3_000_000, c.type)
        for c in table.columns
    ]
    rewrite(archive, pa.table(columns, table.column_names), compression="lz4")


def packed_better(archive: Archive) -> None:
    table = pq.read_table(io.BytesIO(archive.files[segment(archive, "tensor")]))
    rewrite(archive, table, compression="zstd")


def another_column(archive: Archive) -> None:
    table = pq.read_table(io.BytesIO(archive.files[segment(archive, "tensor")]))
    rewrite(archive, table.append_column("more", pa.nulls(len(table), pa.int8())))


def rewrite(archive: Archive, table: pa.Table, compression: str = "snappy") -> None:
    sink = io.BytesIO()
    pq.write_table(table, sink, store_schema=False, compression=compression)
    archive.put(segment(archive, "tensor"), sink.getvalue())


LOSS = b'{"iteration": 0, "loss": 5.0, "seconds": 0.5, "recorded": true}\n'
HOSTILE: dict[str, tuple[Callable[[Archive], None], str]] = {
    "absolute": (put("/etc/cron.d/x"), "not a valid name for a file in a bundle"),
    "parent": (put("runs/../../x.json"), "not a valid name for a file in a bundle"),
    "parent in a run": (put("runs/a/tensors/../../../x.pt"), "not a valid name for a file in a bundle"),
    "backslash": (put("runs\\a\\run.json"), "not a valid name for a file in a bundle"),
    "drive": (put("C:/x.json"), "not a valid name for a file in a bundle"),
    "nul": (put("aa\0.json"), "not a valid name for a file in a bundle"),
    "hidden run": (put("runs/.sessions/run.json"), "not a valid name for a file in a bundle"),
    "hidden file": (put("runs/a/tensors/.x.pt"), "not a valid name for a file in a bundle"),
    "stranger": (put("runs/a/setup.py"), "not a valid name for a file in a bundle"),
    "directory": (put("runs/a/", b""), "not a valid name for a file in a bundle"),
    "the index": (put("index.duckdb"), "not a valid name for a file in a bundle"),
    "index as a run": (put("runs/index.duckdb/run.json"), "not a valid name for a file in a bundle"),
    "two cases": (put("runs/A/run.json"), "cannot be read"),
    "link": (link, "link"),
    "bomb": (bomb, "unpacks to more than 100 times"),
    "lie": (claim(3), "run.json' is damaged"),
    "no files": (lambda archive: archive.files.clear(), "it is empty"),
    "outside path": (repath("../../../etc/passwd"), "that is not in the bundle"),
    "absolute path": (repath("/etc/passwd"), "that is not in the bundle"),
    "path of no file": (repath("tensors/9999.pt"), "that is not in the bundle"),
    "path of no tensor": (repath("run.json"), "that is not in the bundle"),
    "no rows": (drop("tensor.parquet"), "cannot be read"),
    "no run.json": (drop("run.json"), "cannot be read"),
    "no parquet": (lambda archive: archive.put(segment(archive, "sketch"), b"PAR1"), "cannot be read"),
    "swapped tables": (lambda a: a.put(segment(a, "sketch"), a.files[segment(a, "score")]), "no column"),
    "long texts": (long_texts, "takes too much memory"),
    "many rows": (many_rows, "takes more than 100 times its size in memory"),
    "packed better": (packed_better, "is compressed with ZSTD: expected one of LZ4, SNAPPY, UNCOMPRESSED"),
    "another column": (another_column, "has unknown columns"),
    "running": (status(state="running", host="", pid=1), "is"),
    "odd status": (status(iteration="many"), 'iteration is "many"'),
    "odd state": (status(state="<b>"), "cannot be read"),
    "a text as capture_every": (run_json(capture_every="x"), 'capture_every is "x"'),
    "a number as recipe": (run_json(recipe=8), "recipe is 8"),
    "deep losses": (losses(b"[" * 200_000), "line 1 of its loss.jsonl is damaged: "),
    "a text as loss": (losses(LOSS + LOSS.replace(b"5.0", b'"high"')), "line 2 of its loss.jsonl is damaged: "),
    "a text as iteration": (losses(LOSS.replace(b" 0,", b' "x",')), "line 1 of its loss.jsonl is damaged: "),
    "a text as seconds": (losses(LOSS.replace(b"0.5", b'"long"')), "line 1 of its loss.jsonl is damaged: "),
    "a loss that is none": (losses(LOSS.replace(b"5.0", b"NaN")), "line 1 of its loss.jsonl is damaged: "),
    "an axis that is not there": (every_row("contracted_axis", 9), "cannot be indexed: .*contracted_axis"),
    "an axis of shards that is not there": (every_row("shard_axis", -4), "cannot be indexed: .*shard_axis"),
    "deep run.json": (lambda a: a.put(f"{run_of(a)}/run.json", b"[" * 100_000), "cannot be read"),
}  # fmt: skip


def hostile(case: str, packed: Path) -> tuple[Archive, str]:
    """A bundle with the change of a case of HOSTILE, and words of the sentence that refuses it."""
    change, words = HOSTILE[case]
    archive = Archive(packed)
    change(archive)
    archive.reseal()
    if case == "running":
        name = f"{run_of(archive)}/status.json"
        archive.put(name, json.dumps(json.loads(archive.files[name]) | live()).encode())
        words = "is running"
    return archive, words


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_bundles_change_nothing(case: str, packed: Path, tmp_path: Path):
    archive, words = hostile(case, packed)
    refused(archive.write(tmp_path / "hostile.zip"), tmp_path, words)


def flip(ending: str) -> Callable[[Archive], None]:
    """A file with another byte, in an archive whose own checksum agrees."""

    def change(archive: Archive) -> None:
        name = next(path for path in archive.files if path.endswith(ending))
        content = bytearray(archive.files[name])
        content[len(content) // 2] ^= 1
        archive.put(name, bytes(content))

    return change


def in_manifest(change: Callable[[dict[str, Any]], None]) -> Callable[[Archive], None]:
    def changed(archive: Archive) -> None:
        name = next(path for path in archive.files if path.endswith("manifest.json"))
        content = json.loads(archive.files[name])
        change(content)
        archive.put(name, json.dumps(content).encode())

    return changed


def drop_segment(archive: Archive) -> None:
    first = segment(archive, "tensor").removesuffix("tensor.parquet")
    archive.files = {name: content for name, content in archive.files.items() if not name.startswith(first)}


OUTSIDE = {"../../../../../../../../etc/passwd": {"bytes": 1, "sha256": "0" * 64}}
CHANGED: dict[str, tuple[Callable[[Archive], None], str]] = {
    "sketches": (flip("sketch.parquet"), "sketch.parquet (has SHA-256|cannot be read)"),
    "values": (flip(".pt"), "pt has SHA-256"),
    "configuration": (run_json(recipe="bf16"), "run.json is damaged: it has CRC-32"),
    "no values": (drop(".pt"), "that is not in the bundle"),
    "no table": (drop("score.parquet"), "cannot be read"),
    "no manifest": (drop("manifest.json"), "manifest.json is missing"),
    "no segment": (drop_segment, "a segment is missing"),
    "another run": (in_manifest(lambda content: content.update(run_id="x")), "it was written by run x"),
    "another file": (in_manifest(lambda content: content["files"].update(OUTSIDE)), "manifest.json cannot be read"),
    "odd digest": (in_manifest(lambda content: content.update(digests={"a": "x"})), "manifest.json cannot be read"),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CHANGED)
def test_the_checksums_of_a_run_are_compared(case: str, packed: Path, tmp_path: Path):
    change, words = CHANGED[case]
    archive = Archive(packed)
    change(archive)
    refused(archive.write(tmp_path / "changed.zip"), tmp_path, words)


def test_losses_cut_short_by_a_crash_are_taken_in(packed: Path, tmp_path: Path):
    archive = Archive(packed)
    losses(LOSS + LOSS[:20])(archive)
    taken = bundle.import_runs(tmp_path / "root", archive.write(tmp_path / "cut.zip"))
    found = read_losses(tmp_path / "root" / run_of(archive).removeprefix("runs/"))
    assert len(taken.added) == 2 and [record["loss"] for record in found] == [5.0]


def live() -> dict[str, Any]:
    return {
        "state": "running",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": process_start(os.getpid()),
    }


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_twice(packed: Path, tmp_path: Path):
    refused(Archive(packed).write(tmp_path / "twice.zip", twice="session.json"), tmp_path, "twice")
    refused(Archive(packed).write(tmp_path / "cased.zip", twice="Session.json"), tmp_path, "not a valid name")


def refused(path: Path, tmp_path: Path, words: str = "") -> None:
    """The bundle is refused in one sentence, and nothing is changed: neither the root nor what lies beside it."""
    root = tmp_path / "root"
    root.mkdir(exist_ok=True)
    (root / "mine.txt").write_text("mine")
    before = everything(tmp_path)
    with pytest.raises(BundleError, match=words) as error:
        bundle.import_runs(root, path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert everything(tmp_path) == before


def test_a_check_that_refuses_changes_nothing(packed: Path, tmp_path: Path):
    def check(beside: dict[str, bytes]) -> None:
        raise BundleError("no such session")

    with pytest.raises(BundleError, match="no such session"):
        bundle.import_runs(tmp_path / "root", packed, check)
    assert not (tmp_path / "root").exists()


def test_read_only(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BINADE_READ_ONLY", "1")
    with pytest.raises(ValueError, match="BINADE_READ_ONLY"):
        bundle.import_runs(tmp_path / "root", packed)
    assert not (tmp_path / "root").exists()


@pytest.mark.thorough
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=some.integers(0, 2**32), kind=some.sampled_from(["flip", "cut", "insert", "zero", "junk"]))
def test_damaged_archives(seed: int, kind: str, packed: Path, tmp_path_factory: pytest.TempPathFactory):
    """Bytes changed anywhere: taken as it is or refused, and a refusal leaves nothing."""
    chance = random.Random(seed)
    raw = bytearray(packed.read_bytes())
    # Most of the archive is tensors and tables: aim at the directory at its end as often.
    at = chance.randrange(len(raw)) if chance.random() < 0.5 else len(raw) - 1 - chance.randrange(min(len(raw), 6000))
    match kind:
        case "flip":
            raw[at] ^= 1 << chance.randrange(8)
        case "cut":
            del raw[at : at + chance.randrange(1, 200)]
        case "insert":
            raw[at:at] = chance.randbytes(chance.randrange(1, 50))
        case "zero":
            raw[at : at + 16] = bytes(len(raw[at : at + 16]))
        case "junk":
            raw = bytearray(chance.randbytes(chance.randrange(400)))
    place = tmp_path_factory.mktemp("damaged")
    (place / "b.zip").write_bytes(raw)
    try:
        taken = bundle.import_runs(place / "root", place / "b.zip")
    except BundleError as refused:
        message = str(refused)
        assert "\n" not in message and not (place / "root").exists()
    else:
        assert len(taken.added) == 2 and taken.extras == {"session.json": b'{"a": 1}'}
    shutil.rmtree(place)


PARTS = ("runs", "..", ".", "", "a", "segments", "tensors", "run.json", "x.pt", "/", "~", "tensor.parquet", "\u202e")
names = some.lists(
    some.sampled_from(PARTS),
    min_size=1,
    max_size=6,
).map("/".join)


@settings(max_examples=1500)
@given(names | some.text(min_size=1, max_size=40))
def test_no_name_leads_out_of_a_run(name: str):
    """A name that is taken stays below runs/<run>/ and is in the normal form already; or it is a .json beside."""
    if bundle._RUN_FILE.fullmatch(name):
        assert posixpath.normpath(name) == name and name.isascii()
        assert name.startswith("runs/") and len(name.split("/")) >= 3
        assert not any(part.startswith(".") for part in name.split("/"))
    elif bundle._EXTRA.fullmatch(name):
        assert "/" not in name and name.endswith(".json")


def _varint(value: int, length: int = 0) -> bytes:
    """An integer as Thrift's compact protocol writes it, in more bytes than it needs if so requested."""
    value, out = value << 1, bytearray()
    while value > 127 or len(out) < length - 1:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def test_a_table_whose_metadata_lies_about_its_values_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A list of eight million zeros in a file of a few kilobytes, which says that it has ten."""
    count, path = 8_000_000, tmp_path / "runs" / "run" / "segments" / "s" / "t.parquet"
    path.parent.mkdir(parents=True)
    column = pa.ListArray.from_arrays([0, count], pa.array(np.zeros(count, np.int64)))
    pq.write_table(pa.table({"x": column}), path, compression="lz4", store_schema=False, write_statistics=False)
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    true = _varint(count)
    assert true in content[start:]
    path.write_bytes(content[:start] + content[start:].replace(true, _varint(10, len(true))))
    assert pq.read_metadata(path).row_group(0).column(0).num_values == 10 and path.stat().st_size < 1 << 20
    monkeypatch.setattr(bundle, "SMALL_TABLES", 32 << 20)
    with pytest.raises(BundleError, match=r"t.parquet|memory"):
        bundle._check_sizes([path])
    path.write_bytes(content)
    with pytest.raises(BundleError, match="takes more than 100 times"):
        bundle._check_sizes([path])
