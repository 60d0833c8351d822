"""A layer that a seam found, and what it is told: the words that pass between `capture.instrument` and the seams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import Any

from torch import nn

from binade.collector.models.attention import CoreQuantization
from binade.collector.models.parallel import Quantization
from binade.collector.models.site import Site
from binade.data.segment import Shard


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


def is_answered(module: nn.Module) -> bool:
    """Whether a seam answers for a method of this instance already."""
    return any(isinstance(value, _Answer) for value in vars(module).values())


def whole(name: str) -> Shard:
    """The shard of a layer that is not divided."""
    return Shard()


class _Answer:
    """What stands in a module's dictionary in the place of its method. A copy of the module gets the method again, as
    its own: the closure would go on using the weights of the module that was copied."""

    def __init__(self, module: nn.Module, name: str, value: Callable) -> None:
        self._module, self._name, self._value = module, name, value
        self._before = vars(module).get(name)  # of the instance's own
        update_wrapper(self, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._value(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module))
        if copied is None:
            raise InstrumentError("an instrumented module's method cannot be copied alone")
        if self._before is not None:
            return deepcopy(self._before, memo)
        return getattr(type(copied), self._name).__get__(copied)


def set_on(module: nn.Module, name: str, value: Callable) -> Detach:
    """Give one instance an attribute of its own, as `module.name = value` does without nn.Module's bookkeeping.
    Returns what puts the instance's dictionary back exactly; it raises InstrumentError if another stands there now."""
    own = vars(module)
    had, before = name in own, own.get(name)
    answer = own[name] = _Answer(module, name, value)

    def undo() -> None:
        if own.get(name) is not answer:
            raise InstrumentError(
                f"{type(module).__name__}.{name} was replaced in the instrumented model: undo that before leaving"
            )
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
