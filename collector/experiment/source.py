"""Where the model and the data of an experiment come from: a checkpoint by path, a model that a seed draws, or a run.

The weights are those of the checkpoint, those that the seed draws, or those of a run's last checkpoint. Sequences are
those that a run holds out, or those that follow the ones left out: of a run, those that it trains on.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.datasets.loading import open_dataset
from binade.collector.errors import ConfigError, raising
from binade.collector.experiment.evaluator import Evaluator, evaluator_of
from binade.collector.models.model import GPTModel
from binade.collector.pretrained.checkpoint import open_checkpoint
from binade.collector.pretrained.directory import describe_weights
from binade.collector.settings import DeviceName
from binade.collector.training.held_out import hold_out, logits_of, open_batches, sequences_read
from binade.collector.training.loop import describe_run, prepare
from binade.collector.training.plan import Plan
from binade.data.run.directory import CHECKPOINTS, RunError
from binade.data.run.tensor_files import load_plain

MEASURES = (
    "model", "size", "layers", "vocab_size", "weights", "data", "seed", "sequence_length", "micro_batch_size",
)  # fmt: skip
"""The fields of run.json that two experiments of one run agree in."""
OF_TRAINING = ("recipe", "operands", "recipe_toml", "run_config", "train_iters", "control_iter")
"""What `describe_run` says that does not hold for an experiment."""


@dataclass(frozen=True)
class ExperimentSource:
    """What an experiment evaluates.

    plan       of the model, the data and the length of sequences; its recipe is not used
    sequences  how many are evaluated
    skip       how many sequences of the data are left out before these
    held_out   the plan of a run that holds documents out, of which the sequences then are; None for those after `skip`
    weights    the directory of a run whose last checkpoint has the weights; None for those of the plan
    """

    plan: Plan
    sequences: int = 8
    skip: int = 0
    held_out: Plan | None = None
    weights: Path | None = None


def unread(run: Plan, length: int) -> dict[str, Any]:
    """The fields of an ExperimentSource for sequences of this length that a run did not train on: those that it holds
    out, or those that follow the ones it reads."""
    if run.config.evaluate_every:
        return {"held_out": run}
    return {"skip": -(-sequences_read(run.config) * run.config.sequence_length // length)}


@dataclass(frozen=True)
class OpenedSource:
    """An evaluator of the model, its data, what run.json says of them, and both in words."""

    evaluator: Evaluator
    batches: Sequence[tuple[Tensor, Tensor]]
    facts: dict[str, Any]
    described: tuple[str, str]


@contextmanager
def open_source(source: ExperimentSource, attention: bool) -> Iterator[OpenedSource]:
    """A context with the model, its data and its facts. attention: whether products of attention are rounded.

    Raises ConfigError, RunError and their like."""
    if source.plan.config.world_size > 1:
        raise ConfigError("an experiment runs on one rank: leave out --tp and --dp")
    cannot = f"{source.plan.config.model_title} cannot be measured"
    with raising(ConfigError, cannot, InstrumentError), torch.no_grad():
        model, batches, facts, described = _opened(source)
        facts["measures"] |= {"attention": attention}
        config = source.plan.config
        options: dict[str, Any] = {"backend": config.quantized_by, "seed": config.seed}
        with evaluator_of(model, logits_of, attention=attention, **options) as evaluator:
            yield OpenedSource(evaluator, batches, facts, described)


def _opened(
    source: ExperimentSource,
) -> tuple[nn.Module, list[tuple[Tensor, Tensor]], dict[str, Any], tuple[str, str]]:
    """The model, the batches, the facts, and a description of data and weights."""
    plan, config = source.plan, source.plan.config
    prepare(plan)
    device = (
        torch.device("cuda", torch.cuda.current_device()) if config.device == DeviceName.CUDA else torch.device("cpu")
    )
    checkpoint = open_checkpoint(config.model, plan.shape) if config.has_path else None
    dataset = open_dataset(config.dataset, config.tokenizer_name, plan.shape.vocab)
    if source.held_out:
        batches = hold_out(source.held_out, dataset).batches(config, source.sequences, device)
    else:
        batches = open_batches(plan, dataset, source.skip, source.sequences, device)
    torch.manual_seed(config.seed)
    with device:
        if checkpoint:
            model: nn.Module = checkpoint.build()
        else:
            model = GPTModel(plan.shape)
            model.initialize(config.seed)
    run_facts = describe_run(plan, checkpoint, dataset, device)
    facts = {name: value for name, value in run_facts.items() if name not in OF_TRAINING}
    if source.weights:
        facts["weights"] = {"sha256": f"{source.weights.name}/{_restore(model, source.weights)}"}
        facts["measured_run"] = source.weights.name
    weights = describe_weights(checkpoint.path) if checkpoint else f"drawn with seed {config.seed}"
    where = "that the run holds out" if source.held_out else f"after the first {source.skip}"
    described = (
        f"data: {dataset}, {source.sequences} sequences of {config.sequence_length} tokens {where}",
        f"weights {f'of {source.weights.name}' if source.weights else weights}",
    )
    measures = {name: facts.get(name) for name in MEASURES} | {"skip": source.skip}
    measures |= {"held_out": True} if source.held_out else {}
    measures |= {"device": device.type} if device.type != "cpu" else {}
    return model, batches, facts | {"measures": measures}, described


def _restore(model: nn.Module, run: Path) -> str:
    """Load the weights of a run's last checkpoint of one rank; returns its name. Raises RunError."""
    folders = sorted((run / CHECKPOINTS).glob("*/rank00.json"))
    if not folders:
        raise RunError(f"{run.name} has no checkpoint: train it with --checkpoint-every, or name a model")
    path = folders[-1].with_name("rank00.pt")
    damage = OSError, RuntimeError, KeyError, ValueError, TypeError, pickle.UnpicklingError
    with raising(RunError, f"{path} cannot be read", *damage):
        model.load_state_dict(load_plain(path)["model"])
    return path.parent.name
