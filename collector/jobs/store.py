"""The queue on disk, and everything that changes it.

    <root>/.jobs/
      queue.json            the next job's number, how many jobs may run at once
      queue.lock            held while the queue is changed
      runner.lock           held by the runner for as long as it lives
      runner.json           which process that is
      runner.log            what it had to say
      <id>/job.json         what is asked for: arguments as a list, title, tags, place in the queue
      <id>/process.json     the process that was started for it
      <id>/cancel.json      it is to be cancelled
      <id>/end.json         how its process ended, as the runner saw it
      <id>/log.txt          what the collector printed

Files are replaced atomically, and changed under the lock: any number of apps and command lines may do so at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from binade.collector.jobs.command_line import arguments_of, asked
from binade.collector.training.config import RunConfig
from binade.data.access import check_writable
from binade.data.runs import RunError, now
from binade.data.store import write_atomic

FOLDER = ".jobs"
LONGEST_TITLE = 120
MOST_AT_ONCE = 64


class JobError(ValueError):
    """There is no such job, or it cannot be done to it. The message says which."""


@dataclass(frozen=True)
class Job:
    """What is asked for. token marks the job's processes; directory is where the command was typed; created is ISO 8601
    in UTC; retry_of the number of the job that it repeats."""

    id: int
    token: str
    arguments: tuple[str, ...]
    directory: str
    created: str
    title: str = ""
    tags: tuple[str, ...] = ()
    retry_of: int | None = None

    @property
    def config(self) -> RunConfig:
        """Raises ConfigError and its kin where the arguments are no longer understood."""
        return asked(self.arguments)[0]


def default_title(config: RunConfig) -> str:
    return f"{config.recipe} · {config.model} {config.size}"


@dataclass(frozen=True)
class Queue:
    """queue.json."""

    next_id: int = 1
    at_once: int = 1


def folder(root: Path) -> Path:
    return root / FOLDER


def place(root: Path, job: Job | int) -> Path:
    """The job's own directory."""
    return folder(root) / f"{job if isinstance(job, int) else job.id:04d}"


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """The queue is this process's to change. Raises RunError if the root cannot be written."""
    try:
        folder(root).mkdir(parents=True, exist_ok=True)
        handle = os.open(folder(root) / "queue.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(
            f"cannot write to {root}: {error.strerror or error}; choose another root for the runs"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def read_json(path: Path) -> dict[str, Any] | None:
    """A file of the queue; None where there is none, or it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file; on a full disk, which has no room for a second one, its own block will do. Raises OSError."""
    text = json.dumps(content).encode()
    try:
        write_atomic(path, text)
    except OSError:
        with open(path, "r+b") as file:
            file.write(text)
            file.truncate()


def _queue(root: Path) -> Queue:
    found = read_json(folder(root) / "queue.json") or {}
    try:
        return Queue(**found)
    except TypeError:
        return Queue()


def at_once(root: Path) -> int:
    """How many jobs may run at the same time."""
    return _queue(root).at_once


def set_at_once(root: Path, count: int) -> None:
    """Raises JobError, ReadOnlyError, RunError, OSError."""
    check_writable("changing the queue")
    if not 1 <= count <= MOST_AT_ONCE:
        raise JobError(f"{count} jobs at once: it must be 1 to {MOST_AT_ONCE}")
    with locked(root):
        write_json(folder(root) / "queue.json", asdict(replace(_queue(root), at_once=count)))


def add(
    root: Path,
    line: Sequence[str],
    *,
    title: str = "",
    tags: Sequence[str] = (),
    directory: Path | None = None,
    retry_of: int | None = None,
) -> list[Job]:
    """Queue a command line of run, batch or quick: a job for each run of it, in their order. Who adds jobs sees to it
    that somebody works on them: `runner.wake`.

    Raises ConfigError and its kin for a command line that cannot be run; ReadOnlyError, RunError, OSError.
    """
    check_writable("starting a run")
    runs = asked(line)
    with locked(root):
        queue = _queue(root)
        first = max([queue.next_id, *(number + 1 for number in numbers(root)[-1:])])
        made = [
            Job(
                first + index,
                secrets.token_hex(8),
                tuple(arguments_of(config)),
                str(directory or Path.cwd()),
                now(),
                _title(title) or default_title(config),
                _tags(tags),
                retry_of,
            )
            for index, config in enumerate(runs)
        ]
        write_json(folder(root) / "queue.json", asdict(replace(queue, next_id=first + len(made))))
        for job in made:
            _write(root, job)
    return made


def _write(root: Path, job: Job) -> None:
    """A new job's directory, filled aside and renamed."""
    target = place(root, job)
    aside = target.with_name(f".{target.name}.part")
    try:
        aside.mkdir()
        write_atomic(aside / "job.json", json.dumps(asdict(job), indent=1).encode())
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def numbers(root: Path) -> list[int]:
    """Of all jobs, in the order of the queue."""
    with suppress(FileNotFoundError):
        return sorted(int(entry.name) for entry in folder(root).iterdir() if entry.name.isdecimal())
    return []


def read_jobs(root: Path) -> list[Job]:
    """Every job, in the order of the queue; those whose job.json cannot be read are left out."""
    return [job for number in numbers(root) if (job := read_job(root, number))]


def read_job(root: Path, number: int) -> Job | None:
    """None where there is none, or its file is damaged."""
    found = read_json(place(root, number) / "job.json")
    if found is None:
        return None
    try:
        job = Job(**found)
        return replace(job, arguments=tuple(job.arguments), tags=tuple(job.tags))
    except TypeError:
        return None


def find(root: Path, number: int) -> Job:
    """Raises JobError."""
    job = read_job(root, number)
    if job is None:
        known = [str(each) for each in numbers(root)]
        there = f"there are {', '.join(known[-8:])}" if known else "there are none"
        raise JobError(f"there is no job {number} in {root}: {there}")
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
        write_json(place(root, job) / "job.json", asdict(job))
    return job


def _title(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:LONGEST_TITLE]


def _tags(given: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(tag for text in given if (tag := _title(text.replace(",", " ")))))
