"""What `instrument` and the adapters exchange: layers, how they run, and when."""

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
    """The iteration and micro-batch of a forward pass, and whether it is recorded."""

    iteration: int
    micro_batch: int
    recording: bool


Detach = Callable[[], None]
LayerQuantization = Quantization | CoreQuantization


class InstrumentError(ValueError):
    """The model has no layer to instrument, or a module that cannot be intercepted."""


@dataclass(frozen=True)
class Layer:
    """A layer of a model whose products can be intercepted.

    name     the module's path in the model
    shard    how this rank's part of a tensor, by the name that a tap sees, relates to the whole
    attach   makes the module's products run as given (a CoreQuantization for a core), and returns the undo function
    path     the module's name in its site where two layers of the model would have the same site
    """

    name: str
    module: nn.Module
    site: Site
    shard: Callable[[str], Shard]
    attach: Callable[[LayerQuantization], Detach]
    path: str = ""

    @property
    def is_core(self) -> bool:
        return self.site.module == "core" or self.site.module.endswith(".core")


@dataclass(frozen=True)
class Found:
    """What an adapter finds in a model.

    layers    to quantize and record
    excluded  modules that stay as they are on purpose (the LM head)
    refused   names of modules that cannot be intercepted, each with the reason
    watched   whether the first forward pass is watched for other products
    """

    layers: tuple[Layer, ...] = ()
    excluded: tuple[nn.Module, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    watched: bool = False


def is_answered(module: nn.Module) -> bool:
    """Whether an adapter has replaced a method of this instance already."""
    return any(isinstance(value, _Answer) for value in vars(module).values())


def whole(name: str) -> Shard:
    """The shard of a layer that is not divided."""
    return Shard()


class _Answer:
    """Replaces a method in the dictionary of a module. A copy of the module gets its original method back: the closure
    would keep using the weights of the module that was copied."""

    def __init__(self, module: nn.Module, name: str, value: Callable[..., Any]) -> None:
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


def set_on(module: nn.Module, name: str, value: Callable[..., Any]) -> Detach:
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
