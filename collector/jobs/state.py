"""How a job is doing, from what is on disk and from its processes; nothing of it is remembered.

While its process lives a job runs. Afterwards its run directory says how it ended, and where that is silent, what the
runner saw: the exit status, the boot that the process belonged to, whether the kernel killed for memory meanwhile.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from binade.collector.jobs.processes import Process, boot, host, marked
from binade.collector.jobs.store import Job, folder, place, read_jobs, read_json
from binade.data import runs
from binade.data.runs import RunError, RunInfo, read_run, read_status, sound_losses

QUEUED, STARTING, RUNNING, CANCELLING = ACTIVE = "queued", "starting", "running", "cancelling"
DONE, CANCELLED, FAILED, CRASHED = "done", "cancelled", "failed", "crashed"
KILLED, NO_MEMORY, NO_DISK, RESTARTED = "killed", "out of memory", "disk full", "machine restarted"
STATES = (*ACTIVE, DONE, CANCELLED, FAILED, CRASHED, KILLED, NO_MEMORY, NO_DISK, RESTARTED)

ADVICE = {
    FAILED: "Read the reason and the last lines below; change what it names, or retry.",
    CRASHED: "Retry. If it happens again, the last lines below say how far it came.",
    KILLED: "Somebody or something ended its process. Retry; if it happens again, look at who watches this machine.",
    NO_MEMORY: "Take fewer layers, a shorter sequence, a smaller micro-batch or the tiny size, and run fewer at once.",
    NO_DISK: "Free space, or delete runs; a smaller byte budget or no values at all takes less.",
    RESTARTED: "The machine went down while it ran. Retry.",
}
_NO_DISK = re.compile(r"No space left|Disk quota exceeded", re.I)
_NO_MEMORY = re.compile(
    r"out of memory|MemoryError|can't allocate memory|Cannot allocate memory|not enough memory", re.I
)
_WAS_KILLED = re.compile(r"was killed by SIGKILL")
REFUSED = 2  # the collector's exit status for bad usage
TAIL = 16_384  # bytes of a log that are read


@dataclass(frozen=True)
class JobView:
    """A job as it is now. reason and advice are for one that did not end as it should; started and ended are ISO 8601
    in UTC; run is None before the run directory exists, and once it is deleted."""

    job: Job
    state: str
    reason: str | None = None
    run: RunInfo | None = None
    started: str | None = None
    ended: str | None = None

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    @property
    def advice(self) -> str | None:
        return ADVICE.get(self.state)


@dataclass(frozen=True)
class Progress:
    """Iterations done, of how many, warm-up among them; seconds that are left, None while that cannot be told."""

    done: int
    total: int
    seconds_left: float | None

    @property
    def share(self) -> float:
        return min(self.done / self.total, 1.0) if self.total else 0.0


@dataclass(frozen=True)
class Started:
    """process.json. process is None while it is being started. oom_kills: of the kernel, before it began."""

    process: Process | None
    host: str
    boot: str
    at: str
    oom_kills: int

    @classmethod
    def read(cls, root: Path, job: Job) -> Started | None:
        found = read_json(place(root, job) / "process.json")
        if found is None:
            return None
        try:
            process = Process(int(found["pid"]), float(found["pid_started"])) if found["pid"] else None
            return cls(process, found["host"], found["boot"], found["at"], int(found["oom_kills"]))
        except (KeyError, TypeError, ValueError):
            return None

    @property
    def here(self) -> bool:
        """Whether its process number means anything on this machine, as it is booted now."""
        return self.host == host() and self.boot == boot()

    @property
    def alive(self) -> bool:
        return self.here and self.process is not None and self.process.alive


_owners: dict[tuple[Path, int], tuple[int, float, str]] = {}  # a run directory's owner never changes


def owners(root: Path) -> dict[tuple[int, float, str], Path]:
    """The run directory of each process that has made one: by pid, its start, its host."""
    found = {}
    with suppress(OSError):
        for entry in sorted(root.iterdir(), reverse=True):  # of copies, the first by name
            if entry.name.startswith(".") or not (entry / "status.json").is_file():
                continue
            key = (entry, entry.stat().st_ino)
            if key not in _owners:
                try:
                    status = read_status(entry)
                except (OSError, ValueError, TypeError):
                    continue
                _owners[key] = (status.pid, status.pid_started, status.host)
            found[_owners[key]] = entry
    return found


def look(root: Path, job: Job, known: dict[tuple[int, float, str], Path] | None = None) -> JobView:
    """The job as it is now. known: `owners` of the root, if they have been read already."""
    end = read_json(place(root, job) / "end.json")
    started = Started.read(root, job)
    asked_to_end = (place(root, job) / "cancel.json").exists()
    if started is None or started.process is None:
        if end:
            state = CANCELLED if end.get("cancelled") else FAILED
            return JobView(job, state, end.get("reason"), ended=end.get("at"))
        return JobView(job, STARTING if started else QUEUED)
    lives = end is None and _lives(root, job, started)
    # Once nobody writes any more, what is on disk is final: it is read after that was seen.
    end = None if lives else read_json(place(root, job) / "end.json")
    run = run_of(root, started, known)
    if run is None and not lives:
        run = run_of(root, started)
    at = (run.config.get("started") if run else None) or started.at
    if lives and (started.host == host() or run is None or run.status.state == runs.RUNNING):
        state = CANCELLING if asked_to_end else RUNNING if run else STARTING
        return JobView(job, state, None, run, at)
    state, reason = _verdict(root, job, started, end, run, asked_to_end)
    seen = (end or {}).get("at")
    said = run.status.finished if run else None  # of a crashed run only the last sign of life
    ended = seen or said if run and run.status.state == runs.CRASHED else said or seen
    return JobView(job, state, reason, run, at, ended)


def run_of(root: Path, started: Started, known: dict[tuple[int, float, str], Path] | None = None) -> RunInfo | None:
    """The run that the job's process has made."""
    if started.process is None:
        return None
    process = started.process
    directory = (owners(root) if known is None else known).get((process.pid, process.started, started.host))
    if directory is None:
        return None
    try:
        run = read_run(directory)
    except RunError:
        return None
    # After another boot the same numbers may be another's: a run is not older than the process that made it.
    return run if str(run.config.get("started", "")) >= started.at[:19] else None


