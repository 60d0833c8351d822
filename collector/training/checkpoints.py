"""The positions of a run at its checkpoints, which `collector.training.resume` writes and continues from. No torch."""

from __future__ import annotations

from pathlib import Path

from pydantic.dataclasses import dataclass

from binade.collector.errors import raising
from binade.collector.training.config import RunConfig
from binade.data.json_files import STRICT, Count, read_json
from binade.data.runs import CHECKPOINTS, COUNTS, DONE, RUNNING, RunError, RunInfo, Whole


@dataclass(frozen=True, config=STRICT)
class Position:
    """The position of a rank's part of a run, with the run's configuration. losses, events and twins are the sizes of
    these files in bytes; recorded counts the tensors in the order of their ids; the rest is as in status.json."""

    config: RunConfig
    done: Count
    segments: Count
    recorded: Count
    losses: Count
    events: Count
    tensors: Count
    tensors_without_raw: Count
    bytes: Count
    iteration: Whole
    loss_first: float | None
    loss_last: float | None
    twins: Count = 0

    @property
    def counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in COUNTS}


def check_resumable(run: RunInfo) -> None:
    """Raise RunError for a run that is done or still running."""
    if run.status.state == DONE:
        raise RunError(f"{run.run_id} is done: there is nothing to resume")
    if run.status.state == RUNNING:
        raise RunError(f"{run.run_id} is still running: cancel it first")


def last(run: RunInfo) -> tuple[Path, tuple[Position, ...]]:
    """The last checkpoint that all ranks have written: its folder, and the positions of the ranks. Raises RunError if
    there is none, or the run cannot be resumed."""
    check_resumable(run)
    ranks = int(run.config.get("tp") or 1) * int(run.config.get("dp") or 1)
    for folder in sorted(run.directory.glob(f"{CHECKPOINTS}/*"), reverse=True):
        files = [folder / f"rank{rank:02d}.json" for rank in range(ranks)]
        if all(file.exists() for file in files):
            with raising(RunError, f"{folder} cannot be read", OSError, ValueError):
                return folder, tuple(read_json(Position, file) for file in files)
    raise RunError(
        f"{run.run_id} has no checkpoint to resume from: it ended before the first one, or was started "
        "without --checkpoint-every"
    )
