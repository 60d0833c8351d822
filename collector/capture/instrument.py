"""`instrument` makes a model's GEMMs run under a recipe and passes their tensors to a Recorder.

with Recorder(root, label="mine", config={"recipe": "mxfp8"}) as recorder, instrument(model, "mxfp8", recorder):
    train_step()
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from binade.collector.capture.adapters import around_forward, find
from binade.collector.capture.adapters.layer import Layer
from binade.collector.capture.adapters.passes import Clock, Listener
from binade.collector.capture.adapters.watch import Watch
from binade.collector.capture.recorder import Recorder
from binade.collector.models.attention import CoreQuantization
from binade.collector.models.parallel import Quantization
from binade.collector.models.site import Site
from binade.collector.recipes.recipe import BF16, Part, Recipe, parse_recipe
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
) -> Iterator[None]:
    """Within this context the model's GEMMs run under the recipe, and the recorder records their tensors.

    model      of collector.models, megatron.core, transformers or plain torch modules; or Megatron's list of chunks
    recipe     a Recipe, or the name of a recipe or a format; default: CUSTOM_QUANT_TYPE, else "bf16" (not quantized)
    backend    what quantizes: auto, triton or torch
    skip       layers that stay unquantized, as a Selection or its text: "first,last"
    capture    layers that are recorded, likewise; default: all
    exclude   paths of modules that are neither quantized nor recorded, * for any part of a path
    head       treat the LM head as one more linear layer, `layer0.head`; by default it is left as it is

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
    recorded = _chosen(capture, sites) if capture else frozenset(sites)

    def quantization(layer: Layer, part: Part, product: Product) -> Quantization:
        part = Part() if layer.site in skipped else part
        if recorder is None or layer.site not in recorded:
            return Quantization(part.formats, backend)
        return Quantization(part.formats, backend, Listener(recorder, layer, part, product))

    if recorder:
        recorder.config.setdefault("recipe", recipe.name)
    attention = recipe.qk != Part() or recipe.pv != Part()
    watched = recorder is not None or attention or recipe.linear != Part()
    with ExitStack() as undo:
        for layer in layers:
            if layer.is_core:
                qk, pv = quantization(layer, recipe.qk, Product.QK), quantization(layer, recipe.pv, Product.PV)
                undo.callback(layer.attach(CoreQuantization(qk, pv)))
            else:
                part = recipe.router if layer.site.module == "router" else recipe.linear
                undo.callback(layer.attach(quantization(layer, part, Product.LINEAR)))
        for each, seen in zip(models, found, strict=True):
            clock = Clock(recorder, each) if recorder else None
            watch = Watch(each, seen.layers, seen.excluded, attention) if watched and seen.watched else None
            undo.enter_context(around_forward(each, clock, watch))
        yield


def _chosen(selection: Selection | str, sites: Sequence[Site]) -> frozenset[Site]:
    return (Selection.parse(selection) if isinstance(selection, str) else selection).of(sites)
