"""What a collection is asked to do: models, sizes, datasets, and one frozen RunConfig. No torch here."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from binade.collector.datasets.inputs import BYTE, DATASETS, check_inputs
from binade.collector.errors import ConfigError
from binade.collector.models.registry import MODELS
from binade.collector.models.shape import Shape
from binade.collector.recipes.recipe import Part, Recipe, parse_recipe
from binade.collector.recipes.selection import Selection, SelectionError
from binade.data.tensor_kinds import tensor_names
from binade.quant.formats import FORMATS

__all__ = [
    "BACKENDS",
    "BYTE",
    "DATASETS",
    "DEFAULT_SCORES",
    "DEVICES",
    "MODELS",
    "SIZES",
    "ConfigError",
    "RunConfig",
    "check",
    "fast",
]

SIZES = ("tiny", "full")
BACKENDS = ("triton", "torch")
DEVICES = ("cpu", "cuda")
DEFAULT_SCORES = ("hifp8", "mxfp8", "mxfp4", "nvfp4")
MOST = 10**9  # of whatever is counted: more is a slip of the finger


@dataclass(frozen=True)
class RunConfig:
    """One run.

    *_quant                formats in the place of the recipe's: of a part, of one GEMM of every linear layer, or of
                           operands, as "qk.forward.key=mxfp4"; see collector.recipe
    skip_layers            the layers left in bf16, "" for none; see collector.selection
    train_iters            optimizer steps under the recipe, after warmup_iterations in bf16; None for just enough
    control_iter           iterations recorded, 0 for every one, of which one in capture_every is taken: 0, N, 2 N, ...
    collect_micro_batches  the first so many of a recorded iteration are recorded, 0 for all
    tensors, modules, capture_layers, ranks
                           what is recorded of them; empty for all. save_tensors False records nothing
    sequence_length        in tokens; micro_batch_size in sequences
    max_bytes              bounds the tensor files of the run; the ranks that record share it out
    tp, dp                 tensor-parallel ranks that share a model, and replicas of the model, each with micro-batches
                           of its own
    load_hf                directory of a Hugging Face checkpoint to start from
    dataset, tokenizer     names or paths; tokenizer None is BYTE for text. vocab_size replaces the model's own
    """

    model: str = "llama32-1b"
    size: str = "tiny"
    dataset: str = "wikipedia"
    tokenizer: str | None = None
    vocab_size: int | None = None
    recipe: str = "bf16"
    linear_quant: str | None = None
    qk_quant: str | None = None
    pv_quant: str | None = None
    router_quant: str | None = None
    forward_quant: str | None = None
    dgrad_quant: str | None = None
    wgrad_quant: str | None = None
    operand_quant: tuple[str, ...] = ()
    skip_layers: str = ""
    train_iters: int | None = None
    control_iter: int = 1
    warmup_iterations: int = 0
    micro_batches: int = 1
    collect_micro_batches: int = 1
    capture_every: int = 1
    micro_batch_size: int = 2
    sequence_length: int = 256
    layers: int | None = None
    load_hf: str | None = None
    save_tensors: bool = True
    tensors: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    capture_layers: str = ""
    ranks: tuple[int, ...] = ()
    scores: tuple[str, ...] = DEFAULT_SCORES
    raw: bool = True
    max_bytes: int = 4 << 30
    learning_rate: float = 1e-3
    seed: int = 1234
    device: str = "cpu"
    backend: str = "triton"
    tp: int = 1
    dp: int = 1
    sequence_parallel: bool = False

    def parsed_recipe(self) -> Recipe:
        return parse_recipe(
            self.recipe,
            linear=self.linear_quant,
            qk=self.qk_quant,
            pv=self.pv_quant,
            router=self.router_quant,
            forward=self.forward_quant,
            dgrad=self.dgrad_quant,
            wgrad=self.wgrad_quant,
            operands=self.operand_quant,
        )

    def shape(self) -> Shape:
        published = MODELS[self.model][self.size]
        return replace(published, layers=self.layers or published.layers, vocab=self.vocab_size or published.vocab)

    def skip(self) -> Selection | None:
        """The layers that stay in bf16, None for none. Raises SelectionError, as `capture` does."""
        return Selection.parse(self.skip_layers) if self.skip_layers else None

    def capture(self) -> Selection:
        """The layers that are recorded."""
        return Selection.parse(self.capture_layers, self.modules)

    @property
    def world_size(self) -> int:
        """How many ranks train."""
        return self.tp * self.dp

    @property
    def recording_ranks(self) -> tuple[int, ...]:
        return self.ranks or tuple(range(self.world_size))

    def to_dict(self) -> dict[str, Any]:
        """For run.json: plain values, train_iters as a number."""
        return asdict(self) | {"train_iters": self.iterations}

    @property
    def iterations(self) -> int:
        """Optimizer steps under the recipe."""
        return self.needed_iterations if self.train_iters is None else self.train_iters

    @property
    def needed_iterations(self) -> int:
        """How many it takes until control_iter of them are recorded."""
        return (self.control_iter - 1) * self.capture_every + 1 if self.control_iter else 1

    @property
    def recorded_micro_batches(self) -> int:
        return self.collect_micro_batches or self.micro_batches

    @property
    def recorded_iterations(self) -> range:
        """Of the iterations under the recipe, from 0, those that are recorded."""
        everyone = range(0, self.iterations if self.save_tensors else 0, self.capture_every)
        return everyone[: self.control_iter or None]

    def records(self, iteration: int) -> bool:
        return iteration in self.recorded_iterations


def fast(config: RunConfig) -> RunConfig:
    """--training-config fast: a quarter of the tokens."""
    return replace(config, micro_batch_size=1, sequence_length=128)


def check(config: RunConfig) -> None:
    """Raise ConfigError, RecipeError or UnknownFormatError for the first choice that cannot be run."""
    _one_of("model", config.model, MODELS)
    _one_of("size", config.size, SIZES)
    check_inputs(config.dataset, config.tokenizer)
    config.parsed_recipe()
    for name, least, most in (
        ("control_iter", 0, MOST),
        ("train_iters", 1, MOST),
        ("warmup_iterations", 0, MOST),
        ("micro_batches", 1, MOST),
        ("collect_micro_batches", 0, MOST),
        ("capture_every", 1, MOST),
        ("micro_batch_size", 1, MOST),
        ("sequence_length", 1, MOST),
        ("vocab_size", 1, MOST),
        ("max_bytes", 0, (1 << 63) - 1),
        ("tp", 1, MOST),
        ("dp", 1, MOST),
    ):
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            bound = f"{least} or more" if value < least else f"at most {most}"
            raise ConfigError(f"--{name.replace('_', '-')} is {value}: it must be {bound}")
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"--seed is {config.seed}: it must be 0 or more and less than 2^63")
    if not 0 <= config.learning_rate < math.inf:
        raise ConfigError(f"--learning-rate is {config.learning_rate}: it must be 0 or more, and finite")
    published = MODELS[config.model][config.size]
    if config.layers is not None and not 1 <= config.layers <= published.layers:
        raise ConfigError(f"--layers is {config.layers}: {config.model} {config.size} has 1 to {published.layers}")
    if config.load_hf is not None and not os.path.isfile(os.path.join(config.load_hf, "config.json")):
        raise ConfigError(
            f"checkpoint {config.load_hf} has no config.json: give the directory of a Hugging Face model to --load-hf"
        )
    if config.sequence_length > published.max_sequence:
        raise ConfigError(f"--sequence-length is {config.sequence_length}: at most {published.max_sequence}")
    if config.collect_micro_batches > config.micro_batches:
        raise ConfigError(
            f"--collect-micro-batches is {config.collect_micro_batches}, but an iteration has "
            f"{config.micro_batches}: raise --micro-batches"
        )
    _check_iterations(config)
    _check_ranks(config)
    _check_sites(config)
    for name in config.scores:
        _one_of("score format", name, [*FORMATS, *FORMATS.aliases])
    _one_of("backend", config.backend, BACKENDS)
    _one_of("device", config.device, DEVICES)


def _check_ranks(config: RunConfig) -> None:
    shape = config.shape()
    for what, value in shape.divided.items():
        if value % config.tp:
            raise ConfigError(f"--tp is {config.tp}: it must divide {config.model} {config.size}'s {value} {what}")
    if config.sequence_parallel and config.tp == 1:
        raise ConfigError("--sequence-parallel splits sequences among tensor-parallel ranks: it needs --tp 2 or more")
    if config.sequence_parallel and config.sequence_length % config.tp:
        raise ConfigError(
            f"--sequence-length is {config.sequence_length}: with --sequence-parallel --tp {config.tp} must divide it"
        )
    for rank in config.ranks:
        if not 0 <= rank < config.world_size:
            raise ConfigError(f"--ranks has {rank}: the ranks of the run are 0 to {config.world_size - 1}")


def _check_iterations(config: RunConfig) -> None:
    if config.train_iters is None:
        if config.control_iter == 0:
            raise ConfigError("--control-iter 0 records every iteration: say how many there are with --train-iters")
    elif config.train_iters < config.needed_iterations:
        raise ConfigError(
            f"--train-iters is {config.train_iters}, but --control-iter {config.control_iter} with --capture-every "
            f"{config.capture_every} takes {config.needed_iterations}: raise it, or lower the others"
        )


def _check_sites(config: RunConfig) -> None:
    """Layers, modules and tensors, against what the model has."""
    model = config.shape().sites()
    if config.parsed_recipe().router != Part() and not any(site.module == "router" for site in model):
        raise ConfigError(
            f"the router is given a format, but {config.model} of {config.shape().layers} layers has none"
        )
    option = "--skip-layers"
    try:
        if skip := config.skip():
            skip.of(model)
        option = "--capture-layers and --modules"
        modules = {site.module for site in config.capture().of(model)}
    except SelectionError as error:
        raise ConfigError(f"{option}: {error}") from None
    for name in config.tensors:
        _one_of("tensor", name, tensor_names())
    types = ["attention"] * ("core" in modules) + ["linear"] * bool(modules - {"core"})
    recordable = tuple(dict.fromkeys(name for each in types for name in tensor_names(each)))
    if config.tensors and not set(config.tensors) & set(recordable):
        raise ConfigError(
            f"--tensors {','.join(config.tensors)} records nothing of {', '.join(sorted(modules))}: "
            f"those have {', '.join(recordable)}"
        )


def _one_of(what: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise ConfigError(f"{what} {value!r} is unknown: {', '.join(allowed)}")
