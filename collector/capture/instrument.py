"""`instrument` makes a model's GEMMs run under a recipe and passes their tensors to a Recorder.

with Recorder(root, label="mine", config={"recipe": "mxfp8"}) as recorder, instrument(model, "mxfp8", recorder):
    train_step()
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from torch import nn

from binade.collector.capture.adapters import around_forward, find
from binade.collector.capture.adapters.layer import InstrumentError, Layer
from binade.collector.capture.adapters.passes import Clock, Listener
from binade.collector.capture.adapters.watch import Watch
from binade.collector.capture.delayed_scales import DelayedScales
from binade.collector.capture.recorder import Recorder
from binade.collector.models.attention import CoreQuantization
from binade.collector.models.parallel import Quantization
from binade.collector.models.site import Site
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import BF16, Part, Recipe, RecipeError
from binade.collector.recipes.selection import Selection
from binade.data.tensor_kinds import Product

RECIPE_VARIABLE = "CUSTOM_QUANT_TYPE"


@contextmanager
def instrument(
    model: nn.Module | Sequence[nn.Module],
    recipe: Recipe | str | None = None,
    recorder: Recorder | None = None,
    *,
    backend: str = "auto",
    skip: Selection | str | None = None,
    capture: Selection | str | None = None,
    exclude: Sequence[str] = (),
    head: bool = False,
    seed: int = 0,
    iterations: int | None = None,
    scales_of: str | Path | None = None,
) -> Iterator[None]:
    """Within this context the model's GEMMs run under the recipe, and the recorder records their tensors.

    model      of collector.models, megatron.core, transformers or plain torch modules; or Megatron's list of chunks
    recipe     a Recipe, the name of a recipe or a format, or the path of a .toml file; default: CUSTOM_QUANT_TYPE, else
               "bf16" (not quantized)
    backend    what quantizes: auto, triton or torch
    skip       layers that stay unquantized besides those that the recipe keeps, as a Selection or its text:
               "first,last"
    capture    layers that are recorded, likewise; default: all
    exclude   paths of modules that are neither quantized nor recorded, * for any part of a path
    head       treat the LM head as one more linear layer, `layer0.head`; by default it is left as it is
    seed       of stochastic rounding and random signs, which are drawn for each iteration, micro-batch, rank, layer
               and GEMM; a recomputed forward pass draws the same again
    iterations how many the model will be trained, for a recipe whose schedule depends on it
    scales_of  the directory of a run whose delayed scales go on; a run's are written there when the context ends

    The model's modules get a `forward` (or what stands for it) of their own, and lose it again at the end; nothing else
    of the model changes. With tensor parallelism each rank instruments its model.

    Raises InstrumentError, naming the module, for one that cannot be intercepted: at once where that can be seen, else
    in the first forward pass, which is watched for products that no adapter intercepts; if there is nothing to
    instrument; and in a forward pass, for a recorded layer that computes in float64. RecipeError for an unknown recipe,
    SelectionError for layers that the model does not have.
    """
    if not isinstance(recipe, Recipe):
        recipe = parse_recipe(recipe or os.environ.get(RECIPE_VARIABLE) or BF16)
    models = [model] if isinstance(model, nn.Module) else list(model)
    found = [find(each, exclude, head) for each in models]
    layers = [layer for each in found for layer in each.layers]
    sites = [layer.site for layer in layers]
    skipped = _chosen(skip, sites) if skip else frozenset()
    if recipe.keep:
        kept = _chosen(recipe.keep, sites)
        if kept == frozenset(sites):
            raise InstrumentError(recipe.keeps_all)
        skipped |= kept
    recorded = _chosen(capture, sites) if capture else frozenset(sites)
    try:
        recipe.check_modules(sites)
    except RecipeError as error:
        raise InstrumentError(str(error)) from None

    stages = recipe.stages(iterations)
    varies = len(stages) > 1 or any(part.formats.varies for part in recipe.every_part())
    counter = recorder or (Recorder(enabled=False) if varies else None)
    scales = DelayedScales(scales_of, recorder.rank if recorder else 0)

    def quantization(layer: Layer, product: Product, part_of: Callable[[Recipe], Part]) -> Quantization:
        parts = [(start, part_of(stage)) for start, stage in stages] if layer.site not in skipped else [(0, Part())]
        observed = recorder is not None and layer.site in recorded
        histories = scales.of(layer.site, product, (part.formats for _, part in parts))
        made = Quantization(parts[0][1].formats, backend, histories=histories)
        if counter is not None and (observed or len(parts) > 1 or made.formats.varies):
            made.tap = listener = Listener(counter, layer, parts, product, observed, seed, made)
            made.running = listener.running
        return made

    if recorder:
        recorder.config.setdefault("recipe", recipe.name)
    attention = any(stage.qk != Part() or stage.pv != Part() for _, stage in stages)
    watched = recorder is not None or attention or any(part != Part() for part in recipe.every_part())
    with ExitStack() as undo:
        for layer in layers:
            if layer.is_core:
                qk = quantization(layer, Product.QK, lambda stage: stage.qk)
                pv = quantization(layer, Product.PV, lambda stage: stage.pv)
                undo.callback(layer.attach(CoreQuantization(qk, pv)))
            else:
                linear = partial(Recipe.linear_of, module=layer.site.module)
                undo.callback(layer.attach(quantization(layer, Product.LINEAR, linear)))
        for each, seen in zip(models, found, strict=True):
            clock = Clock(counter, each, varies) if counter else None
            watch = Watch(each, seen.layers, seen.excluded, attention) if watched and seen.watched else None
            undo.enter_context(around_forward(each, clock, watch))
        if recorder:
            undo.callback(scales.save, recorder)
        yield


def _chosen(selection: Selection | str, sites: Sequence[Site]) -> frozenset[Site]:
    return (Selection.parse(selection) if isinstance(selection, str) else selection).of(sites)
