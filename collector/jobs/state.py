"""The state of a job, from files on disk and from its processes.

Until the runner has noted how a job ended, the job is active as long as any process of it lives, or the runner that
follows it: only that runner knows the exit status, so no state is shown that it could contradict later. If that runner
is gone too, the state follows from the same evidence that the next runner will use.
"""

from __future__ import annotations

import re
import signal
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from binade.collector.jobs.estimate import step_times
from binade.collector.jobs.processes import boot, host, marked, out_of_memory_kills
from binade.collector.jobs.slurm import ENDS, ClusterJob
from binade.collector.jobs.store import (
    Execution,
    Job,
    JobError,
    cancelled_at,
    directory_of,
    read_execution,
    read_jobs,
    read_runner,
)
from binade.collector.jobs.transitions import ACTIVE, JobEvent, JobState, after
from binade.collector.training.checkpoints import last
from binade.collector.training.config import RunConfig
from binade.data import runs
from binade.data.runs import RUN_FILE, RunError, RunInfo, read_run, run_directories, sound_losses
from binade.data.store import no_link
from binade.data.text import signal_name

ADVICE = {
    JobState.FAILED: "Read the reason and the end of the log, correct the cause, and retry.",
    JobState.CRASHED: "Retry. If it happens again, the end of the log shows how far it got.",
    JobState.KILLED: (
        "Its process was killed. Retry. If it happens again, find out what kills processes on this machine."
    ),
    JobState.NO_MEMORY: (
        "Use fewer layers, a shorter sequence, a smaller micro-batch or the tiny size, and run fewer jobs at once."
    ),
    JobState.NO_DISK: (
        "Free space, or delete runs; a smaller byte budget, or recording without values, takes less space."
    ),
    JobState.RESTARTED: "The machine went down while the job was running. Retry.",
    JobState.TIME_LIMIT: "What was recorded is kept. Request a longer limit with --time, or train fewer iterations.",
    JobState.NODE_LOST: "Retry: the cluster may use another node.",
}
_NO_DISK = re.compile(r"No space left|Disk quota exceeded", re.I)
_NO_MEMORY = re.compile(
    r"out of memory|MemoryError|can't allocate memory|Cannot allocate memory|not enough memory|"
    r"exceeded (job )?memory limit|oom-kill event",  # as Slurm says it
    re.I,
)
PEER_LOST = "lost the connection to another rank"  # as PeerLostError says, in a module that imports torch
_TIME_LIMIT = re.compile(r"came near its time limit")
_OF_SLURM = re.compile(r"(slurmstepd|srun|slurmd)\S*: error: .*(memory limit|oom|[Kk]illed|[Nn]ode)")
_WAS_KILLED = re.compile(r"was killed by SIGKILL|^srun: error: .*: Killed$")
TAIL = 16_384  # bytes of a log that are read


@dataclass(frozen=True)
class JobView:
    """The current state of a job. reason and advice are for one that failed; started and ended are ISO 8601 in UTC; run
    is None before the run directory exists, and once it is deleted; cluster is for one on a cluster."""

    job: Job
    state: JobState
    reason: str | None = None
    run: RunInfo | None = None
    started: str | None = None
    ended: str | None = None
    cluster: ClusterJob | None = None

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    @property
    def advice(self) -> str | None:
        return ADVICE.get(self.state)


@dataclass(frozen=True)
class Progress:
    """Iterations done and in total, warm-up included; estimated seconds left, None while there is no estimate."""

    done: int
    total: int
    seconds_left: float | None

    @property
    def share(self) -> float:
        return min(self.done / self.total, 1.0) if self.total else 0.0


_jobs: dict[Path, tuple[tuple[int, int], str]] = {}  # by run directory: which run.json was read, and its job


def runs_by_job(root: Path) -> dict[str, Path]:
    """The run directory of each job, by the job's token."""
    directories = {}
    for entry in reversed(run_directories(root)):  # for copied runs, the first by name
        with suppress(RunError, OSError):  # no run, damaged, or just deleted
            written = (entry / RUN_FILE).stat()
            mark = written.st_ino, written.st_mtime_ns
            if entry not in _jobs or _jobs[entry][0] != mark:
                _jobs[entry] = mark, str(read_run(entry).config.get("job_token"))
            directories[_jobs[entry][1]] = entry
    return directories


