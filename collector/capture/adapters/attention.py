"""Attention cores: intercepts the functions of torch that compute QKᵀ and PV while the forward of a core runs.

A TorchFunctionMode replaces them: in the forward of a core only, and only while there is something to quantize or
record. Keys and values are recorded as they enter the products: copied to every head where the model copies them.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.capture.adapters.dtensor import core_on_parts
from binade.collector.capture.adapters.hidden_pairs import (
    SOFTMAXES,
    hidden_by,
    hiding_of,
    lowered,
    never_seen,
    permuted,
)
from binade.collector.capture.adapters.layer import InstrumentError, eagerly, refusal, refuse
from binade.collector.capture.adapters.products import (
    Interception,
    Product,
    by_head,
    computing,
    listen_to_result,
    listened,
    observed_product,
    product_dtype,
    tensors_in,
)
from binade.collector.models.attention import PROB_NAMES, SCORE_NAMES, CoreBegin, hiding
from binade.collector.models.parallel import STACKED, Call, reshaped
from binade.quant.attention import flash, smoothed
from binade.quant.gemm import Observed, Tap, matmul
from binade.quant.memory import without_modes

PIECE = 1 << 26  # values
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


def product(original: Product, a: Tensor, b: Tensor, call: Call, *, transpose_b: bool, scale: float = 1.0) -> Tensor:
    """a [..., m, k] · b [..., k, n] (bᵀ with b [..., n, k] if transpose_b) · scale, as `original(a, b)` computes it."""
    with computing:
        if call.quantizes:
            a, b = a.to(product_dtype(a)), b.to(product_dtype(b))
            batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
            a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
            y = matmul(a, b, call.rounding, transpose_b=transpose_b, tap=call.tap)
            return y if scale == 1.0 else y * scale
        if call.tap is None:
            return original(a, b)
        tap = by_head(_unscaled(call.tap, scale), call.rounding.heads)
        return observed_product(original, a, b, tap, -1 if transpose_b else -2)


def _unscaled(tap: Tap, scale: float) -> Tap:
    """A tap that gets the gradient of scale · a · b as that of a · b, which the quantized product uses."""
    if scale == 1.0:
        return tap
    gradients = ("grad", "wgrad_grad")
    return lambda seen: tap(replace(seen, tensor=seen.tensor * scale) if seen.name in gradients else seen)


def context(original: Product, probs: Tensor, before: Tensor, value: Tensor, call: Call) -> Tensor:
    """probs [..., s, t] · value [..., t, v]. before: the probabilities before dropout, which are what is recorded."""
    tap = call.tap
    if tap is None or before is probs:
        return product(original, probs, value, call, transpose_b=False)
    call = replace(call, rounding=call.rounding.begun())
    without_a = replace(call, tap=lambda seen: None if seen.name == "a" else tap(seen))
    y = product(original, probs, value, without_a, transpose_b=False)
    with computing:
        if not call.quantizes:
            tap(Observed("a", before.detach()))
        else:
            call.rounding.operand(before.to(product_dtype(before)), "forward_a", -1, tap, "a")
    return y


def show_scores(tap: Tap | None, scores: Tensor) -> None:
    if tap:
        with without_modes():
            tap(Observed("scores", scores.detach()))


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


def attend(
    qk: Call,
    pv: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention: query [..., heads, s, d], key [..., heads or groups, t, d] -> [..., heads, s, v].

    If it is not quantized, this is torch's own call, shown by `observed_core`. Probabilities are shown before dropout,
    whose mask is the same with or without a tap on a CPU. Quantized, the softmax is in float32 and the probabilities in
    the query's dtype.
    """
    options: Any = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "enable_gqa": enable_gqa}
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    (key, qk), (value, pv) = qk.cached(key), pv.cached(value)
    if not (qk.quantizes or pv.quantizes):
        if qk.tap is None or pv.tap is None:
            return F.scaled_dot_product_attention(query, key, value, scale=scale, **options)
        original = partial(F.scaled_dot_product_attention, scale=scale, **options)
        return observed_core(
            original, qk.tap, pv.tap, query, key, value, factor, attn_mask, is_causal, enable_gqa, dropout_p > 0
        )
    query, key, value = (x.to(product_dtype(x)) for x in (query, key, value))
    hidden = hidden_by((query.shape[-2], key.shape[-2]), attn_mask, is_causal, query.device)
    qk, pv = hiding_of(qk, SCORE_NAMES, hidden), hiding_of(pv, PROB_NAMES, hidden)
    if pv.rounding.formats.softmax.tile:
        if dropout_p:
            raise InstrumentError(f"softmax={pv.rounding.formats.softmax} does not support dropout: set it to 0")
        masked = _masked(_scores(qk, query, key, factor, enable_gqa), attn_mask, is_causal)
        stacked, shape, per_group = _stacked(masked, value, enable_gqa)
        value = value.expand(*stacked.shape[:-2], *value.shape[-2:])
        with torch.autocast(value.device.type, enabled=False):
            output = flash(stacked, value, pv.of_heads(per_group).rounding, reshaped(pv.tap, shape, STACKED))
        return output.reshape(*masked.shape[:-1], value.shape[-1])
    probs = _probabilities(qk, query, key, factor, attn_mask, is_causal, enable_gqa)
    dropped = F.dropout(probs, dropout_p) if dropout_p else probs
    stacked, shape, per_group = _stacked(dropped, value, enable_gqa)
    before = _stacked(probs, value, enable_gqa)[0] if dropout_p else stacked
    call = replace(pv, tap=reshaped(pv.tap, shape, STACKED)).of_heads(per_group)
    output = context(torch.matmul, stacked, before, value, call)
    return output.reshape(*probs.shape[:-1], value.shape[-1])


