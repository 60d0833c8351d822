"""Products that a module computes itself with a weight: its own `weight` [out, in], the stacked weights of experts
[experts, ·, ·], or the weight of one of its linear layers, as in `self.dt_proj.weight @ x`.

While the module's forward runs, F.linear, matmul, bmm, addmm and grouped_mm with such a weight, a view or a cast of it
are replaced by the products of linear layers: one, or one for each expert that tokens were routed to. This covers every
family of experts in transformers with the implementations `eager` and `grouped_mm`; other implementations run as
`eager` while the module is instrumented. Other functions with the weight are left to `first_pass`, which refuses them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.capture.adapters.dtensor import is_dtensor, linear_on_parts
from binade.collector.capture.adapters.layer import Detach, InstrumentError, eagerly, set_on
from binade.collector.capture.adapters.products import (
    Interception,
    Product,
    computing,
    linear,
    observed_product,
    tensors_in,
)
from binade.collector.models.parallel import Begin, Call
from binade.quant.gemm import Observed, Tap

MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
ADDMMS = (torch.addmm, Tensor.addmm)
GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")  # of torch.nn.functional, torch and transformers
CASTS = (Tensor.to, Tensor.type, Tensor.float, Tensor.bfloat16, Tensor.half, Tensor.contiguous, Tensor.clone)
NAMES = frozenset(("@", "linear", "matmul", "mm", "bmm", "addmm", *GROUPED))  # of these functions, in source code


@dataclass(frozen=True)
class Source:
    """The weight that a tensor is, or was made of. first: its first expert's number; None if they are not in order."""

    name: str
    first: int | None = 0


class Weights:
    """Recognizes the weights of these names, their views, and anything computed from weights alone."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self.names = {id(x): name for name, x in named}
        self.made: dict[int, tuple[weakref.ref[Tensor], Source]] = {}

    def name_of(self, x: Tensor) -> str | None:
        return self.names.get(id(x))

    def source(self, x: Tensor) -> Source | None:
        if name := self.name_of(x):
            return Source(name)
        made = self.made.get(id(x))
        if made and made[0]() is x:
            return made[1]
        base = x._base
        if base is None or not (name := self.name_of(base)):
            return None
        return _part(x, base, Source(name), False)

    def follow(self, func: Callable[..., Any], operands: Sequence[Tensor], result: Any) -> None:
        """Note the result of func if all of its operands are weights."""
        operands = [x for x in operands if x.dim() > 1]
        sources = [self.source(x) for x in operands]
        if not (sources and sources[0] and all(sources)):
            return
        for x in tensors_in(result):
            if x.dim() > 1 and not self.name_of(x):
                self.made[id(x)] = weakref.ref(x), _part(x, operands[0], sources[0], func in CASTS)


def _part(x: Tensor, of: Tensor, source: Source, cast: bool) -> Source:
    """The source of x, made of a tensor of this source."""
    if of.dim() != 3 or source.first is None or (cast and x.shape == of.shape):
        return source
    of_one_expert = x.dim() == 2 and x.numel() <= of[0].numel()
    in_order = x.dim() == 3 and x.stride(0) == of.stride(0)
    is_view = x.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
    if not (is_view and (of_one_expert or in_order)):
        return replace(source, first=None)
    return replace(source, first=source.first + (x.storage_offset() - of.storage_offset()) // of.stride(0))


def functional_linear(name: str, call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear as the call says, on this rank's parts if the weight is a DTensor."""

    def on_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(lambda a, b: F.linear(a, b, bias), x, weight, call, bias)

    return linear_on_parts(name, on_parts, input, weight, bias)