def view_of(root: Path, job: Job, known: dict[str, Path] | None = None) -> JobView:
    """The current state of the job. known: `runs_by_job` of the root, if that has been read already. Raises JobError if
    the job's files are damaged."""
    execution = read_execution(root, job)
    if execution is None:
        return JobView(job, JobState.QUEUED)
    cancelled = cancelled_at(root, job)
    cluster = execution.cluster
    if execution.process is None and cluster is None:
        if execution.end:
            return JobView(job, execution.end.state, execution.end.reason, ended=execution.end.at)
        return JobView(job, state_of(None, cancelled))
    lives = execution.end is None and _lives(job, execution)
    if not lives:  # nothing writes any more: the files are final
        execution = read_execution(root, job) or execution
    run = run_of(root, job, known)
    if run is None and not lives:
        run = run_of(root, job)
    started = (run.config.get("started") if run and not job.resume else None) or execution.at
    if lives and (cluster or execution.host == host() or run is None or run.status.state == runs.RUNNING):
        return JobView(job, state_of(run, cancelled, cluster), None, run, started, cluster=cluster)
    end = execution.end
    if end:
        state, reason = end.state, end.reason
    else:
        outcome, reason = how_it_ended(root, job, execution, run, None)
        state = after(state_of(run, cancelled, cluster), outcome)
    if state is JobState.DONE and run is None and not job.measures:  # a later measurement continues the run
        reason = "its run has been deleted"
    noted, finished = end.at if end else None, run.status.finished if run else None
    # For a crashed run, the status only has the last heartbeat.
    ended = noted or finished if run and run.status.state == runs.CRASHED else finished or noted
    return JobView(job, state, reason, run, started, ended, cluster)


def resumable(view: JobView) -> bool:
    """Whether the job's run can be continued from a checkpoint, on this machine."""
    if view.active or view.run is None or view.job.on_cluster:
        return False
    with suppress(RunError):
        return bool(last(view.run))
    return False


def state_of(run: RunInfo | None, cancelled: str | None, cluster: ClusterJob | None = None) -> JobState:
    """The state of a job that was started or submitted and has not ended."""
    started = cluster is None or not cluster.waits
    events = [
        *([JobEvent.SUBMIT] if cluster else []),
        *([JobEvent.START] if started else []),
        *([JobEvent.RECORD] if run and started else []),
        *([JobEvent.CANCEL] if cancelled is not None else []),
    ]
    return after(JobState.QUEUED, *events)


def run_of(root: Path, job: Job, known: dict[str, Path] | None = None) -> RunInfo | None:
    """The run that the job has created or continued last."""
    directory = (runs_by_job(root) if known is None else known).get(job.token)
    with suppress(RunError):
        return read_run(directory) if directory else None
    return None


def has_runner(root: Path) -> bool:
    """Whether a runner works through the queue, on this machine."""
    runner = read_runner(root)
    return runner is not None and runner.alive


def _lives(job: Job, execution: Execution) -> bool:
    """Whether a process of the job, or the runner that follows it, is alive; for a job of another machine, only its run
    shows that. Ranks may outlive the process that started them for a moment."""
    if execution.cluster or execution.host != host():
        return True
    follower = execution.runner
    return execution.alive or (
        execution.here and ((follower is not None and follower.alive) or bool(marked(job.token)))
    )


def how_it_ended(
    root: Path, job: Job, execution: Execution, run: RunInfo | None, exit_status: int | None
) -> tuple[JobState, str | None]:
    """How and why a job ended whose last process is gone. exit_status is None if unknown."""
    state = run.status.state if run else None
    if state == runs.DONE or (run is None and exit_status == 0):
        return JobState.DONE, None
    cancelled, cluster = cancelled_at(root, job), execution.cluster
    if cluster and cancelled is None and cluster.state in ENDS:
        return ENDS[cluster.state]
    if state == runs.CANCELLED or (run is None and exit_status == 130):
        return JobState.CANCELLED, None
    # A run may fail while it is being cancelled: a rank reports that its neighbor has ended.
    if cancelled is not None and not (run and state == runs.FAILED and (run.status.finished or "") < cancelled):
        return JobState.CANCELLED, None
    message = (run.status.reason if run and state == runs.FAILED else None) or last_words(root, job)
    if _TIME_LIMIT.search(message):
        return JobState.TIME_LIMIT, message
    if cluster:
        message = _first_cause(log_tail(root, job), message)
    if _NO_DISK.search(message):
        return JobState.NO_DISK, message
    if _NO_MEMORY.search(message):
        return JobState.NO_MEMORY, message
    if exit_status == -signal.SIGKILL or _WAS_KILLED.search(message):
        reason = message if _WAS_KILLED.search(message) else "the collector was killed by SIGKILL"
        if cluster is None and execution.here and out_of_memory_kills() > execution.oom_kills:
            return JobState.NO_MEMORY, f"{reason}; the kernel killed a process during the run because memory ran out"
        return JobState.KILLED, reason
    if cluster is None and execution.host == host() and execution.boot != boot():
        return JobState.RESTARTED, "the machine was restarted while the job ran"
    if state == runs.FAILED or (cluster and message) or (exit_status is not None and exit_status > 0):
        return JobState.FAILED, message or f"the collector ended with exit status {exit_status}"
    if cluster:
        return JobState.CRASHED, f"the job has ended ({cluster.state.lower()}) and its log gives no reason"
    if exit_status is not None and exit_status < 0:
        return JobState.CRASHED, f"the collector was ended by {signal_name(-exit_status)}"
    return JobState.CRASHED, "the collector's process ended without giving a reason"