def observed_core(
    original: Callable[[Tensor, Tensor, Tensor], Tensor],
    qk: Tap,
    pv: Tap,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None,
    causal: bool,
    grouped: bool,
    dropout: bool,
    by_head: Callable[[Tensor], Tensor] = lambda output: output,
) -> Tensor:
    """original(query, key, value) of an attention core, shown to the taps of its two products; by_head turns its result
    into [..., heads, s, v].

    What it does not return is computed again: scores and probabilities, and, when the gradient of the result arrives
    and there is no dropout, the gradients of the probabilities and of the unscaled scores.
    """
    hidden = hidden_by((query.shape[-2], key.shape[-2]), mask, causal, query.device)
    qk, pv = (
        hiding_of(Call(tap=tap), names, hidden).tap or tap for tap, names in ((qk, SCORE_NAMES), (pv, PROB_NAMES))
    )
    output = original(listened(query, qk, "grad_a"), listened(key, qk, "grad_b"), listened(value, pv, "grad_b"))
    with torch.no_grad(), without_modes():
        query, key, value = query.detach(), key.detach(), value.detach()
        probs = _probabilities(Call(tap=qk), query, key, scale, mask, causal, grouped)
        pv(Observed("a", probs))
        pv(Observed("b", value, dim=-2))
        pv(Observed("y", by_head(output.detach())))

    def show(seen: Observed) -> None:
        seen = replace(seen, tensor=by_head(seen.tensor))
        pv(seen)
        pv(Observed("dgrad_b", value))
        pv(Observed("wgrad_grad", seen.tensor, dim=-2))
        pv(Observed("wgrad_a", probs, dim=-2))
        qk(Observed("dgrad_b", key, dim=-2))
        qk(Observed("wgrad_a", query, dim=-2))
        if not dropout:
            per_group = probs.shape[-3] // value.shape[-3] if value.dim() > 2 else 1
            head_values = value.repeat_interleave(per_group, -3) if per_group > 1 else value
            grad_probs = seen.tensor.to(value.dtype) @ head_values.transpose(-1, -2)
            pv(Observed("grad_a", grad_probs))
            grad_scores = torch.empty(grad_probs.shape, dtype=query.dtype, device=query.device)
            for exact, weighted, out in zip(*map(by_heads, (probs, grad_probs, grad_scores)), strict=True):
                exact = exact.float()
                weighted = exact * weighted.float()
                out.copy_((weighted - exact * weighted.sum(-1, keepdim=True)) * scale)
            qk(Observed("grad", grad_scores))
            qk(Observed("wgrad_grad", grad_scores, dim=-2))

    listen_to_result(output, show)
    return output


