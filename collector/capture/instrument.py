"""`instrument` makes a model's GEMMs run under a recipe and passes their tensors to a Recorder.

with Recorder(root, label="mine", config={"recipe": "mxfp8"}) as recorder, instrument(model, "mxfp8", recorder):
    train_step()
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from binade.collector.capture.adapters.declared import Equations
from binade.collector.capture.adapters.first_pass import FirstPass
from binade.collector.capture.adapters.layer import (
    InstrumentError,
    Layer,
    is_a,
    refusal,
    wrong_dtype,
)
from binade.collector.capture.adapters.torch_modules import is_compiled
from binade.collector.capture.clock import Moment, PassCounter
from binade.collector.capture.delayed_scales import DelayedScales
from binade.collector.capture.instrumented import Instrumented
from binade.collector.capture.kernel.layers import seen_in_kernels
from binade.collector.capture.observer import Hook
from binade.collector.capture.options import check_type, whole, words
from binade.collector.capture.recorder import Recorder
from binade.collector.capture.step import others, recorded
from binade.collector.capture.survey import Survey, around_forward, find, without_compiling
from binade.collector.errors import ConfigError
from binade.collector.models.attention import CoreBegin
from binade.collector.models.site import WRAPPERS, Site
from binade.collector.probes.probe import Finding
from binade.collector.probes.registry import of_a_model
from binade.collector.recipes.files import to_toml
from binade.collector.recipes.ladder import without
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import BF16, Part, Recipe, RecipeError
from binade.collector.recipes.selection import SiteSelection
from binade.collector.settings import BackendName
from binade.data.run.tensor_kinds import Other, Product
from binade.data.words.text import and_more
from binade.quant.specs import GemmFormats

RECIPE_VARIABLE = "CUSTOM_QUANT_TYPE"


@contextmanager
def instrument(
    model: nn.Module | Sequence[nn.Module],
    recipe: Recipe | str | None = None,
    recorder: Recorder | None = None,
    *,
    backend: str = "auto",
    skip: SiteSelection | str | None = None,
    capture: SiteSelection | str | None = None,
    exclude: Sequence[str] = (),
    cores: Sequence[str] = (),
    products: Mapping[str, Equations] | Literal["kernel"] = {},
    head: bool = False,
    seed: int = 0,
    iterations: int | None = None,
    scales_of: str | Path | None = None,
) -> Iterator[None]:
    """Within this context the model's GEMMs run under the recipe, and the recorder records their tensors.

    Args:
        model: A model of collector.models, megatron.core, transformers or plain torch modules, or Megatron's list of
            chunks.
        recipe: A Recipe, the name of a recipe or a format, or the path of a .toml or .yaml file. The default is
            $CUSTOM_QUANT_TYPE, else "bf16" (not quantized).
        backend: "triton", "torch" or "auto": see `fake_quantize`.
        skip: Layers to leave unquantized, in addition to those that the recipe keeps: a Selection or its text, such
            as "first,last".
        capture: Layers to record, in the same form. The default is all.
        exclude: Paths of modules to neither quantize nor record; * stands for any part of a path.
        cores: Paths of modules whose forward pass computes attention as two matrix products, QKᵀ and PV, of tensors
            with three or more axes.
        products: Other products of two tensors: the einsum equation of one, or a tuple of several, by the path of the
            module whose forward pass makes them, such as {"*.mixer": "bhls,bhsp->bhlp"}. Or "kernel": products with
            weights, and F.scaled_dot_product_attention, are seen where torch computes them, see docs/own_training.md.
        head: Whether to treat the LM head as one more linear layer, `layer0.head`.
        seed: Seeds stochastic rounding and random signs. They are drawn for each iteration, micro-batch, rank, layer
            and GEMM; a recomputed forward pass draws the same again.
        iterations: The number of training iterations, if the recipe's schedule depends on it.
        scales_of: The directory of a run whose delayed scales, and sums of de-oscillation, are continued. A run writes
            its own when the context ends.

    The `forward` method of the model's modules (or its equivalent) is replaced, and restored at the end, or once
    nothing more is recorded and nothing is quantized. Nothing else in the model changes, apart from what the recipe's
    tables [state] and [deoscillation] do after each step of a torch optimizer. Until then, the model and what
    it calls run eagerly, whether torch.compile was called before or is called later; other compiled functions stay
    compiled. A function that is compiled with fullgraph=True cannot call the model then. With tensor parallelism, each
    rank instruments its model.

    Raises:
        InstrumentError: There is nothing to instrument, or a module cannot be intercepted; the message names it. Where
            that is not visible at the start, the first forward pass raises the error, when a module's weight enters a
            GEMM that no adapter intercepts. A forward pass also raises it if the inputs of a recorded layer are in
            float64, or if a CUDA graph captures what is recorded or rounded differently in each pass.
        ConfigError: An argument is of another type, or the backend is unknown.
        RecipeError: The recipe is unknown.
        SelectionError: `skip` or `capture` refers to layers that the model does not have.
    """
    models = _models(model)
    _check_arguments(recipe, recorder, backend, skip, capture, products, scales_of)
    exclude, cores, seed = words("exclude", exclude), words("cores", cores), whole("seed", seed)
    iterations = None if iterations is None else whole("iterations", iterations)
    requested, recipe = recipe_of(recipe)
    attention = quantizes_attention(recipe)
    quantizes = recipe.kv_cache is not None or any(part != Part() for part in recipe.every_part())
    in_kernels, show = products == "kernel", _show(recorder) if recorder or quantizes else lambda _: None
    options: dict[str, Any] = {"exclude": exclude, "head": head, "cores": cores}
    options["products"] = {} if in_kernels else products
    options["attention"] = attention
    surveys = [
        find(model, partial(seen_in_kernels, model, show), **options) if in_kernels else find(model, **options)
        for model in models
    ]
    layers = [layer for survey in surveys for layer in survey.layers]
    named = [others(*pair, recorder.tensors if recorder else ()) for pair in zip(models, surveys, strict=True)]
    sites = [layer.site for layer in layers]
    recordable = [*sites, *(layer.site for pairs in named for _, layer in pairs)]
    captured = _chosen(capture, recordable) if capture else frozenset(recordable)
    _check(recipe, requested, layers)
    counter = recorder or Recorder(enabled=False)  # which counts passes, but has no run
    delayed = any(part.formats.delayed for part in recipe.every_part())
    scales = DelayedScales(scales_of if delayed else None, counter.ranks.rank)
    stages = _stages(recipe, iterations, layers, unquantized(recipe, skip, sites))
    _check_kernels(models, stages)
    _check_dtypes(stages, captured if recorder else ())
    hooks = _hooks(stages, counter, captured if recorder else (), backend, seed, scales)
    varies = recipe.state is not None or any(hook.varies for hook in hooks)
    attached = [
        _Model(
            model,
            survey,
            [(place, layer) for place, layer in besides if layer.site in captured],
            _passes(counter, model, varies) if recorder or varies else None,
            _first_pass(model, survey, attention, recorder) if recorder or quantizes else None,
        )
        for model, survey, besides in zip(models, surveys, named, strict=True)
    ]
    by_model, former = dict(zip(models, surveys, strict=True)), None if scales_of is None else Path(scales_of)
    instrumented = Instrumented(by_model, hooks, attached[0].passes, recipe, seed, former, counter)
    probes = of_a_model(instrumented)
    if recorder:
        _check_names(hooks, recorder.instrumented)
        _describe(recorder, _facts(models, recipe, recorder, skip, backend))
        recorder.compile(_linear_formats(stages), next(models[0].parameters(), torch.empty(0)).device)
    with ExitStack() as undo:
        for probe in (scales, *probes):
            undo.enter_context(counter.probes.during(probe))
        fixed, eager = quantizes or recipe.state is not None, any(probe.eager for probe in probes)
        undo.enter_context(_attached(attached, hooks, recorder, fixed, eager))
        if recorder:
            if recorder.instrumented is None:
                undo.callback(setattr, recorder, "instrumented", None)
                recorder.instrumented = instrumented
            undo.callback(recorder.save_state)
        yield


def _models(model: object) -> list[nn.Module]:
    """Raises ConfigError."""
    models = [model] if isinstance(model, nn.Module) else list(model) if isinstance(model, Sequence) else []
    if not models or not all(isinstance(each, nn.Module) for each in models):
        raise ConfigError(f"model is a {type(model).__name__}: expected a torch module, or a list of them")
    return models


def _check_arguments(
    recipe: object,
    recorder: object,
    backend: object,
    skip: object,
    capture: object,
    products: Any,
    scales_of: object,
) -> None:
    """Raise ConfigError for an argument of `instrument` of another type."""
    check_type("recipe", recipe, Recipe | str | None, "the name of a recipe or a format, or a Recipe")
    check_type("recorder", recorder, Recorder | None, "a Recorder")
    if backend not in tuple(BackendName):
        raise ConfigError(f"backend={backend!r}: expected one of {', '.join(BackendName)}")
    for name, sites in (("skip", skip), ("capture", capture)):
        check_type(name, sites, SiteSelection | str | None, "layers, such as 'first,last'")
    check_type("scales_of", scales_of, str | Path | None, "the directory of a run")
    if products != "kernel":
        check_type("products", products, Mapping, 'a dict of equations by module, or "kernel"')
        for path, equations in products.items():
            check_type("a path in products", path, str, "that of a module, as text")
            check_type(f"the equation of {path} in products", equations, str | Sequence, "text, or a tuple of texts")


def _check(recipe: Recipe, requested: str, layers: Sequence[Layer]) -> None:
    """Raises InstrumentError for communication, and for modules that the model lacks. Warns of patterns that match
    nothing."""
    if recipe.communication:
        raise InstrumentError(
            "[communication] rounds what ranks of `binade run` exchange: choose the recipe without it, as in "
            f"{without(requested, 'communication')}"
        )
    try:
        unmatched = recipe.check_modules(layer.site for layer in layers if Product.LINEAR in layer.products)
    except RecipeError as error:
        raise InstrumentError(str(error)) from None
    for text in unmatched:
        warnings.warn(text, stacklevel=2)


Stages = list[tuple[Layer, Product, Sequence[tuple[int, Part]]]]


def _stages(recipe: Recipe, iterations: int | None, layers: Sequence[Layer], skipped: Collection[Site]) -> Stages:
    """The products of the layers, and the parts of the recipe that each has, by the iteration from which they hold."""
    products: Stages = []
    for layer in layers:
        for product in layer.products:
            stages = [(0, Part())]
            if layer.site not in skipped:
                stages = [(at, stage.part_of(product, layer.site)) for at, stage in recipe.stages(iterations)]
            products.append((layer, product, stages))
    return products


def _check_names(hooks: Sequence[Hook], instrumented: Instrumented | None) -> None:
    """Warn if two layers whose products are recorded in a run have one name. instrumented: the model that the Recorder
    records beside."""
    recorded = [*hooks, *(instrumented.hooks if instrumented else ())]
    modules: dict[tuple[str, Product], set[int]] = {}
    for hook in recorded:
        if hook.observing:
            modules.setdefault((hook.layer.site.name, hook.product), set()).add(id(hook.layer))
    twice = [name for (name, _), layers in modules.items() if len(layers) > 1]
    if twice:
        warnings.warn(
            f"two models have {twice[0]}{and_more(twice)}: their rows cannot be told apart. Give each a Recorder of "
            "its own, or choose what is recorded with `capture`",
            stacklevel=4,
        )


def _describe(recorder: Recorder, facts: dict[str, Any]) -> None:
    """Say in run.json what is instrumented. Of several models, the first: the words of a run are those of its rows."""
    if recorder.instrumented is None:
        recorder.describe(**facts)
    elif facts["recipe"] != (first := recorder.config.get("recipe")):
        warnings.warn(
            f"the run is described by the model that was instrumented first, with the recipe {first}: rows of the "
            f"other, with {facts['recipe']}, have the recipe {first} too. Give each model a Recorder of its own",
            stacklevel=4,
        )


def _hooks(
    stages: Stages,
    recorder: Recorder,
    captured: Collection[Site],
    backend: str,
    seed: int,
    scales: DelayedScales,
) -> list[Hook]:
    """Begin the calls of the products. captured: the sites whose products are recorded."""
    return [
        Hook(
            recorder.policy,
            layer,
            product,
            of_product,
            backend,
            recorder.observing if layer.site in captured else None,
            seed,
            recorder.ranks.rank,
            scales.of(layer.site, product, (part.formats for _, part in of_product)),
        )
        for layer, product, of_product in stages
    ]


def _linear_formats(stages: Stages) -> Iterator[GemmFormats]:
    """The formats that linear layers have at first, each once."""
    return iter(dict.fromkeys(parts[0][1].formats for _, product, parts in stages if product is Product.LINEAR))


def _check_kernels(models: Sequence[nn.Module], stages: Stages) -> None:
    """Raises InstrumentError for layers that can only be recorded, if the recipe quantizes them."""
    names = {
        layer.name: layer.kernels
        for layer, _, of_product in stages
        if layer.kernels and any(part != Part() for _, part in of_product)
    }
    if names:
        raise InstrumentError(refusal({name: m for model in models for name, m in model.named_modules()}, names))


def _check_dtypes(stages: Stages, recorded: Collection[Site]) -> None:
    """Raises InstrumentError for recorded or quantized layers with weights in float64 or complex numbers. What a layer
    computes in follows from its inputs, too: the first pass shows that."""
    for layer, _, of_product in stages:
        if layer.site in recorded or any(part != Part() for _, part in of_product):
            for weight in layer.module.parameters():
                if weight.dtype == torch.float64 or weight.is_complex():
                    raise wrong_dtype(layer, weight.dtype)


def _first_pass(model: nn.Module, survey: Survey, attention: bool, recorder: Recorder | None) -> FirstPass | None:
    """What watches the first pass; None for our own models, all of whose products are known."""
    if not survey.watched:
        return None
    return FirstPass(model, survey.layers, survey.left, attention, _show(recorder), survey.seen)


def _show(recorder: Recorder | None) -> Callable[[str], None]:
    """Warns of what a pass shows, and notes it in the run."""

    def show(text: str) -> None:
        warnings.warn(text, stacklevel=2)
        if recorder:
            findings = [Finding(recorder.iteration, text, "")]
            recorder.report(lambda: findings)

    return show


@dataclass(frozen=True)
class _Model:
    """A model that is instrumented: its layers, what is recorded besides products, and what counts and watches its
    forward passes."""

    module: nn.Module
    found: Survey
    others: Sequence[tuple[Other, Layer]]
    passes: PassCounter | None
    first_pass: FirstPass | None


def _passes(recorder: Recorder, model: nn.Module, always: bool) -> PassCounter:
    """always: passes are counted even if nothing is recorded."""
    policy = recorder.policy

    def moment() -> Moment | None:
        return policy.moment() if always or not policy.idle else None

    return PassCounter(recorder.clock, model, recorder.go_to, recorder.begin_pass, moment)


@contextmanager
def _attached(
    models: Sequence[_Model], hooks: Sequence[Hook], recorder: Recorder | None, fixed: bool, eager: bool
) -> Iterator[None]:
    """A context in which the hooks begin the calls of their layers: as long as something is recorded or, if fixed, all
    the time. Then the model is restored. eager: whether it runs without torch.compile until the context ends."""
    by_layer: dict[int, list[Hook]] = {}
    for hook in hooks:
        by_layer.setdefault(id(hook.layer), []).append(hook)
    modules = [model.module for model in models]
    # Where adapters exchange tensors, all ranks run the same code, whichever of them record.
    exchanges = any(hook.layer.exchanges for hook in hooks)
    # Passes are counted in every step, for the hashes of their data; if the model is itself a layer, it stays attached.
    counts = recorder is not None and recorder.enabled
    may_compile = not exchanges or any(is_compiled(module) for model in modules for module in model.modules())
    multiplying = (module for hook in hooks for module in (hook.layer.module, *(m for m, _ in hook.layer.others)))
    itself = counts and any(module in modules for module in multiplying)
    fixed = fixed or exchanges or itself
    with ExitStack() as undo:
        attached, is_attached = undo.enter_context(ExitStack()), False

        def follow() -> None:
            nonlocal is_attached
            before, is_attached = is_attached, fixed or (recorder is not None and not recorder.policy.over)
            if before and not is_attached:
                attached.close()
            if before or not is_attached:
                return
            for of_layer in by_layer.values():
                begins = [hook.begin for hook in of_layer]
                attached.callback(of_layer[0].layer.attach(CoreBegin(*begins) if len(begins) > 1 else begins[0]))
            for model in models:
                if not counts:
                    attached.enter_context(
                        around_forward(model.module, model.found.layers, model.passes, model.first_pass)
                    )
                if recorder and model.others:
                    attached.enter_context(recorded(model.module, recorder, model.others))

        follow()
        if recorder:
            recorder.clock.followers.append(follow)
            undo.callback(recorder.clock.followers.remove, follow)
        for model in models if counts else ():
            undo.enter_context(around_forward(model.module, model.found.layers, model.passes, model.first_pass))
        for module in modules if may_compile or eager else ():
            undo.enter_context(without_compiling(module, lambda: eager or is_attached))
        yield


def _facts(
    models: Sequence[nn.Module], recipe: Recipe, recorder: Recorder, skip: SiteSelection | str | None, backend: str
) -> dict[str, Any]:
    """What run.json says of an instrumented model, in the words of `binade run`."""
    ranks, model = recorder.ranks, models[0]
    facts: dict[str, Any] = {"recipe": recipe.name, "operands": recipe.lines(), "recipe_toml": to_toml(recipe)}
    facts |= {"model": model_name(model), "backend": backend, "tp": ranks.tensor.size, "dp": ranks.replicas}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    facts["device"] = f"cpu, {torch.get_num_threads()} threads" if device.type == "cpu" else device_name(device)
    if ranks.replicas == ranks.size and not any(is_fsdp1(module) for model in models for module in model.modules()):
        facts["parameters"] = sum(p.numel() for p in {p for model in models for p in model.parameters()})
    return facts | ({"skip_layers": str(skip)} if skip else {})


def device_name(device: torch.device) -> str:
    """The name that an accelerator gives itself, such as "NVIDIA H100 80GB HBM3", else the type of the device."""
    if device.type == "meta":  # the parameters have no values yet
        return device.type
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(named(device)) if named else device.type


def model_name(model: nn.Module) -> str:
    """The name that transformers knows the model by, without the folder of a local one, else its class."""
    while inner := next((vars(model)["_modules"].get(name) for name in WRAPPERS if name in model._modules), None):
        model = inner
    config: Any = getattr(model, "config", None)
    given = str(getattr(config, "name_or_path", "") or "")
    if given:
        return Path(given).name if Path(given).is_absolute() or Path(given).exists() else given
    kind = type(model)
    return (kind.__mro__[2] if is_a("torch.distributed.fsdp", "FSDPModule", model) else kind).__name__


def is_fsdp1(module: nn.Module) -> bool:
    return is_a("torch.distributed.fsdp", "FullyShardedDataParallel", module)


def quantizes_attention(recipe: Recipe) -> bool:
    stages = recipe, *(later for _, later in recipe.schedule)
    caches = recipe.kv_cache is not None and (recipe.kv_cache.key or recipe.kv_cache.value) is not None
    return caches or any(stage.qk != Part() or stage.pv != Part() for stage in stages)


def recipe_of(recipe: Recipe | str | None) -> tuple[str, Recipe]:
    """The text of a recipe, and the recipe."""
    if isinstance(recipe, Recipe):
        return recipe.name, recipe
    text = recipe or os.environ.get(RECIPE_VARIABLE) or BF16
    return text, parse_recipe(text)


def unquantized(recipe: Recipe, skip: SiteSelection | str | None, sites: Sequence[Site]) -> dict[Site, str]:
    """The sites that stay in bf16, with the reason."""
    reasons: dict[Site, str] = {}
    if recipe.keep:
        reasons |= dict.fromkeys(_chosen(recipe.keep, sites), "kept by the recipe")
        if reasons.keys() == frozenset(sites):
            raise InstrumentError(recipe.keeps_all)
    return reasons | dict.fromkeys(_chosen(skip, sites) if skip else (), "skip")


def _chosen(selection: SiteSelection | str, sites: Sequence[Site]) -> frozenset[Site]:
    return (SiteSelection.parse(selection) if isinstance(selection, str) else selection).of(sites)
