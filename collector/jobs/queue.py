"""The queue: runs that wait to be started, and what was requested for each.

    <root>/<run_id>/  job.json     what was requested
                      launch.json  where and when it was started, cancelled by the user, and left by its last process
                      output.txt   what its command printed
    <root>/.jobs/     queue.json   the next number, and how many jobs may run at the same time
                      runner.json  the process that starts jobs; its output is in runner.log

A job is a run: its state is in the run's status.json. queue.lock is held while a job is added, started, cancelled or
ended. The directory of a queued run is staged and renamed, so that a job exists as a whole or not at all.
"""

from __future__ import annotations

import fcntl
import getpass
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from filelock import FileLock
from pydantic import Field
from pydantic.dataclasses import dataclass

from binade.collector.jobs.directory import (
    HERE,
    LAUNCH_FILE,
    Job,
    JobError,
    Launch,
    check_command,
    directory_of,
    read_if_sound,
    read_job,
    read_job_status,
    read_launch,
    write_launch,
)
from binade.collector.jobs.processes import Process, boot, host
from binade.collector.jobs.slurm import ClusterJob, check_submits, script, submit
from binade.collector.recipes.files import label
from binade.collector.training.checkpoints import last
from binade.collector.training.plan import Plan
from binade.collector.training.slurm_options import SlurmOptions
from binade.collector.training.targets import Target
from binade.data.run.access import check_writable
from binade.data.run.directory import (
    JOB_FILE,
    QUEUED,
    RootError,
    RunError,
    now,
    read_run,
    run_directories,
    unusable_root,
)
from binade.data.run.json_files import STRICT, Count, read_json, write_json
from binade.data.run.run_writer import new_run_id, write_queued
from binade.data.run.store import locked as held
from binade.data.run.store import remove_directory, staged_directory
from binade.data.words.text import describe

Work = Plan | Sequence[str]  # what a run is queued for: a training, or a command QUEUEABLE as words without the root
FOLDER = ".jobs"
LONGEST_TITLE = 120
MOST_AT_ONCE = 64


@dataclass(frozen=True, config=STRICT)
class Queue:
    """queue.json."""

    next_id: Count = 1
    at_once: Annotated[int, Field(ge=1, le=MOST_AT_ONCE)] = 1


@dataclass(frozen=True, config=STRICT)
class RunnerProcess:
    """runner.json."""

    process: Process
    host: str
    boot: str

    @property
    def alive(self) -> bool:
        return self.host == host() and self.boot == boot() and self.process.alive


def folder(root: Path) -> Path:
    return root / FOLDER


# The queue as a whole


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


def _queue(root: Path) -> Queue:
    return read_if_sound(Queue, folder(root) / "queue.json") or Queue()


def queue_mark(root: Path) -> tuple[int, int]:
    """Differs after a job has been added or resumed."""
    with suppress(OSError):
        written = (folder(root) / "queue.json").stat()
        return written.st_ino, written.st_mtime_ns
    return 0, 0


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


def read_runner(root: Path) -> RunnerProcess | None:
    return read_if_sound(RunnerProcess, folder(root) / "runner.json")


def write_runner(root: Path, process: Process) -> None:
    """Raises OSError."""
    write_json(folder(root) / "runner.json", RunnerProcess(process, host(), boot()))


# Adding and finding


def add_runs(
    root: Path,
    works: Sequence[Work],
    start: SlurmOptions = HERE,
    titles: Sequence[str] = (),
    *,
    tags: Sequence[str] = (),
    directory: Path | None = None,
    repeats: str | None = None,
) -> list[Job]:
    """Queue a run for each of these, in their order. They start only after `runner.start_runner`. On a cluster, where
    all are plans, they are submitted as one array before this returns, so that a refusal is reported at once.
    directory: where they work, by default here. Raises ConfigError, ReadOnlyError, RunError, OSError, SubmissionError.
    """
    check_writable("starting a run")
    for work in works:
        if not isinstance(work, Plan):
            check_command(work)
    target, working = _target(works, start), directory or Path.cwd()
    check_queue(root)
    if target:
        check_submits(root, working)
    created = now()
    requests = [
        Job(
            run_id=_run_id(work),
            config=work.config if isinstance(work, Plan) else None,
            command=() if isinstance(work, Plan) else tuple(work),
            start=start,
            directory=str(working),
            created=created,
            title=_title(title) or _title(_named(work)),
            tags=_tags(tags),
            repeats=repeats,
        )
        for work, title in zip(works, titles or [""] * len(works), strict=True)
    ]
    with locked(root):
        made = _make(root, requests)
        if target:
            directories = [directory_of(root, job) for job in made]
            _submit(root, made, script(target, root, directories, working, start.target or ""))
    return made


