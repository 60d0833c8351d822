"""The state of a job: that of its run, and why it ended.

From its start until the runner has noted its end, a job is active as long as any process of it lives, or the runner
that follows it: only that runner knows the exit status, so no state is shown that it could contradict later. If that
runner is gone too, the state follows from the same evidence that the next runner will use.
"""

from __future__ import annotations

import re
import signal
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from binade.collector.jobs.directory import (
    OUTPUT_FILE,
    Job,
    JobError,
    Launch,
    directory_of,
    read_job_status,
    read_launch,
)
from binade.collector.jobs.estimate import step_times
from binade.collector.jobs.processes import Process, boot, host, marked, out_of_memory_kills
from binade.collector.jobs.queue import read_jobs, read_runner
from binade.collector.jobs.slurm import ENDS, ClusterJob
from binade.collector.training.checkpoints import last
from binade.collector.training.config import RunConfig
from binade.data.run import directory as runs
from binade.data.run.directory import (
    RankStatus,
    RunError,
    RunInfo,
    RunState,
    Status,
    rank_statuses,
    read_run,
)
from binade.data.run.losses import read_losses
from binade.data.run.store import no_link
from binade.data.words.text import signal_name


class JobState(StrEnum):
    """The state of a job, as shown to users: that of its run, or what happens to it before and after."""

    QUEUED = RunState.QUEUED
    PENDING = "pending"  # waits in a cluster's queue
    STARTING = "starting"  # has a process, or will have one in a moment, that has not begun the run yet
    RUNNING = RunState.RUNNING
    CANCELLING = "cancelling"  # its processes are being ended
    DONE = RunState.DONE
    CANCELLED = RunState.CANCELLED
    FAILED = RunState.FAILED
    CRASHED = RunState.CRASHED


_NO_DISK = re.compile(r"No space left|Disk quota exceeded", re.I)
_NO_MEMORY = re.compile(
    r"out of memory|memory ran out|MemoryError|can't allocate memory|Cannot allocate memory|not enough memory|"
    r"exceeded (job )?memory limit|oom-kill event",  # as Slurm says it
    re.I,
)
# What to do about a reason, the first that matches.
ADVICE = (
    (_NO_DISK, "Free space, or delete runs; a smaller byte budget, or recording without values, takes less space."),
    (
        _NO_MEMORY,
        "Use fewer layers, a shorter sequence, a smaller micro-batch or the tiny size, and run fewer at once.",
    ),
    (re.compile("time limit"), "What was recorded is kept. Request more with --time, or train fewer iterations."),
    (re.compile("a node of the job|preempted|revoked"), "Retry: the cluster may use another node."),
    (re.compile("machine was restarted"), "The machine went down while the job was running. Retry."),
    (re.compile("SIGKILL|: Killed$"), "Retry. If it happens again, find out what kills processes on this machine."),
)
OTHER_ADVICE = {
    JobState.FAILED: "Read the reason and the end of the log, correct the cause, and retry.",
    JobState.CRASHED: "Retry. If it happens again, the end of the log shows how far it got.",
}
PEER_LOST = "lost the connection to another rank"  # as PeerLostError says, in a module that imports torch
_OF_SLURM = re.compile(r"(slurmstepd|srun|slurmd)\S*: error: .*(memory limit|oom|[Kk]illed|[Nn]ode)")
_WAS_KILLED = re.compile(r"was killed by SIGKILL|^srun: error: .*: Killed$")
TAIL = 16_384  # bytes of a log that are read


@dataclass(frozen=True)
class JobView:
    """The current state of a job. active: whether it waits or is followed; reason is for one that failed; started and
    ended are ISO 8601 in UTC; run is None before its command has begun it, and if its command continues another run,
    which then is `continues`; cluster is for one on a cluster."""

    job: Job
    state: JobState
    active: bool
    reason: str | None = None
    run: RunInfo | None = None
    started: str | None = None
    ended: str | None = None
    cluster: ClusterJob | None = None
    continues: RunInfo | None = None

    @property
    def written(self) -> RunInfo | None:
        """The run that its command writes: its own, or the one that it continues."""
        return self.run or self.continues

    @property
    def advice(self) -> str | None:
        """What to do about the reason; None for a job that did not fail."""
        if self.state not in OTHER_ADVICE:
            return None
        found = (advice for pattern, advice in ADVICE if pattern.search(self.reason or ""))
        return next(found, OTHER_ADVICE[self.state])


@dataclass(frozen=True)
class Progress:
    """Iterations done and in total, warm-up included; estimated seconds left, None while there is no estimate."""

    done: int
    total: int
    seconds_left: float | None

    @property
    def share(self) -> float:
        return min(self.done / self.total, 1.0) if self.total else 0.0


def view_of(root: Path, job: Job) -> JobView:
    """The current state of the job. Raises JobError if its files are damaged."""
    view = _own_view(root, job)
    name = None if view.run else read_job_status(root, job).continues
    return replace(view, continues=_read_if_sound(root / Path(name).name)) if name else view


def _own_view(root: Path, job: Job) -> JobView:
    """The state of the job without the run that it continues. Raises JobError."""
    launch = read_launch(root, job)
    lives = launch is not None and launch.ended is None and _lives(root, job, launch)
    if launch and not lives:  # nothing writes any more: the files are final
        launch = read_launch(root, job)
    status, run = read_job_status(root, job), run_of(root, job)
    if launch is None:
        status = run.status if run else status  # which is of a process that has ended unexpectedly, too
        queued = status.state == runs.QUEUED
        return JobView(job, JobState(status.state), queued, status.reason, run, ended=status.finished)
    started = run.config.get("started") if run and not job.resumes else launch.at
    if lives:
        active = _active_state(root, job, launch, status)
        return JobView(job, active, True, None, run, started, None, launch.cluster)
    if launch.ended:
        state, reason = (run.status.state, run.status.reason) if run else (status.state, status.reason)
    else:
        state, reason = how_it_ended(root, job, launch, status, None)
    ended = status.finished or launch.ended
    return JobView(job, JobState(state), False, reason, run, started, ended, launch.cluster)


