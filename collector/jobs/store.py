"""The queue on disk, and everything that changes it.

    <root>/.jobs/
      queue.json            the next job's number, and how many jobs may run at once
      queue.lock            held while the queue is changed
      runner.lock           held by the runner for as long as it lives
      runner.json           the runner's process
      runner.log            the runner's output
      <id>/job.json         what was requested: the run's configuration, title, tags
      <id>/process.json     the process that was started for it and, once that is gone, how the job ended
      <id>/cancel.json      when the user cancelled it
      <id>/log.txt          the collector's output
      <id>/submission.sh    the script that was submitted to a cluster for this job and those after it

Files are replaced atomically, and changed under the lock, so that several apps and commands can do so at the same time.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

from filelock import FileLock
from pydantic import Field
from pydantic.dataclasses import dataclass

from binade.collector.errors import ConfigError
from binade.collector.jobs.processes import Process, boot, host
from binade.collector.jobs.slurm import ClusterJob, check_submits, script, submit
from binade.collector.jobs.transitions import JobState
from binade.collector.recipes.files import label
from binade.collector.settings import new_token
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import Plan
from binade.collector.training.slurm_options import SlurmOptions
from binade.data.access import check_writable
from binade.data.json_files import STRICT, Count, Text, Time, read_json, write_json
from binade.data.runs import RootError, RunError, now, unusable_root
from binade.data.store import locked as held
from binade.data.store import remove_directory, staged_directory
from binade.data.text import describe

FOLDER = ".jobs"
LONGEST_TITLE = 120
MOST_AT_ONCE = 64
HERE = SlurmOptions()
T = TypeVar("T")


class JobError(ValueError):
    """The job does not exist, its files are damaged, or its state does not allow the action. The message says which."""

    exit_status = 2


@dataclass(frozen=True, config=STRICT)
class MeasureJob:
    """What `binade measure` does for a job: it rounds groups of what each of these recipes or formats rounds, in the
    model of a run. by: the granularities of groups, as its option has them."""

    run: Text
    formats: Annotated[tuple[Text, ...], Field(min_length=1)]
    sequences: Count = 8
    by: Text = "model"

    @property
    def arguments(self) -> list[str]:
        options = ["--formats", ",".join(self.formats), "--by", self.by, "--sequences", str(self.sequences)]
        return ["measure", self.run, *options]


@dataclass(frozen=True, config=STRICT)
class Job:
    """job.json. token marks the job's processes and its run; resume names the run to continue, if any; directory is the
    working directory of the command; created is ISO 8601 in UTC, the same for jobs that were queued together; retry_of
    is the number of the job that this one repeats or continues; measures is what it does instead of training."""

    id: Count
    token: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    config: RunConfig
    start: SlurmOptions
    resume: str | None
    directory: Text
    created: Time
    title: str = ""
    tags: tuple[str, ...] = ()
    retry_of: int | None = None
    measures: MeasureJob | None = None

    @property
    def on_cluster(self) -> bool:
        return self.start.on_cluster

    @property
    def arguments(self) -> list[str]:
        """The command line that does the same, for people."""
        if self.measures:
            return self.measures.arguments
        line = ["run", "--resume", self.resume] if self.resume else self.config.arguments()
        return [*line, *self.start.arguments()]


@dataclass(frozen=True, config=STRICT)
class Queue:
    """queue.json."""

    next_id: Count = 1
    at_once: Annotated[int, Field(ge=1, le=MOST_AT_ONCE)] = 1


@dataclass(frozen=True, config=STRICT)
class End:
    """How a job ended, as observed by the runner. at is ISO 8601 in UTC."""

    state: JobState
    reason: str | None
    at: Time


@dataclass(frozen=True, config=STRICT)
class Execution:
    """process.json. process is None while it is being started, and for a job that was cancelled before that. runner is
    the process that starts or follows it; oom_kills is the kernel's count before the start; at is ISO 8601 in UTC. A
    job on a cluster has no process here."""

    host: str
    boot: str
    at: Time
    oom_kills: int = 0
    process: Process | None = None
    runner: Process | None = None
    end: End | None = None
    cluster: ClusterJob | None = None

    @property
    def here(self) -> bool:
        """Whether its process number is valid on this machine in the current boot."""
        return self.host == host() and self.boot == boot()

    @property
    def alive(self) -> bool:
        return self.here and self.process is not None and self.process.alive


@dataclass(frozen=True, config=STRICT)
class RunnerProcess:
    """runner.json."""

    process: Process
    host: str
    boot: str

    @property
    def alive(self) -> bool:
        return self.host == host() and self.boot == boot() and self.process.alive


@dataclass(frozen=True, config=STRICT)
class Cancellation:
    """cancel.json. at is ISO 8601 in UTC."""

    at: Time


def folder(root: Path) -> Path:
    return root / FOLDER


def directory_of(root: Path, job: Job | int) -> Path:
    return folder(root) / f"{job if isinstance(job, int) else job.id:04d}"


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the queue's lock; creates the queue if there is none. Raises RunError if the root cannot be written."""
    check_queue(root)
    lock = FileLock(folder(root) / "queue.lock")
    try:
        folder(root).mkdir(parents=True, exist_ok=True)
        with held(folder(root), fcntl.LOCK_SH):  # raises an error without locks; FileLock would do without them
            lock.acquire(poll_interval=0.01)
    except OSError as error:
        raise RunError(
            f"cannot write to {root}: {error.strerror or error}; choose another root for the runs"
        ) from error
    try:
        yield
    finally:
        lock.release()


