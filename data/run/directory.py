"""Run directories: the source of truth on disk, from which the index is derived.

    <root>/<run_id>/
      run.json       configuration, versions, device, command line, and their checksum; an instrumented run adds the
                     recipe and the model once they are known
      status.json    state, pid and its start time, progress, loss, heartbeat; replaced atomically
      notes.json     the name, color and note that users gave it; may be missing
      log.txt        what the collector printed
      job.json       what was queued (collector.jobs.queue), beside launch.json and output.txt; only of a
                     run that was queued
      loss.jsonl     a record for each iteration: see data.run.records and data.run.losses
      events.jsonl   other events: see data.run.events
      experiment/    results of treatments, and what the run evaluated while it trained: see data.run.experiment
      tensors/       tensor files      segments/   their rows
      ranks/         of a run on several ranks: the process of each and what it has recorded; rank 0 adds them up

A run's state follows from its status and its process: a run whose status says running but whose process is gone has
crashed. A run that is queued has no run.json until its command begins it (`RunWriter.create`); until then it is no part
of the index.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass
from typing_extensions import TypedDict  # pydantic requires this TypedDict before Python 3.12

from binade.data.run.access import check_writable
from binade.data.run.json_files import (
    STRICT,
    Count,
    Pid,
    Whole,
    parse_json,
    read_json,
    sealed,
)
from binade.data.run.losses import LOSS, first_record
from binade.data.run.segment import MERGED, Manifest, read_manifest, segment_digest, segment_names
from binade.data.run.store import (
    LINK,
    locked,
    process_start,
    read_file,
    remove_directory,
    write_atomic,
)

RUN_FILE = "run.json"
STATUS_FILE = "status.json"
JOB_FILE = "job.json"
IMPORT = "import"  # run.json's "kind" of a run whose tensors another tool logged
FOLDERS = ("segments", "tensors", "ranks", "checkpoints")  # of a run
CHECKPOINTS = "checkpoints"  # the folder of a run that can be resumed from them
DEFAULT_ROOT = Path("data/runs")


class RunState(StrEnum):
    """How a run is doing."""

    QUEUED = "queued"  # its command has not begun it yet, or will continue it
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"  # and its status says why
    CANCELLED = "cancelled"
    CRASHED = "crashed"  # the status says running, but the process is gone; written down only of a run that was queued


QUEUED, RUNNING, DONE, FAILED, CANCELLED, CRASHED = STATES = tuple(RunState)


class RunError(ValueError):
    """A run directory or root cannot be used. The message says why, and what to do."""

    exit_status = 1


class NotBegunError(RunError):
    """The run is queued, or ended before its command began it."""


class RootError(RunError):
    """The root is not a directory, or does not have the run that was named. The message says what is in its place."""

    exit_status = 2


@pydantic_dataclass(frozen=True, config=STRICT)
class Status:
    """status.json. iteration is the last one finished (-1 before the first), times are ISO 8601 in UTC; the run is
    alive as long as the process `pid` of `host` is, in the same boot. continues: of a queued run, the run that its
    command writes in its place."""

    state: RunState
    pid: Pid
    pid_started: float
    iteration: Whole = -1
    tensors: Count = 0
    tensors_without_raw: Count = 0
    bytes: Count = 0
    loss_first: float | None = None
    loss_last: float | None = None
    reason: str | None = None
    heartbeat: str = ""
    finished: str | None = None
    host: str = ""
    boot: str = ""
    continues: str | None = None


@pydantic_dataclass(frozen=True, config=STRICT)
class RankStatus:
    """ranks/rank00.json: the rank's process and its share of the run's counts."""

    pid: Pid
    pid_started: float
    host: str
    boot: str = ""
    tensors: Count = 0
    tensors_without_raw: Count = 0
    bytes: Count = 0


@pydantic_dataclass(frozen=True, config=STRICT)
class RunNotes:
    """notes.json: the name, color and note that users gave a run. Each may be empty."""

    name: Annotated[str, Field(max_length=80, pattern=r"^[^\x00-\x1f]*$")] = ""
    color: Annotated[str, Field(pattern="^(#[0-9a-f]{6})?$")] = ""
    note: Annotated[str, Field(max_length=10_000)] = ""


Text = str | None
WholeOrNone = Whole | None


class Weights(TypedDict, total=False):
    """Where the weights of a run came from, and the formats that they were dequantized from."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]

    path: str
    quantized: list[str]


