"""One product of a model: computed by the model and shown to a tap, or computed by quant.gemm.

A product that is not quantized is left to the model's own call, so that its result has the same bits; the tap sees its
operands before and its result after the call. Gradients are observed where they leave this product: operands are passed
as views, whose gradient is this product's share alone.
"""

from __future__ import annotations

import dis
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.models.parallel import STACKED, Call, add_bias, reshaped
from binade.quant import gemm
from binade.quant.gemm import Observed, Tap
from binade.quant.memory import without_modes

Product = Callable[[Tensor, Tensor], Tensor]
APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]  # torch


class _Computing(threading.local):
    """True while an adapter computes a product: its own calls are neither intercepted nor watched."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


computing = _Computing()
in_kernel = _Computing()  # while a kernel runs that a transform of torch.func called: its own stack is empty then
INTERCEPTED = "intercepted"  # the name of functions that run a method under an Interception


def transformed() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp) is running: its tensors have no values to record, and their
    products no backward GEMMs to round."""
    return torch._C._functorch.peek_interpreter_stack() is not None or in_kernel.depth > 0


def applying_function() -> bool:
    """Whether the forward method of an autograd function is running."""
    return running(lambda code: code is APPLY)


def running(wanted: Callable[[CodeType], bool]) -> bool:
    """Whether a function with such code is running, on this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not wanted(frame.f_code):
        frame = frame.f_back
    return frame is not None


class Interception(TorchFunctionMode):
    """Sees the calls of torch's functions, except those that an adapter makes to compute a product."""

    with_gradients = False

    def __enter__(self) -> Self:
        self.with_gradients = torch.is_grad_enabled()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @property
    def in_function(self) -> bool:
        """Whether the forward method of an autograd function, called in a method that is intercepted, is running: its
        backward method is not seen, so that a product in it would be replaced by half."""
        if not self.with_gradients or torch.is_grad_enabled():
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name != INTERCEPTED:
            if frame.f_code is APPLY:
                return True
            frame = frame.f_back
        return False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {})) if computing.depth else self.call(func, args, kwargs or {})

    @abstractmethod
    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What func(*args, **kwargs) returns."""


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for member in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(member)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> frozenset[str]:
    """The names that the code uses but for local ones, with those of the functions that are written in it; "@" is the
    operator."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    operators = {"@"} if any(instruction.argrepr == "@" for instruction in dis.get_instructions(code)) else set()
    return frozenset(operators.union(code.co_names, *map(names_in, inner)))


