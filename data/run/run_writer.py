"""Writes a run's directory: queues a run, creates or continues it, and says how it ended."""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from binade.data.run.access import check_writable
from binade.data.run.directory import (
    COUNTS,
    QUEUED,
    RUN_FILE,
    RUNNING,
    STATUS_FILE,
    RankStatus,
    RunError,
    RunFile,
    RunState,
    Status,
    boot,
    describe_run,
    now,
    rank_statuses,
    read_status,
    write_run_file,
    written_segments,
)
from binade.data.run.json_files import (
    parse_json,
    read_json,
    write_json,
)
from binade.data.run.losses import LOSS
from binade.data.run.records import append_record
from binade.data.run.segment import last_number, segment_names
from binade.data.run.store import (
    delete_left,
    process_start,
    staged_directory,
    sweep,
)

# The absolute path of the queued run that a process was started for; inherited by what it starts.
RUN_VARIABLE = "BINADE_RUN"
UNNAMEABLE = re.compile(r"[^A-Za-z0-9._-]")
LONGEST_LABEL = 128


def _process(pid: int | None = None) -> dict[str, Any]:
    """The fields of a status that name a process of this machine: this one unless given."""
    pid = pid or os.getpid()
    return {"pid": pid, "pid_started": process_start(pid) or 0.0, "host": socket.gethostname(), "boot": boot()}


@dataclass
class RunWriter:
    """The run directory that this process writes, or one rank of several. Only rank 0 writes status, log and losses; on
    the others these calls do nothing, or keep the rank's own counts. Threads may share it. Every method raises OSError
    if it cannot write."""

    run_id: str
    directory: Path
    status: Status
    rank: int = 0
    ranks: int = 1
    _segments: int = field(default=0)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    @classmethod
    def create(
        cls, root: Path, label: str, config: dict[str, Any], *, ranks: int = 1, owner: int | None = None
    ) -> RunWriter:
        """Create <root>/<run_id> atomically, with run.json and a first status. The id contains the label, with "-" in
        place of characters that are not plain in a file name. A process that was started for a queued run of this root
        begins that run instead. owner is the process that the run depends on, by default this one. Raises RunError if
        the root cannot be written or `read_run` would not accept the configuration, and then leaves nothing behind;
        ReadOnlyError."""
        check_writable("recording a run")
        try:
            parse_json(RunFile, json.dumps(config).encode())
        except ValueError as error:
            raise RunError(f"run.json: {error}") from None
        sweep(root)
        queued = queued_run(root)
        run_id = queued.name if queued else new_run_id(label)
        try:
            with nullcontext(queued) if queued else staged_directory(root / run_id) as part:
                for name in ("segments", "tensors", *(["ranks"] if ranks > 1 else [])):
                    (part / name).mkdir(exist_ok=bool(queued))
                started = {"run_id": run_id, "started": now()}
                write_run_file(part, started | config)
                writer = cls(run_id, part, Status(RUNNING, **_process(owner)), ranks=ranks)
                writer.update()
        except OSError as error:
            raise unwritable(root, error) from error
        writer.directory = root / run_id
        return writer

    @classmethod
    def reopen(cls, directory: Path, *, ranks: int = 1, owner: int | None = None, **changes: Any) -> RunWriter:
        """Continue a run that has ended: it is running again, in the process `owner` or this one, with these changes of
        its status. Raises OSError, ReadOnlyError, or RunError if its status is damaged."""
        check_writable("recording a run")
        try:
            before = read_status(directory)
            run_id = read_json(RunFile, directory / RUN_FILE).get("run_id") or directory.name  # it may be renamed
        except ValueError as error:
            raise RunError(f"{directory.name} cannot be read: {error}") from error
        for end in ("part", "gone"):  # of killed processes, also of older versions and other machines
            for left in directory.glob(f"segments/.*.{end}"):
                delete_left(left)
        segments = last_number(written_segments(directory, segment_names(directory)))
        writer = cls(run_id, directory, before, ranks=ranks, _segments=segments)
        writer.update(state=RUNNING, reason=None, finished=None, **_process(owner), **changes)
        return writer

    def continue_after(self, segments: int) -> None:
        """Number the next segment as the one after this many."""
        self._segments = segments

    @classmethod
    def join(cls, directory: Path, rank: int, ranks: int) -> RunWriter:
        """Another rank's part of a run that rank 0 has created. Raises RunError if its directory cannot be found."""
        try:
            status = read_status(directory)
            writer = cls(directory.name, directory, status, rank, ranks)
            writer.update(**dict.fromkeys(COUNTS, 0))
        except OSError as error:
            raise RunError(
                f"rank {rank} cannot write to {directory}: {error.strerror or error}; all ranks need the same directory"
            ) from error
        return writer

    def update(self, **changes: Any) -> None:
        """Replace status.json. The counts in the changes are this rank's; the status has the sums over all ranks."""
        with self._lock:
            if self.ranks > 1:
                changes |= self._count({name: changes[name] for name in COUNTS if name in changes})
            self.status = replace(self.status, **changes, heartbeat=now())
            if self.rank == 0:
                write_json(self.directory / STATUS_FILE, self.status)

    def _count(self, counts: dict[str, Any]) -> dict[str, int]:
        """Save this rank's counts if they have changed. Returns the sums of what all ranks have written so far."""
        if counts:
            write_json(self.directory / "ranks" / f"rank{self.rank:02d}.json", RankStatus(**_process(), **counts))
        return total_counts(self.directory)

    def finish(self, state: RunState, reason: str | None = None) -> None:
        """Record how the run ended."""
        if self.rank == 0:
            self.update(state=state, reason=reason, finished=now())

    def describe(self, facts: Mapping[str, Any]) -> None:
        """As `describe_run`."""
        if self.rank == 0:
            describe_run(self.directory, facts)

    def append_loss(self, record: Mapping[str, Any]) -> None:
        if self.rank == 0:
            append_record(self.directory, LOSS, record)

    @property
    def segments(self) -> int:
        """The number of the last segment of this rank."""
        self.next_segment_name()
        return self._segments

    def next_segment_name(self) -> str:
        """The name of the next segment; it stays the same until a segment of this name has been published."""
        while (self.directory / "segments" / (name := f"rank{self.rank:02d}-{self._segments + 1:06d}")).exists():
            self._segments += 1
        return name


