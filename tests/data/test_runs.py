"""Run directories and segments: what is there after a writer died, and what a reader makes of damage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from binade.data.index.catalog import Catalog
from binade.data.run.directory import CRASHED, DONE, FAILED, RUNNING, RunError, list_runs, read_run, resolve_root
from binade.data.run.losses import LOSS, read_losses
from binade.data.run.records import read_lines
from binade.data.run.run_writer import RunWriter, settle
from binade.data.run.segment import TABLES, segment_names, write_segment
from binade.data.run.store import process_start
from binade.quant.summary import summarize
from tests.collector.forked import forked, kill_at
from tests.data.builder import CONFIG, assorted, make_run, reseal, row, with_column

pytestmark = pytest.mark.slow

STEMS = {name: TABLES[name] for name in ("tensor", "sketch", "score")}


def test_a_segment_holds_what_was_given(tmp_path):
    tensors = assorted(0)
    rows = [row("r", i, x, None, **{k: v for k, v in words.items() if k != "raw"}) for i, (x, words) in
            enumerate(tensors)]  # fmt: skip
    write_segment(tmp_path / "segments", "s", rows)
    assert segment_names(tmp_path) == ["s"]
    tables = {stem: pq.read_table(tmp_path / "segments" / "s" / f"{stem}.parquet") for stem in STEMS}
    assert {stem: table.schema for stem, table in tables.items()} == STEMS
    records = tables["tensor"].to_pylist()
    assert [record["tensor_id"] for record in records] == [r.tensor_id for r in rows]
    for record, (x, words) in zip(records, tensors, strict=True):
        assert record["shape"] == list(x.shape) and record["numel"] == x.numel()
        assert record["dtype"] == str(x.dtype).removeprefix("torch.")
        assert record["format"] == words.get("format")
        assert (record["sqnr_db"] is None) == ("format" not in words)
        finite = x[x.isfinite()].double()
        assert record["nans"] == int(x.isnan().sum()) and record["infs"] == int(x.isinf().sum())
        assert record["zeros"] == int((x == 0).sum())
        if finite.numel():
            assert record["min"] == float(finite.min()) and record["max"] == float(finite.max())
            assert record["mean"] == pytest.approx(float(finite.mean()), rel=1e-12, abs=1e-15)
    sketch = tables["sketch"].to_pandas().groupby("tensor_id")["count"].sum()
    for r, (x, _) in zip(rows, tensors, strict=True):
        assert sketch.get(r.tensor_id, 0) == int(x.isfinite().sum())
        assert summarize(x).counts.sum() == sketch.get(r.tensor_id, 0)
    assert len(tables["score"]) == 2 * sum("format" in words for _, words in tensors)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("call", "count"), [("fsync", 1), ("fsync", 2), ("fsync", 3), ("rename", 1)])
def test_a_killed_writer_leaves_no_visible_part(tmp_path, call, count):
    """Killed at a call of os.fsync or os.rename: the moments between which a segment comes to be."""

    def write() -> None:
        writer = RunWriter.create(tmp_path, "killed", CONFIG)
        rows = [row(writer.run_id, i, torch.randn(16, 32), None, format="mxfp8") for i in range(3)]
        write_segment(writer.directory / "segments", "rank00-000001", rows)
        kill_at(call, count)
        write_segment(writer.directory / "segments", "rank00-000002", rows)

    assert forked(write, {}) == [-signal.SIGKILL]
    (run,), refused = list_runs(tmp_path)
    assert refused == [] and run.status.state == CRASHED and "killed" in run.status.reason
    assert run.status.finished == run.status.heartbeat
    assert run.segments == ["rank00-000001"]
    with Catalog.open(tmp_path) as catalog:
        assert catalog.totals().tensors == 3 and catalog.refused == []
        assert catalog.runs()["state"].tolist() == [CRASHED]


def test_a_segment_is_not_written_twice(tmp_path):
    rows = [row("r", 0, torch.ones(3), None)]
    write_segment(tmp_path, "s", rows)
    before = (tmp_path / "s" / "tensor.parquet").read_bytes()
    with pytest.raises(OSError, match="not empty"):
        write_segment(tmp_path, "s", rows)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert (tmp_path / "s" / "tensor.parquet").read_bytes() == before


def test_a_run_appears_whole(tmp_path):
    writer = RunWriter.create(tmp_path / "deep" / "root", "label", {"model": "m"})
    assert [p.name for p in (tmp_path / "deep" / "root").iterdir()] == [writer.run_id]
    run = read_run(writer.directory)
    assert run.status.state == RUNNING and run.config["model"] == "m" and run.config["run_id"] == writer.run_id
    writer.finish(FAILED, "no reason")
    status = read_run(writer.directory).status
    assert (status.state, status.reason) == (FAILED, "no reason") and status.finished
    assert {p.name for p in writer.directory.iterdir()} == {"run.json", "status.json", "tensors", "segments"}


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_root_that_cannot_be_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match=r"cannot write to .*--tensor-save-dir"):
        RunWriter.create(tmp_path / "file" / below, "label", {})
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_what_a_killed_process_left_is_gone_when_a_run_goes_on(tmp_path):
    writer = RunWriter.create(tmp_path, "x", {"recipe": "bf16"})
    # The number of a process in a container is always 1.
    for name in (".rank00-000001.1.part", ".rank00-000006.0abc.gone"):
        (writer.directory / "segments" / name).mkdir(parents=True)
        (writer.directory / "segments" / name / "tensor.parquet").write_bytes(b"half")
    (writer.directory / "segments" / ".snapshots").mkdir()  # of a file system
    writer.finish(FAILED, "killed")
    RunWriter.reopen(writer.directory)
    assert [path.name for path in (writer.directory / "segments").iterdir()] == [".snapshots"]


def test_a_run_of_one_process_keeps_its_counts_when_its_end_is_written_for_it(tmp_path):
    run = make_run(tmp_path, assorted(1))
    settle(run.directory, FAILED, "no reason")
    status = read_run(run.directory).status
    assert (status.state, status.tensors) == (FAILED, run.status.tensors) and status.tensors


def test_a_config_that_is_no_json_leaves_no_run(tmp_path):
    with pytest.raises(TypeError):
        RunWriter.create(tmp_path, "label", {"x": object()})
    assert list(tmp_path.iterdir()) == []


class TestState:
    def claim(self, root: Path, **status) -> str:
        writer = RunWriter.create(root, "claims", {})
        (writer.directory / "status.json").write_text(json.dumps(asdict(replace(writer.status, **status))))
        return read_run(writer.directory).status.state

    def test_a_live_process_runs(self, tmp_path):
        assert self.claim(tmp_path) == RUNNING

    def test_a_dead_process_crashed(self, tmp_path):
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            started = process_start(child.pid)
            assert self.claim(tmp_path, pid=child.pid, pid_started=started) == RUNNING
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, not yet reaped
            assert self.claim(tmp_path, pid=child.pid, pid_started=started) == CRASHED
        assert self.claim(tmp_path, pid=child.pid, pid_started=started) == CRASHED

    def test_another_process_by_the_same_number_is_not_it(self, tmp_path):
        assert self.claim(tmp_path, pid=os.getpid(), pid_started=process_start(os.getpid()) - 1) == CRASHED

    def test_a_finished_run_needs_no_process(self, tmp_path):
        assert self.claim(tmp_path, state=DONE, pid=2**22 + 1) == DONE


def status_text(**changes) -> bytes:
    return json.dumps({"state": "done", "pid": 1, "pid_started": 1.0} | changes).encode()


BROKEN = {
    "run.json empty": ("run.json", b""),
    "run.json cut short": ("run.json", b'{"model": "llama'),
    "run.json not an object": ("run.json", b"[1, 2]"),
    "run.json not UTF-8": ("run.json", b'{"model": "\xff\xfe"}'),
    "run.json too deep": ("run.json", b"[" * 100_000),
    "run.json of a huge number": ("run.json", b'{"a": ' + b"9" * 5000 + b"}"),
    "run.json started at no time": ("run.json", b'{"started": "yesterday"}'),
    "run.json started at a number": ("run.json", b'{"started": 5}'),
    "run.json asks for a text of iterations": ("run.json", b'{"control_iter": "many"}'),
    "run.json with half a character": ("run.json", b'{"model": "\\ud800"}'),
    "run.json with a text as capture_every": ("run.json", b'{"capture_every": "x"}'),
    "run.json that records every 0th iteration": ("run.json", b'{"capture_every": 0}'),
    "run.json with a list of weights": ("run.json", b'{"weights": [1]}'),
    "run.json of weights at a number": ("run.json", b'{"weights": {"path": 5}}'),
    "run.json with a truth as tp": ("run.json", b'{"tp": true}'),
    "run.json with a number among operands": ("run.json", b'{"operands": ["linear", 5]}'),
    "run.json with texts as ranks": ("run.json", b'{"ranks": ["0"]}'),
    "run.json with a word for raw": ("run.json", b'{"raw": "yes"}'),
    "run.json of a list as model": ("run.json", b'{"model": ["x"]}'),
    "status.json empty": ("status.json", b""),
    "status.json a list": ("status.json", b"[]"),
    "status.json without a state": ("status.json", b'{"pid": 1, "pid_started": 1.0}'),
    "status.json of unknown keys": ("status.json", status_text(mood="fine")),
    "status.json of an unknown state": ("status.json", status_text(state="asleep")),
    "status.json with a number as state": ("status.json", status_text(state=5)),
    "status.json with a list as state": ("status.json", status_text(state=[])),
    "status.json with a text as iteration": ("status.json", status_text(iteration="x")),
    "status.json of a huge iteration": ("status.json", status_text(iteration=10**30)),
    "status.json finished at no time": ("status.json", status_text(finished="x")),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_is_named_and_the_others_shown(tmp_path, name):
    good = make_run(tmp_path, assorted(1), label="good")
    bad = make_run(tmp_path, assorted(2), label="bad")
    file, content = BROKEN[name]
    (bad.directory / file).write_bytes(content)
    with Catalog.open(tmp_path) as catalog:
        assert len(catalog.refused) == 1 and bad.run_id in catalog.refused[0]
        assert len(catalog.refused[0]) < 400 and "\n" not in catalog.refused[0]
        assert catalog.runs()["run_id"].tolist() == [good.run_id]
        assert set(catalog.tensors()["run_id"]) == {good.run_id}


@pytest.mark.parametrize("name", ["run.json started at no time", "status.json a list"])
def test_a_run_that_breaks_later_is_dropped_and_may_heal(tmp_path, name):
    run = make_run(tmp_path, assorted(2))
    file, content = BROKEN[name]
    sound = (run.directory / file).read_bytes()
    with Catalog.open(tmp_path) as catalog:
        (run.directory / file).write_bytes(content)
        catalog.sync()
        assert catalog.totals().tensors == 0 and catalog.runs().empty and len(catalog.refused) == 1
        (run.directory / file).write_bytes(sound)
        catalog.sync()
        assert catalog.totals().tensors == 7 and catalog.refused == []


def test_what_is_no_run_is_passed_over_by_name(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / os.fsdecode(b"\xff")).mkdir()
    runs, refused = list_runs(tmp_path)
    assert runs == [] and len(refused) == 2
    assert "notes is not a run: run.json is missing" in refused
    assert list_runs(tmp_path / "nowhere") == ([], [])


@pytest.mark.parametrize(
    ("label", "named"),
    [
        ("meta-llama/Llama-3.2_1B", "meta-llama-Llama-3.2_1B"),
        ("../../x", "-..-x"),
        (".hidden", "hidden"),
        ("größe 1\n\0", "gr--e-1--"),
        ("", "run"),
        ("x" * 999, "x" * 128),
    ],
)
def test_a_label_is_part_of_a_plain_name(tmp_path, label, named):
    writer = RunWriter.create(tmp_path / "runs", label, CONFIG)
    assert [writer.directory] == list((tmp_path / "runs").iterdir()) and len(list(tmp_path.iterdir())) == 1
    assert writer.run_id[15:].removeprefix("_").rpartition("_")[0] == named
    assert list_runs(tmp_path / "runs")[0][0].run_id == writer.run_id


def test_a_pid_that_is_no_number_is_nobody():
    assert process_start("a\0b") is None  # type: ignore[arg-type]
    assert process_start(2**22 + 1) is None


def test_losses_survive_a_crash_in_the_last_line(tmp_path):
    writer = RunWriter.create(tmp_path, "x", CONFIG)
    assert read_losses(writer.directory) == []
    for i in range(3):
        writer.append_loss({"iteration": i, "loss": 5.0 - i})
    with open(writer.directory / "loss.jsonl", "a") as file:
        file.write('{"iteration": 3, "lo')
    assert [record["loss"] for record in read_losses(writer.directory)] == [5.0, 4.0, 3.0]


GOOD = b'{"iteration": 3, "loss": 5.0, "seconds": 0.5, "time": 1e9, "recorded": true}'


@pytest.mark.parametrize(
    "line",
    [
        *(b"[" * 200_000, b"17", b"{}", b'"x"'),
        *(GOOD.replace(b"5.0", bad) for bad in (b'"high"', b"NaN", b"-Infinity", b"true", b"9" * 400)),
        *(GOOD.replace(b"3,", bad + b",") for bad in (b'"x"', b"1.5", b"null", b"9" * 30)),
        *(GOOD.replace(b"0.5", bad) for bad in (b'"long"', b"Infinity", b"[]")),
        GOOD.replace(b"1e9", b'"noon"'),
    ],
    ids=lambda line: line.decode()[:60],
)
def test_what_is_no_loss_is_left_out_and_named(tmp_path, line):
    path = tmp_path / "loss.jsonl"
    path.write_bytes(GOOD + b"\n" + line + b"\n")
    assert read_losses(tmp_path) == [json.loads(GOOD)]
    assert "line 2 of its loss.jsonl is damaged: " in (read_lines(LOSS, tmp_path, "loss.jsonl").problem or "")


def test_an_axis_that_the_shape_has_not_is_refused(tmp_path):
    good, bad = (make_run(tmp_path, assorted(seed), label="made") for seed in (1, 2))
    (path,) = bad.directory.glob("segments/*/tensor.parquet")
    path.write_bytes(with_column(path.read_bytes(), "contracted_axis", 9))
    reseal(bad.directory)
    with Catalog.open(tmp_path) as catalog:
        assert set(catalog.tensors()["run_id"]) == {good.run_id}
        (reason,) = catalog.refused
        assert bad.run_id in reason and "contracted_axis" in reason and "\n" not in reason


def test_the_root_is_the_given_one_then_the_environment_then_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "env"))
    assert resolve_root(tmp_path / "given") == tmp_path / "given"
    assert resolve_root() == tmp_path / "env"
    monkeypatch.delenv("TENSOR_SAVE_DIR")
    assert resolve_root() == Path.cwd() / "data" / "runs"
    assert resolve_root("~/x") == Path.home() / "x"
    with pytest.raises(RunError, match=r"a\\udcff is not valid Unicode"):
        resolve_root(os.fsdecode(b"a\xff"))
    with pytest.raises(RunError, match="~nobody-of-that-name is not a user's home"):
        resolve_root("~nobody-of-that-name")


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/a", Path("s3://bucket/a"), "gs://b", "https://example.com/a"])
def test_a_url_is_not_a_root(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="the root is a URL: expected a directory") as raised:
        resolve_root(url)
    assert "secret" not in str(raised.value)


def test_times_are_in_utc_wherever_the_machine_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        before = f"{datetime.now(UTC):%Y%m%d_%H%M%S}"
        writer = make_run(tmp_path, assorted(1), started="2026-01-02T03:04:05+05:30")
        assert before <= writer.run_id[:15] <= f"{datetime.now(UTC):%Y%m%d_%H%M%S}"
        with Catalog.open(tmp_path) as catalog:
            assert catalog.runs()["started"].tolist() == [pd.Timestamp("2026-01-01 21:34:05")]
    finally:
        monkeypatch.undo()
        time.tzset()
