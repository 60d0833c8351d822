"""What a run will do: computed and checked once from its configuration, before anything is started. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from binade.collector.datasets.inputs import check_inputs
from binade.collector.errors import ConfigError, raising
from binade.collector.models.shape import Shape
from binade.collector.models.specs import OtherSpec, Spec
from binade.collector.pretrained.directory import shape_of
from binade.collector.pretrained.transformers_model import TransformersShape
from binade.collector.recipes.ladder import without
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Part, Recipe
from binade.collector.recipes.selection import SelectionError, SiteSelection
from binade.collector.settings import Size, declared
from binade.collector.training.config import OVERRIDES, RunConfig
from binade.data.run.tensor_kinds import tensor_names
from binade.quant.formats import UnknownFormatError
from binade.quant.specs import Spec as FormatSpec
from binade.quant.specs import SpecError


@dataclass(frozen=True)
class Branch:
    """Where a run branches off from another one.

    run_id  of the other run
    config  of the other run
    done    how many iterations it had done, warm-up included
    """

    run_id: str
    config: RunConfig
    done: int

    @property
    def iteration(self) -> int:
        """The first iteration that the branch trains; below 0 in the warm-up."""
        return self.done - self.config.warmup_iterations

    def describe(self, config: RunConfig) -> str:
        """What a branch with this configuration is of, and in what it differs."""
        changes = []
        for name, setting in declared(RunConfig).items():
            chosen, other = getattr(config, name), getattr(self.config, name)
            if chosen != other:
                words = ("none" if value in (None, (), "") else setting.text(value) for value in (chosen, other))
                changes.append("{} {} (was {})".format(setting.flag, *words))
        return f"branch of {self.run_id} after {self.done} iterations; differs in {', '.join(changes) or 'nothing'}"

    def arguments(self, config: RunConfig) -> list[str]:
        """The command line of the branch with this configuration, after `binade`."""
        line = ["run", "--resume", self.run_id, "--recipe", config.recipe]
        for name, setting in declared(RunConfig).items():
            value = getattr(config, name)
            if name != "recipe" and value != getattr(self.config, name):
                line += [setting.flag] if setting.kind is bool else [setting.flag, setting.text(value)]
        return line


@dataclass(frozen=True)
class Plan:
    """A run that has been checked.

    shape       the dimensions of its model
    recorded    the layers and other parts of the model that are recorded
    skip        the layers that stay in bf16 besides those that the recipe keeps; None for none
    capture     the layers and modules that are recorded
    branch      where it branches off from another run; None for a run from the start
    """

    config: RunConfig
    shape: Shape
    recipe: Recipe
    recorded: tuple[Spec | OtherSpec, ...]
    skip: SiteSelection | None
    capture: SiteSelection
    branch: Branch | None = None

    @property
    def arguments(self) -> list[str]:
        """The command line, after `binade`."""
        return self.branch.arguments(self.config) if self.branch else self.config.arguments()

    @property
    def kept_layers(self) -> str:
        """The layers that stay in bf16, those that the recipe keeps included."""
        return ", ".join(filter(None, (self.recipe.keep, self.config.skip_layers)))


def most_layers(model: str) -> int:
    """The number of layers that a model can have, of any size: those of its full size. Raises ConfigError."""
    return shape_of(model, Size.FULL).layers


def model_of(config: RunConfig) -> tuple[Shape, tuple[str, ...]]:
    """The dimensions of the model, and its modules that can be recorded, in their order. Raises ConfigError."""
    shape = _shape(config, shape_of(config.model, config.size))
    return shape, tuple(dict.fromkeys(spec.site.module for spec in shape.recordable(config.tensors)))


def _shape(config: RunConfig, published: Shape) -> Shape:
    return replace(published, layers=config.layers or published.layers, vocab=config.vocab_size or published.vocab)


def recorded_of(config: RunConfig, shape: Shape) -> tuple[Spec | OtherSpec, ...]:
    """The layers and other parts of the model that are recorded. Raises SelectionError."""
    recordable = shape.recordable(config.tensors)
    chosen = _capture(config).of([spec.site for spec in recordable])
    return tuple(spec for spec in recordable if spec.site in chosen)


def _capture(config: RunConfig) -> SiteSelection:
    return SiteSelection.parse(config.capture_layers, config.modules)


def plan(config: RunConfig) -> Plan:
    """The plan of a run. Raises ConfigError or a similar error for the first invalid setting. What needs the model is
    checked last, since reading it may need a package that is not installed."""
    config.check()
    check_inputs(config.dataset, config.tokenizer, config.tokenizer_name)
    try:
        formats: dict[str, Any] = {name: getattr(config, f"{name}_quant") for name in OVERRIDES}
        recipe = parse_recipe(config.recipe, operands=config.operand_quant, softmax=config.softmax, **formats)
    except (UnknownFormatError, SpecError) as error:
        raise ConfigError(str(error)) from None
    if config.collect_micro_batches > config.micro_batches:
        raise ConfigError(
            f"--collect-micro-batches is {config.collect_micro_batches}, but an iteration has "
            f"{config.micro_batches}: raise --micro-batches"
        )
    _check_iterations(config)
    _check_twin(config)
    if config.evaluate_every and config.find_nan:
        raise ConfigError("--evaluate-every and --find-nan cannot be combined: leave one of them out")
    for name in config.scores:
        with raising(ConfigError, "--scores", UnknownFormatError, SpecError):
            FormatSpec.of(name)
    published = shape_of(config.model, config.size)
    _check_model(config, published)
    shape = _shape(config, published)
    _check_ranks(config, shape)
    return _planned(config, shape, recipe)


def _check_model(config: RunConfig, published: Shape) -> None:
    if config.layers is not None and config.layers > (most := most_layers(config.model)):
        raise ConfigError(f"--layers is {config.layers}: expected 1 to {most} for {config.model_title}")
    if config.has_path and config.size != Size.FULL:
        raise ConfigError(f"--size is {config.size}: a model given by path has only the size {Size.FULL}")
    if isinstance(published, TransformersShape):
        for flag, value, only in (("--layers", config.layers, None), ("--tp", config.tp, 1)):
            if value != only:
                raise ConfigError(
                    f"{flag} is {value}: {config.model_title} runs in transformers, where Binade can neither drop "
                    "layers nor split them across ranks"
                )
    if config.has_path and config.vocab_size not in (None, published.vocab):
        raise ConfigError(
            f"--vocab-size is {config.vocab_size}: the vocabulary of {config.model_title} has {published.vocab} tokens"
        )
    if config.sequence_length > published.max_sequence:
        raise ConfigError(f"--sequence-length is {config.sequence_length}: expected at most {published.max_sequence}")


def _check_ranks(config: RunConfig, shape: Shape) -> None:
    for what, value in shape.divided.items():
        if value % config.tp:
            raise ConfigError(f"--tp is {config.tp}: it must divide {config.model_title}'s {value} {what}")
    if config.sequence_parallel and config.tp == 1:
        raise ConfigError("--sequence-parallel splits sequences among tensor-parallel ranks: it needs --tp 2 or more")
    if config.sequence_parallel and config.sequence_length % config.tp:
        raise ConfigError(
            f"--sequence-length is {config.sequence_length}: --sequence-parallel needs a multiple of --tp {config.tp}"
        )
    for flag, ranks in (("--ranks", config.ranks), ("--unmerged-ranks", config.unmerged_ranks)):
        for rank in ranks:
            if not 0 <= rank < config.world_size:
                raise ConfigError(f"{flag} has {rank}: the ranks of the run are 0 to {config.world_size - 1}")
    if idle := sorted({*config.unmerged_ranks} - {*config.recording_ranks}):
        raise ConfigError(f"--unmerged-ranks has {idle[0]}, which records nothing: add it to --ranks")
    if config.unmerged_ranks and not config.merges_ranks:
        raise ConfigError("--unmerged-ranks needs merged ranks: add --merge-ranks on, and record several ranks")


def _check_twin(config: RunConfig) -> None:
    if config.twin and config.world_size > 1:
        raise ConfigError(
            f"--twin runs on one rank, but --tp {config.tp} and --dp {config.dp} make {config.world_size}, each with a "
            "part of the gradient: leave out --twin, or --tp and --dp"
        )
    if config.twin and config.find_nan:
        raise ConfigError("--twin and --find-nan cannot be combined: leave one of them out")


def _check_iterations(config: RunConfig) -> None:
    if config.train_iters is None:
        if config.control_iter == 0:
            raise ConfigError(
                "--control-iter 0 records every iteration: set the number of iterations with --train-iters"
            )
    elif config.train_iters < config.needed_iterations:
        raise ConfigError(
            f"--train-iters is {config.train_iters}, but --control-iter {config.control_iter} with --capture-every "
            f"{config.capture_every} requires {config.needed_iterations}: raise --train-iters, or lower the others"
        )


def _planned(config: RunConfig, shape: Shape, recipe: Recipe) -> Plan:
    """Raises ConfigError if the model does not have the layers, modules and tensors."""
    model = shape.sites()
    if recipe.router != Part() and not any(site.module == "router" for site in model):
        raise ConfigError(
            f"the router is given a format, but {config.model_title} with {shape.layers} layers has no router"
        )
    experts = any(site.expert is not None for site in model) and not isinstance(shape, TransformersShape)
    if recipe.communication and recipe.communication.all_to_all and not experts:
        raise ConfigError(
            f"the recipe rounds the tokens of all_to_all, but {config.model_title} with {shape.layers} layers has no "
            f"experts that Binade computes itself: use {without(config.recipe, 'communication')}"
        )
    recipe.check_modules(model)
    option, hint = "the recipe's layers to keep", "; or quantize them too, as in nvidia_nvfp4(without=keep)"
    try:
        if recipe.keep and SiteSelection.parse(recipe.keep).of(model) == frozenset(model):
            raise ConfigError(recipe.keeps_all)
        option, hint = "--skip-layers", ""
        skip = SiteSelection.parse(config.skip_layers) if config.skip_layers else None
        if skip:
            skip.of(model)
        option = "--capture-layers and --modules"
        recorded = recorded_of(config, shape)
    except SelectionError as error:
        raise ConfigError(f"{option}: {error}{hint}") from None
    names = tuple(
        dict.fromkeys(
            name for place in dict.fromkeys(spec.layer_type for spec in recorded) for name in tensor_names(place)
        )
    )
    if config.tensors and not set(config.tensors) & set(names):
        raise ConfigError(
            f"--tensors {','.join(config.tensors)} matches no tensor of "
            f"{', '.join(sorted({spec.site.module for spec in recorded}))}: expected one of {', '.join(names)}"
        )
    return Plan(config, shape, recipe, recorded if config.save_tensors else (), skip, _capture(config))
