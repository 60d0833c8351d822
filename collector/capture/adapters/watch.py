"""Watches the first forward pass of a model and refuses matrix products that no adapter intercepts, at its end.

It looks for products with one of the model's weights, for F.scaled_dot_product_attention and, where the recipe
quantizes attention, for any other product of two activations; not for embeddings and excluded modules. It knows a
weight as itself, as a view, and as anything computed from weights alone: a cast, detached, transposed, stacked or
normalized copy. It does not see convolutions, elementwise products that are summed, and calls of torch.ops.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.capture.adapters.layer import InstrumentError, Layer, refusal
from binade.collector.capture.adapters.products import Interception, tensors_in

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
                "matmul",
                "mm",
                "bmm",
                "addmm",
                "addbmm",
                "baddbmm",
                "_grouped_mm",
                "__matmul__",
                "__rmatmul__",
                "mv",
                "inner",
                "dot",
                "addmv",
                "addmm_",
                "addbmm_",
                "baddbmm_",
                "addmv_",
                "chain_matmul",
            )
            for owner in (torch, Tensor)
            if hasattr(owner, name)
        ),
    )
)


class Watch(Interception):
    """layers: what the adapters intercept. excluded: modules that are not watched. attention: whether products of two
    activations are refused too."""

    def __init__(
        self, model: nn.Module, layers: Iterable[Layer], excluded: Iterable[nn.Module], attention: bool
    ) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.missed: dict[str, str] = {}
        self.done = False
        self.excluded = {inner for module in excluded for inner in module.modules()}
        self.left = [m for m in self.names if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) or m in self.excluded]
        self.cores = {layer.module for layer in layers if layer.is_core}
        self.linears = {layer.module for layer in layers if not layer.is_core}
        self.attention = attention
        self.copies: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self.done = error is None and not self.missed
        if error is None and self.missed:
            raise InstrumentError(refusal({name: module for module, name in self.names.items()}, self.missed))

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = list(tensors_in((args, kwargs)))
        if func in PRODUCTS:
            self._look(func, operands)
        result = func(*args, **kwargs)
        if func not in PRODUCTS and isinstance(result, Tensor) and result.dim() > 1:
            sources = [self._weight(x) for x in operands if x.dim() > 1]
            if sources and sources[0] and all(sources):  # weights alone: no activation came in
                self.copies[id(result)] = (weakref.ref(result), sources[0])
        return result

    def _weight(self, x: Tensor) -> str | None:
        """The weight that x is, or was made of. It is looked for among those of now: FSDP replaces them in a pass, by
        parameters or by views of a flat one."""
        made = self.copies.get(id(x))
        if made and made[0]() is x:
            return made[1]
        owner = x if isinstance(x, nn.Parameter) else x._base
        is_flat = getattr(owner, "_is_flat_param", False)
        if not isinstance(owner, nn.Parameter) or (x if is_flat else owner).dim() < 2:
            return None
        given = next((name for name, p in self.model.named_parameters() if p is x or p is owner), None)
        if given is None and not is_flat:
            return None
        left = (each for module in self.left for each in tensors_in(vars(module)))
        if any(each is owner or each is x or (is_flat and each.data_ptr() == x.data_ptr()) for each in left):
            return None
        return f"a weight {list(x.shape)}" if is_flat else given

    def _look(self, func: Callable[..., Any], operands: list[Tensor]) -> None:
        weight = next((name for x in operands if (name := self._weight(x))), None)
        attends = func is F.scaled_dot_product_attention or (self.attention and _activations(operands))
        if weight is None and not attends:
            return
        module = _caller(self.names)
        # An adapter checks by itself whether its module called the product.
        if module in self.excluded or module in (self.linears if weight else self.cores):
            return
        name = self.names[module] if module else (weight or "").rpartition(".")[0]
        what = f"with {weight}" if weight else f"of activations {[list(x.shape) for x in operands[:2]]}"
        not_there = "that is not intercepted: neither quantized nor recorded"
        self.missed.setdefault(name, f"computes a product {what} by {func.__name__} {not_there}")


def _activations(operands: list[Tensor]) -> bool:
    """Whether this may be a product of attention: two tensors of three axes or more, contracted over more than one
    element (an outer product, as of rotary angles, is not)."""
    batched = [x for x in operands if x.is_floating_point() and x.dim() > 2]
    return len(batched) > 1 and batched[-2].shape[-1] > 1


def _caller(names: dict[nn.Module, str]) -> nn.Module | None:
    """The innermost of the model's modules whose method is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            return owner
        frame = frame.f_back
    return None
