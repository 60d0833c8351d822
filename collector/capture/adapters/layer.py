"""The data that `instrument` and the adapters exchange: layers, how they run, and when."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import update_wrapper
from threading import Lock, local
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from binade.collector.models.site import Site
from binade.data.run.columns import Shard
from binade.data.run.tensor_kinds import Product
from binade.data.words.text import and_more

Detach = Callable[[], None]
Attach = Callable[[Any], Detach]  # given what begins a call: for a core a CoreBegin, else a Begin


class InstrumentError(ValueError):
    """The model has no layer to instrument, or a module that cannot be intercepted."""


@dataclass(frozen=True)
class Layer:
    """A layer of a model whose products can be intercepted.

    name     the module's path in the model
    shard    how this rank's part of a tensor, by the name that a tap sees, relates to the whole
    attach   makes the module's products run as the calls that are begun say, and returns the undo function
    path     the module's name in its site where two layers of the model would have the same site
    is_head  whether it is the LM head, which is left alone unless requested
    kernels  why it can only be recorded, if it cannot be quantized
    exchanges  whether the adapter communicates instead of the module: all ranks then stay attached, whichever of them
               record
    part     which of the module's layers, where it has several: the weight and the expert, or the declared product
    is_declared  whether it is a declared product
    by_sdpa  whether it is a core that attends by F.scaled_dot_product_attention
    others   modules that contain it and multiply by its weight themselves, with what makes these products run likewise
    """

    name: str
    module: nn.Module
    site: Site
    shard: Callable[[str], Shard]
    attach: Attach
    path: str = ""
    is_head: bool = False
    exchanges: bool = False
    kernels: str = ""
    part: str = ""
    is_declared: bool = False
    by_sdpa: bool = False
    others: tuple[tuple[nn.Module, Attach], ...] = ()

    @property
    def products(self) -> tuple[Product, ...]:
        if self.is_declared:
            return (Product.EINSUM,)
        return (Product.QK, Product.PV) if f".{self.site.module}".endswith(".core") else (Product.LINEAR,)

    @property
    def weight(self) -> Tensor | None:
        """As `weight_of`."""
        return weight_of(self.module)

    @property
    def is_core(self) -> bool:
        return Product.QK in self.products


def weight_of(module: nn.Module) -> Tensor | None:
    """The weight that a module holds now, which FSDP replaces; None if it has none of that name, or computes it each
    time that it is asked for it, as a parametrized module does: that may change its state."""
    computed = "weight" in getattr(module, "parametrizations", ())
    weight: Tensor | None = None if computed else getattr(module, "weight", None)
    return weight


def wrong_dtype(layer: Layer, dtype: torch.dtype) -> InstrumentError:
    """The error for a layer that computes in a dtype other than DTYPES."""
    return InstrumentError(
        f"{layer.name} ({layer.site.name}) computes in {str(dtype).removeprefix('torch.')}, which is neither recorded "
        "nor rounded: convert the model and its inputs to float32, bfloat16 or float16, or leave this layer out with "
        "`exclude`"
    )


@dataclass(frozen=True)
class Refused:
    """The name of a module that cannot be intercepted, with the reason. is_core: because of its attention alone."""

    name: str
    reason: str
    is_core: bool = False


def refusal(modules: Mapping[str, nn.Module], reasons: Mapping[str, str]) -> str:
    """One line for the modules of these names that are not intercepted: grouped by class and reason, with the patterns
    of `exclude` that leave all of them out and no other module of the model."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        kinds.setdefault((type(modules[name]).__name__, re.sub(r"\d+", "*", reason)), []).append(name)
    texts = [
        f"{names[0] or 'the model'}{and_more(names)} ({kind}) {reasons[names[0]]}" for (kind, _), names in kinds.items()
    ]
    alike: dict[str, list[str]] = {}
    for name in reasons:
        alike.setdefault(numbers_left_out(name), []).append(name)
    patterns: list[str] = []
    for pattern, names in alike.items():
        fits = all(name in reasons for name in modules if fnmatchcase(name, pattern))
        patterns += [pattern] if fits else names
    return f"{'; '.join(texts)}. To leave them out on purpose: exclude={patterns}"


@dataclass
class Findings:
    """What the first forward pass of a model shows: by the names of its modules, why they cannot be intercepted, and
    why others are recorded but not rounded."""

    refused: dict[str, str] = field(default_factory=dict)
    unrounded: dict[str, str] = field(default_factory=dict)


