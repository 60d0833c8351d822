"""kill -9 before each change of the file system while a job is added, started, begun, ended, cancelled, resumed or
deleted: no job is lost or run twice, and the next runner brings each to an end."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from binade.cli import main
from binade.collector import jobs
from binade.collector.cli.jobs import add_line
from binade.collector.jobs import directory, processes, queue, runner
from binade.data.run.directory import list_runs, now, read_status
from binade.data.run.run_writer import RUN_VARIABLE, RunWriter
from tests.app import roots
from tests.conftest import until
from tests.siege.files import GONE, LINE
from tests.siege.steps import killed_before, steps
from tests.siege.test_kills import check_nothing_is_left

pytestmark = pytest.mark.slow

BATCH = ("batch", *LINE[1:], "--quantization", "mxfp8,bf16")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root whose jobs end at once, with the exit status 0."""
    monkeypatch.setattr(sys, "executable", "/bin/true")
    return tmp_path / "root"


def start_again(root: Path) -> jobs.Job:
    """A root with one queued job."""
    if root.exists():
        shutil.rmtree(root)
    (job,) = add_line(root, LINE)
    return job


def launched(root: Path, job: jobs.Job) -> directory.Launch:
    """What a runner that was killed left of the start of a job."""
    launch = directory.Launch(processes.host(), processes.boot(), now(), 1 << 40, GONE)
    directory.write_launch(root, job, launch)
    return launch


def states_after(root: Path) -> list[str]:
    """The states of the jobs once a new runner has worked through the queue."""
    assert jobs.problems(root) == []
    worker = runner.Runner(root)
    until(lambda: not worker.turn() and not worker.work_left(), "the queue to be empty")
    check_nothing_is_left(root)
    views = jobs.listing(root)
    assert not any(view.active for view in views)
    return [view.state for view in views]


def test_adding(root: Path):
    counts = set()
    for _ in steps(lambda: add_line(root, BATCH)):
        found = [job.id for job in queue.read_jobs(root)]
        counts.add(len(found))
        assert found == [*range(1, len(found) + 1)]
        if root.exists():
            assert states_after(root) == ["done"] * len(found)
            assert add_line(root, LINE)[0].id > len(found)
            shutil.rmtree(root)
    assert counts == {0, 1, 2}


def test_starting(root: Path):
    start_again(root)
    for _ in steps(lambda: runner.Runner(root)._start_next()):
        assert states_after(root) == ["done"]
        start_again(root)


def test_beginning(root: Path, monkeypatch: pytest.MonkeyPatch):
    """By its command: the run is that of the job's directory, whether it is started once or twice."""
    seen = set()

    def prepare() -> jobs.Job:
        job = start_again(root)
        launched(root, job)
        monkeypatch.setenv(RUN_VARIABLE, str(root / job.run_id))
        return job

    def begin() -> None:
        RunWriter.create(root, "mine", {"recipe": "bf16"})

    job = prepare()
    for _ in steps(begin):
        seen.add(state := read_status(root / job.run_id).state)
        if state == "queued":
            assert jobs.view_of(root, job).state == "starting"
            assert not killed_before(1000, begin)  # it is started once more
        assert states_after(root) == ["crashed"]
        assert [run.run_id for run in list_runs(root)[0]] == [job.run_id]
        job = prepare()
    assert seen == {"queued", "running"}


def test_ending(root: Path):
    def end() -> None:
        (job,) = queue.read_jobs(root)
        runner.Runner(root)._settle(job, directory.read_launch(root, job), 1)

    seen = set()
    launched(root, start_again(root))
    for _ in steps(end):
        seen.update(states_after(root))
        launched(root, start_again(root))
    assert seen == {"done", "failed"}  # done: its end was not noted, and no process had begun the run


def test_cancelling(root: Path):
    for prepare in (start_again, lambda root: launched(root, start_again(root))):
        prepare(root)
        seen = set()
        for _ in steps(lambda: jobs.cancel(root, 1)):
            seen.update(states_after(root))
            prepare(root)
        assert seen == {"done", "cancelled"}


def test_deleting(root: Path):
    counts = set()

    def prepare() -> None:
        start_again(root)
        jobs.cancel(root, 1)

    prepare()
    for _ in steps(lambda: jobs.delete(root, 1)):
        counts.add(len(states_after(root)))
        prepare()
    assert counts == {0, 1}


def test_resuming(root: Path, tmp_path: Path):
    made = tmp_path / "made"
    line = [*LINE, "--no-save-tensors", "--train-iters", "1", "--checkpoint-every", "1"]
    assert main([*line, "--tensor-save-dir", str(made)]) == 0
    (run,) = roots.runs_of(made)
    roots.change_status(run, state="failed", reason="as if")
    shutil.copytree(made, root)
    plan = jobs.trained_with(run.name, dict(list_runs(root)[0][0].config))
    seen = set()
    for _ in steps(lambda: jobs.add_resumed(root, run.name, plan)):
        (found,), refused = list_runs(root)
        assert found.run_id == run.name and refused == []
        seen.add((found.status.state, *states_after(root)))
        shutil.rmtree(root)
        shutil.copytree(made, root)
    assert seen == {("failed",), ("failed", "failed"), ("queued", "done")}
