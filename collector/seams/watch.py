"""The first forward pass of a model, watched: a matrix product that no seam answers is refused where it happens.

What is looked for: a product with one of the model's weights, F.scaled_dot_product_attention, and, where the recipe
quantizes attention, any other product of two activations. Embeddings and what is left out on purpose are not meant. A
weight is known as itself, as a view, or as a cast or transposed copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from collector.seams.layer import InstrumentError, Layer
from collector.seams.products import is_answering

PRODUCTS = frozenset(
    (
        F.linear,
        F.bilinear,
        F.multi_head_attention_forward,
        F.scaled_dot_product_attention,
        torch.einsum,
        torch.tensordot,
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
            )
            for owner in (torch, Tensor)
            if hasattr(owner, name)
        ),
    )
)
STEPS = 4  # from a weight's copy back to the weight


class Watch(TorchFunctionMode):
    """layers: what the seams answer for. left: modules whose products are their own affair. attention: whether any
    product of activations is meant."""

    def __init__(self, model: nn.Module, layers: Iterable[Layer], left: Iterable[nn.Module], attention: bool) -> None:
        self.names = {module: name or type(model).__name__ for name, module in model.named_modules()}
        self.left = {inner for module in left for inner in module.modules()}
        embedded = (m for m in self.names if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) or m in self.left)
        known = {id(p) for module in embedded for p in module.parameters(recurse=False)}
        self.weights = {
            id(p): name for name, p in model.named_parameters() if p.dim() > 1 and id(p) not in known
        }  # fmt: skip
        self.cores = {layer.module for layer in layers if layer.is_core}
        self.linears = {layer.module for layer in layers if not layer.is_core}
        self.attention = attention

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in PRODUCTS and not is_answering():
            self._look(func, list(_tensors((*args, *(kwargs or {}).values()))))
        return func(*args, **(kwargs or {}))

    def _look(self, func: Callable, operands: list[Tensor]) -> None:
        weight = next((self.weights[key] for x in operands for key in _origins(x) if key in self.weights), None)
        attends = func is F.scaled_dot_product_attention or (self.attention and _activations(operands))
        if weight is None and not attends:
            return
        module = _caller(self.names)
        # A seam need not answer where there is nothing to do, and looks itself whether it was asked.
        if module in self.left or module in (self.linears if weight else self.cores):
            return
        where = f"{self.names[module]} ({type(module).__name__})" if module else "the model"
        what = f"with {weight}" if weight else f"of activations {[list(x.shape) for x in operands[:2]]}"
        pattern = self.names[module] if module else weight
        raise InstrumentError(
            f"{where} computes a product {what} by {func.__name__} that is not intercepted: neither quantized nor "
            f"recorded. Leave it out on purpose with leave=[{pattern!r}]"
        )


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _origins(x: Tensor) -> Iterable[int]:
    """What x may be a view, a transposed or a cast copy of."""
    yield id(x)
    if x._base is not None:
        yield id(x._base)
    node = x.grad_fn
    for _ in range(STEPS):
        if node is None:
            return
        if hasattr(node, "variable"):
            yield id(node.variable)
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        node = parents[0] if len(parents) == 1 else None


def _activations(operands: list[Tensor]) -> bool:
    """Whether this may be a product of attention: two tensors of three axes or more, contracted over more than one
    element (an outer product, as of rotary angles, is not)."""
    batched = [x for x in operands if x.is_floating_point() and x.dim() > 2]
    return len(batched) > 1 and batched[-2].shape[-1] > 1


def _caller(names: dict[nn.Module, str]) -> nn.Module | None:
    """The innermost of the model's modules whose method is running."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in names:
            return owner
        frame = frame.f_back
    return None
