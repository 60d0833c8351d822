"""The runner: one small process a root, which starts the jobs, ends those that are cancelled, and notes how they ended.

`wake` starts it where none lives; it leaves when the queue is empty. It holds a lock for as long as it lives, and
decides to leave under the queue's lock, so that a job queued meanwhile either is seen or wakes another. A runner that
was killed leaves its jobs running; the next one takes them over.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from binade.collector.jobs.processes import MARK, Process, boot, host, living, marked, out_of_memory_kills
from binade.collector.jobs.state import Started, run_of
from binade.collector.jobs.store import Job, at_once, folder, locked, numbers, place, read_job, read_json, write_json
from binade.data import runs
from binade.data.access import check_writable
from binade.data.runs import RunInfo, now, rank_statuses, settle

PROJECT = Path(__file__).parents[3]
TURN = 0.25  # seconds between looks
# Seconds after which a job that is to end is pressed harder: first every process of it is asked, then ended.
ASK_ALL, END_ALL = 12.0, 18.0
NOTICE = 12.0  # seconds that the ranks have to notice that who started them is gone, and to say so
LEAST_SPACE = 1 << 20  # bytes free, or the next job waits


def wake(root: Path) -> None:
    """See to it that somebody works through the queue. Raises ReadOnlyError, RunError, OSError."""
    check_writable("starting a run")
    with locked(root):
        lock = _hold(root)
        if lock is None:
            return
        lock.close()
        with open(folder(root) / "runner.log", "ab") as log:
            started = subprocess.Popen(
                [sys.executable, "-P", "-m", "binade", "jobs", "serve", "--tensor-save-dir", str(root)],
                cwd=PROJECT,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    threading.Thread(target=started.wait, daemon=True).start()  # it would stay behind as a zombie otherwise


def _hold(root: Path) -> IO[bytes] | None:
    """The runner's lock, None where another holds it. Only under the queue's lock: a look at it would turn away one
    that comes to stay."""
    handle = open(folder(root) / "runner.lock", "ab")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        return None
    return handle


def _environment() -> dict[str, str]:
    """The project is found wherever the job was asked for."""
    paths = [str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def serve(root: Path) -> None:
    """Work through the queue until it is empty; at once, if somebody else does already. Raises ReadOnlyError."""
    check_writable("starting a run")
    with locked(root):
        lock = _hold(root)
    if lock is None:
        return
    with lock:
        me = Process.of(os.getpid())
        assert me
        own = {"pid": me.pid, "pid_started": me.started, "host": host(), "boot": boot()}
        write_json(folder(root) / "runner.json", own)
        runner = Runner(root)
        while True:
            if not folder(root).is_dir():  # the root was deleted: it is not to come back
                return
            busy = runner.turn()
            if not busy:
                with locked(root):
                    if not runner.work_left():
                        lock.close()
                        return
            time.sleep(TURN)


@dataclass
class Runner:
    """children are the processes that this runner has started itself: only their exit statuses can be known."""

    root: Path
    children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    pressed: dict[int, float] = field(default_factory=dict)  # since when a job is to end
    orphaned: dict[int, float] = field(default_factory=dict)  # since when its first process is gone

    def turn(self) -> bool:
        """Look at every job that has not ended, and start what there is a place for. Whether any runs."""
        running = sum(self._attend(job, started) for job, started in self._open() if started)
        places = at_once(self.root)
        with suppress(OSError):  # the disk refuses: it is tried again
            while running < places and self._start_next():
                running += 1
        return running > 0

    def work_left(self) -> bool:
        return any(started is None and self._has_space() for _, started in self._open())

    def _open(self) -> list[tuple[Job, Started | None]]:
        """The jobs that have not ended, with their processes if they have been started."""
        found = []
        for number in numbers(self.root):
            if number in self.settled:
                continue
            if (place(self.root, number) / "end.json").exists():
                self.settled.add(number)
                continue
            job = read_job(self.root, number)
            if job is None:
                continue
            started = Started.read(self.root, job)
            if started is None or started.host == host():  # another machine's jobs are its runner's
                found.append((job, started))
        return found

    # Starting

    def _has_space(self) -> bool:
        return shutil.disk_usage(self.root).free >= LEAST_SPACE

    def _start_next(self) -> bool:
        with locked(self.root):
            queued = [job for job, started in self._open() if started is None]
            if not queued or not self._has_space():
                return False
            self._start(queued[0])
            return True

    def _start(self, job: Job) -> None:
        """Start its process; what is on disk says at every moment whether there may be one."""
        directory, kills = place(self.root, job), out_of_memory_kills()
        note = {"pid": 0, "pid_started": 0.0, "host": host(), "boot": boot(), "at": now(), "oom_kills": kills}
        write_json(directory / "process.json", note)
        command = [sys.executable, "-P", "-m", "binade", *job.arguments, "--tensor-save-dir", str(self.root)]
        try:
            with open(directory / "log.txt", "ab") as log:
                child = subprocess.Popen(
                    command,
                    cwd=job.directory,
                    env=_environment() | {MARK: job.token},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            reason = f"it could not be started: {error.strerror or error}{_named(error)}"
            write_json(directory / "end.json", {"exit_status": None, "cancelled": False, "at": now(), "reason": reason})
            return
        self.children[job.id] = child
        self._note(job, note, Process.of(child.pid) or Process(child.pid, 0.0))

    def _note(self, job: Job, note: dict, process: Process) -> None:
        write_json(place(self.root, job) / "process.json", note | {"pid": process.pid, "pid_started": process.started})

    # Following

    def _attend(self, job: Job, started: Started) -> bool:
        """Whether the job still runs; one that has ended is settled."""
        if started.process is None:
            return self._adopt(job)
        child = self.children.get(job.id)
        if child:
            child.poll()
        cancel = read_json(place(self.root, job) / "cancel.json")
        if cancel is not None:
            self._press(job, started)
        if started.alive:
            return True
        if started.here and (rest := self._processes(job, started)):
            since = self.orphaned.setdefault(job.id, time.monotonic())
            if time.monotonic() - since > NOTICE:
                _send(rest, signal.SIGKILL)
            return True
        self._settle(job, started, child.returncode if child else None, cancel)
        return False

    def _adopt(self, job: Job) -> bool:
        """A runner was killed while it started this job: its process, if there is one, carries the job's mark."""
        note = read_json(place(self.root, job) / "process.json") or {}
        found = sorted(marked(job.token), key=lambda process: (process.started, process.pid))
        if not found:
            (place(self.root, job) / "process.json").unlink(missing_ok=True)
            return False
        self._note(job, note, found[0])
        return True

    def _processes(self, job: Job, started: Started) -> set[Process]:
        """Every live process of the job: the first, those that carry its mark, the ranks that its run has recorded."""
        assert started.process
        found = {started.process} | marked(job.token)
        run = run_of(self.root, started)
        for rank in rank_statuses(run.directory) if run else []:
            if rank.host == host():
                found.add(Process(rank.pid, rank.pid_started))
        return living(found)

    def _press(self, job: Job, started: Started) -> None:
        """End a job: ask its first process, which asks the ranks and writes down what was recorded; then all of them;
        then end them."""
        assert started.process
        if not started.here:
            return
        asked = started.alive and job.id in self.pressed
        since = time.monotonic() - self.pressed.setdefault(job.id, time.monotonic())
        if since > END_ALL:
            _send(self._processes(job, started), signal.SIGKILL)
        elif not asked and started.alive:
            started.process.send(signal.SIGTERM)
        elif since > ASK_ALL or not started.alive:
            _send(self._processes(job, started), signal.SIGTERM)

    def _settle(self, job: Job, started: Started, exit_status: int | None, cancel: dict | None) -> None:
        """Write down how a job ended whose last process is gone."""
        run = run_of(self.root, started)
        with suppress(OSError):  # a full disk: the run itself says how it ended, and it is tried again
            state = run.status.state if run else None
            if cancel and run and (state in (runs.CRASHED, runs.RUNNING) or _failed_since(run, cancel.get("at", ""))):
                settle(run.directory, runs.CANCELLED, None)
                state = runs.CANCELLED
            end = {
                "exit_status": exit_status,
                "cancelled": cancel is not None and state not in (runs.DONE, runs.FAILED),
                "out_of_memory": started.here and out_of_memory_kills() > started.oom_kills,
                "at": now(),
            }
            write_json(place(self.root, job) / "end.json", end)
        self.children.pop(job.id, None)


def _failed_since(run: RunInfo, asked: str) -> bool:
    """Whether a run failed while it was being cancelled: a rank whose neighbour has been ended says so."""
    return run.status.state == runs.FAILED and (run.status.finished or "") >= asked


def _send(processes: set[Process], signum: signal.Signals) -> None:
    for process in processes:
        process.send(signum)


def _named(error: OSError) -> str:
    return f" ({error.filename})" if error.filename else ""
