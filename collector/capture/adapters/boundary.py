"""Watches a linear layer from outside, where its products cannot be intercepted: its input, its weight, its result, and
the gradients of these. The layer rounds as its own code says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from binade.collector.capture.adapters.dtensor import is_dtensor
from binade.collector.capture.adapters.products import listen_to_result, listened, showing_operands, tensors_in
from binade.collector.models.parallel import Begin
from binade.quant.gemm import Observed, Tap
from binade.quant.memory import ordinary
from binade.quant.quantizer import DTYPES


class Boundary:
    """One forward pass of a linear layer. The layer must be called with `args` and `kwargs`, in which its input is
    a view, whose gradient is this pass's share; `show` may follow after the call."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = tuple(args), dict(kwargs)
        self.tap: Tap | None = None
        self.input = next((x for x in tensors_in((args, kwargs)) if x.is_floating_point()), None)
        view = None if self.input is None else listened(self.input, self._arrive, "grad_a")
        self.args = tuple(view if x is self.input else x for x in self.args)
        self.kwargs = {name: view if x is self.input else x for name, x in self.kwargs.items()}

    def _arrive(self, seen: Observed) -> None:
        if self.tap:
            self.tap(seen)

    def show(self, tap: Tap, weight: Tensor | None, result: Any) -> None:
        """Show what the layer multiplied, and as they come, the gradients. weight: None, or in a dtype that is not
        recorded, if its codes alone are known. result: the tensor that the layer returned, or what contains that
        first."""
        x, y = self.input, next(tensors_in((result,)), None)
        if x is None or y is None:
            return

        def by_model(seen: Observed) -> None:
            tap(replace(seen, by_model=True))

        self.tap = by_model
        a = x.detach()
        b = None if weight is None else ordinary(weight)
        by_model(Observed("a", a))
        show: Tap = by_model
        if weight is not None and b is not None and b.dtype in DTYPES:
            by_model(Observed("b", b))
            again = a.detach().requires_grad_(x.requires_grad), b.detach().requires_grad_(weight.requires_grad)
            show = showing_operands(by_model, *again, -1)
            show = with_weight_gradients([weight], by_model, show) if torch.is_grad_enabled() else show
        by_model(Observed("y", y.detach()))
        listen_to_result(y, show)


class InsideFunction:
    """A product in the forward method of an autograd function, x [..., in] · weightᵀ [in, out] -> y [..., out], and
    the parameter that the weight is."""

    def __init__(self, tap: Tap, x: Tensor, weight: Tensor, parameter: Tensor, y: Tensor) -> None:
        self.tap, self.x, self.weight, self.parameter, self.y = _by_model(tap), x, weight, parameter, y
        self.version = y._version

    def show_operands(self, is_result: bool) -> None:
        """is_result: whether y is the product alone."""
        self.tap(Observed("a", self.x))
        self.tap(Observed("b", self.weight))
        if is_result:
            self.tap(Observed("y", self.y.detach()))

    def listen(self, result: Tensor, with_weight: bool) -> None:
        """Show the gradients that come after that of the module's result. with_weight: the parameter's, too."""
        returned = self.y.requires_grad and self.y._version == self.version
        y, show = (self.y, self._show_gradient) if returned else (result, _ignore)
        listen_to_result(y, with_weight_gradients([self.parameter], self.tap, show) if with_weight else show)

    def _show_gradient(self, seen: Observed) -> None:
        a, b = self.x.detach().requires_grad_(), self.weight.detach().requires_grad_(self.parameter.requires_grad)
        showing_operands(self.tap, a, b, -1)(seen)


def _by_model(tap: Tap) -> Tap:
    return lambda seen: tap(replace(seen, by_model=True))


def _ignore(_: Observed) -> None:
    pass


def multiplies_itself(weight: Any) -> bool:
    """Whether a weight is of a subclass of Tensor that holds other tensors and computes its products itself, such as
    those of torchao. Its memory must not be read. A DTensor is none: its products are computed on local parts."""
    return is_traceable_wrapper_subclass(weight) and not is_dtensor(weight)


def watched_forward(module: nn.Module) -> Callable[[Begin], Callable[..., Any]]:
    """What replaces the forward of a layer whose weight no kernel of ours reads: the same, watched from outside."""

    def method(begin: Begin) -> Callable[..., Any]:
        forward = module.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            tap = begin().tap
            if tap is None:
                return forward(*args, **kwargs)
            boundary = Boundary(args, kwargs)
            result = forward(*boundary.args, **boundary.kwargs)
            boundary.show(tap, None, result)
            return result

        return watched

    return method


def with_weight_gradients(weights: Sequence[Tensor], tap: Tap, show: Tap) -> Tap:
    """A tap of the result that also shows the weights' gradients, once they arrive after the result's: other passes may
    be in flight. They arrive at the weights themselves, which the module reads."""
    arrived: dict[int, Tensor] = {}
    running = False

    def listener(at: int) -> Callable[[Tensor], None]:
        def arrive(gradient: Tensor) -> None:
            nonlocal running
            if not running:
                return
            arrived[at] = gradient.detach()
            handles[at].remove()
            if len(arrived) == len(weights):
                tap(Observed("grad_b", torch.cat([arrived[i] for i in range(len(weights))])))
                arrived.clear()
                running = False

        return arrive

    handles = [
        weight.register_hook(listener(at))  # type: ignore[no-untyped-call]
        for at, weight in enumerate(weights)
        if weight.requires_grad
    ]

    def begin(seen: Observed) -> None:
        nonlocal running
        running = True
        show(seen)

    return begin