def attended(root: Path) -> bool:
    """Whether a runner works through the queue, on this machine."""
    found = read_json(folder(root) / "runner.json")
    try:
        return (
            bool(found)
            and (found["host"], found["boot"]) == (host(), boot())
            and Process(found["pid"], found["pid_started"]).alive
        )
    except (KeyError, TypeError):
        return False


def _lives(root: Path, job: Job, started: Started) -> bool:
    """Until the runner has seen it end; ranks may outlive the process that started them for a moment. Of another
    machine's only its run can tell."""
    if started.host != host():
        return True
    return started.alive or (started.here and (attended(root) or bool(marked(job.token))))


def _verdict(
    root: Path, job: Job, started: Started, end: dict[str, Any] | None, run: RunInfo | None, asked_to_end: bool
) -> tuple[str, str | None]:
    """How a job ended, and why."""
    status = (end or {}).get("exit_status")
    short_of_memory = bool((end or {}).get("out_of_memory"))
    state = run.status.state if run else None
    if state == runs.DONE or (run is None and status == 0):
        return DONE, None if run else "its run was deleted since"
    if state == runs.CANCELLED or (end or {}).get("cancelled") or (run is None and status == 130):
        return CANCELLED, None
    if asked_to_end and state != runs.FAILED:
        return CANCELLED, None
    said = (run.status.reason if run and state == runs.FAILED else None) or last_words(root, job)
    if _NO_DISK.search(said):
        return NO_DISK, said
    if _NO_MEMORY.search(said):
        return NO_MEMORY, said
    if status == -signal.SIGKILL or _WAS_KILLED.search(said):
        who = said if _WAS_KILLED.search(said) else "the collector was killed by SIGKILL"
        if short_of_memory:
            return NO_MEMORY, f"{who}; the kernel killed for memory meanwhile"
        return KILLED, who
    if started.host == host() and started.boot != boot():
        return RESTARTED, "the machine was restarted while the job ran"
    if state == runs.FAILED or (status is not None and status > 0):
        return FAILED, said or f"the collector ended with exit status {status}"
    if status is not None and status < 0:
        return CRASHED, f"the collector was ended by {signal.Signals(-status).name}"
    return CRASHED, "the collector's process is gone and did not say why"


