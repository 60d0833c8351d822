"""The runner: one small process per root that starts the jobs, ends the cancelled ones, and notes how each ended.

`start_runner` starts it if none is running; it exits when the queue is empty. It holds a lock for its lifetime, and
decides to exit under the queue's lock, so that a job queued at that time is either seen or starts another runner. A
runner that was killed leaves its jobs running; the next one follows them.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from filelock import FileLock, Timeout

from binade.collector.jobs import slurm
from binade.collector.jobs.processes import Process, boot, host, marked, out_of_memory_kills
from binade.collector.jobs.state import how_it_ended, run_of, state_of
from binade.collector.jobs.store import (
    End,
    Execution,
    Job,
    JobError,
    at_once,
    cancelled_at,
    directory_of,
    drop_execution,
    folder,
    locked,
    numbers,
    read_execution,
    read_job,
    write_execution,
    write_runner,
)
from binade.collector.jobs.transitions import JobEvent, JobState, after
from binade.collector.settings import JOB_VARIABLE
from binade.data import runs
from binade.data.access import check_writable
from binade.data.python import package_environment
from binade.data.runs import RunError, now, rank_statuses, settle
from binade.data.store import no_link
from binade.data.text import one_line

TURN = 0.25  # seconds between two turns
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
        time.sleep(TURN)


@dataclass
class Runner:
    """children are the processes that this runner has started: exit statuses are known only for these."""

    root: Path
    process: Process = field(default_factory=Process.current)
    children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    pressed: dict[int, float] = field(default_factory=dict)  # when each job was first asked to end
    orphaned: dict[int, float] = field(default_factory=dict)  # when its first process was first found to be gone
    polled: float = -POLL  # when the cluster was last asked
    reported: dict[int, str] = field(default_factory=dict)

    def turn(self) -> bool:
        """Check every job that has not ended, and start the next ones. Returns whether any is running."""
        opened = self._open()
        on_cluster = [(job, execution) for job, execution in opened if job.on_cluster]
        running = sum(self._attend(job, execution) for job, execution in opened if execution and not job.on_cluster)
        if on_cluster and time.monotonic() - self.polled > POLL:
            with suppress(OSError):  # for example, no more processes can be started: the next turn tries again
                self._follow(on_cluster)
            self.polled = time.monotonic()
        places = at_once(self.root)
        with suppress(OSError, RunError):  # a write failed: the next turn tries again
            while running < places and self._start_next():
                running += 1
        return running > 0 or bool(on_cluster)

    def work_left(self) -> bool:
        return any(job.on_cluster or (not execution and self._has_space()) for job, execution in self._open())

    def _open(self) -> list[tuple[Job, Execution | None]]:
        """The jobs that have not ended, with their processes if they have been started.

        A job of another machine belongs to that machine's runner, a job on a cluster to any runner that has the
        cluster's commands."""
        opened = []
        for number in numbers(self.root):
            if number in self.settled:
                continue
            try:
                job = read_job(self.root, number)
                execution = read_execution(self.root, job) if job else None
            except JobError as error:
                self._report(number, error)
                continue
            if job is None:
                continue
            if execution and execution.end:
                self.settled.add(number)
            elif execution is None or (slurm.follows() if execution.cluster else execution.host == host()):
                opened.append((job, execution))
        return opened

    def _report(self, number: int, error: Exception) -> None:
        """Log a problem with a job, once."""
        if self.reported.get(number) != str(error):
            self.reported[number] = str(error)
            print(f"{now()} job {number}: {one_line(error)}", flush=True)

    # Starting

    def _has_space(self) -> bool:
        return shutil.disk_usage(self.root).free >= LEAST_SPACE

    def _start_next(self) -> bool:
        with locked(self.root):
            queued = [job for job, execution in self._open() if execution is None and not job.on_cluster]
            if not queued or not self._has_space():
                return False
            self._start(queued[0])
            return True

    def _start(self, job: Job) -> None:
        """Start its process. The files say at every moment whether there may be a process."""
        execution = Execution(host(), boot(), now(), out_of_memory_kills(), runner=self.process)
        write_execution(self.root, job, execution)
        what = ["run", "--config", str(directory_of(self.root, job) / "job.json")]
        if job.measures:
            what = job.measures.arguments
        elif job.resume:
            what = ["run", "--resume", job.resume]
        command = [sys.executable, "-P", "-m", "binade", *what, "--tensor-save-dir", str(self.root)]
        try:
            with open(directory_of(self.root, job) / "log.txt", "ab", opener=no_link) as log:
                child = subprocess.Popen(
                    command,
                    cwd=job.directory,
                    env=_environment() | {JOB_VARIABLE: job.token},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            named = f" ({error.filename})" if error.filename else ""
            reason = f"it could not be started: {error.strerror or error}{named}"
            self._note_end(job, execution, after(JobState.STARTING, JobState.FAILED), reason)
            return
        self.children[job.id] = child
        process = Process.of(child.pid) or Process(child.pid, 0.0)
        write_execution(self.root, job, replace(execution, process=process))

    # Following

    def _follow(self, opened: list[tuple[Job, Execution | None]]) -> None:
        """Ask the cluster about its jobs, end the cancelled ones and note how the others ended. Raises OSError."""
        known = [(job, execution.cluster) for job, execution in opened if execution and execution.cluster]
        if ids := [cluster.id for job, cluster in known if cancelled_at(self.root, job) is not None]:
            slurm.cancel(ids)
        cluster_jobs = slurm.poll([cluster for _, cluster in known]) if known else {}
        for job, execution in opened:
            try:
                self._follow_one(job, execution, cluster_jobs)
            except (OSError, ValueError) as error:  # as in `_attend`
                self._report(job.id, error)

    def _follow_one(self, job: Job, execution: Execution | None, cluster_jobs: Mapping[str, slurm.ClusterJob]) -> None:
        if execution is None or execution.cluster is None:
            self._lose(job)
            return
        cluster = cluster_jobs.get(execution.cluster.id, execution.cluster)
        if cluster != execution.cluster:
            execution = replace(execution, cluster=cluster)
            write_execution(self.root, job, execution)
        if cluster.state in slurm.ENDED:
            self._settle(job, execution, None)

    def _lose(self, job: Job) -> None:
        """A job is submitted while the queue is locked, so one without a number from the cluster was interrupted."""
        with locked(self.root):
            submission = read_execution(self.root, job)
            if read_job(self.root, job.id) and not (submission and (submission.cluster or submission.end)):
                state = after(JobState.QUEUED, JobEvent.SUBMIT, JobState.FAILED)
                execution = Execution(host(), boot(), now())
                self._note_end(job, execution, state, "its submission was interrupted: retry the job")

    def _attend(self, job: Job, execution: Execution) -> bool:
        """Whether the job still runs; if not, its end is recorded. A problem with one job does not affect others."""
        try:
            return self._look_after(job, execution)
        except (OSError, ValueError) as error:  # a write failed, or a file is damaged: the next turn tries again
            self._report(job.id, error)
            return execution.alive or job.id in self.children

    def _look_after(self, job: Job, execution: Execution) -> bool:
        if execution.process is None:
            return self._adopt(job, execution)
        if cancelled_at(self.root, job) is not None:
            self._press(job, execution)
        child = self.children.get(job.id)
        # A child counts as alive until its exit status is known, which may be later than its process looks dead.
        if child.poll() is None if child else execution.alive:
            if execution.runner != self.process:
                with suppress(OSError):
                    write_execution(self.root, job, replace(execution, runner=self.process))
            return True
        if execution.here and (rest := self._processes(job, execution)):
            since = self.orphaned.setdefault(job.id, time.monotonic())
            if time.monotonic() - since > NOTICE:
                _send(rest, signal.SIGKILL)
            return True
        self._settle(job, execution, child.returncode if child else None)
        return False

    def _adopt(self, job: Job, execution: Execution) -> bool:
        """A runner was killed while it started this job: find its process, if there is one, by the job's mark."""
        processes = sorted(marked(job.token), key=lambda process: (process.pid_started, process.pid))
        with locked(self.root):
            if processes:
                write_execution(self.root, job, replace(execution, process=processes[0], runner=self.process))
            elif (state := after(state_of(None, cancelled_at(self.root, job)), JobEvent.LOSE)) is JobState.QUEUED:
                drop_execution(self.root, job)
            else:
                self._note_end(job, execution, state, None)
        return bool(processes)

    def _processes(self, job: Job, execution: Execution) -> set[Process]:
        """Every live process of the job: the first one, those with its mark, and the ranks recorded by its run."""
        processes = marked(job.token) | ({execution.process} if execution.process else set())
        run = run_of(self.root, job)
        for rank in rank_statuses(run.directory) if run else []:
            if rank.host == host():
                processes.add(Process(rank.pid, rank.pid_started))
        return {process for process in processes if process.alive}

    def _press(self, job: Job, execution: Execution) -> None:
        """End a job. First its first process gets a signal, which ends the ranks and saves what was recorded; then all
        of its processes do; then they are killed."""
        if not execution.here or execution.process is None:
            return
        asked_before = execution.alive and job.id in self.pressed
        since = time.monotonic() - self.pressed.setdefault(job.id, time.monotonic())
        if since > END_ALL:
            _send(self._processes(job, execution), signal.SIGKILL)
        elif not asked_before and execution.alive:
            execution.process.send(signal.SIGTERM)
        elif since > ASK_ALL or not execution.alive:
            _send(self._processes(job, execution), signal.SIGTERM)

    def _settle(self, job: Job, execution: Execution, exit_status: int | None) -> None:
        """Record how a job ended whose last process is gone. Raises OSError."""
        run = run_of(self.root, job)
        with locked(self.root):  # a cancellation comes before this or is refused
            before = state_of(run, cancelled_at(self.root, job), execution.cluster)
            end, reason = how_it_ended(self.root, job, execution, run, exit_status)
            if end is JobState.CANCELLED and run and run.status.state != runs.CANCELLED:
                settle(run.directory, runs.CANCELLED, None)
            elif execution.cluster and run and run.status.state in (runs.RUNNING, runs.CRASHED):
                settle(run.directory, runs.FAILED, reason)  # its ranks could not report it
            self._note_end(job, execution, after(before, end), reason)
        self.children.pop(job.id, None)

    def _note_end(self, job: Job, execution: Execution, state: JobState, reason: str | None) -> None:
        write_execution(self.root, job, replace(execution, end=End(state, reason, now())))


def _send(processes: set[Process], signum: signal.Signals) -> None:
    for process in processes:
        process.send(signum)