def on_values(name: str, x: Any, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A jagged nested tensor of the function's result for the values of one, [tokens, ...]. Raises InstrumentError for
    another nested tensor."""
    if x.layout is not torch.jagged or x.lengths() is not None or x._ragged_idx != 1:
        raise InstrumentError(
            f"{name} is called with a nested tensor whose sequences do not lie one after the other: expected "
            f"torch.nested.nested_tensor(..., layout=torch.jagged), or leave it out with exclude=[{name!r}]"
        )
    y: Tensor = torch.nested.nested_tensor_from_jagged(function(x.values()), x.offsets())
    return y


def linear(original: Product, x: Tensor, weight: Tensor, call: Call, bias: Tensor | None = None) -> Tensor:
    """x [..., in] · weightᵀ [in, out] + bias -> [..., out]. original computes it as the model does, bias included.

    Under autocast a quantized or recorded product takes its operands in autocast's dtype, as torch's linear does.
    """
    with computing:
        dtype = product_dtype(x)
        x, call = call.cached(x if call.is_plain else x.to(dtype))
        tap = call.tap
        if call.is_plain:
            return original(x, weight)
        if tap and not call.quantizes:
            return observed_product(original, x.to(dtype), cast(weight, dtype), tap)
        inner = tap if bias is None else _but_result(tap)
        rows = x.to(dtype) if x.dim() > 1 else x.to(dtype)[None]
        if x.dim() == 1:
            inner = reshaped(inner, lambda seen: tuple(seen.shape[1:]), STACKED)
        y = gemm.linear(rows, cast(weight, dtype), call.rounding, tap=inner)
        y = y if x.dim() > 1 else y[0]
        if bias is None:
            return y
        y = add_bias(y, bias)
        if tap:
            tap(Observed("y", y.detach()))
        return y


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in a dtype. Within one region of autocast, a parameter has one copy, to which all products of the region
    add their gradients before that is cast back: this returns that copy, which a product of no rows shows."""
    device = weight.device.type
    copies = torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled() and torch.is_grad_enabled()
    of_autocast = copies and weight.dtype is torch.float32 and dtype == torch.get_autocast_dtype(device)
    plain = type(weight) in (Tensor, nn.Parameter) and weight.is_leaf and weight.requires_grad and weight.dim() == 2
    if not (of_autocast and plain):
        return weight.to(dtype)
    with without_modes():
        nothing = weight.new_empty(0, weight.shape[1]).requires_grad_()
        shown: Tensor | None = getattr(F.linear(nothing, weight).grad_fn, "_saved_mat2", None)
    return weight.to(dtype) if shown is None else shown.t()


def _but_result(tap: Tap | None) -> Tap | None:
    """A tap for a product whose bias is added later: its output is not the result yet."""
    return tap and (lambda seen: tap(replace(seen, name="product") if seen.name == "y" else seen))


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x in torch's own products: autocast's if it is enabled."""
    device = x.device.type
    cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return torch.get_autocast_dtype(device) if cast else x.dtype


def observed_product(product: Product, a: Tensor, b: Tensor, tap: Tap, dim_b: int = -1) -> Tensor:
    """product(a, b), shown to the tap as quant.gemm shows its own: operands, result and, as they come, gradients.
    a is contracted along its last axis, b along dim_b."""
    with without_modes():
        tap(Observed("a", a.detach()))
        tap(Observed("b", b.detach(), dim=dim_b))
    y = product(listened(a, tap, "grad_a"), listened(b, tap, "grad_b"))
    with without_modes():
        tap(Observed("y", y.detach()))
        listen_to_result(y, showing_operands(tap, a, b, dim_b))
    return y


def by_head(tap: Tap, heads: int) -> Tap:
    """A tap that sees the rows of each head apart, as they are when they are rounded."""
    if heads == 1:
        return tap

    def show(seen: Observed) -> None:
        x = seen.tensor
        apart = x.reshape(*x.shape[:-2], heads, -1, x.shape[-1]) if seen.name in STACKED else x
        tap(replace(seen, tensor=apart))

    return show


def showing_operands(tap: Tap, a: Tensor, b: Tensor, dim_b: int) -> Tap:
    """A tap that with a result's gradient shows the other operands of dgrad and wgrad, as quant.gemm does."""
    dgrad, wgrad = a.requires_grad, b.requires_grad
    b_again, a_again = b.detach() if dgrad else None, a.detach() if wgrad else None
    flat = b.dim() == 2

    def show(seen: Observed) -> None:
        tap(seen)
        if seen.name != "grad":
            return
        if b_again is not None:
            tap(Observed("dgrad_b", b_again, dim=-3 - dim_b))
        if a_again is not None:
            for name, x in (("wgrad_grad", seen.tensor), ("wgrad_a", a_again)):
                tap(Observed(name, x.reshape(-1, x.shape[-1]) if flat else x, dim=-2))

    return show


def listened(x: Tensor, tap: Tap, name: str) -> Tensor:
    """x for one product: a view whose gradient the tap sees by that name."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    with without_modes():  # a selective checkpoint saves results by operation, and must not meet this one
        view = x.view_as(x)
    view.register_hook(_observer(tap, name))  # type: ignore[no-untyped-call]  # torch has no annotations there
    return view


def listen_to_result(y: Tensor, tap: Tap) -> None:
    """Show the gradient of a product's result to the tap, as "grad"."""
    if not y.requires_grad:
        return
    base = y._base
    if base is None or base.grad_fn is None or base.numel() != y.numel() or not base.is_contiguous():
        base = y
    # A product of three axes is a view of one of two. Modified in place (F.relu(y, inplace=True)) it would lose its own
    # place in the graph, and a hook with it; what it is a view of keeps its.
    shape, stride, number, is_view = y.shape, y.stride(), base.output_nr, base is not y

    def observe(gradients: tuple[Tensor, ...]) -> None:
        with without_modes():
            gradient = gradients[number].detach()
            tap(Observed("grad", gradient.contiguous().as_strided(shape, stride) if is_view else gradient))

    node: Any = base.grad_fn
    node.register_prehook(observe)  # which runs after the hooks of the tensor: they may change the gradient


def _observer(tap: Tap, name: str) -> Callable[[Tensor], None]:
    return lambda gradient: tap(Observed(name, gradient.detach()))