def last_words(root: Path, job: Job) -> str:
    """The last line of the job's log in which the collector says why it ended."""
    for line in reversed(log_tail(root, job)):
        if line.startswith("binade: "):
            return line.removeprefix("binade: ")
        if re.match(r"[\w.]*(Error|Exception|Killed)\b", line):
            return line
    return ""


def log_tail(root: Path, job: Job, lines: int = 40) -> list[str]:
    """The last lines of what the collector printed, oldest first."""
    try:
        with open(place(root, job) / "log.txt", "rb") as file:
            file.seek(0, 2)
            size = file.tell()
            file.seek(max(0, size - TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    found = text.splitlines()[1 if size > TAIL else 0 :]
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in found][-lines:]


def listing(root: Path) -> list[JobView]:
    """Every job of a root as it is now, in the order of the queue."""
    jobs = read_jobs(root)
    known = owners(root) if jobs else {}
    return [look(root, job, known) for job in jobs]


def progress(view: JobView) -> Progress:
    """How far a job's run has come. Of what is left, an iteration that is recorded takes as long as those before did,
    one that is not likewise."""
    if view.run is None:
        return Progress(0, 0, None)
    config = view.run.config
    total = _whole(config.get("warmup_iterations")) + _whole(config.get("train_iters"))
    losses = losses_of(view.run)
    left = _seconds_left(config, losses) if view.state == RUNNING else None
    return Progress(len(losses), total, left)


def losses_of(run: RunInfo) -> list[dict[str, Any]]:
    """The records of loss.jsonl that can be used; none where it cannot be read."""
    try:
        return sound_losses(run.directory)
    except OSError:
        return []


def _seconds_left(config: dict[str, Any], losses: Sequence[dict[str, Any]]) -> float | None:
    timed = [record for record in losses if isinstance(record.get("seconds"), (int, float))]
    if not timed:
        return None
    last = max(record["iteration"] for record in losses)
    warm_up = max(0, -1 - last)
    recorded = _recorded_until(config, _whole(config.get("train_iters"))) - _recorded_until(config, last + 1)
    plain = max(0, _whole(config.get("train_iters")) - max(last + 1, 0)) - recorded
    kinds = {
        "warm-up": [record["seconds"] for record in timed if record["iteration"] < 0],
        "recorded": [record["seconds"] for record in timed if record["iteration"] >= 0 and record.get("recorded")],
        "plain": [record["seconds"] for record in timed if record["iteration"] >= 0 and not record.get("recorded")],
    }
    if (recorded or plain) and not kinds["recorded"] + kinds["plain"]:
        return None  # nothing under the recipe yet: what warm-up took says little of it
    left = warm_up * median(kinds["warm-up"]) if warm_up else 0.0
    for count, own, other in ((recorded, "recorded", "plain"), (plain, "plain", "recorded")):
        left += count * median(kinds[own] or kinds[other]) if count else 0.0
    at = losses[-1].get("time")
    passed = datetime.now().timestamp() - at if isinstance(at, (int, float)) else 0.0
    return max(left - passed, 0.0)


def _recorded_until(config: dict[str, Any], end: int) -> int:
    """How many of the iterations from 0 to before `end` are recorded."""
    count = -(-max(end, 0) // max(1, _whole(config.get("capture_every"))))
    return min(count, _whole(config.get("control_iter")) or count)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
