"""A layer that a seam found, and what it is told: the words that pass between `capture.instrument` and the seams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from collector.attention import CoreQuantization
from collector.parallel import Quantization
from collector.site import Site
from data.segment import Shard


@dataclass(frozen=True)
class Moment:
    """When a forward pass is: its iteration and micro-batch, and whether it is recorded."""

    iteration: int
    micro_batch: int
    recording: bool


Detach = Callable[[], None]
Told = Quantization | CoreQuantization


class InstrumentError(ValueError):
    """The model holds nothing that a recipe could be applied to, or a module that cannot be intercepted."""


@dataclass(frozen=True)
class Layer:
    """A layer of a model whose products can be answered.

    name     the module's path in the model
    shard    how this rank's tensor of the name that a tap sees stands to the whole one
    attach   makes the module's products run as told (a CoreQuantization for a core), and returns what undoes it
    path     another word for the module, used where two layers of the model would have the same site
    """

    name: str
    module: nn.Module
    site: Site
    shard: Callable[[str], Shard]
    attach: Callable[[Told], Detach]
    path: str = ""

    @property
    def is_core(self) -> bool:
        return self.site.module == "core" or self.site.module.endswith(".core")


@dataclass(frozen=True)
class Found:
    """What a seam has of a model: layers, modules that it leaves as they are on purpose (the LM head), and those that
    it knows and cannot intercept, each with the reason. watched: whether the first pass is to be watched for others."""

    layers: tuple[Layer, ...] = ()
    left: tuple[nn.Module, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    watched: bool = False


def whole(name: str) -> Shard:
    """The shard of a layer that is not divided."""
    return Shard()


def set_on(module: nn.Module, name: str, value: object) -> Detach:
    """Give one instance an attribute of its own, as `module.name = value` does without nn.Module's bookkeeping.
    Returns what puts the instance's dictionary back exactly."""
    own = vars(module)
    had, before = name in own, own.get(name)
    own[name] = value

    def undo() -> None:
        if had:
            own[name] = before
        else:
            del own[name]

    return undo


def distinct(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The layers with a site each: where two share one, both are called by their path instead."""
    often = Counter(layer.site for layer in layers)
    named = [
        replace(layer, site=replace(layer.site, module=layer.path)) if often[layer.site] > 1 and layer.path else layer
        for layer in layers
    ]
    return tuple(named)
