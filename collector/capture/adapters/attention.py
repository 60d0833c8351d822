"""Attention cores: intercepts the functions of torch that compute QKᵀ and PV while the forward of a core runs.

A TorchFunctionMode replaces them: in the forward of a core only, and only while there is something to quantize or
record. Keys and values are recorded as they enter the products: copied to every head where the model copies them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.capture.adapters.attend import attend, context, product, show_scores
from binade.collector.capture.adapters.dtensor import core_on_parts
from binade.collector.capture.adapters.hidden_pairs import (
    SOFTMAXES,
    lowered,
    never_seen,
    permuted,
)
from binade.collector.capture.adapters.layer import eagerly, refusal, refuse
from binade.collector.capture.adapters.products import (
    Interception,
    Product,
    computing,
    tensors_in,
)
from binade.collector.models.attention import PROB_NAMES, SCORE_NAMES, CoreBegin, hiding
from binade.collector.models.parallel import Call
from binade.quant.attention import smoothed

ATTRIBUTES = ("__get__", "size", "dim")
BADDBMMS = (torch.baddbmm, Tensor.baddbmm)
MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
SCALINGS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.div, Tensor.div, Tensor.__truediv__)


class SdpaMode(Interception):
    """One pass through an attention core that calls F.scaled_dot_product_attention, or FlexAttention: replaces its
    products, and checks at the end that all of them were computed. With torch.compile turned off, FlexAttention ends in
    a higher-order operator, which is replaced by the two products that define it in torch.

    calls    how often one of these functions was called
    dropped  the result of the last dropout and what it was applied to, because probabilities are recorded before it
    """

    def __init__(self, name: str, module: nn.Module, qk: Call, pv: Call) -> None:
        self.name, self.module = name, module
        self.calls = 0
        self.qk, self.pv = qk, pv
        self.dropped: tuple[Tensor, Tensor] | None = None

    def check(self) -> None:
        """Called after the pass; calls `missing` if products are missing."""
        if not self.calls:
            self.missing(
                "did not call F.scaled_dot_product_attention, or in the forward method of a torch.autograd.Function, "
                "so its products were not intercepted"
            )

    def missing(self, what: str) -> None:
        """Refuses the module, or warns if these products are only recorded."""
        if self.qk.quantizes or self.pv.quantizes:
            refuse(self.name, self.module, what)
        else:
            warnings.warn(refusal({self.name: self.module}, {self.name: what}), stacklevel=2)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.in_function:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "flex_attention":
            from torch._higher_order_ops.flex_attention import math_attention

            self.calls += 1
            with WrittenMode(self.name, self.module, self.qk, self.pv):
                return math_attention(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return self._attend(*args, **kwargs)
        result = func(*args, **kwargs)
        before = args[0] if args else kwargs.get("input")
        if func is F.dropout and isinstance(before, Tensor) and result.data_ptr() != before.data_ptr():
            self.dropped = result, before
        return result

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.is_nested:
            self.missing("attends to nested tensors, which its products do not support")
            return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)

        def on_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(self.qk, self.pv, q, k, v, *args, **kwargs)

        with computing:
            return core_on_parts(self.name, on_parts, query, key, value)

    def before_dropout(self, probs: Tensor) -> Tensor:
        """The probabilities before dropout was applied to them or to the tensor they are a view of, if it was."""
        result, before = self.dropped or (None, probs)
        if result is None or (result.data_ptr(), result.numel()) != (probs.data_ptr(), probs.numel()):
            return probs
        return before.reshape(probs.shape)


def core_forward(name: str, module: nn.Module, mode: type[SdpaMode]) -> Callable[[CoreBegin], Callable[..., Any]]:
    """The module's forward under a mode; without one while nothing is quantized or recorded."""

    def method(begin: CoreBegin) -> Callable[..., Any]:
        forward = module.forward

        def intercepted(*args: Any, **kwargs: Any) -> Any:
            qk, pv = begin.qk(), begin.pv()
            if qk.is_plain and pv.is_plain:
                return forward(*args, **kwargs)
            with mode(name, module, qk, pv) as core:
                result = forward(*args, **kwargs)
            core.check()
            return result

        return eagerly(intercepted)

    return method


