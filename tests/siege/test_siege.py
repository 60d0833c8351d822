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

from binade.app.frame import state as app_state
from binade.collector import jobs
from binade.collector.cli.jobs import add_line
from binade.collector.cli.options import parse
from binade.collector.jobs import directory, processes, runner, state
from binade.data.index.catalog import Catalog
from binade.data.run.directory import DONE, list_runs
from binade.data.run.events import read_events
from binade.data.run.run_writer import RUN_VARIABLE, RunWriter
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


LAUNCH, STATUS, JOB = "launch.json", "status.json", "job.json"


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, how) for name in (LAUNCH, STATUS, JOB) for how in ("empty", "deep", "a FIFO", "a directory")),
        *((name, "missing") for name in (LAUNCH, STATUS, JOB)),
        *((JOB, f"a field {index}") for index in (0, 1, 7, 10, 13)),
        *((LAUNCH, f"a field {index}") for index in (0, 6, 8, 20)),
        (LAUNCH, "a field is added"), (LAUNCH, "a terabyte"), (LAUNCH, "a link to a device"),
        (LAUNCH, "a link to nothing"),
        ("output.txt", "a FIFO"), ("output.txt", "a link to a device"),
        ("queue.json", "a field 6"), ("queue.json", "a FIFO"), ("runner.json", "a FIFO"), ("runner.log", "a FIFO"),
    ],
)  # fmt: skip
def test_a_damaged_job_is_named_and_the_others_go_on(besiege, name: str, how: str):
    besiege("damaged-jobs", (name, how))


def test_the_page_names_a_damaged_job(besiege):
    besiege("damaged-jobs", (LAUNCH, "an object"), number=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("line", range(12))
def test_a_job_that_is_another_command_is_never_started(besiege, monkeypatch, line: int):
    monkeypatch.setattr(Attempt, "choose", lambda self, cases: cases[line])
    besiege("lines-of-jobs", None)


@pytest.mark.parametrize("text", ["a\0b", "--help", "\u202e"])
def test_a_text_is_the_value_of_its_option(besiege, text: str):
    besiege("options-of-jobs", ("--dataset", text))


@pytest.mark.parametrize("name", ["run.json", "status.json", "loss.jsonl", "events.jsonl"])
def test_a_fifo_in_a_run_is_not_waited_for(tmp_path, name: str):
    writer = RunWriter.create(tmp_path, "mine", {})
    (writer.directory / name).unlink(missing_ok=True)
    os.mkfifo(writer.directory / name)
    found, refused = list_runs(tmp_path)
    if name == "events.jsonl":
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
    launch = directory.Launch(processes.host(), processes.boot(), job.created)
    runner.Runner(tmp_path)._settle(job, launch, -int(signal.SIGRTMIN) - 3)
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
    until(lambda: ours(RUN_VARIABLE), "a job to be started")
    siege.terminate()
    assert siege.communicate(timeout=60)[1].endswith("siege: stopped: what it had started was ended\n")
    assert siege.returncode == 130 and not ours("TMPDIR") and list(tmp_path.iterdir()) == []


assert urls  # registers its attacks