def _active_state(root: Path, job: Job, launch: Launch, status: Status) -> JobState:
    if launch.cancelled:
        return JobState.CANCELLING
    if launch.cluster and launch.cluster.waits:
        return JobState.PENDING
    begun = status.state != runs.QUEUED or status.continues
    return JobState.RUNNING if begun else JobState.STARTING


def resumable(view: JobView) -> bool:
    """Whether the job's run can be continued from a checkpoint, on this machine."""
    if view.active or view.run is None or view.job.on_cluster:
        return False
    with suppress(RunError):
        return bool(last(view.run))
    return False


def run_of(root: Path, job: Job) -> RunInfo | None:
    """The run of a job; None if its command has not begun it, or its files are damaged."""
    return _read_if_sound(directory_of(root, job))


def _read_if_sound(directory: Path) -> RunInfo | None:
    with suppress(RunError):
        return read_run(directory)
    return None


def has_runner(root: Path) -> bool:
    """Whether a runner works through the queue, on this machine."""
    runner = read_runner(root)
    return runner is not None and runner.alive


def processes_of(root: Path, job: Job) -> set[Process]:
    """Every live process of a job on this machine: those with its mark, and the ranks recorded by its run."""
    found = marked(directory_of(root, job))
    recorded: list[Status | RankStatus] = [read_job_status(root, job), *rank_statuses(directory_of(root, job))]
    for rank in recorded:
        if rank.host == host() and rank.boot == boot():
            found.add(Process(rank.pid, rank.pid_started))
    return {process for process in found if process.alive}


def _lives(root: Path, job: Job, launch: Launch) -> bool:
    """Whether a process of the job, or the runner that follows it, is alive; for a job of another machine, only its run
    shows that. Ranks may outlive the process that started them for a moment."""
    if launch.cluster:
        return True
    if launch.host != host():
        run = run_of(root, job)
        return run is None or run.status.state in (runs.QUEUED, runs.RUNNING)
    if not launch.here:
        return False
    followed = launch.runner is not None and launch.runner.alive
    begun = read_job_status(root, job).state != runs.QUEUED  # else the next runner follows it or queues it again
    return followed or not begun or bool(processes_of(root, job))


def how_it_ended(
    root: Path, job: Job, launch: Launch, status: Status, exit_status: int | None
) -> tuple[RunState, str | None]:
    """How and why a job ended whose last process is gone. exit_status is None if unknown."""
    state, begun = status.state, status.state != runs.QUEUED
    if state == runs.DONE or (not begun and exit_status == 0):
        return runs.DONE, None
    cancelled, cluster = launch.cancelled, launch.cluster
    if cluster and cancelled is None and cluster.state in ENDS:
        return ENDS[cluster.state]
    if state == runs.CANCELLED or (not begun and exit_status == 130):
        return runs.CANCELLED, None
    # A run may fail while it is being cancelled: a rank reports that its neighbor has ended.
    if cancelled is not None and not (state == runs.FAILED and (status.finished or "") < cancelled):
        return runs.CANCELLED, None
    message = (status.reason if state == runs.FAILED else None) or last_words(root, job)
    if cluster:
        message = _first_cause(log_tail(root, job), message)
    if _NO_DISK.search(message) or _NO_MEMORY.search(message):
        return runs.FAILED, message
    if exit_status == -signal.SIGKILL or _WAS_KILLED.search(message):
        reason = message if _WAS_KILLED.search(message) else "the collector was killed by SIGKILL"
        if cluster is None and launch.here and out_of_memory_kills() > launch.oom_kills:
            reason = f"{reason}; the kernel killed a process during the run because memory ran out"
        return runs.FAILED if state == runs.FAILED else runs.CRASHED, reason
    if cluster is None and launch.host == host() and launch.boot != boot():
        return runs.CRASHED, "the machine was restarted while the job ran"
    if state == runs.FAILED or (cluster and message) or (exit_status is not None and exit_status > 0):
        return runs.FAILED, message or f"the collector ended with exit status {exit_status}"
    if cluster:
        return runs.CRASHED, f"the job has ended ({cluster.state.lower()}) and its log gives no reason"
    if exit_status is not None and exit_status < 0:
        return runs.CRASHED, f"the collector was ended by {signal_name(-exit_status)}"
    return runs.CRASHED, "the collector's process ended without giving a reason"


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
    """The last lines of what the command printed, oldest first."""
    try:
        with open(directory_of(root, job) / OUTPUT_FILE, "rb", opener=no_link) as file:
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
    views = []
    for job in read_jobs(root):
        with suppress(JobError):
            views.append(view_of(root, job))
    return views


def progress(view: JobView) -> Progress:
    """The progress of a job's run. The estimate assumes that each remaining iteration takes as long as earlier ones of
    its kind: warm-up, recorded, not recorded."""
    config = view.job.config
    if view.run is None or config is None:
        return Progress(0, 0, None)
    losses = losses_of(view.run)
    left = seconds_left(config, losses) if view.state is JobState.RUNNING else None
    return Progress(len(losses), config.warmup_iterations + config.iterations, left)


def losses_of(run: RunInfo) -> list[dict[str, Any]]:
    """The records of loss.jsonl that have a loss; none if it cannot be read."""
    try:
        return [step for step in read_losses(run.directory) if step["loss"] is not None]
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
