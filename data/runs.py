"""Run directories: the truth on disk that the index is derived from.

    <root>/<run_id>/
      run.json       configuration, versions, device, command line; written once
      status.json    state, pid and its start time, progress, loss, heartbeat; replaced atomically
      log.txt        what the collector printed
      loss.jsonl     one line per iteration
      tensors/       tensor files      segments/   their rows

A run's state is what its status and its process say together: a run that claims to be running while its process is
gone has crashed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.segment import segment_names
from data.store import write_atomic

DEFAULT_ROOT = Path("data/runs")
RUNNING, DONE, FAILED, CANCELLED, CRASHED = STATES = "running", "done", "failed", "cancelled", "crashed"


class RunError(ValueError):
    """A run directory or root cannot be used. The message says what, and what to do."""


@dataclass(frozen=True)
class Status:
    """What status.json holds. iteration is the last one finished (-1 before the first), times are ISO 8601 in UTC."""

    state: str
    pid: int
    pid_started: float
    iteration: int = -1
    tensors: int = 0
    tensors_without_raw: int = 0
    bytes: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    reason: str | None = None
    heartbeat: str = ""
    finished: str | None = None


@dataclass(frozen=True)
class RunInfo:
    """A run as read from its directory. `config` is run.json; state is checked against the live process."""

    run_id: str
    directory: Path
    config: dict[str, Any]
    status: Status

    @property
    def segments(self) -> list[str]:
        return segment_names(self.directory)


def resolve_root(given: str | os.PathLike | None = None) -> Path:
    """The root: the given one, else TENSOR_SAVE_DIR, else data/runs, as an absolute path."""
    return Path(given or os.environ.get("TENSOR_SAVE_DIR") or DEFAULT_ROOT).expanduser().absolute()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def process_start(pid: int) -> float | None:
    """Start time of a live process in clock ticks since boot, None if there is none (or it is a zombie)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, ValueError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] == "Z" else float(fields[19])


@dataclass
class RunWriter:
    """The run directory that this process writes. Every method raises OSError if the disk refuses."""

    run_id: str
    directory: Path
    status: Status
    _segments: int = field(default=0)

    @classmethod
    def create(cls, root: Path, label: str, config: dict[str, Any]) -> RunWriter:
        """Make <root>/<run_id> with run.json and a first status, all at once. Raises RunError if the root cannot be
        written, and then leaves nothing there."""
        run_id = f"{datetime.now():%Y%m%d_%H%M%S}_{label}_{secrets.token_hex(3)}"
        aside = root / f".{run_id}.part"
        writer = cls(run_id, aside, Status(RUNNING, os.getpid(), process_start(os.getpid()) or 0.0))
        try:
            (aside / "segments").mkdir(parents=True)
            (aside / "tensors").mkdir()
            started = {"run_id": run_id, "started": now()}
            write_atomic(aside / "run.json", json.dumps(started | config, indent=1).encode())
            writer.update()
            writer.directory = aside.rename(root / run_id)
        except OSError as error:
            raise RunError(
                f"cannot write to {root}: {error.strerror or error}; choose a directory with --tensor-save-dir"
            ) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return writer

    def update(self, **changes: Any) -> None:
        """Replace status.json."""
        self.status = replace(self.status, **changes, heartbeat=now())
        write_atomic(self.directory / "status.json", json.dumps(asdict(self.status)).encode())

    def finish(self, state: str, reason: str | None = None) -> None:
        """Say how the run ended, on a full disk too."""
        try:
            self.update(state=state, reason=reason, finished=now())
        except OSError:  # no room for a second status.json: the first one's own block will do
            with open(self.directory / "status.json", "r+b") as file:
                file.write(json.dumps(asdict(self.status)).encode())
                file.truncate()

    def append_loss(self, record: dict[str, Any]) -> None:
        with open(self.directory / "loss.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    def next_segment_name(self, rank: int) -> str:
        self._segments += 1
        return f"rank{rank:02d}-{self._segments:06d}"


def read_run(directory: Path) -> RunInfo:
    """A run's configuration and state. Raises RunError if the directory is no run or its files are damaged."""
    try:
        config = json.loads((directory / "run.json").read_bytes())
        status = Status(**json.loads((directory / "status.json").read_bytes()))
    except FileNotFoundError as error:
        raise RunError(f"{directory.name} is not a run: {Path(error.filename).name} is missing") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise RunError(f"{directory.name} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise RunError(f"{directory.name} cannot be read: run.json is not an object")
    if status.state not in STATES:
        raise RunError(f"{directory.name} cannot be read: its state is {status.state!r}, not {', '.join(STATES)}")
    if status.state == RUNNING and process_start(status.pid) != status.pid_started:
        status = replace(
            status,
            state=CRASHED,
            finished=status.heartbeat,
            reason="the collector's process ended without saying so: killed, out of memory, or the machine restarted",
        )
    return RunInfo(directory.name, directory, config, status)


def list_runs(root: Path) -> tuple[list[RunInfo], list[str]]:
    """The runs under a root, oldest first, and what was passed over with the reason. A missing root has none."""
    runs: list[RunInfo] = []
    refused: list[str] = []
    if not root.is_dir():
        return runs, refused
    for directory in sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        try:
            runs.append(read_run(directory))
        except RunError as error:
            refused.append(str(error))
    runs.sort(key=lambda run: (str(run.config.get("started")), run.run_id))  # a name tells seconds only
    return runs, refused


def read_losses(directory: Path) -> list[dict[str, Any]]:
    """loss.jsonl as records: iteration (from 0 under the recipe, below 0 in warm-up), loss in nats per token, time as
    seconds since 1970, the step's own seconds and whether tensors were recorded in it (older runs lack these two). A
    line cut short by a crash or damaged ends them."""
    path = directory / "loss.jsonl"
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records