class _FirstPass(local):
    """The findings of the first pass that runs; None in other passes."""

    findings: Findings | None = None


FIRST_PASS = _FirstPass()


def refuse(name: str, module: nn.Module, reason: str) -> None:
    """Raises InstrumentError for this module; in a first pass, at its end, together with all others."""
    if FIRST_PASS.findings is None:
        raise InstrumentError(refusal({name: module}, {name: reason}))
    FIRST_PASS.findings.refused.setdefault(name, reason)


def numbers_left_out(name: str) -> str:
    """ "layers.*.mlp.up" for "layers.3.mlp.up"."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def is_instrumented(module: nn.Module) -> bool:
    """Whether an adapter has replaced a method of this instance already, or its products are seen in kernels."""
    hooked = any(getattr(hook, "sees_products", False) for hook in module._forward_pre_hooks.values())
    return hooked or any(isinstance(value, _Replacement) for value in vars(module).values())


def is_a(module: str, name: str, value: object) -> bool:
    """isinstance for classes of modules that take a second to import. False while the module has not been imported."""
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name))


def whole(name: str) -> Shard:
    """The shard of a layer that is not divided."""
    return Shard()


class _Replacement:
    """Replaces a method in the dictionary of a module. A copy of the module gets its original method back: the closure
    would keep using the weights of the module that was copied."""

    def __init__(self, module: nn.Module, name: str, value: Callable[..., Any]) -> None:
        self._module, self._name, self._value = module, name, value
        self._before = vars(module).get(name)  # of the instance's own
        update_wrapper(self, value, updated=())  # which would otherwise copy the state of another replacement

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._value(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module))
        if copied is None:
            raise InstrumentError("a method of an instrumented module cannot be copied without the module")
        if self._before is not None:
            return deepcopy(self._before, memo)
        return getattr(type(copied), self._name).__get__(copied)

    def __reduce__(self) -> tuple[Any, ...]:  # torch.save keeps the original method, too, and nothing of ours
        if self._before is not None:
            return getattr, (SimpleNamespace(method=self._before), "method")
        return getattr, (self._module, self._name)


def set_on(module: nn.Module, name: str, value: Callable[..., Any]) -> Detach:
    """Set an attribute on one instance, as `module.name = value` does, but without nn.Module's bookkeeping. Returns a
    function that restores the instance's dictionary exactly; it raises InstrumentError if the attribute has been
    replaced since."""
    attributes = vars(module)
    had, before = name in attributes, attributes.get(name)
    replacement = attributes[name] = _Replacement(module, name, value)

    def undo() -> None:
        if attributes.get(name) is not replacement:
            raise InstrumentError(
                f"{type(module).__name__}.{name} was replaced in the instrumented model: undo that before the context "
                "exits"
            )
        if had:
            attributes[name] = before
        else:
            del attributes[name]

    return undo


def together(*detach: Detach) -> Detach:
    """A function that calls these, the last one first."""
    undo = ExitStack()
    for function in detach:
        undo.callback(function)
    return undo.close


def replaces(module: nn.Module, name: str, method: Callable[[Any], Callable[..., Any]]) -> Attach:
    """A function that replaces one method of the module with `method(begin)`, where begin begins its calls.
    Compiled code that calls the method is divided there."""
    return lambda begin: set_on(module, name, _uncompiled(method(begin)))


class _Eager:
    """torch's stance is one for the process: the first of overlapping calls sets it, the last one restores it."""

    def __init__(self) -> None:
        self.lock, self.calls, self.undo = Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self.lock:
            if not self.calls:
                self.undo.enter_context(torch.compiler.set_stance("force_eager"))
            self.calls += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.calls -= 1
            if not self.calls:
                self.undo.close()


EAGER = _Eager()


def eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which runs as its original Python code wherever it is called, and so do compiled functions that it
    calls. Others stay compiled."""

    def instrumented_and_not_compiled(*args: Any, **kwargs: Any) -> Any:  # torch shows this name where it must compile
        with EAGER:
            return function(*args, **kwargs)

    return _uncompiled(instrumented_and_not_compiled)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    divided: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]  # torch
    return divided


def distinct(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """The layers with unique sites: if two share one, both are named by their path instead."""
    counts = Counter(layer.site for layer in layers)
    return tuple(
        replace(layer, site=replace(layer.site, module=layer.path)) if counts[layer.site] > 1 and layer.path else layer
        for layer in layers
    )