def check_queue(root: Path) -> None:
    """Raises RootError if the root cannot have a queue."""
    if problem := no_queue(root):
        raise RootError(problem)


def no_queue(root: Path) -> str:
    """Why the queue of a root cannot be used, or ""."""
    place = folder(root)
    if problem := unusable_root(root):
        return problem
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        return f"{place} is not a directory: remove it; a queue belongs to one root, and cannot be a link or a file"
    return ""


def read_if_sound(kind: type[T], path: Path) -> T | None:
    """The contents of a file; None if it does not exist or is damaged."""
    with suppress(OSError, ValueError):
        return read_json(kind, path)
    return None


def _read_sound(kind: type[T], root: Path, number: int, name: str) -> T | None:
    """The contents of a file; None if it does not exist. Raises JobError if it is damaged."""
    place = directory_of(root, number)
    try:
        return read_json(kind, place / name)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not (place / name).is_symlink():
            return None
        raise JobError(_damaged(root, number, f"{name}: {describe(error)}")) from None


def _damaged(root: Path, number: int, reason: str) -> str:
    return (
        f"job {number} is skipped because its files are damaged: {reason}; to remove it, delete "
        f"{directory_of(root, number)}"
    )


def read_execution(root: Path, job: Job) -> Execution | None:
    """The execution of a job; None if it was not started. Raises JobError if its file is damaged."""
    return _read_sound(Execution, root, job.id, "process.json")


def write_execution(root: Path, job: Job, execution: Execution) -> None:
    """Raises OSError."""
    write_json(directory_of(root, job) / "process.json", execution)


def drop_execution(root: Path, job: Job) -> None:
    """Put a job back into the queue. Raises OSError."""
    (directory_of(root, job) / "process.json").unlink(missing_ok=True)


def cancelled_at(root: Path, job: Job) -> str | None:
    """When the user cancelled the job; None if it was not cancelled."""
    path = directory_of(root, job) / "cancel.json"
    cancellation = read_if_sound(Cancellation, path)
    return cancellation.at if cancellation else "" if path.exists() else None


def write_cancellation(root: Path, job: Job) -> None:
    """Raises OSError."""
    write_json(directory_of(root, job) / "cancel.json", Cancellation(now()))


def read_runner(root: Path) -> RunnerProcess | None:
    return read_if_sound(RunnerProcess, folder(root) / "runner.json")


def write_runner(root: Path, process: Process) -> None:
    """Raises OSError."""
    write_json(folder(root) / "runner.json", RunnerProcess(process, host(), boot()))


def _queue(root: Path) -> Queue:
    return read_if_sound(Queue, folder(root) / "queue.json") or Queue()


def at_once(root: Path) -> int:
    """How many jobs may run at the same time."""
    return _queue(root).at_once


def set_at_once(root: Path, count: int) -> None:
    """Raises JobError, ReadOnlyError, RunError, OSError."""
    check_writable("changing the queue")
    if not 1 <= count <= MOST_AT_ONCE:
        raise JobError(f"{count} parallel jobs: expected 1 to {MOST_AT_ONCE}")
    with locked(root):
        write_json(folder(root) / "queue.json", replace(_queue(root), at_once=count))


