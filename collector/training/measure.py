"""`binade measure`: the effects of rounding groups of products in a model of `binade run`, as a run on disk.

The weights are those of a checkpoint by path, those that the seed draws, or those of a run's last checkpoint. Sequences
are those that a run holds out, or those that follow the ones left out: of a run, those that it trains on.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.capture.effects import EffectMeter, EffectTask, measuring, recipes_of, tasks_of
from binade.collector.capture.effects_run import SAME, check_requested, record
from binade.collector.datasets.loading import open_dataset
from binade.collector.errors import ConfigError, raising
from binade.collector.models.model import GPTModel
from binade.collector.pretrained.checkpoint import open_checkpoint
from binade.collector.pretrained.directory import describe_weights
from binade.collector.settings import DeviceName
from binade.collector.training.held_out import hold_out, logits_of, open_batches, sequences_read
from binade.collector.training.loop import describe_run, prepare
from binade.collector.training.plan import Plan
from binade.data.continued import continued_run
from binade.data.effects import MEASURE, Effect, Measured, continue_effects
from binade.data.runs import CHECKPOINTS, RunError
from binade.data.tensor_files import load_plain

Say = Callable[[str], None]
Progress = Callable[[int, int], None]
MEASURES = (
    "model", "size", "layers", "vocab_size", "weights", "data", "seed", "sequence_length", "micro_batch_size",
)  # fmt: skip
"""The fields of run.json that two measurements of one run agree in."""
OF_TRAINING = ("recipe", "operands", "recipe_toml", "run_config", "train_iters", "control_iter")
"""What `describe_run` says that does not hold for a measurement."""


@dataclass(frozen=True)
class Measurement:
    """What to measure.

    plan       of the model, the data and the length of sequences; its recipe is not used
    formats    formats, specs or recipes
    by         granularities, see `effects.BY`
    parts      of recipes; all if empty
    sequences  how many are evaluated
    skip       how many sequences of the data are left out before these
    held_out   the plan of a run that holds documents out, of which the sequences then are; None for those after `skip`
    weights    the directory of a run whose last checkpoint has the weights; None for those of the plan
    """

    plan: Plan
    formats: tuple[str, ...]
    by: tuple[str, ...] = ("part", "site")
    parts: tuple[str, ...] = ("linear",)
    sequences: int = 8
    skip: int = 0
    held_out: Plan | None = None
    weights: Path | None = None

    def tasks(self, measured: EffectMeter) -> list[EffectTask]:
        """The measurements, in their order. Raises ConfigError as `tasks_of`."""
        tasks = tasks_of(measured, recipes_of(self.formats), self.by, self.parts)
        whole = [task for task in tasks if task.group.layer_index is None and task.group.module is None]
        return [*whole, *(task for task in tasks if task not in whole)]

    def check(self) -> None:
        """Raise ConfigError for what cannot be measured."""
        check_requested(self.by, self.parts)
        recipes_of(self.formats)
        if self.plan.config.world_size > 1:
            raise ConfigError("effects are measured on one rank: leave out --tp and --dp")

    @property
    def attention(self) -> bool:
        """Whether products of attention are rounded."""
        return "model" in self.by or bool({"qk", "pv"} & set(self.parts)) or not self.parts


def unread(run: Plan, length: int) -> dict[str, Any]:
    """The fields of a Measurement for sequences of this length that a run did not train on: those that it holds out, or
    those that follow the ones it reads."""
    if run.config.evaluate_every:
        return {"held_out": run}
    return {"skip": -(-sequences_read(run.config) * run.config.sequence_length // length)}


@dataclass(frozen=True)
class Opened:
    """A model, its data and what run.json says of them."""

    model: nn.Module
    batches: Sequence[tuple[Tensor, Tensor]]
    facts: dict[str, Any]


def measure_effects(
    asked: Measurement, root: Path, *, say: Say, progress: Progress = lambda done, total: None
) -> tuple[str, list[Measured]]:
    """Measure, as a run of this root or of what is left of it. Returns the run's id and its effects of what was asked.

    Raises ConfigError and its like before anything is written; later OSError or KeyboardInterrupt, with the run marked
    accordingly: the same call continues it."""
    asked.check()
    with measurable(asked), torch.no_grad():
        opened = open_measured(asked, say)
        facts = opened.facts | {"kind": MEASURE}
        label = f"measure_{asked.plan.config.model_name}"
        with _measuring(asked, opened) as measured:
            tasks = asked.tasks(measured)
            with continued_run(root, label, facts, SAME, "effects are being measured") as (writer, existed):
                known = len(continue_effects(writer.directory)) if existed else 0
                say(f"run {writer.run_id}" + f", continued after {known} measurements" * bool(known))
                clock = _Clock(measured, tasks, len(opened.batches), say, progress)
                return writer.run_id, record(writer, measured, opened.batches, tasks, clock)


def estimate(asked: Measurement, *, say: Say) -> tuple[int, float]:
    """(how many passes a measurement takes, about how many seconds), from a pass without rounding and one with."""
    asked.check()
    with measurable(asked), torch.no_grad():
        opened = open_measured(asked, say)
        with _measuring(asked, opened) as measured:
            tasks = asked.tasks(measured)
            measured.reference(opened.batches[0], 0)
            whole = measured.rounded(tasks[0].recipe, tasks[0].group).seconds
            return len(tasks) * len(opened.batches), len(opened.batches) * seconds_of(measured, tasks, whole)


def seconds_of(measured: EffectMeter, tasks: Sequence[EffectTask], whole: float) -> float:
    """About how long these tasks take for one batch, from the time of the first one. Where outputs of blocks are kept,
    a pass takes the time of the blocks that it computes and of what follows them."""
    rest = min(measured.rest, whole)
    return sum(rest + (whole - rest) * measured.cost(task.recipe, task.group) for task in tasks)


@dataclass(eq=False)
class _Clock:
    """Reports progress, and how long it will take once the first pass has ended."""

    measured: EffectMeter
    tasks: Sequence[EffectTask]
    batches: int
    say: Say
    progress: Progress
    said: bool = False

    def __call__(self, effect: Effect, count: int, of: int) -> None:
        if not self.said:
            self.said = True
            task = next(task for task in self.tasks if (task.format, task.group) == (effect.format, effect.group))
            share = self.measured.cost(task.recipe, task.group)
            whole = self.measured.rest + (effect.seconds - self.measured.rest) / max(share, 0.05)
            seconds = seconds_of(self.measured, self.tasks, whole) / len(self.tasks) * (of - count)
            self.say(f"{of - count:,} of {of:,} passes to go, {duration(seconds)}")
        self.progress(count, of)


def duration(seconds: float) -> str:
    """About a time, in the unit that fits."""
    if seconds < 90:
        return f"about {max(seconds, 1):.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def open_measured(asked: Measurement, say: Say) -> Opened:
    """The model, its data and its facts. Raises ConfigError, RunError and their like."""
    plan, config = asked.plan, asked.plan.config
    prepare(plan)
    device = (
        torch.device("cuda", torch.cuda.current_device()) if config.device == DeviceName.CUDA else torch.device("cpu")
    )
    checkpoint = open_checkpoint(config.model, plan.shape) if config.has_path else None
    dataset = open_dataset(config.dataset, config.tokenizer_name, plan.shape.vocab)
    if asked.held_out:
        batches = hold_out(asked.held_out, dataset).batches(config, asked.sequences, device)
    else:
        batches = open_batches(plan, dataset, asked.skip, asked.sequences, device)
    torch.manual_seed(config.seed)
    with device:
        if checkpoint:
            model: nn.Module = checkpoint.build()
        else:
            model = GPTModel(plan.shape)
            model.initialize(config.seed)
    described = describe_run(plan, checkpoint, dataset, device)
    facts = {name: value for name, value in described.items() if name not in OF_TRAINING}
    if asked.weights:
        facts["weights"] = {"sha256": f"{asked.weights.name}/{_restore(model, asked.weights)}"}
        facts["measured_run"] = asked.weights.name
    drawn = f"drawn with seed {config.seed}"
    weights = describe_weights(checkpoint.path) if checkpoint else drawn
    where = "that the run holds out" if asked.held_out else f"after the first {asked.skip}"
    say(f"data: {dataset}, {asked.sequences} sequences of {config.sequence_length} tokens {where}")
    say(f"weights {f'of {asked.weights.name}' if asked.weights else weights}")
    measures = {name: facts.get(name) for name in MEASURES} | {"skip": asked.skip, "attention": asked.attention}
    measures |= {"held_out": True} if asked.held_out else {}
    return Opened(model, batches, facts | {"measures": measures})


def _restore(model: nn.Module, run: Path) -> str:
    """Load the weights of a run's last checkpoint of one rank; returns its name. Raises RunError."""
    folders = sorted((run / CHECKPOINTS).glob("*/rank00.json"))
    if not folders:
        raise RunError(f"{run.name} has no checkpoint: train it with --checkpoint-every, or give --model")
    path = folders[-1].with_name("rank00.pt")
    damage = OSError, RuntimeError, KeyError, ValueError, TypeError, pickle.UnpicklingError
    with raising(RunError, f"{path} cannot be read", *damage):
        model.load_state_dict(load_plain(path)["model"])
    return path.parent.name


def _measuring(asked: Measurement, opened: Opened) -> AbstractContextManager[EffectMeter]:
    config = asked.plan.config
    return measuring(opened.model, logits_of, attention=asked.attention, backend=config.quantized_by, seed=config.seed)


def measurable(asked: Measurement) -> AbstractContextManager[None]:
    """A context that names the model that cannot be measured."""
    return raising(ConfigError, f"{asked.plan.config.model_title} cannot be measured", InstrumentError)
