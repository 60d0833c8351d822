"""Which layers of a model have their products seen in kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import nn

from binade.collector.capture.adapters.layer import Layer, distinct
from binade.collector.capture.adapters.torch_modules import NOT_PRODUCTS, calls, own_layers, own_shapes
from binade.collector.capture.adapters.towers import placed
from binade.collector.capture.adapters.weights import OwnProducts
from binade.collector.capture.kernel.products import Products
from binade.collector.capture.survey import Survey

LOOKUPS = frozenset(("embedding", "embedding_bag"))  # functions that take rows of a weight


def seen_in_kernels(model: nn.Module, show: Callable[[str], None], survey: Survey) -> Survey:
    """The survey, with layers whose products are seen in kernels where that is possible: not those that are only
    watched, the models of this package, and attention that is written out. show is called with a sentence about
    products of a backward pass that are not known.
    """
    if not survey.watched:
        return survey
    products = Products(model, survey.left, show)
    found = [*survey.layers, *placed(dict(model.named_modules()), [*_unnamed(model, survey)])]
    layers = tuple(
        replace(layer, attach=partial(products.attach, layer), exchanges=False, others=())
        if (layer.by_sdpa if layer.is_core else not (layer.kernels or layer.is_declared))
        else layer
        for layer in distinct(found)
    )
    return replace(survey, layers=layers, seen=lambda: products.seen)


def _unnamed(model: nn.Module, survey: Survey) -> Iterator[Layer]:
    """The weights that no code of their module names in a product: of autograd functions, and of other modules."""
    modules = dict(model.named_modules())
    shapes = own_shapes(modules.values())
    known = {(layer.module, layer.part) for layer in survey.layers if not (layer.is_core or layer.is_declared)}
    whole = {layer.module for layer in survey.layers if layer.kernels}
    for name, module in modules.items():
        if isinstance(module, NOT_PRODUCTS) or module in survey.left or module in whole or calls(module, LOOKUPS):
            continue
        owner = OwnProducts(name, module)
        for layer in own_layers(modules, shapes, name, owner, every=True):
            if (module, layer.part) not in known:
                yield layer
