"""Checkpoints of a run, how a run that has ended early is continued (`binade run --resume RUN`), and how new runs
branch off from a checkpoint (`binade run --resume RUN --recipe A,B`).

    <run>/checkpoints/00000400/        iterations done, warm-up included; the last two are kept
      rank00.pt                        weights, optimizer and generators of a rank; loaded with weights_only
      delayed_scales_r00.safetensors   of a recipe with delayed scaling
      deoscillation_r00.safetensors    of a recipe with de-oscillation
      rank00.json                      how far the rank's part of the run was: a Position. It is written last

What the run recorded after its checkpoint is deleted, since it is recorded again. The data are read again from the
start, so no state of the data is saved.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import nn

from binade.collector.capture.recorder import Recorder
from binade.collector.capture.session import Continued
from binade.collector.errors import ConfigError, raising
from binade.collector.settings import DeviceName
from binade.collector.training.checkpoints import Position, check_resumable, last, to_branch
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import Branch, Plan
from binade.data.run.directory import CHECKPOINTS, SEGMENT, RunError, RunInfo, read_run
from binade.data.run.events import EVENT
from binade.data.run.experiment import cut_results
from binade.data.run.json_files import write_json
from binade.data.run.losses import LOSS, first_step
from binade.data.run.run_writer import RunWriter
from binade.data.run.store import no_link, remove_directory, save_state, staged_file, write_atomic
from binade.data.run.tensor_files import load_plain

KEPT = 2  # a rank may write the next one while another has not written this one


@dataclass(frozen=True)
class Resumed:
    """The last checkpoint of a run: its folder, and the positions of all ranks."""

    run: RunInfo
    folder: Path
    positions: tuple[Position, ...]

    @property
    def done(self) -> int:
        return self.positions[0].done

    def continued(self, rank: int) -> Continued | None:
        """What a Session needs of a rank; None for a new run."""
        position = self.positions[rank]
        return Continued(self.reopen, position.segments, position.recorded, position.counts)

    def scales(self, rank: int) -> Path | None:
        """The directory of the delayed scales and sums of de-oscillation, if there are any."""
        names = (f"{name}_r{rank:02d}.safetensors" for name in ("delayed_scales", "deoscillation"))
        return self.folder if any((self.folder / name).exists() for name in names) else None

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        """Restore a rank's state. Raises RunError for a file that is damaged or belongs to another model."""
        path = self.folder / f"rank{rank:02d}.pt"
        damage = OSError, RuntimeError, KeyError, ValueError, TypeError, pickle.UnpicklingError
        with raising(RunError, f"{path} cannot be read", *damage):
            state = load_plain(path, mapped=False)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["cpu"])
            if "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"])

    def reopen(self, ranks: int, owner: int | None) -> RunWriter:
        """On rank 0: mark the run as running again, and delete what it recorded after the checkpoint. Raises RunError,
        OSError."""
        run = read_run(self.run.directory)
        check_resumable(run)
        segments = {name: run.directory / "segments" / name for name in run.segments}
        if changed := [name for name in segments if not SEGMENT.fullmatch(name)]:
            raise RunError(f"{run.run_id} cannot be resumed: its segment {changed[0]} was merged or copied")
        later = {name for name in segments if _number(name) > self.positions[_rank(name)].segments}
        tables = {
            name: pq.read_table(path / "tensor.parquet", columns=["path"], partitioning=None)["path"].to_pylist()
            for name, path in segments.items()
            if name not in later
        }
        for rank, position in enumerate(self.positions):
            rows = sum(len(paths) for name, paths in tables.items() if _rank(name) == rank)
            if rows != position.tensors:
                raise RunError(
                    f"{run.run_id} cannot be resumed: at its checkpoint rank {rank} had recorded {position.tensors} "
                    f"tensors, but its segments contain {rows}, so they have been changed"
                )
            for file, size in self._files(rank):
                if _size(file) < size:
                    raise RunError(f"{run.run_id} cannot be resumed: {file.name} is shorter than at its checkpoint")
        first = self.positions[0]
        # The counts before the segments, since uncounted rows are not treated as damage.
        for path in (run.directory / "ranks").glob("rank*.json"):
            path.unlink()
        status = {name: getattr(first, name) for name in ("iteration", "loss_first", "loss_last")}
        writer = RunWriter.reopen(run.directory, ranks=ranks, owner=owner, **first.counts, **status)
        for name in sorted(later, reverse=True):  # the last one first, so that a run killed in the meantime has no gap
            remove_directory(segments[name])
        for folder in self.folder.parent.iterdir():  # a later checkpoint counts segments that are gone
            if folder.name > self.folder.name:
                remove_directory(folder)
        named = {path for paths in tables.values() for path in paths}
        for file in run.directory.glob("tensors/*/*"):
            if str(file.relative_to(run.directory)) not in named:
                file.unlink()
        for rank in range(len(self.positions)):
            for file, size in self._files(rank):
                _cut(file, size)
        cut_results(run.directory, first.done - first.config.warmup_iterations)
        return writer

    def _files(self, rank: int) -> Iterator[tuple[Path, int]]:
        """The files that a rank appends to, with the sizes that they had."""
        yield self.run.directory / EVENT.file_of(rank), self.positions[rank].events
        if rank == 0:
            yield self.run.directory / LOSS.file, self.positions[rank].losses


