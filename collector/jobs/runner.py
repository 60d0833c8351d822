"""The runner: one small process per root that starts the jobs, ends the cancelled ones, and notes how each ended.

`start_runner` starts it if none is running; it exits when the queue is empty. It holds a lock for its lifetime, and
decides to exit under the queue's lock, so that a job queued at that time is either seen or starts another runner. A
runner that was killed leaves its jobs running; the next one follows them.

launch.json is written before a process is started, and the process carries the directory of its run in its environment.
So wherever a runner is killed, the next one finds a process of the job, or none, and then the job is queued again.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from filelock import FileLock, Timeout

from binade.collector.jobs import slurm
from binade.collector.jobs.directory import (
    OUTPUT_FILE,
    Job,
    JobError,
    Launch,
    change_launch,
    directory_of,
    drop_launch,
    read_job,
    read_job_status,
    read_launch,
    write_launch,
)
from binade.collector.jobs.processes import Process, boot, host, marked, out_of_memory_kills
from binade.collector.jobs.queue import at_once, folder, locked, queue_mark, write_runner
from binade.collector.jobs.state import JobView, has_runner, how_it_ended, processes_of
from binade.data.exchange.python import package_environment
from binade.data.run import directory as runs
from binade.data.run.access import check_writable, read_only
from binade.data.run.directory import RunError, now, run_directories
from binade.data.run.run_writer import RUN_VARIABLE, settle
from binade.data.run.store import no_link
from binade.data.words.text import one_line

TURN = 0.1  # seconds between two turns, unless a child ends
POLL = 3.0  # seconds between two queries of a cluster
# Seconds until a job that should end gets the next signal: first to all of its processes, then SIGKILL.
ASK_ALL, END_ALL = 12.0, 18.0
NOTICE = 12.0  # seconds that the ranks have to notice that their launcher is gone, and to say so
LEAST_SPACE = 1 << 20  # bytes free, or the next job waits


def start_runner(root: Path) -> None:
    """Start the runner if none is running. Raises ReadOnlyError, RunError, OSError."""
    check_writable("starting a run")
    with locked(root):
        lock = _hold(root)
        if lock is None:
            return
        lock.release()
        with open(folder(root) / "runner.log", "ab", opener=no_link) as log:
            started = subprocess.Popen(
                [sys.executable, "-P", "-m", "binade", "jobs", "serve", "--tensor-save-dir", str(root)],
                cwd="/",
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    threading.Thread(target=started.wait, daemon=True).start()  # it would stay behind as a zombie otherwise


def ensure_runner(root: Path, views: Sequence[JobView]) -> None:
    """Start the runner if jobs wait and no runner is alive, for example after a restart of the machine. Raises as
    `start_runner`."""
    if any(view.active for view in views) and not read_only() and not has_runner(root):
        start_runner(root)


def _hold(root: Path) -> FileLock | None:
    """Take the runner's lock; None if another process holds it. Call it only under the queue's lock: otherwise a test
    of the lock could make a runner that has just started exit."""
    lock = FileLock(folder(root) / "runner.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return None
    return lock


def _environment() -> dict[str, str]:
    return package_environment() | {"PYTHONUNBUFFERED": "1"}


def serve(root: Path) -> None:
    """Work through the queue until it is empty. Returns at once if another runner is active. Raises ReadOnlyError."""
    check_writable("starting a run")
    with locked(root):
        lock = _hold(root)
    if lock is None:
        return
    runner = Runner(root)
    write_runner(root, runner.process)
    while folder(root).is_dir():  # a root that was deleted must not come back
        if not runner.turn():
            with locked(root):
                if not runner.work_left():
                    lock.release()
                    return
        runner.rest()


@dataclass
class Runner:
    """children are the processes that this runner has started: exit statuses are known only for these. All others are
    by the name of the run."""

    root: Path
    process: Process = field(default_factory=Process.current)
    children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    mark: tuple[int, int] = (0, 0)  # of queue.json when `settled` was empty
    settled: set[str] = field(default_factory=set)  # runs that were not queued, or have ended
    pressed: dict[str, float] = field(default_factory=dict)  # when each job was first asked to end
    orphaned: dict[str, float] = field(default_factory=dict)  # when its first process was first found to be gone
    polled: float = -POLL  # when the cluster was last asked
    reported: dict[str, str] = field(default_factory=dict)

    def turn(self) -> bool:
        """Check every job that has not ended, and start the next ones. Returns whether any is running."""
        opened = self._open()
        on_cluster = [(job, launch) for job, launch in opened if job.on_cluster]
        running = sum(self._attend(job, launch) for job, launch in opened if launch and not job.on_cluster)
        if on_cluster and time.monotonic() - self.polled > POLL:
            with suppress(OSError):  # for example, no more processes can be started: the next turn tries again
                self._follow(on_cluster)
            self.polled = time.monotonic()
        places = at_once(self.root)
        with suppress(OSError, RunError):  # a write failed: the next turn tries again
            while running < places and self._start_next():
                running += 1
        return running > 0 or bool(on_cluster)

    def rest(self) -> None:
        """Wait for TURN, or until the first of the children that run ends."""
        running = next((child for child in self.children.values() if child.poll() is None), None)
        if running is None:
            time.sleep(TURN)
        else:
            with suppress(subprocess.TimeoutExpired):
                running.wait(TURN)

    def work_left(self) -> bool:
        self.settled.clear()  # one that added a job may have been killed before it changed queue.json
        return any(job.on_cluster or (not launch and self._has_space()) for job, launch in self._open())

    def _open(self) -> list[tuple[Job, Launch | None]]:
        """The jobs that have not ended, in the order of the queue, with their launches if they have been started.

        A job of another machine belongs to that machine's runner, a job on a cluster to any runner that has the
        cluster's commands."""
        if (mark := queue_mark(self.root)) != self.mark:
            self.settled.clear()
            self.mark = mark
        opened = []
        for directory in run_directories(self.root):
            if directory.name in self.settled:
                continue
            try:
                job = read_job(directory)
                launch = read_launch(self.root, job) if job else None
                waits = job is not None and (
                    (launch is not None and launch.ended is None)
                    or (launch is None and read_job_status(self.root, job).state == runs.QUEUED)
                )
            except JobError as error:
                self._report(directory.name, error)
                continue
            if job is None or not waits:
                self.settled.add(directory.name)
            elif launch is None or (slurm.follows() if launch.cluster else launch.host == host()):
                opened.append((job, launch))
        return sorted(opened, key=lambda pair: pair[0].position)

    def _report(self, name: str, error: Exception) -> None:
        """Log a problem with a job, once."""
        if self.reported.get(name) != str(error):
            self.reported[name] = str(error)
            print(f"{now()} {name}: {one_line(error)}", flush=True)

    # Starting

    def _has_space(self) -> bool:
        return shutil.disk_usage(self.root).free >= LEAST_SPACE

    def _start_next(self) -> bool:
        with locked(self.root):
            queued = [job for job, launch in self._open() if launch is None and not job.on_cluster]
            if not queued or not self._has_space():
                return False
            self._start(queued[0])
            return True

    def _start(self, job: Job) -> None:
        """Start its process. The files say at every moment whether there may be a process."""
        launch = Launch(host(), boot(), now(), out_of_memory_kills(), self.process)
        write_launch(self.root, job, launch)
        directory = directory_of(self.root, job)
        command = [
            sys.executable,
            "-P",
            "-m",
            "binade",
            *job.started_as(self.root),
            "--tensor-save-dir",
            str(self.root),
        ]
        try:
            with open(directory / OUTPUT_FILE, "ab", opener=no_link) as output:
                self.children[job.run_id] = subprocess.Popen(
                    command,
                    cwd=job.directory,
                    env=_environment() | {RUN_VARIABLE: os.path.realpath(directory)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            named = f" ({error.filename})" if error.filename else ""
            self._end(job, launch, runs.FAILED, f"it could not be started: {error.strerror or error}{named}")

    # Following a cluster

    def _follow(self, opened: list[tuple[Job, Launch | None]]) -> None:
        """Ask the cluster about its jobs, end the cancelled ones and note how the others ended. Raises OSError."""
        known = [(job, launch.cluster) for job, launch in opened if launch and launch.cluster]
        cancelled = {job.run_id for job, launch in opened if launch and launch.cancelled}
        if ids := [cluster.id for job, cluster in known if job.run_id in cancelled]:
            slurm.cancel(ids)
        cluster_jobs = slurm.poll([cluster for _, cluster in known]) if known else {}
        for job, launch in opened:
            try:
                if launch is None or launch.cluster is None:
                    self._lose(job)
                    continue
                cluster = cluster_jobs.get(launch.cluster.id, launch.cluster)
                if cluster != launch.cluster:
                    launch = replace(launch, cluster=cluster)
                    with locked(self.root):
                        change_launch(self.root, job, cluster=cluster)
                if cluster.state in slurm.ENDED:
                    self._settle(job, launch, None)
            except (OSError, ValueError) as error:  # as in `_attend`
                self._report(job.run_id, error)

    def _lose(self, job: Job) -> None:
        """A job is submitted while the queue is locked, so one without a number from the cluster was interrupted."""
        with locked(self.root):
            if read_job(directory_of(self.root, job)) and read_launch(self.root, job) is None:
                reason = "its submission was interrupted: retry the job"
                self._end(job, Launch(host(), boot(), now()), runs.FAILED, reason)

    # Following processes of this machine

    def _attend(self, job: Job, launch: Launch) -> bool:
        """Whether the job still runs; if not, its end is recorded. A problem with one job does not affect others."""
        try:
            return self._look_after(job, launch)
        except (OSError, ValueError) as error:  # a write failed, or a file is damaged: the next turn tries again
            self._report(job.run_id, error)
            return job.run_id in self.children

    def _look_after(self, job: Job, launch: Launch) -> bool:
        child, first = self.children.get(job.run_id), self._first(job, launch)
        if launch.cancelled:
            self._press(job, launch, first)
        # A child counts as alive until its exit status is known, which may be later than its process looks dead.
        if child.poll() is None if child else first is not None and first.alive:
            self._adopt(job, launch)
            return True
        if launch.here and (left := processes_of(self.root, job)):
            self._adopt(job, launch)
            if child or first:  # it had a first process, which is gone
                since = self.orphaned.setdefault(job.run_id, time.monotonic())
                if time.monotonic() - since > NOTICE:
                    _send(left, signal.SIGKILL)
            return True
        if launch.here and child is None and first is None:
            self._take_back(job)
        else:
            self._settle(job, launch, child.returncode if child else None)
        return False

    def _first(self, job: Job, launch: Launch) -> Process | None:
        """The process that the run depends on; None if it is of another runner and has not begun the run, or is not of
        this machine."""
        if child := self.children.get(job.run_id):
            return Process.of(child.pid)
        status = read_job_status(self.root, job)
        if not launch.here or status.state == runs.QUEUED:
            return None
        return Process(status.pid, status.pid_started)

    def _adopt(self, job: Job, launch: Launch) -> None:
        """Follow a job that another runner has started."""
        if launch.runner != self.process:
            with suppress(OSError, RunError), locked(self.root):
                change_launch(self.root, job, runner=self.process)

    def _take_back(self, job: Job) -> None:
        """A runner was killed while it started this job, and there is no process: it is queued again."""
        with locked(self.root):
            launch = read_launch(self.root, job)
            if launch and launch.cancelled:
                self._end(job, launch, runs.CANCELLED, None)
            elif not marked(directory_of(self.root, job)):
                drop_launch(self.root, job)

    def _press(self, job: Job, launch: Launch, first: Process | None) -> None:
        """End a job. First its first process gets a signal, which ends the ranks and saves what was recorded; then all
        of its processes do; then they are killed."""
        if not launch.here:
            return
        alive = first is not None and first.alive
        asked_before = alive and job.run_id in self.pressed
        since = time.monotonic() - self.pressed.setdefault(job.run_id, time.monotonic())
        if since > END_ALL:
            _send(processes_of(self.root, job), signal.SIGKILL)
        elif first and alive and not asked_before:
            first.send(signal.SIGTERM)
        elif since > ASK_ALL or not alive:
            _send(processes_of(self.root, job), signal.SIGTERM)

    # Ending

    def _settle(self, job: Job, launch: Launch, exit_status: int | None) -> None:
        """Record how a job ended whose last process is gone. Raises OSError."""
        with locked(self.root):  # a cancellation comes before this or is refused
            launch = replace(read_launch(self.root, job) or launch, cluster=launch.cluster)
            status = read_job_status(self.root, job)
            state, reason = how_it_ended(self.root, job, launch, status, exit_status)
            if launch.cluster and state == runs.CRASHED:
                state = runs.FAILED
            self._end(job, launch, state, reason)
        self.children.pop(job.run_id, None)

    def _end(self, job: Job, launch: Launch, state: runs.RunState, reason: str | None) -> None:
        """Write the state of a run that has not ended by itself, then that nothing of it is left."""
        directory = directory_of(self.root, job)
        status = read_job_status(self.root, job)
        if (status.state, status.reason) != (state, reason):
            settle(directory, state, reason)
        write_launch(self.root, job, replace(launch, ended=now()))


def _send(processes: set[Process], signum: signal.Signals) -> None:
    for process in processes:
        process.send(signum)