def _target(works: Sequence[Work], start: SlurmOptions) -> Target | None:
    return start.for_run(works[0].config) if isinstance(works[0], Plan) else None


def _run_id(work: Work) -> str:
    return new_run_id(f"{work.config.model_name}_{work.recipe.name}" if isinstance(work, Plan) else work[0])


def _make(root: Path, requests: Sequence[Job]) -> list[Job]:
    """Number these jobs and make the directories of their runs."""
    first = _next_number(root)
    made = [replace(job, id=number, position=number, user=_user()) for number, job in enumerate(requests, first)]
    for job in made:
        with staged_directory(directory_of(root, job)) as part:
            write_json(part / JOB_FILE, job)
            write_queued(part)
    write_json(folder(root) / "queue.json", replace(_queue(root), next_id=first + len(made)))
    return made


def add_resumed(root: Path, run_id: str, plan: Plan) -> Job:
    """Queue the continuation of a run that has ended early, whether or not it was queued before. Raises JobError,
    ReadOnlyError, RunError, OSError."""
    check_writable("starting a run")
    with locked(root):
        run = read_run(root / run_id)
        if run.status.state == QUEUED:
            raise JobError(f"{run_id} is queued already")
        last(run)
        number = _next_number(root)
        new = Job(run_id, str(Path.cwd()), now(), number, config=plan.config, title=_named(plan), user=_user())
        before = read_job(run.directory) or new
        job = replace(before, position=number, start=HERE, resumes=True, created=now())
        (run.directory / LAUNCH_FILE).unlink(missing_ok=True)  # first: it is that of the time before
        write_json(run.directory / JOB_FILE, job)
        write_queued(run.directory)
        write_json(folder(root) / "queue.json", replace(_queue(root), next_id=number + 1))
    return job


def next_script(root: Path, plans: Sequence[Plan], start: SlurmOptions) -> str | None:
    """The script that `add_runs` would submit, but for the names of the runs; None for runs on this machine. Raises
    ConfigError."""
    if target := _target(plans, start):
        return script(target, root, [root / _run_id(plan) for plan in plans], Path.cwd(), start.target or "")
    return None


def _next_number(root: Path) -> int:
    jobs = read_jobs(root)
    return max([_queue(root).next_id, *(1 + max(job.id, job.position) for job in jobs)])


def _submit(root: Path, made: Sequence[Job], text: str) -> None:
    """Submit jobs as one array; if that is refused, the jobs are deleted."""
    try:
        array = submit(text, directory_of(root, made[0]) / "submission.sh")
        for index, job in enumerate(made):
            write_launch(root, job, Launch(host(), boot(), now(), cluster=ClusterJob(f"{array}_{index}")))
    except BaseException:
        for job in made:
            remove_directory(directory_of(root, job))
        raise


def read_jobs(root: Path) -> list[Job]:
    """Every job, in the order of the queue; `problems` names those that cannot be read."""
    jobs = []
    for directory in [] if no_queue(root) else run_directories(root):
        with suppress(JobError):
            if job := read_job(directory):
                jobs.append(job)
    return sorted(jobs, key=lambda job: job.position)


def find(root: Path, number: int) -> Job:
    """The job with this number. Raises JobError."""
    jobs = read_jobs(root)
    for job in jobs:
        if job.id == number:
            return job
    known = ", ".join(str(job.id) for job in jobs[-8:])
    raise JobError(f"there is no job {number} in {root}: there are {known or 'none'}")


def problems(root: Path) -> list[str]:
    """A sentence for each unusable part of a root's queue."""
    if problem := no_queue(root):
        return [problem]
    sentences = []
    path = folder(root) / "queue.json"
    try:
        read_json(Queue, path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        sentences.append(
            f"only one job runs at a time, since {path} is damaged: {describe(error)}; set the number of "
            "parallel jobs again"
        )
    for directory in run_directories(root):
        try:
            if job := read_job(directory):
                read_job_status(root, job)
                read_launch(root, job)
        except JobError as error:
            sentences.append(str(error))
    return sentences


def _named(work: Work) -> str:
    """What a job is called that was given no title."""
    if isinstance(work, Plan):
        return f"{label(work.config.recipe)} · {work.config.model_title}"
    return " ".join(work)


def _title(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:LONGEST_TITLE]


def _tags(given: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tag for text in given if (tag := _title(text.replace(",", " ")))))


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in a container
        return ""