@dataclass(frozen=True)
class Branched(Resumed):
    """The checkpoint of a run from which a new one branches off.

    branch   where that is
    same     whether the branch has the recipe of the run, so that delayed scales go on
    history  the names of the recipes that were trained before, without the warm-up
    first    the first iteration of the run's training: see data.run.directory.Step
    """

    branch: Branch
    same: bool
    history: tuple[str, ...]
    first: dict[str, Any]

    def continued(self, rank: int) -> None:
        return None

    def scales(self, rank: int) -> Path | None:
        return super().scales(rank) if self.same else None

    @property
    def facts(self) -> dict[str, Any]:
        """What run.json says of the branch."""
        branch = {"run_id": self.branch.run_id, "iteration": self.branch.iteration, "recipes": list(self.history)}
        return {"branch_of": branch}


def open_branched(root: Path, plan: Plan, branch: Branch, recipe_toml: str) -> Branched:
    """The checkpoint of a branch with this recipe. Raises RunError if it cannot be read."""
    run = read_run(root / branch.run_id)
    folder, positions = to_branch(run, {"train_iters": plan.config.iterations})
    first = json.loads(first_step(run.directory) or "{}")
    if positions[0].done != branch.done or not first.get("data_sha256"):
        raise RunError(f"{run.run_id} cannot be branched: its checkpoints or losses have changed")
    described: dict[str, Any] = dict(run.config)
    before = tuple((described.get("branch_of") or {}).get("recipes") or ())
    history = before if branch.iteration <= 0 else (*before, str(described.get("recipe")))
    return Branched(run, folder, positions, branch, described.get("recipe_toml") == recipe_toml, history, first)


def open_resumed(root: Path, name: str) -> Resumed:
    """The run of this name. Raises RunError if it cannot be resumed."""
    run = read_run(root / Path(name).name)
    return Resumed(run, *last(run))


def check_unchanged(resumed: Resumed, description: dict[str, Any]) -> None:
    """Raise ConfigError if the data, the weights or, unless it branches off, the recipe are no longer those that the
    run started with."""
    before: dict[str, Any] = dict(resumed.run.config)
    branches = isinstance(resumed, Branched)
    names = {"data": "dataset", "weights": "weights of the model"} | ({} if branches else {"recipe_toml": "recipe"})
    for name, what in names.items():
        if before.get(name) != json.loads(json.dumps(description[name])):
            how = "branched" if branches else "resumed"
            raise ConfigError(f"{resumed.run.run_id} cannot be {how}: the {what} has changed since it started")


def write_checkpoint(
    config: RunConfig, recorder: Recorder, done: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write this rank's checkpoint if one is due after this many iterations. Raises OSError."""
    if not config.checkpoint_every or done % config.checkpoint_every:
        return
    directory, rank = recorder.writer.directory, recorder.ranks.rank
    position = recorder.position()
    folder = directory / CHECKPOINTS / f"{done:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "cpu": torch.get_rng_state()}
    if config.device == DeviceName.CUDA:
        state["cuda"] = torch.cuda.get_rng_state()
    with staged_file(folder / f"rank{rank:02d}.pt") as file:
        save_state(state, file)
    recorder.save_state(folder)
    status = recorder.writer.status
    words = Position(
        config=config,
        done=done,
        **position,
        losses=_size(directory / LOSS.file),
        events=_size(directory / EVENT.file_of(rank)),
        iteration=status.iteration,
        loss_first=status.loss_first,
        loss_last=status.loss_last,
    )
    write_json(folder / f"rank{rank:02d}.json", words)
    if rank == 0:
        for old in sorted((directory / CHECKPOINTS).iterdir())[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)


def _rank(segment: str) -> int:
    return int(segment.removeprefix("rank").partition("-")[0])


def _number(segment: str) -> int:
    return int(segment.partition("-")[2])


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _cut(file: Path, size: int) -> None:
    """Keep the first bytes as a new file: the index takes an old one that is longer for one that has grown."""
    with suppress(FileNotFoundError), open(file, "rb", opener=no_link) as before:
        write_atomic(file, before.read(size))