def add_runs(
    root: Path,
    plans: Sequence[Plan],
    start: SlurmOptions = HERE,
    titles: Sequence[str] = (),
    *,
    tags: Sequence[str] = (),
    directory: Path | None = None,
    retry_of: int | None = None,
    resume: str | None = None,
    measures: MeasureJob | None = None,
) -> list[Job]:
    """Queue these runs, one job for each, in their order. They start only after `runner.start_runner`. On a cluster
    they are submitted as one array before this returns, so that a refusal is reported at once. resume: the run to
    continue, if there is only one; measures: what to do instead of training. Raises ConfigError, ReadOnlyError,
    RunError, OSError, SubmissionError."""
    check_writable("starting a run")
    target = start.for_run(plans[0].config)
    if target and resume:
        raise ConfigError("--resume continues a run on this machine: leave out --target and --launcher")
    working, created = directory or Path.cwd(), now()
    check_queue(root)
    if target:
        check_submits(root, working)
    with locked(root):
        queue = _queue(root)
        first = _next_number(root)
        made = [
            Job(
                first + index,
                new_token(),
                plan.config,
                start,
                resume,
                str(working),
                created,
                _title(title) or f"{label(plan.config.recipe)} · {plan.config.model_title}",
                _tags(tags),
                retry_of,
                measures,
            )
            for index, (plan, title) in enumerate(zip(plans, titles or [""] * len(plans), strict=True))
        ]
        write_json(folder(root) / "queue.json", replace(queue, next_id=first + len(made)))
        for job in made:
            with staged_directory(directory_of(root, job)) as part:
                write_json(part / "job.json", job)
        if target:
            text = script(target, root, folder(root), working, first, len(made), start.target or "")
            _submit(root, made, text)
    return made


def next_script(root: Path, plans: Sequence[Plan], start: SlurmOptions) -> str | None:
    """The script that `add_runs` would submit; None for runs on this machine. Raises ConfigError."""
    if target := start.for_run(plans[0].config):
        number, name = _next_number(root), start.target or ""
        return script(target, root, folder(root), Path.cwd(), number, len(plans), name)
    return None


def _next_number(root: Path) -> int:
    return max([_queue(root).next_id, *(number + 1 for number in numbers(root)[-1:])])


def _submit(root: Path, made: Sequence[Job], text: str) -> None:
    """Submit jobs as one array; if that is refused, the jobs are deleted."""
    try:
        array = submit(text, directory_of(root, made[0]) / "submission.sh")
        for index, job in enumerate(made):
            cluster = ClusterJob(f"{array}_{index}")
            write_execution(root, job, Execution(host(), boot(), now(), cluster=cluster))
    except BaseException:
        for job in made:
            remove_directory(directory_of(root, job))
        raise


def numbers(root: Path) -> list[int]:
    """The numbers of all jobs, in the order of the queue."""
    if no_queue(root):
        return []
    with suppress(FileNotFoundError):
        names = [entry.name for entry in folder(root).iterdir() if entry.name.isdecimal()]
        return sorted(int(name) for name in names if name == f"{int(name):04d}")
    return []


def read_jobs(root: Path) -> list[Job]:
    """Every job, in the order of the queue; `problems` names those that cannot be read."""
    jobs = []
    for number in numbers(root):
        with suppress(JobError):
            jobs.append(find(root, number))
    return jobs


def read_job(root: Path, number: int) -> Job | None:
    """A job; None if it does not exist. Raises JobError if its files are damaged."""
    job = _read_sound(Job, root, number, "job.json")
    if job and job.id != number:
        raise JobError(_damaged(root, number, f"job.json: id is {job.id}, expected {number}"))
    if job is None and directory_of(root, number).exists():
        raise JobError(_damaged(root, number, "job.json is missing"))
    return job


def problems(root: Path) -> list[str]:
    """A sentence for each unusable part of a root's queue."""
    if problem := no_queue(root):
        return [problem]
    sentences = []
    try:
        read_json(Queue, folder(root) / "queue.json")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        path = folder(root) / "queue.json"
        sentences.append(
            f"only one job runs at a time, since {path} is damaged: {describe(error)}; set the number of "
            "parallel jobs again"
        )
    for number in numbers(root):
        try:
            if job := read_job(root, number):
                read_execution(root, job)
        except JobError as error:
            sentences.append(str(error))
    return sentences


def find(root: Path, number: int) -> Job:
    """The job with this number. Raises JobError."""
    job = read_job(root, number)
    if job is None:
        known = [str(job_number) for job_number in numbers(root)]
        raise JobError(f"there is no job {number} in {root}: there are {', '.join(known[-8:]) or 'none'}")
    return job


def change(root: Path, number: int, *, title: str | None = None, tags: Sequence[str] | None = None) -> Job:
    """Rename or tag a job. Raises JobError, ReadOnlyError, RunError, OSError."""
    check_writable("changing a job")
    with locked(root):
        job = find(root, number)
        if title is not None:
            job = replace(job, title=_title(title) or job.title)
        if tags is not None:
            job = replace(job, tags=_tags(tags))
        write_json(directory_of(root, job) / "job.json", job)
    return job


def _title(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:LONGEST_TITLE]


def _tags(given: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tag for text in given if (tag := _title(text.replace(",", " ")))))
