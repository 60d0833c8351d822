"""What a job has in the directory of its run: what was requested, and where and when it was started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic.dataclasses import dataclass

from binade.collector.errors import ConfigError
from binade.collector.jobs.processes import Process, boot, host
from binade.collector.jobs.slurm import ClusterJob
from binade.collector.settings import QUEUEABLE
from binade.collector.training.config import RunConfig
from binade.collector.training.slurm_options import SlurmOptions
from binade.data.run.directory import JOB_FILE, Status
from binade.data.run.json_files import STRICT, Count, Text, Time, read_json, write_json
from binade.data.words.text import describe

LAUNCH_FILE, OUTPUT_FILE = "launch.json", "output.txt"
HERE = SlurmOptions()
T = TypeVar("T")


class JobError(ValueError):
    """The job does not exist, its files are damaged, or its state does not allow the action. The message says which."""

    exit_status = 2


@dataclass(frozen=True, config=STRICT)
class Job:
    """job.json.

    run_id    the name of the run's directory; under another name, a directory is a copy and no job
    id        the number by which people name it
    position  its place in the order in which jobs are started; later if it is resumed
    config    what it trains; None for another command
    command   the words of a command QUEUEABLE, without the root
    resumes   whether it continues what the run has trained so far
    repeats   the run that it repeats
    directory the working directory of the command
    created   ISO 8601 in UTC, the same for jobs that were queued together
    user      who requested it
    """

    run_id: Text
    directory: Text
    created: Time
    id: Count = 0
    position: Count = 0
    config: RunConfig | None = None
    command: tuple[Text, ...] = ()
    start: SlurmOptions = HERE
    title: str = ""
    tags: tuple[str, ...] = ()
    user: str = ""
    resumes: bool = False
    repeats: str | None = None

    def __post_init__(self) -> None:
        if self.config is None:
            check_command(self.command)

    @property
    def on_cluster(self) -> bool:
        return self.start.on_cluster

    @property
    def arguments(self) -> list[str]:
        """The command line that does the same, for people."""
        if self.config is None:
            return list(self.command)
        line = ["run", "--resume", self.run_id] if self.resumes else self.config.arguments()
        return [*line, *self.start.arguments()]

    def started_as(self, root: Path) -> list[str]:
        """What binade is started with, apart from the root."""
        if self.config is None or self.resumes:
            return self.arguments
        return ["run", "--config", str(directory_of(root, self) / JOB_FILE)]


def check_command(words: Sequence[str]) -> None:
    """Raises ConfigError for words that are not those of a command QUEUEABLE, or that name a root."""
    if not words or words[0] not in QUEUEABLE:
        raise ConfigError(f"a job that trains nothing is a command line of {', '.join(QUEUEABLE)}")
    if any(word.partition("=")[0] == "--tensor-save-dir" for word in words):
        raise ConfigError("--tensor-save-dir comes before the command: binade jobs add --tensor-save-dir DIR COMMAND")


@dataclass(frozen=True, config=STRICT)
class Launch:
    """launch.json, from the start of a job on. host and boot are those of the runner that started it, runner is the
    process that starts or follows it, oom_kills is the kernel's count before the start; the times are ISO 8601 in UTC.
    A job on a cluster has no process here. It is changed while the queue is locked."""

    host: str
    boot: str
    at: Time
    oom_kills: int = 0
    runner: Process | None = None
    cluster: ClusterJob | None = None
    cancelled: Time | None = None
    ended: Time | None = None

    @property
    def here(self) -> bool:
        """Whether its processes may be on this machine, in the current boot."""
        return self.cluster is None and self.host == host() and self.boot == boot()


def directory_of(root: Path, job: Job) -> Path:
    return root / job.run_id


def read_if_sound(kind: type[T], path: Path) -> T | None:
    """The contents of a file; None if it does not exist or is damaged."""
    with suppress(OSError, ValueError):
        return read_json(kind, path)
    return None


def _read_sound(kind: type[T], path: Path) -> T | None:
    """The contents of a file; None if it does not exist. Raises JobError if it is damaged."""
    try:
        return read_json(kind, path)
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and not path.is_symlink():
            return None
        raise _damage(path, describe(error)) from None


def _damage(path: Path, reason: str) -> JobError:
    return JobError(
        f"the job of run {path.parent.name} is skipped because {path.name} is damaged: {reason}; to remove it, delete "
        f"{path.parent}"
    )


def read_job(directory: Path) -> Job | None:
    """The job of a run; None if it was not queued, is a copy of one that was, a link or another user's. Raises JobError
    if it is damaged."""
    if directory.is_symlink() or not os.access(directory, os.X_OK):
        return None
    job = _read_sound(Job, directory / JOB_FILE)
    return job if job and job.run_id == directory.name else None


def read_launch(root: Path, job: Job) -> Launch | None:
    """None if the job was not started. Raises JobError if its file is damaged."""
    return _read_sound(Launch, directory_of(root, job) / LAUNCH_FILE)


def write_launch(root: Path, job: Job, launch: Launch) -> None:
    """Raises OSError."""
    write_json(directory_of(root, job) / LAUNCH_FILE, launch)


def change_launch(root: Path, job: Job, **changes: Any) -> None:
    """Raises JobError, OSError."""
    if launch := read_launch(root, job):
        write_launch(root, job, replace(launch, **changes))


def drop_launch(root: Path, job: Job) -> None:
    """Put a job back into the queue. Raises OSError."""
    (directory_of(root, job) / LAUNCH_FILE).unlink(missing_ok=True)


def read_job_status(root: Path, job: Job) -> Status:
    """The status of the job's run. Raises JobError if it is damaged."""
    status = _read_sound(Status, directory_of(root, job) / "status.json")
    if status is None:
        raise _damage(directory_of(root, job) / "status.json", "it is missing")
    return status