def _probabilities(
    call: Call,
    query: Tensor,
    key: Tensor,
    scale: float,
    mask: Tensor | None,
    causal: bool,
    grouped: bool,
) -> Tensor:
    """The softmax of the scaled scores [..., heads, s, t]; rows that may see nothing are all 0, as torch has them."""
    scores = _scores(call, query, key, scale, grouped)
    if torch.is_grad_enabled() and scores.requires_grad:
        return _softmax(scores, mask, causal).to(query.dtype)
    probs = torch.empty(scores.shape, dtype=query.dtype, device=scores.device)
    parts, outs = by_heads(scores), by_heads(probs)
    masks = repeat(None) if mask is None else by_heads(mask.expand(scores.shape))
    for part, out, part_mask in zip(parts, outs, masks, strict=False):
        out.copy_(_softmax(part, part_mask, causal))
    return probs


def _scores(call: Call, query: Tensor, key: Tensor, scale: float, grouped: bool) -> Tensor:
    """The scaled scores [..., heads, s, t] before the mask."""
    query, key, complete = smoothed(query, key, call.rounding.formats)
    stacked, shape, per_group = _stacked(query, key, grouped)
    shown = replace(call, tap=reshaped(call.tap, shape, STACKED)).of_heads(per_group)
    raw = product(lambda a, b: a @ b.transpose(-1, -2), stacked, key, shown, transpose_b=True)
    batch = raw.shape[:-2] if stacked is query else query.shape[:-2]
    scores = complete(raw.reshape(*batch, query.shape[-2], key.shape[-2]), 1.0) * scale
    show_scores(call.tap, scores)
    return scores


def by_heads(x: Tensor) -> list[Tensor]:
    """x [..., s, t] in pieces of whole heads and about PIECE values, so that what is computed of them in float32 takes
    little memory; views of a contiguous x. A mask that differs by sequence is copied for its heads."""
    heads = x.reshape(x.shape[:-2].numel(), *x.shape[-2:])
    return list(torch.split(heads, max(1, PIECE // max(1, x.shape[-2:].numel()))))


def _softmax(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """float32 softmax; rows that may see nothing are all 0."""
    masked = _masked(scores, mask, causal)
    blind = (masked == -torch.inf).all(-1, keepdim=True)
    return masked.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def _masked(scores: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    masked = scores.float()
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        masked = masked.masked_fill(~allowed, -torch.inf)
    if mask is not None:
        masked = masked.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else masked + mask
    return masked


def _stacked(x: Tensor, other: Tensor, grouped: bool) -> tuple[Tensor, Callable[[Tensor], tuple[int, ...]], int]:
    """x [..., heads, s, d] for a product with `other` [..., groups, t, d]: [..., groups, heads/groups · s, d], so that
    nothing is copied to each head; the shape by head to show it in; and heads/groups."""
    if not grouped or x.shape[-3] == other.shape[-3]:
        return x, lambda seen: tuple(seen.shape), 1
    *batch, heads, length, _ = x.shape
    groups = other.shape[-3]
    stacked = x.reshape(*batch, groups, heads // groups * length, x.shape[-1])
    return stacked, lambda seen: (*batch, heads, length, seen.shape[-1]), heads // groups