class BranchOf(TypedDict):
    """Where a run branched off from another one: the first iteration that it trained itself, and the recipes that were
    trained before, oldest first, without the warm-up."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]

    run_id: str
    iteration: Whole
    recipes: list[str]


class RunFile(TypedDict, total=False):
    """The fields of run.json that are used, not only shown. Each may be missing or null."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]  # pydantic reads it here

    run_id: Text
    started: Text
    kind: Text
    command: Text
    run_config: Any  # see collector.training.config.trained_config
    model: Text
    size: Text
    dataset: Text
    recipe: Text
    device: Text
    backend: Text
    train_iters: WholeOrNone
    control_iter: WholeOrNone
    capture_every: Annotated[int, Field(ge=1, lt=2**63)] | None
    weights: Weights | None
    branch_of: BranchOf | None
    warmup_iterations: WholeOrNone
    micro_batches: WholeOrNone
    collect_micro_batches: WholeOrNone
    micro_batch_size: WholeOrNone
    sequence_length: WholeOrNone
    layers: WholeOrNone
    vocab_size: WholeOrNone
    max_bytes: WholeOrNone
    tp: WholeOrNone
    dp: WholeOrNone
    ranks: list[Whole] | None
    operands: list[str] | None
    tensors: list[str] | None
    modules: list[str] | None
    scores: list[str] | None
    raw: bool | None
    save_tensors: bool | None
    loss_unit: Text  # of an import: "nats per token", also if it is absent, or "unknown"


SEGMENT = re.compile(r"(rank\d+-)\d{6,}")
_URL = re.compile(r"[a-z][a-z0-9+.-]*:/")  # pathlib joins the two slashes
COUNTS = ("tensors", "tensors_without_raw", "bytes")
# A run on another machine whose status has not changed for this long has crashed: its process cannot be checked.
SILENCE = timedelta(hours=1)


@dataclass(frozen=True)
class RunInfo:
    """A run as read from its directory. `config` is run.json; state is checked against the live process."""

    run_id: str
    directory: Path
    config: RunFile
    status: Status
    notes: RunNotes = field(default_factory=RunNotes)  # read by the index only

    @property
    def segments(self) -> list[str]:
        return segment_names(self.directory)

    def manifest_of(self, segment: str) -> Manifest:
        """The manifest of a segment. Raises as `segment.read_manifest`."""
        return read_manifest(self.directory / "segments" / segment, self.config.get("run_id"))

    def missing(self, segments: Iterable[str], rows: int) -> str | None:
        """What is missing if the run has these segments with so many rows; None if nothing is. A segment is published
        before it is counted, so there may be more rows than the status says; but a rank numbers its segments from 1
        on."""
        state, counted, is_import = self.status.state, self.status.tensors, self.config.get("kind") == IMPORT
        if state == RUNNING or (state != DONE and is_import):  # the status may be that of the import before
            return None
        if rows < counted:
            return f"its segments contain {rows} tensors, but status.json says {counted}, so a segment is missing"
        names = written_segments(self.directory, segments)
        last = {match[1]: match[0] for name in sorted(names) if (match := SEGMENT.fullmatch(name))}
        for rank, name in last.items():
            before = (f"{rank}{number:06d}" for number in range(1, int(name[len(rank) :])))
            if not is_import and (absent := next((segment for segment in before if segment not in names), None)):
                return f"segment {absent} is missing, although {name} is there"
        return None