@dataclass(frozen=True)
class AttentionProduct:
    """A product of attention: a [..., m, k], b [..., k, n], a function that computes factor · a · b + added from them,
    and `order`, which turns its axes into those of the model's result."""

    a: Tensor
    b: Tensor
    compute: Product
    order: Sequence[int]
    order_a: Sequence[int]
    factor: float = 1.0
    added: Tensor | None = None

    @classmethod
    def of(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AttentionProduct | None:
        """The product that this call computes; None for another function, for fewer than three axes, and for an outer
        product (such as that of rotary angles)."""
        operands = [x for x in tensors_in((args, kwargs)) if x.dim() > 2]
        if len(operands) < 2:
            return None
        a, b = operands[-2:]
        same, candidate = range(a.dim()), None
        if func in MATMULS:
            candidate = cls(a, b, func, range(max(a.dim(), b.dim())), same)
        elif func in BADDBMMS:
            added, (beta, alpha) = args[0], (kwargs.get(name, 1) for name in ("beta", "alpha"))
            rest = torch.mul(added, beta) if beta else None  # without beta, what is added may be uninitialized
            candidate = cls(a, b, partial(func, added, beta=beta, alpha=alpha), same, same, alpha, rest)
        elif func is torch.einsum and re.fullmatch(r"\w+,\w+->\w+", equation := args[0].replace(" ", "")):
            candidate = cls._of_einsum(equation, a, b)
        return candidate if candidate and candidate.a.shape[-1] > 1 else None

    @classmethod
    def _of_einsum(cls, equation: str, a: Tensor, b: Tensor) -> AttentionProduct | None:
        of_a, of_b, of_y = re.split(",|->", equation)
        batch = "".join(letter for letter in of_y if letter in of_a and letter in of_b)
        rows = "".join(letter for letter in of_a if letter not in of_b)
        columns = "".join(letter for letter in of_b if letter not in of_a)
        inner = "".join(letter for letter in of_a if letter in of_b and letter not in of_y)
        if not (len(rows) == len(columns) == len(inner) == 1):
            return None

        def order(given: str, wanted: str) -> list[int]:
            return [given.index(letter) for letter in wanted]

        of_product = batch + rows + columns
        order_a, order_b = order(of_a, batch + rows + inner), order(of_b, batch + inner + columns)

        def compute(a: Tensor, b: Tensor) -> Tensor:
            given = a.permute(order(batch + rows + inner, of_a)), b.permute(order(batch + inner + columns, of_b))
            return torch.einsum(equation, *given).permute(order(of_y, of_product))

        return cls(a.permute(order_a), b.permute(order_b), compute, order(of_product, of_y), order_a)


class WrittenMode(SdpaMode):
    """Attention in two products of tensors of three axes or more: the first is QKᵀ, the second the context. The scores
    are recorded after scaling, if the next operation scales them, and once the softmax shows which of them it sees.

    scores  those that are not recorded yet; a copy, as models mask them in place
    hidden  which of them the softmax does not see; None if that is not known
    """

    def __init__(self, name: str, module: nn.Module, qk: Call, pv: Call) -> None:
        taps = hiding(qk.tap, SCORE_NAMES, self._of_scores), hiding(pv.tap, PROB_NAMES, self._of_probs)
        super().__init__(name, module, replace(qk, tap=taps[0]), replace(pv, tap=taps[1]))
        self.attended = 0
        self.unscaled: Tensor | None = None
        self.added: Tensor | None = None
        self.scores: Tensor | None = None
        self.hidden: Tensor | None = None
        self.order: Sequence[int] = ()  # of the axes of the product of the scores, as the model has them
        self.order_a: Sequence[int] = ()  # of the model's axes of probabilities, as the product has them

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = None if self.in_function else AttentionProduct.of(func, args, kwargs)
        if written and not self._is_of_a_child(written):
            softmax = self.pv.rounding.formats.softmax
            if softmax.tile:
                self.missing(f"computes its own softmax, to which softmax={softmax} cannot be applied")
            self.attended += 1
            if self.attended == 1:
                return self._scores(written)
            if self.attended > 2:  # which of them are QKᵀ and PV is not known
                refuse(self.name, self.module, "made more than two products of its own, so it is no core of attention")
                return func(*args, **kwargs)
            self._see(self.unscaled)
            self._show(None if self.scores is None else never_seen(written.a))
            self.order_a = written.order_a
            probs = next(x for x in tensors_in((args, kwargs)) if x.dim() > 2)
            before = written.a if (kept := self.before_dropout(probs)) is probs else kept.permute(*written.order_a)
            value, pv = self.pv.cached(written.b)
            y = context(written.compute, written.a, before, value, pv)
            return y.permute(*written.order)
        used = bool(args) and args[0] is self.unscaled and getattr(func, "__name__", "") not in ATTRIBUTES
        if self.unscaled is not None and used and func not in SCALINGS:
            self._see(self.unscaled)
        if func in SOFTMAXES and self.scores is not None:
            self._show(lowered(args[0] if args else kwargs["input"], self.scores, self.added))
        if self.unscaled is None or not used:
            return super().call(func, args, kwargs)
        scaled = func(*args, **kwargs)
        self._see(scaled)
        return scaled

    def _is_of_a_child(self, written: AttentionProduct) -> bool:
        """Whether this is the product of a module in the core with a weight of its own."""
        weights = [
            y for x in (written.a, written.b) if isinstance(y := x if x._base is None else x._base, nn.Parameter)
        ]
        own = vars(self.module)["_parameters"].values()
        return any(not any(weight is each for each in own) for weight in weights)

    def check(self) -> None:
        if (self.attended, self.calls) not in ((2, 0), (0, 1)):
            self.missing(
                f"called F.scaled_dot_product_attention {self.calls} times and made {self.attended} products of its "
                "own where one call or two products were expected, so they were not intercepted"
            )

    def _scores(self, written: AttentionProduct) -> Tensor:
        def compute(query: Tensor, key: Tensor) -> Tensor:
            return written.compute(query, key.transpose(-1, -2))

        key, qk = self.qk.cached(written.b.transpose(-1, -2))
        query, key, complete = smoothed(written.a, key, qk.rounding.formats)
        scores = complete(product(compute, query, key, qk, transpose_b=True, scale=written.factor), written.factor)
        if written.added is not None and qk.quantizes:
            scores = scores + written.added
        self.order = written.order
        self.added = None if written.added is None else written.added.expand(scores.shape).permute(*written.order)
        self.unscaled = scores.permute(*written.order)
        return self.unscaled

    def _see(self, scores: Tensor | None) -> None:
        if scores is not None and (self.qk.tap or self.pv.tap):
            self.scores = scores.detach().clone()
        self.unscaled = None

    def _of_scores(self, name: str) -> Tensor | None:
        """What is hidden of a tensor of this name of the product of the scores."""
        back = [*map([*self.order].index, range(len(self.order)))]
        return permuted(self.hidden, [] if name == "scores" else back)

    def _of_probs(self, _: str) -> Tensor | None:
        return permuted(self.hidden, self.order_a)

    def _show(self, hidden: Tensor | None) -> None:
        """Record the scores, without those that are hidden."""
        scores, self.scores = self.scores, None
        if scores is not None:
            self.hidden = hidden
            with computing:
                show_scores(self.qk.tap, scores)
