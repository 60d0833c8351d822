"""Writing in the background: the byte budget, blocking callers, disk errors, files that no row names."""

from __future__ import annotations

import errno
import itertools
import os
import threading
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from binade.collector.capture import writing
from binade.collector.capture.instrument import instrument
from binade.collector.capture.recorder import Recorder
from binade.collector.capture.writing import OVERHEAD, Pending, Writing
from binade.data.run.columns import Identity, TensorRow
from binade.data.run.directory import read_status
from binade.data.run.run_writer import RunWriter
from binade.data.run.segment import segment_names
from binade.data.run.tensor_files import load
from binade.quant.summary import summarize
from tests.collector.small_model import batch, build
from tests.interrupts import interrupted

pytestmark = pytest.mark.slow

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture
def run(tmp_path) -> RunWriter:
    return RunWriter.create(tmp_path, "test", {})


def name(number: int) -> Path:
    return Path("tensors", "bf16", f"{number}.pt")


def pending(run: RunWriter, number: int, x: torch.Tensor, path: Path | None) -> Pending:
    words = Identity("m", "tiny", "d", "bf16", "bf16", "linear", 1, "fc1", "linear", "forward", "pre", "input", 0, 0, 0)
    about = {"captured": datetime(2026, 1, 1), "shape": tuple(x.shape), "dtype": "bfloat16", "nbytes": x.nbytes}
    about |= {"tensor_id": f"r00-{number:06d}", "run_id": run.run_id, "identity": words, "contracted_axis": -1}
    return Pending(path, lambda: TensorRow(**about, path=path and str(path), summary=summarize(x)))


def describe() -> tuple[dict, dict]:
    return {}, {}


def values(size: int = 1000) -> torch.Tensor:
    return torch.randn(size).bfloat16()


def test_files_come_before_the_rows_that_name_them(run):
    files, tensors = Writing(run, 1 << 30), [values() for _ in range(3)]
    for number, x in enumerate(tensors):
        assert files.offer(name(number), x, describe)
        x.zero_()  # the values of that moment are kept
    kept = [load(run.directory / name(number)) for number in range(3) if files.settle() is None]
    assert all(x.any() for x in kept) and segment_names(run.directory) == []
    files.publish([pending(run, number, x, name(number)) for number, x in enumerate(kept)])
    files.settle()
    assert len(segment_names(run.directory)) == 1 and read_status(run.directory).tensors == 3
    assert files.close() is None and len(list(run.directory.rglob("*.pt"))) == 3


def test_a_budget_is_spent_to_the_end_and_never_exceeded(run):
    """What was reserved and not needed is offered again."""
    x = values()
    size = x.nbytes + OVERHEAD
    files = Writing(run, 2 * size)
    taken = [files.offer(name(number), x, describe) for number in range(8)]
    files.publish([pending(run, number, x, name(number)) for number, took in enumerate(taken) if took])
    assert files.close() is None
    written = sum(path.stat().st_size for path in run.directory.rglob("*.pt"))
    one = written // sum(taken)
    assert 2 < sum(taken) < 8 and taken == sorted(taken, reverse=True)
    assert written == read_status(run.directory).bytes <= 2 * size < written + one + OVERHEAD


def test_offering_faster_than_the_disk_blocks(run, monkeypatch):
    monkeypatch.setattr(writing, "IN_FLIGHT", 3000)
    open_disk, entered = threading.Event(), threading.Event()

    def slow() -> tuple[dict, dict]:
        entered.set()
        assert open_disk.wait(20)
        return {}, {}

    files, offered = Writing(run, 1 << 30), []
    assert files.offer(name(0), values(), slow) and entered.wait(20)
    thread = threading.Thread(target=lambda: offered.append(files.offer(name(1), values(), describe)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not offered
    open_disk.set()
    thread.join(20)
    assert offered == [True] and files.close() is None


def test_what_the_disk_refuses_is_raised_once_and_the_rest_is_kept(run):
    """A directory in the place of a file: a real refusal by the system."""
    (run.directory / name(1)).mkdir(parents=True)
    files, x = Writing(run, 1 << 30), values()
    for number in range(2):
        files.offer(name(number), x, describe)
        finish_tasks(files)
    with pytest.raises(OSError, match="Is a directory"):
        files.offer(name(2), x, describe)
    files.offer(name(2), x, describe)
    files.publish([pending(run, number, x, name(number)) for number in range(3)])
    files.settle()
    status = read_status(run.directory)
    assert status.tensors == 2 and status.bytes == sum(
        path.stat().st_size for path in run.directory.rglob("*.pt") if path.is_file()
    )
    assert files.close() is None


def finish_tasks(files: Writing) -> None:
    """Let the thread finish without raising its failures."""
    done = threading.Event()
    files._tasks.put(done.set)
    assert done.wait(20)


def test_rows_that_cannot_be_published_take_their_files_along(run):
    files, x = Writing(run, 1 << 30), values()
    files.offer(name(0), x, describe)
    (run.directory / "segments").rmdir()
    (run.directory / "segments").write_text("in the way")
    files.publish([pending(run, 0, x, name(0))])
    failure = files.close()
    assert isinstance(failure, OSError) and failure.errno in (errno.EEXIST, errno.ENOTDIR)
    assert list(run.directory.rglob("*.pt")) == []
    status = read_status(run.directory)
    assert (status.tensors, status.bytes) == (0, 0)


def test_a_file_that_no_row_names_is_deleted_at_the_end(run):
    files, x = Writing(run, 1 << 30), values()
    for number in range(2):
        files.offer(name(number), x, describe)
    files.publish([pending(run, 1, x, name(1)), pending(run, 2, x, None)])
    assert files.close() is None
    assert [path.name for path in run.directory.rglob("*.pt")] == ["1.pt"]
    status = read_status(run.directory)
    assert (status.tensors, status.tensors_without_raw) == (2, 1)
    assert os.listdir(run.directory / "segments") == segment_names(run.directory)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])])
