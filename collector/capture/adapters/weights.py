"""Products that a module computes itself with a weight: its own `weight` [out, in], the stacked weights of experts
[experts, ·, ·], or the weight of one of its linear layers, as in `self.dt_proj.weight @ x`.

While the module's forward runs, F.linear, matmul, bmm, addmm and grouped_mm with such a weight, a view or a cast of it
are replaced by the products of linear layers: one, or one for each expert that tokens were routed to. This covers every
family of experts in transformers with the implementations `eager` and `grouped_mm`; other implementations run as
`eager` while the module is instrumented. Other functions with the weight are left to `first_pass`, which refuses them.

A product inside the forward method of a torch.autograd.Function is never replaced: its backward products would stay as
they are. A linear layer that computes none that can be replaced is watched from outside, see `boundary`. A module that
multiplies by the weights of its layers in such a function is refused by a recipe that rounds them; else their operands
and results are recorded, and the gradients that leave the function: of the weights, and of the result that it returns.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import attrgetter
from types import FunctionType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.capture.adapters.attend import product
from binade.collector.capture.adapters.boundary import Boundary, InsideFunction, multiplies_itself
from binade.collector.capture.adapters.dtensor import is_dtensor, linear_on_parts
from binade.collector.capture.adapters.layer import (
    FIRST_PASS,
    Detach,
    InstrumentError,
    eagerly,
    refusal,
    refuse,
    set_on,
)
from binade.collector.capture.adapters.products import (
    Interception,
    Product,
    computing,
    linear,
    names_in,
    observed_product,
    on_values,
    tensors_in,
)
from binade.collector.models.parallel import Begin, Call
from binade.quant.gemm import Observed, Tap

MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
ADDMMS = (torch.addmm, Tensor.addmm)
GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")  # of torch.nn.functional, torch and transformers
CASTS = (Tensor.to, Tensor.type, Tensor.float, Tensor.bfloat16, Tensor.half, Tensor.contiguous, Tensor.clone)
PRODUCTS = frozenset(
    (
        F.linear,
        F.bilinear,
        F.multi_head_attention_forward,
        F.scaled_dot_product_attention,
        torch.einsum,
        torch.tensordot,
        torch.linalg.matmul,
        torch.linalg.multi_dot,
        *(
            getattr(owner, name)
            for name in (
                *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "inner", "dot", "chain_matmul"),
                *("addmm", "addbmm", "baddbmm", "addmv", "addmm_", "addbmm_", "baddbmm_", "addmv_"),
            )
            for owner in (torch, Tensor)
            if hasattr(owner, name)
        ),
    )
)
OWN_KERNELS = "multiplies in kernels of its own, so it is recorded but not rounded"
NAMES = frozenset(("@", "linear", "matmul", "mm", "bmm", "addmm", *GROUPED))  # of these functions, in source code


@dataclass(frozen=True)
class WeightSource:
    """The weight that a tensor is, or was made of. first: its first expert's number; None if they are not in order.
    computed: whether its values are others than the weight's, and not only in another dtype."""

    name: str
    first: int | None = 0
    computed: bool = False


class WeightNames:
    """Recognizes the weights of these names, their views, and anything computed from weights alone."""

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        named = list(named)
        self.names = {id(x): name for name, x in named}
        self.axes = {name: x.dim() for name, x in named}
        self.made: dict[int, tuple[weakref.ref[Tensor], WeightSource]] = {}

    def name_of(self, x: Tensor) -> str | None:
        return self.names.get(id(x))

    def source(self, x: Tensor) -> WeightSource | None:
        if name := self.name_of(x):
            return WeightSource(name)
        made = self.made.get(id(x))
        if made and made[0]() is x:
            return made[1]
        base = x._base
        if base is None or not (name := self.name_of(base)):
            return None
        return _part(x, base, WeightSource(name), False)

    def follow(self, func: Callable[..., Any], operands: Sequence[Tensor], result: Any) -> None:
        """Note the result of func if all of its operands are weights."""
        operands = [x for x in operands if x.dim() > 1]
        sources = [self.source(x) for x in operands]
        if not (sources and sources[0] and all(sources)):
            return
        for x in tensors_in(result):
            if x.dim() > 1 and not self.name_of(x):
                source = _part(x, operands[0], sources[0], func in CASTS)
                computed = source.computed or not (func in CASTS or is_view(x, operands[0]))
                self.made[id(x)] = weakref.ref(x), replace(source, computed=computed)


