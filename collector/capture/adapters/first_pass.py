"""Watches the first forward pass of a model and refuses matrix products that no adapter intercepts, at its end.

It looks for products with one of the model's weights and, where the recipe quantizes attention, for
F.scaled_dot_product_attention, FlexAttention and any other product of two activations; not for embeddings and excluded
modules. It recognizes a weight itself, its views, and anything computed from weights alone: a cast, detached,
transposed, stacked or normalized copy. It does not notice convolutions, sums of elementwise products, and kernels of
other packages.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from binade.collector.capture.adapters.layer import (
    FIRST_PASS,
    Findings,
    InstrumentError,
    Layer,
    numbers_left_out,
    refusal,
)
from binade.collector.capture.adapters.products import Interception, tensors_in
from binade.collector.capture.adapters.weights import GROUPED, PRODUCTS, WeightNames, WeightSource, is_linear
from binade.data.run.tensor_kinds import Product

ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
FLEX = "flex_attention"
NAMED = (FLEX, "_scaled_mm", "scaled_mm", *GROUPED)  # some of them are torch operators, which are not single objects


class FirstPass(Interception):
    """layers: what the adapters intercept. excluded: modules that are not watched; nor are those that
    compute a parametrized weight. attention: whether to refuse it.
    show: called with a sentence about layers that are recorded but not rounded. seen: counts the products that were
    seen in kernels, if they are."""

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[Layer],
        excluded: Iterable[nn.Module],
        attention: bool,
        show: Callable[[str], None],
        seen: Callable[[], int] | None = None,
    ) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.findings, self.show, self.seen = Findings(), show, seen or (lambda: 0)
        computing_weights = (module for module in self.names if isinstance(module, parametrize.ParametrizationList))
        self.excluded = {inner for module in (*excluded, *computing_weights) for inner in module.modules()}
        left = [m for m in self.names if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) or m in self.excluded]
        self.weights = CurrentWeights(model, left)
        self.known = {layer.module for layer in layers if layer.products != (Product.LINEAR,)}
        self.kernels = {layer.module for layer in layers if layer.kernels}
        self.linear = {layer.module for layer in layers if is_linear(layer.module)}
        self.attention = attention

    def __enter__(self) -> Self:
        self.findings = FIRST_PASS.findings = Findings()
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        FIRST_PASS.findings = None
        if error is None:
            self.judge()

    def judge(self) -> None:
        """Raises InstrumentError for all that was refused, and shows what is not rounded."""
        modules = {name: module for module, name in self.names.items()}
        if self.findings.refused:
            raise InstrumentError(refusal(modules, self.findings.refused))
        if self.findings.unrounded:
            self.show(refusal(modules, self.findings.unrounded))

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = list(tensors_in((args, kwargs)))
        if func in PRODUCTS or getattr(func, "__name__", "") in NAMED:
            before = self.seen()
            result = func(*args, **kwargs)
            if self.seen() == before:
                self._look(func, operands)
            return result
        result = func(*args, **kwargs)
        self.weights.follow(func, operands, result)
        return result

    def _look(self, func: Callable[..., Any], operands: list[Tensor]) -> None:
        if func is F.scaled_dot_product_attention:  # its mask, a bias by position, may be made of a weight
            operands = operands[:3]
        weight = next((source.name for x in operands if (source := self.weights.source(x))), None)
        attends = self.attention and (func in ATTENTION or func.__name__ == FLEX or _activations(operands))
        if weight is None and not attends:
            return
        module = calling_module(self.names)
        # A core checks by itself whether its module called the product, and so do declared products and linear layers;
        # other packages' kernels are only watched.
        checks = self.known if weight is None else self.linear
        if module in self.excluded or module in self.kernels or module in checks:
            return
        name = self.names[module] if module else (weight or "").rpartition(".")[0]
        what = f"with {weight}" if weight else f"of activations {[list(x.shape) for x in operands[:2]]}"
        not_there = "that is not intercepted: neither quantized nor recorded"
        path = self._pattern(module, name)
        named = (
            "" if weight else f"; if it attends, name it: cores=[{path!r}], else declare it: products={{{path!r}: ...}}"
        )
        self.findings.refused.setdefault(name, f"computes a product {what} by {func.__name__} {not_there}{named}")

    def _pattern(self, module: nn.Module | None, name: str) -> str:
        """A module's path, with * for its numbers if all modules that this matches are of its class."""
        pattern = numbers_left_out(name)
        alike = (other for other, path in self.names.items() if fnmatchcase(path, pattern))
        return pattern if all(type(other) is type(module) for other in alike) else name


class CurrentWeights(WeightNames):
    """The weights that the model has now, but for those of the modules `left`: FSDP replaces them in a pass, by
    parameters or by views of a flat one; and of a DTensor, the part that `to_local` gives as a view."""

    def __init__(self, model: nn.Module, left: list[nn.Module]) -> None:
        super().__init__(())
        self.model, self.left = model, left

    def name_of(self, x: Tensor) -> str | None:
        owner = x if isinstance(x, nn.Parameter) else x._base
        is_flat = getattr(owner, "_is_flat_param", False)
        if x.dim() < 2 or not (is_flat or isinstance(x, nn.Parameter)):
            return None
        given = next((name for name, p in self.model.named_parameters() if p is x), None)
        left = (tensor for module in self.left for tensor in tensors_in(vars(module)))
        if any(tensor is x or (is_flat and tensor.data_ptr() == x.data_ptr()) for tensor in left):
            return None
        return f"a weight {list(x.shape)}" if is_flat else given

    def follow(self, func: Callable[..., Any], operands: Sequence[Tensor], result: Any) -> None:
        parameters = self.model.parameters() if func is Tensor.view_as else ()
        whole = next((p for p in parameters if getattr(p, "_local_tensor", None) is operands[0]), None)
        if whole is not None and (name := self.name_of(whole)):
            self.made[id(result)] = weakref.ref(result), WeightSource(name, None)
        else:
            super().follow(func, operands, result)


def _activations(operands: list[Tensor]) -> bool:
    """Whether this may be a product of attention: two tensors of three axes or more, contracted over more than one
    element (an outer product, as of rotary angles, is not)."""
    batched = [x for x in operands if x.is_floating_point() and x.dim() > 2]
    return len(batched) > 1 and batched[-2].shape[-1] > 1


def calling_module(names: dict[nn.Module, str]) -> nn.Module | None:
    """The innermost of the model's modules whose method is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        owner = frame.f_locals.get(arguments[0]) if arguments else None
        if isinstance(owner, nn.Module) and owner in names:
            return owner
        frame = frame.f_back
    return None