def new_run_id(label: str) -> str:
    """The name of a new run's directory: the time, the label with "-" in place of characters that are not plain in a
    file name, and six hexadecimal digits."""
    named = UNNAMEABLE.sub("-", label).lstrip(".")[:LONGEST_LABEL] or "run"
    return f"{datetime.now(UTC):%Y%m%d_%H%M%S}_{named}_{secrets.token_hex(3)}"


def write_queued(directory: Path) -> None:
    """Mark a run as queued: a new one, in a directory without status.json, or one that has ended. Raises OSError, and
    ValueError if its status is damaged."""
    nobody: dict[str, Any] = {"pid": 0, "pid_started": 0.0, "host": "", "boot": ""}
    try:
        status = replace(read_status(directory), state=QUEUED, reason=None, finished=None, **nobody)
    except FileNotFoundError:
        status = Status(QUEUED, **nobody)
    write_json(directory / STATUS_FILE, replace(status, heartbeat=now()))


def queued_run(root: Path) -> Path | None:
    """The directory of the run of this root that this process was started for, unless that has begun."""
    directory = Path(os.environ.get(RUN_VARIABLE, ""))
    try:
        waits = directory.parent.samefile(root) and read_status(directory).state == QUEUED
        return root / directory.name if waits else None
    except (OSError, ValueError):
        return None


def note_continued(root: Path, run_id: str) -> None:
    """Note in the directory of the queued run that this process was started for, if any, that it writes this run
    instead. Raises OSError."""
    if queued := queued_run(root):
        write_json(queued / STATUS_FILE, replace(read_status(queued), continues=run_id))


def total_counts(directory: Path) -> dict[str, int]:
    ranks = rank_statuses(directory)
    return {name: sum(getattr(rank, name) for rank in ranks) for name in COUNTS}


def settle(directory: Path, state: RunState, reason: str | None) -> None:
    """Record how a run ended whose processes are gone: of several ranks, rank 0 may not have known the cause. Temporary
    files of killed processes are deleted."""
    for part in [*directory.glob(".*.part"), *directory.glob("*/.*.part"), *directory.glob("tensors/*/.*.part")]:
        delete_left(part)
    status = read_status(directory)
    counts: dict[str, Any] = total_counts(directory) if (directory / "ranks").is_dir() else {}
    changed = replace(status, state=state, reason=reason, finished=now(), heartbeat=now(), **counts)
    write_json(directory / STATUS_FILE, changed)


def unwritable(root: Path, error: OSError) -> RunError:
    """That no run can be created in a root."""
    return RunError(f"cannot write to {root}: {error.strerror or error}; choose a directory with --tensor-save-dir")
