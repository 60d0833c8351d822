"""The queue with real processes: cancels at random moments, several launchers, an app that is restarted, clocks that
jump, and unrelated processes with the number of a job's process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from binade.collector import jobs
from binade.collector.cli.jobs import add_line
from binade.collector.jobs import directory, processes, runner
from binade.collector.jobs import queue as files
from binade.data.run.directory import boot
from tests.app import roots
from tests.app.tab import Tab
from tests.browser.driver import answers, free_port
from tests.collector.test_failures import check_rows
from tests.collector.test_jobs import ENDLESS, SHORT, TWO_RANKS, ended, launch, now
from tests.conftest import start_python, until
from tests.siege.attack import Attempt, attack
from tests.siege.files import LINE, command

CLOCK = Path(__file__).parent / "clock"


@contextmanager
def queue(root: Path) -> Iterator[Path]:
    """A root for jobs; at the end nothing that was started there may live. (A failed try is cleaned up by force.)"""
    try:
        yield root
    finally:
        left = [process for job in files.read_jobs(root) for process in processes.marked(root / job.run_id)]
        for process in left:
            process.send(signal.SIGKILL)
        for view in jobs.listing(root):
            if view.active:
                directory.change_launch(root, view.job, cancelled="2026-01-02")
        until(lambda: not jobs.has_runner(root), "the runner to leave", seconds=60)
    assert left == []


def runners(root: Path) -> int:
    """How many processes work through the queue."""
    found = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += entry.read_text().endswith(f"\0serve\0--tensor-save-dir\0{root}\0")
    return found


@attack("Every run is cancelled, rows and counts agree, and no process is left", tries=25, seconds=300, share=7.0)
def cancels(attempt: Attempt) -> None:
    """Eight jobs on one and on two ranks, four at a time, each cancelled at a moment of its own."""
    with queue(attempt.place / "runs") as root:
        jobs.set_at_once(root, 4)
        lines = [attempt.random.choice([ENDLESS, ENDLESS, TWO_RANKS]) for _ in range(8)]
        added = [add_line(root, line)[0] for line in lines]
        jobs.start_runner(root)
        attempt.times = len(added)
        left = {job.id: attempt.random.uniform(0, 12) for job in added}
        while left:
            time.sleep(0.05)
            for number in list(left):
                waited = jobs.view_of(root, jobs.find(root, number)).started
                left[number] -= 0.05 if waited else 0.01
                if left[number] <= 0:
                    jobs.cancel(root, number)
                    del left[number]
        until(lambda: not any(view.active for view in jobs.listing(root)), "all to end", seconds=200)
        views = jobs.listing(root)
        assert [view.state for view in views] == ["cancelled"] * 8, [(view.state, view.reason) for view in views]
        made = [view.run for view in views if view.run]
        assert {run.status.state for run in made} <= {"cancelled"}
        assert len({run.run_id for run in made}) == len(made) == len(roots.runs_of(root))
        assert check_rows(root) == sum(run.status.tensors for run in made)


@attack("Every job runs once, one at a time, and the runners exit", tries=3, seconds=300)
def launchers_at_once(attempt: Attempt) -> None:
    """Two apps and two command lines."""
    app = (
        "import sys; from pathlib import Path; from binade.collector import jobs\n"
        "from binade.collector.cli.jobs import add_line\n"
        "root = Path(sys.argv[1]); input()\n"
        "add_line(root, sys.argv[2:]); jobs.start_runner(root)"
    )
    with queue(attempt.place / "runs") as root:
        apps = [start_python("-c", app, root, *SHORT, stdin=subprocess.PIPE) for _ in range(2)]
        lines = [start_python("-m", "binade", "jobs", "add", "--tensor-save-dir", root, *SHORT) for _ in range(2)]
        for each in apps:
            assert each.stdin
            each.stdin.write("\n")
            each.stdin.flush()
        assert [each.communicate()[1] for each in [*apps, *lines]] == [""] * 4
        # Each launcher starts a runner; those that find the queue's lock held leave, and the last at the end.
        until(lambda: not any(view.active for view in jobs.listing(root)), "the jobs to end", 400)
        views = jobs.listing(root)
        assert [view.job.id for view in views] == [1, 2, 3, 4] and {view.state for view in views} <= {"done"}
        assert len(roots.runs_of(root)) == 4
        until(lambda: not runners(root), "the runners to leave")
        ran = [(view.run.config["started"], view.run.status.finished) for view in views if view.run]
        assert all(before[1] <= after[0] for before, after in pairwise(ran))


@attack("The job continues and is shown in its actual state", tries=1, seconds=900)
def restarted_apps(attempt: Attempt) -> None:
    """An app that is killed and started again while a job runs: up to 20 times."""
    attempt.times = max(2, round(20 * min(1.0, attempt.minutes / 30)))
    with queue(attempt.place / "runs") as root:
        job = launch(root, ENDLESS)
        until(lambda: now(root, job).run, "the run to begin")
        for _ in range(attempt.times):
            port = free_port()
            app = start_python("-m", "binade", "serve", "--port", port, env={"TENSOR_SAVE_DIR": str(root)})
            try:
                until(lambda app=app, port=port: answers(app.pid, f"http://127.0.0.1:{port}"), "the app to answer")
                with Tab(f"http://127.0.0.1:{port}") as tab:
                    page = tab.visit("runs", f"view=jobs&job={job.id}")
                assert "Cancel the job" in page and "Retry" not in page
            finally:
                app.kill()
                app.communicate()
            assert now(root, job).state == "running" and runners(root) == 1
        jobs.cancel(root, job.id)
        view = ended(root, job)
        assert view.state == "cancelled" and view.run and check_rows(root) == view.run.status.tensors


@attack("Jobs end as usual, with their runs and rows", tries=8, seconds=300)
def clock_jumps(attempt: Attempt) -> None:
    """The clock of the runner and of the job jumps by up to an hour and back, at random moments."""
    shift = attempt.place / "shift"
    shift.write_text("0")
    path = os.pathsep.join(filter(None, [str(CLOCK), os.environ.get("PYTHONPATH", "")]))
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": path, "SIEGE_CLOCK": str(shift)}
    jumps = attempt.random.choices([-3600, 3600, 0, -3599, 7200], k=40)
    attempt.case = f"jumps {jumps[:4]} ..."
    try:
        with queue(attempt.place / "runs") as root:
            jobs.set_at_once(root, 2)
            (short,) = add_line(root, [*SHORT, "--control-iter", "20"])
            (long,) = add_line(root, ENDLESS)
            jobs.start_runner(root)

            def jump() -> None:
                part = shift.with_suffix(".part")
                part.write_text(str(jumps.pop() if jumps else 0))
                part.replace(shift)
                time.sleep(attempt.random.uniform(0.05, 0.6))

            while now(root, short).active:
                jump()
            jobs.cancel(root, long.id)
            while now(root, long).active:
                jump()
            done, cancelled = now(root, short), now(root, long)
            assert (done.state, cancelled.state) == ("done", "cancelled"), (done.reason, cancelled.reason)
            assert done.run and cancelled.run and done.run.status.tensors == 20 * 35
            assert check_rows(root) == sum(view.run.status.tensors for view in (done, cancelled) if view.run)
    finally:
        os.environ.clear()
        os.environ |= before


@attack("An unrelated process with the same PID is neither signaled nor mistaken for the job", tries=60)
def reused_pids(attempt: Attempt) -> None:
    root = attempt.place / "runs"
    with subprocess.Popen(["sleep", "600"]) as stranger:
        try:
            theirs = processes.Process.of(stranger.pid)
            assert theirs
            cases = [
                (ticks, where) for ticks in (-1.0, 1.0, 0.5, -theirs.pid_started) for where in ("", "boot", "host")
            ]
            ticks, other = attempt.choose([*cases, (0.0, "boot"), (0.0, "host")])
            attempt.case = f"started {ticks:+} ticks, another {other or 'time'}"
            job, waiting = add_line(root, LINE)[0], add_line(root, LINE)[0]
            process = processes.Process(stranger.pid, theirs.pid_started + ticks)
            names = {"host": processes.host(), "boot": boot()} | ({other: "another"} if other else {})
            directory.write_launch(root, job, directory.Launch(**names, at=job.created, runner=process))
            roots.change_status(root / job.run_id, state="running", **names, **asdict(process))
            files.write_runner(root, process)
            if other != "host":  # a job of another machine belongs to its runner
                assert not jobs.view_of(root, job).active
            assert jobs.has_runner(root) == (not ticks)
            directory.change_launch(root, job, cancelled="2026-01-02")
            (files.folder(root) / "runner.json").unlink()
            worker = runner.Runner(root)
            worker._start = lambda job: None  # type: ignore[method-assign]
            for _ in range(3):
                worker.turn()
            command(root, "jobs", "cancel", str(waiting.id))
            assert stranger.poll() is None
        finally:
            stranger.kill()
    until(lambda: not jobs.has_runner(root), "the runner to leave")