def _first_cause(log: Sequence[str], message: str) -> str:
    """The first cause in the messages of the ranks and Slurm: other ranks only report that a rank is gone."""
    said = [line for line in log if _OF_SLURM.match(line)]
    messages = [line.removeprefix("binade: ") for line in log if line.startswith("binade: ")]
    lack = next((line for line in said if _NO_MEMORY.search(line)), None)
    if lack or (message and PEER_LOST not in message):
        return lack or message
    return next((line for line in messages if PEER_LOST not in line), None) or next(iter(said), message)


def last_words(root: Path, job: Job) -> str:
    """The last line of the job's log that gives the collector's reason for ending."""
    for line in reversed(log_tail(root, job)):
        if line.startswith("binade: "):
            return line.removeprefix("binade: ")
        if re.match(r"[\w.]*(Error|Exception|Killed)\b", line):
            return line
    return ""


def log_tail(root: Path, job: Job, lines: int = 40) -> list[str]:
    """The last lines of what the collector printed, oldest first."""
    try:
        with open(directory_of(root, job) / "log.txt", "rb", opener=no_link) as file:
            file.seek(0, 2)
            size = file.tell()
            file.seek(max(0, size - TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    tail = text.splitlines()[1 if size > TAIL else 0 :]
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in tail][-lines:]


def listing(root: Path) -> list[JobView]:
    """The current state of every job that can be read, in the order of the queue; `problems` names the others."""
    jobs, views = read_jobs(root), []
    known = runs_by_job(root) if jobs else {}
    for job in jobs:
        with suppress(JobError):
            views.append(view_of(root, job, known))
    return views


def progress(view: JobView) -> Progress:
    """The progress of a job's run. The estimate assumes that each remaining iteration takes as long as earlier ones of
    its kind: warm-up, recorded, not recorded."""
    if view.run is None or view.job.measures:
        return Progress(0, 0, None)
    config, losses = view.job.config, losses_of(view.run)
    left = seconds_left(config, losses) if view.state is JobState.RUNNING else None
    return Progress(len(losses), config.warmup_iterations + config.iterations, left)


def losses_of(run: RunInfo) -> list[dict[str, Any]]:
    """The valid records of loss.jsonl; none if it cannot be read."""
    try:
        return sound_losses(run.directory)
    except OSError:
        return []


def seconds_left(config: RunConfig, losses: Sequence[dict[str, Any]]) -> float | None:
    """Seconds until a run with these records of loss.jsonl ends; None while there is no estimate."""
    warm_up_times, plain_times, recorded_times = step_times(losses)
    if not losses or not (warm_up_times or plain_times or recorded_times):
        return None
    last = max(record["iteration"] for record in losses)
    recorded_iterations = config.recorded_iterations
    warm_up = max(0, -1 - last)
    recorded = len(recorded_iterations) - bisect_right(recorded_iterations, last)
    plain = max(0, config.iterations - max(last + 1, 0)) - recorded
    if (recorded or plain) and not (plain_times or recorded_times):
        return None  # nothing under the recipe yet, and warm-up says little about it
    left = warm_up * median(warm_up_times) if warm_up else 0.0
    left += recorded * median(recorded_times or plain_times) if recorded else 0.0
    left += plain * median(plain_times or recorded_times) if plain else 0.0
    passed = datetime.now().timestamp() - losses[-1]["time"] if losses[-1].get("time") is not None else 0.0
    return max(left - max(passed, 0.0), 0.0)  # the clock may have been set back
