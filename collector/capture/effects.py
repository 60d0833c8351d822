"""Measured effects: the change of the loss when one group of products is rounded, on the same weights and data.

    with measuring(model, loss) as measured:
        for batch in batches:
            exact = measured.reference(batch, 0)
            rounded = measured.rounded(parse_recipe("mxfp4"), Group("linear", 3, "fc1"))

Within a batch, the blocks before the first layer of the group compute the same in all passes. Their outputs are kept
from the pass without rounding and returned in their place. A block is a module whose path ends in a number, such as
`model.layers.3`. Passes have no gradients, and the model is in eval mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.declared import Equations
from binade.collector.capture.adapters.layer import set_on
from binade.collector.capture.adapters.products import tensors_in
from binade.collector.capture.clock import seed_of
from binade.collector.capture.evaluation import (
    IGNORED,
    Answer,
    Evaluate,
    evaluating,
    has_logits,
    of_logits,
    sequence_losses,
)
from binade.collector.capture.instrument import instrument
from binade.collector.capture.observer import Hook
from binade.collector.capture.recorder import Recorder
from binade.collector.capture.routes import Routes
from binade.collector.capture.survey import find
from binade.collector.errors import ConfigError
from binade.collector.models.parallel import Call
from binade.collector.models.site import Site
from binade.collector.recipes.files import to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Recipe
from binade.collector.recipes.selection import SiteSelection
from binade.data.effects import Effect, EffectGroup, OfBatch, recipe_sha256
from binade.data.tensor_kinds import Product
from binade.quant.gemm import Rounding
from binade.quant.specs import GemmFormats

COVERS = {True: "mxfp8", False: "linear_mxfp8"}  # recipes that intercept all products, or all but those of attention
MOST_KEPT = 4 << 30  # bytes of blocks' outputs
BY: dict[str, tuple[str, ...]] = {
    "site": ("part", "layer_index", "module"),
    "layer": ("part", "layer_index"),
    "module": ("part", "module"),
    "part": ("part",),
    "model": (),
}
"""What the products of a group have in common, by the granularity of a measurement; for `model`, only the recipe."""

Key = tuple[Site, Product]


@dataclass(frozen=True)
class Losses:
    """Of one pass: the loss of each sequence in nats per token, and the mean divergence of its tokens from those of the
    pass without rounding; empty if the logits are not known."""

    losses: tuple[float, ...]
    divergences: tuple[float, ...]
    seconds: float


def part_of(key: Key) -> str:
    """The name of the part of a recipe that rounds a product."""
    site, product = key
    return "router" if product is Product.LINEAR and site.is_of_router else product.value


def group_of(key: Key, by: str) -> EffectGroup:
    """The group of a product, at a granularity of BY."""
    site, _ = key
    values: dict[str, Any] = {"part": part_of(key), "layer_index": site.layer_index, "module": site.module}
    return EffectGroup(**{name: values[name] for name in BY[by]})


def holds(group: EffectGroup, key: Key) -> bool:
    """Whether a product belongs to a group."""
    site, _ = key
    return (
        group.part in ("", part_of(key))
        and group.layer_index in (None, site.layer_index)
        and group.module in (None, site.module)
    )


def rounds_forward(formats: GemmFormats) -> bool:
    return bool(formats["forward_a"] or formats["forward_b"] or formats.softmax.tile or formats.cache)


@dataclass(eq=False)
class BlockOutputs:
    """The outputs of a model's blocks in the pass without rounding, in the order in which the blocks ended.

    most   how many bytes are kept
    first  how many blocks had ended when a product was first computed
    """

    most: int
    outputs: list[tuple[nn.Module, Any]] = field(default_factory=list)
    ended: list[nn.Module] = field(default_factory=list)
    first: dict[Key, int] = field(default_factory=dict)
    bytes: int = 0

    def add(self, block: nn.Module, output: Any) -> None:
        size = sum(x.nbytes for x in tensors_in(output))
        if len(self.outputs) == len(self.ended) and self.bytes + size <= self.most:
            self.outputs.append((block, output))
            self.bytes += size
        self.ended.append(block)

    def before(self, keys: Iterable[Key]) -> dict[nn.Module, Any]:
        """The blocks that compute the same in a pass that rounds these products, with their outputs: those that had
        ended before, as far as outputs were kept. None if a block runs twice in a pass."""
        if len(set(self.ended)) < len(self.ended):
            return {}
        ended = min((self.first[key] for key in keys if key in self.first), default=len(self.ended))
        return dict(self.outputs[:ended])


class EffectMeter:
    """Evaluates a model with groups of its products rounded.

    products  those that can be rounded, in the order of the model
    reuses    whether outputs of blocks are kept: not in a model that computes something else with them. None before
              the first `reference`
    rest      how many seconds a pass takes in which all blocks are replaced
    """

    def __init__(
        self,
        model: nn.Module,
        evaluate: Evaluate,
        recorder: Recorder,
        products: Sequence[Key],
        blocks: Sequence[nn.Module],
        seed: int,
    ) -> None:
        self.model, self.evaluate, self.products, self.blocks = model, evaluate, tuple(products), tuple(blocks)
        self.reuses: bool | None = None
        self.rest = 0.0
        self._clock, self._seed = recorder.clock, seed
        self._batch: Any = None
        self._number = 0
        self._base: Mapping[Key, GemmFormats] = {}
        self._before: list[Tensor] | None = None  # log-probabilities of each sequence, without rounding
        self._outputs = BlockOutputs(0)

    def reference(self, batch: Any, number: int, formats: Mapping[Key, GemmFormats] = {}) -> Losses:
        """Evaluate a batch with these formats; without rounding, if there are none. The next calls of `rounded` and
        `evaluated` evaluate the same batch. number: of the batch; stochastic rounding depends on it. Raises ConfigError
        for a loss of another form than `measure` takes."""
        self._batch, self._number, self._before, self._base = batch, number, None, formats
        self._outputs = BlockOutputs(MOST_KEPT)
        with ExitStack() as undo:
            for block in self.blocks:
                undo.callback(set_on(block, "forward", self._keeping(block)))
            exact = self._pass(formats, self._outputs.first)
        if self.reuses is None:
            self.reuses = True
            again = self._pass(formats, None, self._outputs.before(()))
            self.reuses, self.rest = again.losses == exact.losses, again.seconds
        return exact

    def rounded(self, recipe: Recipe, group: EffectGroup) -> Losses:
        """Evaluate the batch of the last `reference`, which was without rounding, with a group of products rounded as
        the recipe does."""
        formats = {key: gemm_formats for key, gemm_formats in self.formats(recipe).items() if holds(group, key)}
        return self._pass(formats, None, self._kept(formats))

    def evaluated(self, formats: Mapping[Key, GemmFormats], routes: Routes | None = None) -> Answer:
        """What `evaluate` returns for the batch of the last `reference`, with these formats. routes: records or replays
        the choices of routers; then no block is replaced."""
        answer: Answer = self._evaluate(formats, None, {} if routes else self._kept(formats), routes)
        return answer

    def _kept(self, formats: Mapping[Key, GemmFormats]) -> dict[nn.Module, Any]:
        """The blocks that compute the same as in the last `reference`, with their outputs."""
        changed = [key for key in self.products if formats.get(key) != self._base.get(key)]
        return self._outputs.before(changed) if self.reuses else {}

    def formats(self, recipe: Recipe) -> dict[Key, GemmFormats]:
        """As `forward_formats`. Raises ConfigError if the recipe rounds no forward operand, too."""
        if formats := self.forward_formats(recipe):
            return formats
        raise ConfigError(f"{recipe.name} rounds no forward operand of this model: choose another recipe or format")

    def forward_formats(self, recipe: Recipe) -> dict[Key, GemmFormats]:
        """The formats of the products whose forward operands a recipe rounds in its first iteration. Raises ConfigError
        if they depend on earlier passes."""
        sites = [site for site, _ in self.products]
        kept = SiteSelection.parse(recipe.keep).of(sites) if recipe.keep else frozenset()
        formats = {key: recipe.part_of(key[1], key[0]).formats for key in self.products if key[0] not in kept}
        formats = {key: gemm_formats for key, gemm_formats in formats.items() if rounds_forward(gemm_formats)}
        if any(gemm_formats.delayed for gemm_formats in formats.values()):
            raise ConfigError(
                f"{recipe.name} takes its scales from earlier steps, so one pass does not show its effect: choose a "
                "recipe with current scales, such as te_current"
            )
        return formats

    def cost(self, recipe: Recipe, group: EffectGroup) -> float:
        """The share of the blocks that a pass computes, 0 to 1; for a batch of which the reference is known."""
        keys = [key for key in self.formats(recipe) if holds(group, key)]
        before = self._outputs.before(keys) if self.reuses else {}
        return 1 - len(before) / max(len(self._outputs.ended), 1)

    def _keeping(self, block: nn.Module) -> Callable[..., Any]:
        forward = block.forward

        def keeping(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            self._outputs.add(block, output)
            return output

        return keeping

    def _pass(
        self, formats: Mapping[Key, GemmFormats], first: dict[Key, int] | None, replaced: Mapping[nn.Module, Any] = {}
    ) -> Losses:
        began = time.perf_counter()
        losses, divergences = self._losses(self._evaluate(formats, first, replaced))
        return Losses(losses, divergences, time.perf_counter() - began)

    def _evaluate(
        self,
        formats: Mapping[Key, GemmFormats],
        first: dict[Key, int] | None,
        replaced: Mapping[nn.Module, Any] = {},
        routes: Routes | None = None,
    ) -> Any:
        """first: receives how many blocks had ended when each product was first computed."""

        def begin(hook: Hook) -> Call:
            key = hook.layer.site, hook.product
            if routes:
                routes.begun(hook.layer)
            if first is not None:
                first.setdefault(key, len(self._outputs.ended))
            seed = seed_of(self._seed, self._number, key[0].name, key[1].value)
            return Call(Rounding(formats.get(key) or GemmFormats(), hook.backend, seed))

        with ExitStack() as undo:
            for block, output in replaced.items():
                undo.callback(set_on(block, "forward", _returning(output)))
            undo.callback(setattr, self._clock, "twin", None)
            self._clock.twin = begin
            with torch.no_grad(), routes or nullcontext():
                return self.evaluate(self.model, self._batch)

    def _losses(self, answer: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if not has_logits(answer):
            return sequence_losses(answer), ()
        losses, divergences = [], []
        first, before = self._before is None, self._before or []
        for number, (loss, after, label) in enumerate(of_logits(*answer)):
            losses.append(loss)
            if first:
                before.append(after)
            else:
                p = before[number]
                apart = (p.exp() * (p - after)).sum(-1)[label != IGNORED]
                divergences.append(float(apart.mean()))
        self._before = before
        return tuple(losses), tuple(divergences)


def _returning(output: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: output


@contextmanager
def measuring(
    model: nn.Module,
    evaluate: Evaluate,
    *,
    attention: bool = True,
    backend: str = "auto",
    seed: int = 0,
    exclude: Sequence[str] = (),
    cores: Sequence[str] = (),
    products: Mapping[str, Equations] = {},
    head: bool = False,
) -> Iterator[EffectMeter]:
    """A context in which a model is measured. attention: whether products of attention can be rounded, too; then they
    are computed as products of their own in all passes. The other arguments are those of `instrument`.

    Raises InstrumentError as `instrument` does."""
    options: dict[str, Any] = {"exclude": exclude, "head": head, "cores": cores, "products": products}
    layers = find(model, attention=attention, **options).layers
    keys = [(layer.site, product) for layer in layers for product in layer.products]
    if not attention:
        keys = [key for key in keys if key[1] not in (Product.QK, Product.PV)]
    paths = dict.fromkeys(_block(layer.name) for layer in layers)
    blocks = [model.get_submodule(path) for path in paths if path]
    recorder = Recorder(enabled=False)
    with (
        evaluating(model),
        instrument(model, COVERS[attention], recorder, backend=backend, seed=seed, **options),
    ):
        yield EffectMeter(model, evaluate, recorder, keys, blocks, seed)


def _block(path: str) -> str:
    """The path of the block that a module is in: up to its first number; "" if it is in none."""
    parts = path.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
    return "" if at is None else ".".join(parts[: at + 1])


@dataclass(frozen=True)
class EffectTask:
    """A measurement: a group of products, rounded as a recipe does. format: the recipe as it was written;
    recipe_sha256: of what it rounds."""

    format: str
    recipe: Recipe
    group: EffectGroup
    recipe_sha256: str

    def of(self, batch: int) -> OfBatch:
        """`Effect.of_batch` of the measurement on a batch."""
        return batch, self.format, self.recipe_sha256, self.group


def tasks_of(
    measured: EffectMeter, recipes: Mapping[str, Recipe], by: Sequence[str], parts: Sequence[str] = ()
) -> list[EffectTask]:
    """The measurements of recipes by granularities of BY, the whole ones first. parts: those of the recipes; all if
    empty. Raises ConfigError if a recipe rounds none of them."""
    tasks = []
    for granularity in sorted(by, key=lambda name: len(BY[name])):
        for text, recipe in recipes.items():
            sha256 = recipe_sha256(to_toml(recipe))
            keys = [
                key for key in measured.formats(recipe) if not parts or not BY[granularity] or part_of(key) in parts
            ]
            if not keys:
                raise ConfigError(f"{text} rounds no forward operand of {', '.join(parts)}: choose other parts")
            tasks += [
                EffectTask(text, recipe, group, sha256)
                for group in dict.fromkeys(group_of(key, granularity) for key in keys)
            ]
    return tasks


def effects(
    measured: EffectMeter, batches: Iterable[Any], tasks: Sequence[EffectTask], done: Collection[OfBatch] = ()
) -> Iterator[Effect]:
    """Measure each task on each batch, batch by batch, so that all groups have the same sequences. done: what is known
    already."""
    for number, batch in enumerate(batches):
        left = [task for task in tasks if task.of(number) not in done]
        if not left:
            continue
        exact = measured.reference(batch, number)
        for task in left:
            rounded = measured.rounded(task.recipe, task.group)
            if len(rounded.losses) != len(exact.losses):
                raise ConfigError(
                    f"loss returned {len(exact.losses)} sequences, then {len(rounded.losses)} for the same batch: "
                    "evaluate a batch alike each time"
                )
            yield Effect(
                number, task.format, *task.group, exact.losses, rounded.losses, rounded.divergences, rounded.seconds,
                task.recipe_sha256,
            )  # fmt: skip


def recipes_of(texts: Iterable[str]) -> dict[str, Recipe]:
    """The recipes or formats of these names. Raises RecipeError and SpecError."""
    return {text: parse_recipe(text) for text in texts}
