"""Layers that an autograd function calls in its forward method and whose gradients it computes itself: these products
are neither rounded nor recorded.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from binade.collector.capture.adapters.layer import Layer
from binade.collector.capture.adapters.products import applying_function
from binade.collector.capture.clock import Moment
from binade.collector.probes.probe import Finding, Observation, Probe, Recording
from binade.data.run.tensor_kinds import Product
from binade.data.words.text import and_more


class HiddenProducts(Probe):
    """A linear layer multiplies within the forward method of an autograd function, with gradients off. If its weight
    has a gradient though no backward product was seen, that function computes them itself."""

    observes = frozenset(("grad", "grad_b"))

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.seen: set[str] = set()  # by site: the layers whose backward products were seen in this iteration
        self.with_gradient: dict[str, int] = {}  # by site: the iteration in which the weight had a gradient
        self.named: set[str] = set()

    def before_product(self, layer: Layer, product: Product, moment: Moment) -> None:
        if product is not Product.LINEAR or torch.is_grad_enabled() or moment.evaluation:
            return
        weight = layer.weight
        if weight is None or not weight.requires_grad or not applying_function():
            return

        def arrived(_: Tensor) -> None:
            handle.remove()
            self.with_gradient.setdefault(layer.site.name, moment.iteration)

        handle = weight.register_hook(arrived)  # type: ignore[no-untyped-call]

    def observe(self, observed: Observation) -> None:
        self.seen.add(observed.layer.site.name)

    def end_iteration(self, iteration: int) -> None:
        known = self.named | self.seen
        hidden = {name: at for name, at in self.with_gradient.items() if name not in known}
        self.with_gradient.clear()
        self.seen.clear()
        self.named |= hidden.keys()
        if hidden:
            self.recording.report(lambda: _named(hidden))


def _named(hidden: dict[str, int]) -> Iterator[Finding]:
    first, iteration = next(iter(hidden.items()))
    text = (
        f"{first} weight{and_more(hidden)} has a gradient, but no backward product of the layer was seen: an autograd "
        "function that calls the layer computes it. Its dgrad and wgrad are neither rounded nor recorded: leave the "
        "layer out with `exclude`, or call it outside of that function"
    )
    yield Finding(iteration, text, f"{first} weight")
