"""Watches a linear layer from outside, where its products cannot be intercepted: its input, its weight, its result, and
the gradients of these. The layer rounds as its own code says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from binade.collector.capture.adapters.dtensor import is_dtensor
from binade.collector.capture.adapters.products import listen_to_result, listened, showing_operands, tensors_in
from binade.quant.gemm import Observed, Tap, sampling


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

    def show(self, tap: Tap, weight: Tensor, result: Any) -> None:
        """Show what the layer multiplied, and as they come, the gradients. result: the tensor that it returned, or
        what contains that first."""
        x, y = self.input, next(tensors_in((result,)), None)
        if x is None or y is None:
            return

        def by_model(seen: Observed) -> None:
            tap(replace(seen, by_model=True))

        self.tap = by_model
        a, b = x.detach(), plain_values(weight)
        by_model(Observed("a", a))
        by_model(Observed("b", b))
        by_model(Observed("y", y.detach()))
        again = a.detach().requires_grad_(x.requires_grad), b.detach().requires_grad_(weight.requires_grad)
        show = showing_operands(by_model, *again, -1)
        listen_to_result(y, with_weight_gradients([weight], by_model, show) if torch.is_grad_enabled() else show)


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


def plain_values(weight: Any) -> Tensor:
    """The values of a weight that a subclass of Tensor keeps in a form of its own, such as rounded once for all passes
    (fp8_model_init of Transformer Engine), or in one tensor that it holds."""
    if multiplies_itself(weight) and not hasattr(weight, "dequantize"):
        held = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
        weight = next((x for x in held if x.shape == weight.shape and x.dtype == weight.dtype), weight)
    if (
        isinstance(weight, Tensor)
        and hasattr(weight, "dequantize")
        and type(weight) not in (Tensor, torch.nn.Parameter)
    ):
        weight = weight.dequantize()
    values: Tensor = weight.detach()
    return values


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
            if not sampling():
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
