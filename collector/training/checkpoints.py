"""The positions of a run at its checkpoints, which `collector.training.resume` writes and continues from. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from binade.collector.errors import ConfigError, raising
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import Branch
from binade.data.run.directory import CHECKPOINTS, COUNTS, DONE, QUEUED, RUNNING, RunError, RunInfo
from binade.data.run.json_files import STRICT, Count, Whole, read_json
from binade.data.run.run_writer import queued_run

NO_CHECKPOINT = "it ended before the first one, or was started without --checkpoint-every"


@dataclass(frozen=True, config=STRICT)
class Position:
    """The position of a rank's part of a run, with the run's configuration. losses and events are the sizes of these
    files in bytes; recorded counts tensors in the order of their ids; the rest is as in status.json."""

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

    @property
    def counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in COUNTS}


def check_resumable(run: RunInfo) -> None:
    """Raise RunError for a run that is done, still running, or queued, unless the queue has started this process."""
    if run.status.state == DONE:
        raise RunError(f"{run.run_id} is done: there is nothing to resume")
    if run.status.state == RUNNING:
        raise RunError(f"{run.run_id} is still running: cancel it first")
    if run.status.state == QUEUED and queued_run(run.directory.parent) != run.directory:
        raise RunError(f"{run.run_id} is queued already: see binade jobs")


def last(run: RunInfo) -> tuple[Path, tuple[Position, ...]]:
    """The last checkpoint that all ranks have written: its folder, and the positions of the ranks. Raises RunError if
    there is none, or the run cannot be resumed."""
    check_resumable(run)
    if checkpoint := next(_complete(run), None):
        return checkpoint
    raise RunError(f"{run.run_id} has no checkpoint to resume from: {NO_CHECKPOINT}")


def branch_of(run: RunInfo, changes: Mapping[str, Any]) -> Branch:
    """Where branches with these changes of its configuration leave a run. Raises RunError, ConfigError."""
    first = to_branch(run, changes)[1][0]
    if "evaluate_every" in changes and bool(changes["evaluate_every"]) != bool(first.config.evaluate_every):
        if first.config.evaluate_every:
            raise ConfigError(f"--evaluate-every is 0, but branches hold out what {run.run_id} does: leave it out")
        raise ConfigError(
            f"{run.run_id} was started without --evaluate-every, so no document is held out of what it was trained on: "
            "leave --evaluate-every out, or start the run again with it"
        )
    return Branch(run.run_id, first.config, first.done)


def to_branch(run: RunInfo, changes: Mapping[str, Any]) -> tuple[Path, tuple[Position, ...]]:
    """The last checkpoint, as of `last`, after which something is left to train with these changes of the run's
    configuration. Raises RunError, ConfigError."""
    if run.status.state == RUNNING:
        raise RunError(f"{run.run_id} is still running: branch it when it has ended, or cancel it first")
    first = None
    for folder, positions in _complete(run):
        first = positions[0]
        if first.done < first.config.warmup_iterations + replace(first.config, **changes).iterations:
            return folder, positions
    if first is None:
        raise RunError(f"{run.run_id} has no checkpoint to branch from: {NO_CHECKPOINT}")
    trained = first.done - first.config.warmup_iterations
    raise ConfigError(
        f"{run.run_id} has no checkpoint before its end, so a branch has nothing to train: give --train-iters "
        f"{trained + 1} or more, of which {trained} are done"
    )


def _complete(run: RunInfo) -> Iterator[tuple[Path, tuple[Position, ...]]]:
    """The checkpoints that all ranks have written, the last one first."""
    ranks = int(run.config.get("tp") or 1) * int(run.config.get("dp") or 1)
    for folder in sorted(run.directory.glob(f"{CHECKPOINTS}/*"), reverse=True):
        files = [folder / f"rank{rank:02d}.json" for rank in range(ranks)]
        if all(file.exists() for file in files):
            with raising(RunError, f"{folder} cannot be read", OSError, ValueError):
                yield folder, tuple(read_json(Position, file) for file in files)