def resolve_root(given: str | os.PathLike[str] | None = None) -> Path:
    """The root: the given one, else TENSOR_SAVE_DIR, else data/runs, as an absolute path. Raises RunError for one that
    is not valid Unicode, or is a URL."""
    chosen = given or os.environ.get("TENSOR_SAVE_DIR") or DEFAULT_ROOT
    named = Path(chosen)
    if _URL.match(str(chosen)) and not named.exists():
        raise RunError(  # without the URL, which may contain a secret
            "the root is a URL: expected a directory. Copy an object store with aws s3 sync or rclone, or mount it"
        )
    try:
        root = named.expanduser().absolute()
    except RuntimeError:
        raise RunError(f"{named} is not a user's home: choose a directory with --tensor-save-dir") from None
    if not is_unicode(str(root)):
        shown = str(root).encode(errors="backslashreplace").decode()
        raise RunError(f"the root {shown} is not valid Unicode: choose a directory with --tensor-save-dir")
    return root


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: file names on Linux are arbitrary bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@cache
def boot() -> str:
    """The ID of this boot: process numbers and start times are valid only within one boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def has_not_begun(directory: Path) -> bool:
    """Whether a directory without run.json is that of a queued run, and not of one that has lost it."""
    with suppress(OSError):
        left = any((directory / name).exists() for name in (RUN_FILE, LOSS.file, "experiment"))
        return (directory / JOB_FILE).is_file() and not left and not any((directory / "segments").glob("*"))
    return False


def written_segments(directory: Path, segments: Iterable[str]) -> set[str]:
    """These segments of a run, and the names of the segments that were merged into them."""
    names: set[str] = set()
    for name in segments:
        merged: Mapping[str, str] = {}
        if name.startswith(MERGED):
            with suppress(OSError, ValueError):  # a damaged manifest is reported when its rows are read
                merged = read_manifest(directory / "segments" / name, None).digests
        names.update(merged or [name])
    return names


def write_run_file(directory: Path, config: Mapping[str, Any]) -> None:
    """Write run.json. Raises OSError."""
    write_atomic(directory / RUN_FILE, sealed(json.dumps(config, indent=1).encode()))


def describe_run(directory: Path, facts: Mapping[str, Any]) -> None:
    """Add facts to run.json, which is replaced atomically. Raises RunError if it would not be valid; OSError."""
    with locked(directory, required=False):
        config = dict(read_json(RunFile, directory / RUN_FILE)) | dict(facts)
        try:
            parse_json(RunFile, json.dumps(config).encode())
        except ValueError as error:
            raise RunError(f"run.json: {error}") from None
        write_run_file(directory, config)


def read_status(directory: Path) -> Status:
    """The content of status.json. Raises OSError, and ValueError if it is damaged."""
    return read_json(Status, directory / STATUS_FILE)


def rank_statuses(directory: Path) -> list[RankStatus]:
    """The statuses of the ranks of a multi-rank run, in order; a damaged file is left out."""
    statuses = []
    for path in sorted((directory / "ranks").glob("rank*.json")):
        with suppress(OSError, ValueError):
            statuses.append(read_json(RankStatus, path, directory))
    return statuses


def read_run(directory: Path) -> RunInfo:
    """A run's configuration and state. Raises RunError if the directory is not a run, its files are damaged or one of
    its folders is a link."""
    if linked := next((name for name in FOLDERS if (directory / name).is_symlink()), None):
        raise RunError(f"{directory.name} cannot be read: its {linked} is {LINK}")
    try:
        config = _described(directory)
        status = read_status(directory)
    except FileNotFoundError as error:
        if Path(error.filename).name == RUN_FILE and has_not_begun(directory):
            raise NotBegunError(f"{directory.name} has not begun") from None
        raise RunError(f"{directory.name} is not a run: {Path(error.filename).name} is missing") from None
    except (OSError, ValueError) as error:
        raise RunError(f"{directory.name} cannot be read: {error}") from error
    if status.state == RUNNING and _is_gone(status) and all(_is_gone(rank) for rank in rank_statuses(directory)):
        status = replace(
            status,
            state=CRASHED,
            finished=status.heartbeat,
            reason="the collector's process ended unexpectedly: killed, out of memory, or the machine restarted",
        )
    return RunInfo(directory.name, directory, config, status)


def _described(directory: Path) -> RunFile:
    """run.json. What the losses of an import say of themselves has precedence: they may have replaced those that it
    was written for. Raises OSError, and ValueError if it is damaged."""
    config = read_json(RunFile, directory / RUN_FILE)
    if "loss_column" in config and (settings := (first_record(directory) or {}).get("settings")):
        return parse_json(RunFile, json.dumps({**config, **settings}).encode())
    return config


def _is_gone(status: Status | RankStatus) -> bool:
    if status.host in ("", socket.gethostname()):
        return status.boot not in ("", boot()) or process_start(status.pid) != status.pid_started
    if isinstance(status, RankStatus):
        return True  # only its run's heartbeat shows that
    try:
        return datetime.now(UTC) - datetime.fromisoformat(status.heartbeat) > SILENCE
    except (TypeError, ValueError):
        return True


def delete_run(directory: Path) -> None:
    """Remove a run with everything that it recorded. It disappears at once; its content is deleted after that. Raises
    RunError if it is not a run, queued or still running, ReadOnlyError, and OSError."""
    check_writable("deleting a run")
    run = read_run(directory)
    if run.status.state in (QUEUED, RUNNING):
        state = "queued" if run.status.state == QUEUED else "still running"
        raise RunError(f"{run.run_id} is {state}: cancel it first")
    remove_directory(directory)


def unusable_root(root: Path) -> str:
    """The error message for a root that is not a directory or is below something else, or "" if it is a directory or
    does not exist yet."""
    nearest = next((path for path in (root, *root.parents) if os.path.lexists(path)), Path())
    if nearest.is_dir():
        return ""
    kind = "a file" if nearest.exists() else "a broken link"
    return f"{nearest} is {kind}: the root of the runs must be a directory"


def check_usable(root: Path) -> None:
    """Raises RootError for a root that is neither a directory nor can be created."""
    if problem := unusable_root(root):
        raise RootError(problem)


def check_root(root: Path) -> None:
    """Raises RootError if the root is not a directory."""
    check_usable(root)
    if not root.is_dir():
        raise RootError(f"{root} does not exist: give a directory of runs, or collect some with binade batch")


def check_names(root: Path, run_ids: Collection[str]) -> None:
    """Raises RootError for the first run that the root does not have."""
    for run_id in sorted({*run_ids} - {*run_names(root)}):
        raise RootError(f"{root} has no run {run_id!r}: give the name of a directory in it")


def run_directories(root: Path) -> list[Path]:
    """The directories under a root that may be runs, by name. A missing root has none."""
    return [root / name for name in run_names(root)]


def run_names(root: Path) -> list[str]:
    """The names of `run_directories`."""
    if not root.is_dir():
        return []
    with os.scandir(root) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def list_runs(root: Path) -> tuple[list[RunInfo], list[str]]:
    """The runs under a root that have begun, oldest first, and the skipped directories with the reason. A missing root
    has none."""
    runs: list[RunInfo] = []
    refused: list[str] = []
    for directory in run_directories(root):
        try:
            runs.append(read_run(directory))
        except NotBegunError:
            pass
        except RunError as error:
            refused.append(str(error))
    runs.sort(key=lambda run: (str(run.config.get("started")), run.run_id))  # a name has only seconds
    return runs, refused


def fingerprint(directory: Path) -> str:
    """The digest of a run's content, as 64 hexadecimal digits: SHA-256 over run.json and, segment by segment, the rows,
    sketches and scores. The location and presence of tensor files do not count, nor whether segments were merged: a run
    has the same fingerprint when it is bundled without its values. Raises RunError if a file is missing or damaged."""
    total = hashlib.sha256()
    try:
        total.update(hashlib.sha256(read_file(directory / RUN_FILE, base=directory)).digest())
        for name, digest in sorted(digests(directory).items()):
            total.update(name.encode() + b"\0" + bytes.fromhex(digest))
    except (OSError, ValueError) as error:
        raise RunError(f"{directory.name} cannot be read: {error}") from error
    return total.hexdigest()


def digests(directory: Path) -> dict[str, str]:
    """The `segment_digest` of each segment that a run wrote, in hexadecimal; of a merged one as its manifest names
    them. Raises OSError and ValueError."""
    segment_digests: dict[str, str] = {}
    for name in segment_names(directory):
        segment = directory / "segments" / name
        merged = read_manifest(segment, None).digests if name.startswith(MERGED) else {}
        segment_digests |= merged or {name: segment_digest(segment).hex()}
    return segment_digests
