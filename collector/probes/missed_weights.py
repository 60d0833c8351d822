"""Weights of covered layers that something else multiplies, where no product is intercepted: the training loop, a
function that computes the logits in chunks, or a convolution.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from binade.collector.capture.adapters.layer import Layer
from binade.collector.capture.clock import Moment
from binade.collector.capture.instrumented import Instrumented
from binade.collector.probes.probe import Finding, Observation, Probe, Recording
from binade.data.run.tensor_kinds import Product
from binade.data.words.text import and_more


class MissedWeights(Probe):
    """In the first iteration that is recorded, names the layers whose weights have gradients although no product of the
    layer was seen. Not experts: those without tokens multiply nothing, and may have the gradient of a regularizer."""

    observes = frozenset(("b",))

    def __init__(self, layers: Mapping[str, Layer], recording: Recording) -> None:
        self.layers, self.recording = layers, recording
        self.handles: list[RemovableHandle] = []
        self.multiplied: set[str] = set()
        self.with_gradient: dict[str, None] = {}
        self.begun = self.done = False

    @classmethod
    def of(cls, instrumented: Instrumented) -> Self | None:
        seen = [
            hook.layer
            for hook in instrumented.hooks
            if hook.product is Product.LINEAR and hook.observing and hook.product.place in hook.observing.places
        ]
        layers = {layer.site.name: layer for layer in seen if not layer.part and layer.site.expert is None}
        return cls(layers, instrumented.recording) if layers and instrumented.recording.watch.warn else None

    def begin_pass(self, moment: Moment) -> None:
        if self.begun or moment.evaluation or not moment.recording:
            return
        self.begun = True
        for name, layer in self.layers.items():
            weight = layer.weight
            if type(weight) is nn.Parameter and weight.requires_grad:  # FSDP has views of a flat one
                hook = partial(self._arrived, name)
                self.handles.append(weight.register_hook(hook))  # type: ignore[no-untyped-call]

    def _arrived(self, name: str, _: Tensor) -> None:
        self.with_gradient[name] = None

    def observe(self, observed: Observation) -> None:
        if not self.done:
            self.multiplied.add(observed.layer.site.name)

    def end_iteration(self, iteration: int) -> None:
        if self.done or not self.begun:
            return
        self.done = True
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if missed := [name for name in self.with_gradient if name not in self.multiplied]:
            self.recording.report(partial(_named, iteration, missed))


def _named(iteration: int, names: list[str]) -> Iterator[Finding]:
    text = (
        f"{names[0]} weight{and_more(names)} has a gradient, but no product of the layer was seen: it is multiplied "
        "elsewhere, where products are neither rounded nor recorded. Call the layer, or leave it out with `exclude`"
    )
    yield Finding(iteration, text, f"{names[0]} weight")