def _part(x: Tensor, of: Tensor, source: WeightSource, cast: bool) -> WeightSource:
    """The source of x, made of a tensor of this source."""
    if of.dim() != 3 or source.first is None or (cast and x.shape == of.shape):
        return source
    if not of.stride(0):  # one weight for all rows of a batch
        return source
    of_one_expert = x.dim() == 2 and x.numel() <= of[0].numel()
    in_order = x.dim() == 3 and x.stride(0) == of.stride(0)
    if not (is_view(x, of) and (of_one_expert or in_order)):
        return replace(source, first=None)
    return replace(source, first=source.first + (x.storage_offset() - of.storage_offset()) // of.stride(0))


def is_view(x: Tensor, of: Tensor) -> bool:
    """Whether x has its values in the same memory."""
    if multiplies_itself(x) or multiplies_itself(of):  # which have no memory of their own
        return False
    if not (torch._C._has_storage(x) and torch._C._has_storage(of)):  # in a transform of torch.func
        return x is of
    return bool(x.untyped_storage()._cdata == of.untyped_storage()._cdata)  # some devices have no pointer to the data


def is_repeated(x: Tensor) -> bool:
    """Whether x [batch, ·, ·] is one matrix for the whole batch, expanded."""
    return x.dim() == 3 and (len(x) == 1 or x.stride(0) == 0)


def functional_linear(name: str, call: Call, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear as the call says: on this rank's parts if the weight is a DTensor, on the tokens of all sequences if the
    input is nested."""
    if input.is_nested and not call.is_plain:
        return on_values(name, input, lambda x: functional_linear(name, call, x, weight, bias))

    def on_parts(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(lambda a, b: F.linear(a, b, bias), x, weight, call, bias)

    return linear_on_parts(name, on_parts, input, weight, bias)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer: of torch, or with the attributes of one and a weight of that shape."""
    if isinstance(module, nn.Linear):
        return True
    if isinstance(module, torch.jit.ScriptModule):
        return False
    weight = vars(module)["_parameters"].get("weight")
    sizes = getattr(module, "out_features", None), getattr(module, "in_features", None)
    return weight is not None and weight.is_floating_point() and tuple(weight.shape) == sizes


class OwnProducts:
    """The products that one module computes itself, by weight (a path from the module) and expert.

    is_linear   whether the module is one linear layer, which can be watched from outside
    is_watched  whether that is what is done, because its last pass computed no product that can be replaced; None
                before its first pass
    """

    def __init__(self, name: str, module: nn.Module, is_linear: bool = False) -> None:
        self.name, self.module, self.is_linear = name, module, is_linear
        self.is_watched: bool | None = None if is_linear else False
        self.begins: dict[tuple[str, int], Begin] = {}
        self.methods = ExitStack()

    def attach(self, weight: str, expert: int, begin: Begin) -> Detach:
        if not self.begins:
            for method in ["forward"] if self.is_linear else _computing_methods(type(self.module)):
                original = _in_sight(self.module) if method == "forward" else getattr(self.module, method)
                self.methods.callback(set_on(self.module, method, eagerly(self._intercepted(original))))
        self.begins[weight, expert] = begin

        def detach() -> None:
            del self.begins[weight, expert]
            if not self.begins:
                self.methods.close()

        return detach

    def _intercepted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def intercepted(*args: Any, **kwargs: Any) -> Any:
            weights = {name: attrgetter(name)(self.module) for name in {name for name, _ in self.begins}}
            if divided := [name for name, weight in weights.items() if weight.dim() == 3 and is_dtensor(weight)]:
                raise InstrumentError(
                    f"{self.name or 'the model'} has a three-dimensional DTensor as its {divided[0]}, and GEMMs on "
                    f"its local shards cannot be intercepted: leave it out with exclude=[{self.name!r}]"
                )
            held = [name for name, weight in weights.items() if multiplies_itself(weight)]
            if held and not self.is_linear and any(begin().quantizes for begin in self.begins.values()):
                kind = type(weights[held[0]]).__name__
                reason = f"multiplies by {held[0]}, a {kind}, which computes its products itself"
                raise InstrumentError(refusal({self.name: self.module}, {self.name: reason}))
            # Whether the layer is watched is known after its first pass, for which it is prepared to be.
            boundary = None if self.is_watched is False else Boundary(args, kwargs)
            args, kwargs = (boundary.args, boundary.kwargs) if boundary else (args, kwargs)
            with WeightsMode(self.name, weights, self.begins, self.is_linear) as mode:
                result = method(*args, **kwargs)
            if self.is_linear and not mode.products:
                self._watch(mode, boundary or Boundary(args, kwargs), next(iter(weights.values())), result)
            elif mode.half:
                refuse(self.name, self.module, mode.half)
            mode.listen(result)
            self.is_watched = self.is_linear and not mode.products
            return result

        return intercepted

    def _watch(self, mode: WeightsMode, boundary: Boundary, weight: Tensor, result: Any) -> None:
        """Record this pass from outside. A layer that multiplies its weight in torch and could be rounded, if it were
        written otherwise, is refused where the recipe rounds it: what rounds by itself is not."""
        call = next(iter(self.begins.values()))()
        reason = mode.half or mode.other
        if call.quantizes and reason:
            refuse(self.name, self.module, reason)
        elif call.quantizes and FIRST_PASS.findings:
            FIRST_PASS.findings.unrounded.setdefault(self.name, OWN_KERNELS)
        if call.tap:
            boundary.show(call.tap, weight, result)


def _computing_methods(kind: type[nn.Module]) -> list[str]:
    """The names of a class's methods that multiply: `forward`, and others with products that its user may call."""
    methods = {name: attribute for base in reversed(kind.__mro__) for name, attribute in vars(base).items()}
    others = (
        name
        for name, method in methods.items()
        if isinstance(method, FunctionType) and not name.startswith("__") and NAMES & names_in(method.__code__)
    )
    return list(dict.fromkeys(("forward", *others)))


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


class _Running(threading.local):
    """The innermost mode that runs."""

    mode: WeightsMode | None = None


class WeightsMode(Interception):
    """One pass through a module whose products with these weights are replaced.

    products  how many of them there were
    half      why one was left that is to be rounded, or that a linear layer computes: its backward products would have
              stayed as they are
    other     why one was left: it is of a function that is not replaced
    inside    the products in autograd functions that are recorded as they are
    """

    running = _Running()

    def __init__(
        self,
        name: str,
        weights: Mapping[str, Tensor],
        begins: Mapping[tuple[str, int], Begin],
        is_linear: bool,
    ) -> None:
        self.name, self.weights, self.begins, self.is_linear = name, WeightNames(weights.items()), begins, is_linear
        self.parameters = weights
        self.outer: WeightsMode | None = None
        self.products, self.half, self.other = 0, "", ""
        self.inside: list[InsideFunction] = []

    def __enter__(self) -> Self:
        self.outer, self.running.mode = self.running.mode, self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.running.mode = self.outer
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.running.mode is not self:  # a module inside decides about its own products
            return func(*args, **kwargs)
        if self.in_function and (of_layer := self._operands(func, args, kwargs)):
            return self._inside(func, args, kwargs, *of_layer)
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in MATMULS:
            return self._matmul(func, *args, **kwargs)
        if func in ADDMMS and not kwargs:
            return self._addmm(func, *args)
        if getattr(func, "__name__", "") in GROUPED:
            return self._grouped(func, *args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        if func in PRODUCTS and any(self.weights.source(x) for x in tensors):
            self.other = (
                f"did not multiply by its weight with a function of torch that is intercepted, but with {func.__name__}"
            )
        result = func(*args, **kwargs)
        self.weights.follow(func, tensors, result)
        return result

    def _source(self, weight: Tensor) -> WeightSource | None:
        """The source of a weight whose product can be replaced."""
        source = self.weights.source(weight)
        if source and self.is_linear and multiplies_itself(self.parameters[source.name]):
            return None
        if source is None or not self.in_function:
            return source
        begin = self.begins.get((source.name, source.first or 0))
        if not source.computed and (self.is_linear or (begin and begin().quantizes)):
            self._leave(source)
        return None

    def _leave(self, source: WeightSource) -> None:
        self.half = (
            f"multiplies by {source.name} in the forward method of a torch.autograd.Function, whose backward "
            "products cannot be intercepted; products='kernel' sees them"
        )

    def _operands(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor, WeightSource] | None:
        """(x [..., in], weight [out, in], the source of the weight) of a product with a layer's weight of two axes."""
        if self.is_linear or kwargs:
            return None
        with computing:
            if func is F.linear:
                x, weight, of = args[0], args[1], args[1]
            elif func in MATMULS and self.weights.source(args[1]):
                x, weight, of = args[0], args[1].mT, args[1]
            elif func in MATMULS:
                x, weight, of = args[1].mT, args[0], args[0]
            elif func in ADDMMS:
                x, weight, of = args[1], args[2].mT, args[2]
            else:
                return None
            source = self.weights.source(of) if of.dim() == 2 else None
            return (x, weight, source) if source and (source.name, source.first) in self.begins else None

    def _inside(
        self,
        func: Callable[..., Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        x: Tensor,
        weight: Tensor,
        source: WeightSource,
    ) -> Tensor:
        """A product in an autograd function, computed there. It is recorded unless it is to be rounded."""
        assert source.first is not None, "the source of a layer's weight"
        call = self.begins[source.name, source.first]()
        if call.quantizes:
            self._leave(source)
        with computing:
            y = func(*args, **kwargs)
            if call.tap and not call.quantizes:
                self.inside.append(
                    InsideFunction(call.tap, x.detach(), weight.detach(), self.parameters[source.name], y)
                )
                self.inside[-1].show_operands(is_result=func not in ADDMMS)
        return y

    def listen(self, result: Any) -> None:
        """Show the gradients of the products in autograd functions that arrive outside of these, given what the module
        returns: those of the weights, and of a product's result where the function returns that."""
        y = next(tensors_in((result,)), None)
        weights: set[Tensor] = set()
        if y is None or not torch.is_grad_enabled():
            return
        for inside in self.inside:
            inside.listen(y, with_weight=inside.parameter not in weights)
            weights.add(inside.parameter)

    def _call(self, weight: Tensor) -> Call | None:
        """The call of the product with a weight of two axes, begun; None if it is not one of those replaced."""
        source = self._source(weight) if weight.dim() == 2 else None
        begin = self.begins.get((source.name, source.first)) if source and source.first is not None else None
        self.products += begin is not None
        return begin() if begin else None

    def _stacked(self, weight: Tensor) -> list[Begin]:
        """What begins a call for each expert of a weight with three axes."""
        source = self._source(weight) if weight.dim() == 3 else None
        if source is None or source.first is None or self.weights.axes[source.name] < 3:
            return []
        begins = [self.begins.get((source.name, source.first + i)) for i in range(len(weight))]
        return [begin for begin in begins if begin] if all(begins) else []

    def _grouped_call(self, weight: Tensor) -> Call | None:
        """The call of the product with groups [groups, ·, ·] of the rows of one weight, begun."""
        source = self._source(weight)
        begin = self.begins.get((source.name, 0)) if source and self.weights.axes[source.name] == 2 else None
        self.products += begin is not None
        return begin() if begin else None

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
        if b.dim() == 3 and is_repeated(b) and (call := self._call(b[0])):
            return linear(lambda x, w: func(x, w.mT.expand(b.shape)), a, b[0].mT, call)
        if a.dim() == 3 and is_repeated(a) and (call := self._call(a[0])):
            return linear(lambda x, w: func(w.expand(a.shape), x.mT).mT, b.mT, a[0], call).mT
        if a.dim() == 3 and len(a) == len(b) and (begins := self._stacked(b)):
            return _by_expert(lambda x, w: func(x, w.mT), a, b.mT, begins, None)
        if a.dim() == 3 and b.dim() == 3 and (call := self._grouped_call(b)):
            return product(lambda x, w: func(x, w.mT), a, b.mT, call, transpose_b=True)
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
