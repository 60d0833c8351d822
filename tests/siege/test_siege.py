"""Single tries that once failed, of attacks that no other test covers."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from binade.app import state as app_state
from binade.collector import jobs
from binade.collector.cli.jobs import add_line
from binade.collector.cli.options import parse
from binade.collector.jobs import processes, runner, state, store
from binade.collector.settings import JOB_VARIABLE
from binade.data.catalog import Catalog
from binade.data.events import read_events
from binade.data.runs import DONE, RunWriter, boot, list_runs
from tests.conftest import start_python, until
from tests.siege import files, urls
from tests.siege.attack import ATTACKS, Attempt

pytestmark = pytest.mark.slow


@pytest.fixture
def besiege(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """besiege(attack, case, number): one try, which raises if something does not hold."""
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path))
    shared = tmp_path_factory.getbasetemp() / "siege"
    shared.mkdir(exist_ok=True)

    def besiege(name: str, wanted: Any, number: int = 1, root: Path = tmp_path) -> None:
        place = tmp_path / "place"
        place.mkdir()
        ATTACKS[name].run(Attempt(number, random.Random(number), place, shared, root, wanted=wanted))

    yield besiege
    app_state._open.clear()


PROCESS, JOB = "0002/process.json", "0002/job.json"


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in (PROCESS, JOB) for how in ("empty", "deep", "a FIFO", "a directory", "missing")),
        *((JOB, f"a field {index}") for index in (0, 1, 7, 10, 13)),
        *((PROCESS, f"a field {index}") for index in (0, 6, 8, 20)),
        (PROCESS, "a field is added"), (PROCESS, "a terabyte"), (PROCESS, "a link to a device"),
        (PROCESS, "a link to nothing"),
        ("0002/cancel.json", "a FIFO"), ("0002/log.txt", "a FIFO"), ("0002/log.txt", "a link to a device"),
        ("queue.json", "a field 6"), ("queue.json", "a FIFO"), ("runner.json", "a FIFO"), ("runner.log", "a FIFO"),
    ],
)  # fmt: skip
def test_a_damaged_job_is_named_and_the_others_go_on(besiege, name: str, how: str):
    besiege("damaged-jobs", (name, how))


def test_the_page_names_a_damaged_job(besiege):
    besiege("damaged-jobs", (PROCESS, "an object"), number=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("line", range(12))
def test_a_job_that_is_another_command_is_never_started(besiege, monkeypatch, line: int):
    monkeypatch.setattr(Attempt, "choose", lambda self, cases: cases[line])
    besiege("lines-of-jobs", None)


@pytest.mark.parametrize("text", ["a\0b", "--help", "\u202e"])
def test_a_text_is_the_value_of_its_option(besiege, text: str):
    besiege("options-of-jobs", ("--dataset", text))


def test_a_clock_that_is_set_back_parts_no_job_from_its_run(tmp_path):
    """A run that has started an hour before its process, by the clock on the wall."""
    (job,) = add_line(tmp_path, files.LINE)
    writer = RunWriter.create(tmp_path, "mine", {"job_token": job.token})
    process = processes.Process(writer.status.pid, writer.status.pid_started)
    store.write_execution(tmp_path, job, store.Execution(processes.host(), boot(), "2999-01-01", process=process))
    assert jobs.view_of(tmp_path, job).run.run_id == writer.run_id


@pytest.mark.parametrize("name", ["run.json", "status.json", "loss.jsonl", "events.jsonl", "twin.jsonl"])
def test_a_fifo_in_a_run_is_not_waited_for(tmp_path, name: str):
    writer = RunWriter.create(tmp_path, "mine", {})
    (writer.directory / name).unlink(missing_ok=True)
    os.mkfifo(writer.directory / name)
    found, refused = list_runs(tmp_path)
    if name in ("events.jsonl", "twin.jsonl"):
        assert read_events(writer.directory) == []
        writer.finish(DONE)
        with Catalog.open(tmp_path) as catalog:
            refused = catalog.refused
    assert [name in line and "not a regular file" in line for line in refused] == [True] * (name != "loss.jsonl")
    assert name != "loss.jsonl" or state.losses_of(found[0]) == []


def test_many_negations_are_no_recursion():
    with pytest.raises(ValueError, match="layer99"):
        parse([*files.LINE, "--skip-layers", "!" * 5001 + "layer99"])


def test_a_real_time_signal_has_no_name(tmp_path):
    (job,) = add_line(tmp_path, files.LINE)
    execution = store.Execution(processes.host(), boot(), job.created, process=files.GONE)
    runner.Runner(tmp_path)._settle(job, execution, -int(signal.SIGRTMIN) - 3)
    assert jobs.view_of(tmp_path, job).reason == "the collector was ended by signal 37"


@pytest.mark.thorough
def test_a_siege_that_is_stopped_leaves_nothing(tmp_path):
    """No process of its attacks, such as their runners and jobs, and no file of theirs."""

    def ours(mark: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TMPDIR", "").startswith(str(tmp_path)) and mark in process.environ():
                    found.append(process)
        return found

    command = ("-m", "tests.siege", "--only", "cancels", "--root", tmp_path, "--seed", "1")
    siege = start_python(*command, env={"TMPDIR": str(tmp_path)})
    until(lambda: ours(JOB_VARIABLE), "a job to be started")
    siege.terminate()
    assert siege.communicate(timeout=60)[1].endswith("siege: stopped: what it had started was ended\n")
    assert siege.returncode == 130 and not ours("TMPDIR") and list(tmp_path.iterdir()) == []


assert urls  # registers its attacks