def test_a_recorded_step_waits_for_nothing(tmp_path, device):
    """It runs through although the disk is stopped and, on a GPU, although waiting for a result is an error."""
    model = build().to(device)
    tokens, labels = (part.to(device) for part in batch())

    def step() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()

    scores = ("hifp8", "mxfp8", "mxfp4", "nvfp4")
    with Recorder(tmp_path, scores=scores) as recorder, instrument(model, "mxfp8", recorder):
        step()  # compiles what there is to compile
        recorder.step()
        recorder.settle()
        stopped = threading.Event()
        recorder.session.writing._tasks.put(lambda: stopped.wait(60))
        try:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            step()
            recorder.step()
            assert read_status(recorder.writer.directory).tensors == 70
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
            stopped.set()
    assert read_status(recorder.writer.directory).tensors == 140


def test_an_interrupt_at_any_step_stops_nobody_else(run):
    """Whatever instruction it comes at: the end is reached, every row's file is there and no other."""
    x = values(8)

    def use(files: Writing, step: int) -> None:
        files.offer(name(step), x, describe)
        files.publish([pending(run, step, x, name(step))])
        files.settle()

    for step in itertools.count():
        files = Writing(run, 1 << 30)
        came = interrupted(lambda files=files, step=step: use(files, step), step)
        end = threading.Thread(target=files.close, daemon=True)
        end.start()
        end.join(20)
        assert not end.is_alive(), f"interrupted at step {step}, the thread waits for ever"
        if not came:
            break
    assert step > 100
    tables = [pq.read_table(table) for table in run.directory.glob("segments/*/tensor.parquet")]
    rows = [path for table in tables for path in table.column("path").to_pylist()]
    assert sorted(rows) == sorted(str(path.relative_to(run.directory)) for path in run.directory.rglob("*.pt"))
    assert str(name(step)) in rows and len(rows) < step


def test_a_long_run_has_few_segments(run, monkeypatch):
    """Ten times the time has far less than ten times the segments; a row that nothing was written before is written at
    once."""
    now, counts = [0.0], []
    monkeypatch.setattr(writing, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(writing, "SHARE", 0.1)
    files, x = Writing(run, 0), values(8)
    for number in range(120):
        now[0] += 1.0
        files.publish([pending(run, number, x, None)])
        finish_tasks(files)
        if number in (11, 119):
            counts.append(len(segment_names(run.directory)))
    assert 10 < counts[0] <= 12 and counts[1] - counts[0] <= 25
    files.settle()
    now[0] = 1000.0
    files.publish([])  # as often as the status is updated
    files.publish([pending(run, 120, x, None)])
    finish_tasks(files)
    assert read_status(run.directory).tensors == 121
    assert files.close() is None
    rows = [
        row
        for segment in segment_names(run.directory)
        for row in pq.read_table(run.directory / "segments" / segment / "tensor.parquet")["tensor_id"].to_pylist()
    ]
    assert rows == [f"r00-{number:06d}" for number in range(121)]


def test_many_rows_are_not_kept_waiting(run, monkeypatch):
    monkeypatch.setattr(writing, "SHARE", 1e9)
    monkeypatch.setattr(writing, "ROWS", 3)
    files = Writing(run, 0)
    for number in range(7):
        files.publish([pending(run, number, values(8), None)])
    finish_tasks(files)
    assert len(segment_names(run.directory)) == 2
    files.settle()
    assert len(segment_names(run.directory)) == 3
    assert files.close() is None


def test_the_other_ranks_get_an_answer_and_are_written_though_a_row_fails(run):
    asked = []

    def reduction(iteration: int, own: list[TensorRow]) -> list[TensorRow]:
        asked.append((iteration, len(own)))
        return [*own, pending(run, 100 + iteration, values(8), None).row()]

    files = Writing(run, 0, reduction=reduction)
    files.publish_reduced(0, [Pending(None, lambda: 1 / 0)])
    files.publish_reduced(2, [pending(run, 2, values(8), None)])
    assert isinstance(files.close(), ZeroDivisionError)
    assert asked == [(0, 0), (2, 1)] and read_status(run.directory).tensors == 3