class OwnProducts:
    """The products that one module computes itself, by weight (a path from the module) and expert."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.begins: dict[tuple[str, int], Begin] = {}
        self.forward = ExitStack()

    def attach(self, weight: str, expert: int, begin: Begin) -> Detach:
        if not self.begins:
            self.forward.callback(set_on(self.module, "forward", eagerly(self._intercepted(_in_sight(self.module)))))
        self.begins[weight, expert] = begin

        def detach() -> None:
            del self.begins[weight, expert]
            if not self.begins:
                self.forward.close()

        return detach

    def _intercepted(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            weights = {name: attrgetter(name)(self.module) for name in {name for name, _ in self.begins}}
            if divided := [name for name, weight in weights.items() if weight.dim() == 3 and is_dtensor(weight)]:
                raise InstrumentError(
                    f"{self.name or 'the model'} has a three-dimensional DTensor as its {divided[0]}, and GEMMs on "
                    f"its local shards cannot be intercepted: leave it out with exclude=[{self.name!r}]"
                )
            with WeightsMode(self.name, weights, self.begins) as mode:
                result = forward(*args, **kwargs)
            if isinstance(self.module, nn.Linear) and not mode.products:
                raise InstrumentError(
                    f"{self.name} ({type(self.module).__name__}) did not multiply by its weight with a function of "
                    f"torch, so nothing was intercepted: leave it out with exclude=[{self.name!r}]"
                )
            return result

        return intercepted


def _in_sight(module: Any) -> Callable[..., Any]:
    """The module's forward. For transformers' experts, this is the `eager` function that it decorates, unless
    `grouped_mm` is chosen."""
    forward: Callable[..., Any] = module.forward
    eager = getattr(forward, "__wrapped__", None)
    if eager is None or not hasattr(module, "_apply_gate"):
        return forward

    def chosen(*args: Any, **kwargs: Any) -> Any:
        grouped = module.config._experts_implementation == "grouped_mm"
        return forward(*args, **kwargs) if grouped else eager(module, *args, **kwargs)

    return chosen


class WeightsMode(Interception):
    """One pass through a module whose products with these weights are replaced."""

    def __init__(self, name: str, weights: Mapping[str, Tensor], begins: Mapping[tuple[str, int], Begin]) -> None:
        self.name, self.weights, self.begins = name, Weights(weights.items()), begins
        self.products = 0

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in MATMULS:
            return self._matmul(func, *args, **kwargs)
        if func in ADDMMS and not kwargs:
            return self._addmm(func, *args)
        if getattr(func, "__name__", "") in GROUPED:
            return self._grouped(func, *args, **kwargs)
        result = func(*args, **kwargs)
        self.weights.follow(func, list(tensors_in((args, kwargs))), result)
        return result

    def _call(self, weight: Tensor) -> Call | None:
        """The call of the product with a weight of two axes, begun; None if it is not one of those replaced."""
        source = self.weights.source(weight) if weight.dim() == 2 else None
        begin = self.begins.get((source.name, source.first)) if source and source.first is not None else None
        self.products += begin is not None
        return begin() if begin else None

    def _stacked(self, weight: Tensor) -> list[Begin]:
        """What begins a call for each expert of a weight with three axes."""
        source = self.weights.source(weight) if weight.dim() == 3 else None
        if source is None or source.first is None:
            return []
        found = [self.begins.get((source.name, source.first + i)) for i in range(len(weight))]
        return [each for each in found if each] if all(found) else []

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        call = self._call(weight)
        if call is None:
            return F.linear(input, weight, bias)
        return functional_linear(self.name, call, input, weight, bias)

    def _matmul(self, func: Product, a: Tensor, b: Tensor) -> Tensor:
        if call := self._call(b):
            return linear(lambda x, w: func(x, w.mT), a, b.mT, call)
        if a.dim() == 2 <= b.dim() and (call := self._call(a)):
            return linear(lambda x, w: func(w, x.mT).mT, b.mT, a, call).mT
        if a.dim() == 3 and len(a) == len(b) and (begins := self._stacked(b)):
            return _by_expert(lambda x, w: func(x, w.mT), a, b.mT, begins, None)
        return func(a, b)

    def _addmm(self, func: Callable[..., Tensor], bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        call = self._call(b)
        return linear(lambda x, w: func(bias, x, w.mT), a, b.mT, call, bias) if call else func(bias, a, b)

    def _grouped(
        self, func: Callable[..., Tensor], a: Tensor, b: Tensor, offs: Tensor | None = None, **options: Any
    ) -> Tensor:
        begins = self._stacked(b) if offs is not None and a.dim() == 2 else []
        if not begins or offs is None:
            return func(a, b, offs, **options) if offs is not None else func(a, b, **options)
        with torch.autocast(a.device.type, enabled=False):  # which grouped_mm does not support
            return _by_expert(lambda x, w: func(x, w.mT, offs=offs, **options), a, b.mT, begins, offs.tolist())


def _by_expert(
    original: Product, x: Tensor, weight: Tensor, begins: Sequence[Begin], ends: Sequence[int] | None
) -> Tensor:
    """One product for each expert: x [tokens, in], those of each expert up to its end, or without ends
    [experts, tokens, in], · weightᵀ [experts, out, in]; tokens after the last end get zeros. Experts without tokens
    take no part."""
    if ends is None:
        places: list[Any] = list(range(len(weight))) if x.shape[1] else []
    else:
        places = [slice(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]
    hit = [i for i, place in enumerate(places) if ends is None or place.start < place.stop]
    with computing:
        calls = {i: begins[i]() for i in hit}
        if all(call.is_plain for call in calls.values()):
            return original(x, weight)
        if not any(call.quantizes for call in calls.values()):
            return observed_product(original, x, weight, _spread({i: calls[i].tap for i in hit}, places))
        matrices = weight.unbind()
        parts = {i: linear(F.linear, x[places[i]], matrices[i], calls[i]) for i in hit}
        if ends is None:
            return torch.stack([parts[i] for i in hit])
        rest = x.new_zeros(len(x) - ends[-1], weight.shape[1])
        return torch.cat([*parts.values(), rest.to(next(iter(parts.values())).dtype)])


def _spread(taps: Mapping[int, Tap | None], places: Sequence[Any]) -> Tap:
    """A tap for a product of all experts, which shows each expert's tap its own part."""

    def show(seen: Observed) -> None:
        of_weight = seen.name in ("b", "dgrad_b", "grad_b")
        for i, tap in taps.items():
            if tap:
                tap(replace(seen, tensor=seen.tensor[i if of_weight else places[i]]))

    return show
