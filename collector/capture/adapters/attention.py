"""Attention cores: intercepts the functions of torch that compute QKᵀ and PV while the forward of a core runs.

Only the forward of that module runs under the mode, and only while there is something to quantize or record. Keys and
values are recorded as they enter the products: copied to every head where the model copies them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.capture.adapters.dtensor import core_on_parts
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.capture.adapters.products import (
    UNQUANTIZED,
    Interception,
    Product,
    computing,
    listen_to_result,
    listened,
    observed_product,
    product_dtype,
)
from binade.collector.models.attention import CoreQuantization
from binade.collector.models.parallel import STACKED, Quantization, reshaped
from binade.quant.gemm import Observed, Tap, matmul


class ModuleMode(Interception):
    """Replaces products while the forward of one module runs, and checks then that all of them were made.

    replaced  the functions that a subclass replaces, each with the name of its method that stands for it
    calls     how often each of them was called
    """

    replaced: ClassVar[Mapping[Callable[..., Any], str]]

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.calls: Counter[Callable[..., Any]] = Counter()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in self.replaced:
            return func(*args, **kwargs)
        self.calls[func] += 1
        return getattr(self, self.replaced[func])(*args, **kwargs)

    @abstractmethod
    def check(self) -> None:
        """Called after the pass. Raises InstrumentError if products are missing."""

    def missing(self, what: str) -> InstrumentError:
        kind = type(self.module).__name__
        return InstrumentError(f"{self.name} ({kind}) {what}: leave it out with exclude=[{self.name!r}]")


class CoreMode(ModuleMode):
    """One pass through an attention core. It notes what dropout was applied to: probabilities are recorded before."""

    def __init__(
        self, name: str, module: nn.Module, quantization: CoreQuantization, qk: Tap | None, pv: Tap | None
    ) -> None:
        super().__init__(name, module)
        self.quantization, self.qk, self.pv = quantization, qk, pv
        self.dropped: tuple[Tensor, Tensor] | None = None

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call(func, args, kwargs)
        before = args[0] if args else kwargs.get("input")
        if func is F.dropout and isinstance(before, Tensor) and result.data_ptr() != before.data_ptr():
            self.dropped = result, before
        return result

    def before_dropout(self, probs: Tensor) -> Tensor:
        """What dropout made these probabilities (or what they are a view of) from; themselves, if it did not."""
        result, before = self.dropped or (None, probs)
        if result is None or (result.data_ptr(), result.numel()) != (probs.data_ptr(), probs.numel()):
            return probs
        return before.reshape(probs.shape)


def run_under(forward: Callable[..., Any], start: Callable[[], ModuleMode | None]) -> Callable[..., Any]:
    """forward, run under the mode that `start` gives for each pass, if any."""

    def intercepted(*args: Any, **kwargs: Any) -> Any:
        mode = start()
        if mode is None:
            return forward(*args, **kwargs)
        with mode:
            result = forward(*args, **kwargs)
        mode.check()
        return result

    return intercepted


def core_forward(
    name: str, module: nn.Module, mode: type[CoreMode]
) -> Callable[[CoreQuantization], Callable[..., Any]]:
    """The module's forward under a mode, for a quantization; without one while nothing is quantized or recorded."""

    def forward(quantization: CoreQuantization) -> Callable[..., Any]:
        def start() -> CoreMode | None:
            qk, pv = quantization.qk.tap(), quantization.pv.tap()
            quantized = not (quantization.qk.formats == UNQUANTIZED == quantization.pv.formats)
            return mode(name, module, quantization, qk, pv) if quantized or qk or pv else None

        return run_under(module.forward, start)

    return forward


def product(
    original: Product,
    a: Tensor,
    b: Tensor,
    how: Quantization,
    tap: Tap | None,
    *,
    transpose_b: bool,
    scale: float = 1.0,
) -> Tensor:
    """a [..., m, k] · b [..., k, n] (bᵀ with b [..., n, k] if transpose_b) · scale, as `original(a, b)` computes it."""
    with computing:
        if how.formats != UNQUANTIZED:
            a, b = a.to(product_dtype(a)), b.to(product_dtype(b))
            batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
            a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
            y = matmul(a, b, how.rounding(), transpose_b=transpose_b, tap=tap)
            return y if scale == 1.0 else y * scale
        if tap is None:
            return original(a, b)
        return observed_product(original, a, b, tap, -1 if transpose_b else -2)


def context(
    original: Product, probs: Tensor, before: Tensor, value: Tensor, how: Quantization, tap: Tap | None
) -> Tensor:
    """probs [..., s, t] · value [..., t, v]. before: the probabilities before dropout, which are what is recorded."""
    if tap is None or before is probs:
        return product(original, probs, value, how, tap, transpose_b=False)
    y = product(original, probs, value, how, lambda seen: None if seen.name == "a" else tap(seen), transpose_b=False)
    with computing:
        if how.formats == UNQUANTIZED:
            tap(Observed("a", before.detach()))
        else:
            replace(how.rounding(), again=True).operand(before.to(product_dtype(before)), "forward_a", -1, tap, "a")
    return y


def show_scores(tap: Tap | None, scores: Tensor) -> None:
    """Show the scaled scores; a copy, as models mask them in place."""
    if tap:
        tap(Observed("scores", scores.detach().clone()))


class SdpaMode(CoreMode):
    """A module that calls F.scaled_dot_product_attention."""

    replaced: ClassVar = {F.scaled_dot_product_attention: "attend"}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def on_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(self.quantization, self.qk, self.pv, q, k, v, *args, **kwargs)

        with computing:
            return core_on_parts(self.name, on_parts, query, key, value)

    def check(self) -> None:
        if not self.calls:
            raise self.missing("did not call F.scaled_dot_product_attention, so that its products were not intercepted")


def attend(
    quantization: CoreQuantization,
    qk: Tap | None,
    pv: Tap | None,
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

    Unquantized it is torch's own call; scores and probabilities, which that never holds, are computed again for the
    taps. Probabilities are shown before dropout, whose mask is the same either way on a CPU. Quantized, the softmax is
    in float32 and the probabilities in the query's dtype.
    """
    options: dict[str, Any] = {
        "attn_mask": attn_mask,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "enable_gqa": enable_gqa,
    }
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if quantization.qk.formats == UNQUANTIZED == quantization.pv.formats:
        if qk is None or pv is None:
            return F.scaled_dot_product_attention(query, key, value, scale=scale, **options)
        watched = listened(query, qk, "grad_a"), listened(key, qk, "grad_b"), listened(value, pv, "grad_b")
        output = F.scaled_dot_product_attention(*watched, scale=scale, **options)
        with torch.no_grad():
            plain = Quantization()
            _, probs = _probabilities(plain, qk, query, key, factor, attn_mask, is_causal, enable_gqa)
        pv(Observed("a", probs))
        pv(Observed("b", value.detach(), dim=-2))
        pv(Observed("y", output.detach()))
        listen_to_result(output, _attention_backward(qk, pv, query, key, value, probs, dropout_p > 0))
        return output
    query, key, value = (x.to(product_dtype(x)) for x in (query, key, value))
    _, probs = _probabilities(quantization.qk, qk, query, key, factor, attn_mask, is_causal, enable_gqa)
    dropped = F.dropout(probs, dropout_p) if dropout_p else probs
    stacked, by_head = _stacked(dropped, value, enable_gqa)
    before = _stacked(probs, value, enable_gqa)[0] if dropout_p else stacked
    output = context(torch.matmul, stacked, before, value, quantization.pv, reshaped(pv, by_head, STACKED))
    return output.reshape(*probs.shape[:-1], value.shape[-1])


def _attention_backward(
    qk: Tap, pv: Tap, query: Tensor, key: Tensor, value: Tensor, probs: Tensor, dropout: bool
) -> Tap:
    """A tap of the output that with its gradient shows the operands of the backward GEMMs, and without dropout the
    gradient of the probabilities, which torch's own call never holds."""
    query, key, value = query.detach(), key.detach(), value.detach()

    def show(seen: Observed) -> None:
        pv(seen)
        pv(Observed("dgrad_b", value))
        pv(Observed("wgrad_grad", seen.tensor, dim=-2))
        pv(Observed("wgrad_a", probs, dim=-2))
        qk(Observed("dgrad_b", key, dim=-2))
        qk(Observed("wgrad_a", query, dim=-2))
        if not dropout:
            per_group = probs.shape[-3] // value.shape[-3] if value.dim() > 2 else 1
            each = value.repeat_interleave(per_group, -3) if per_group > 1 else value
            pv(Observed("grad_a", seen.tensor.to(value.dtype) @ each.transpose(-1, -2)))

    return show


def _probabilities(
    how: Quantization,
    tap: Tap | None,
    query: Tensor,
    key: Tensor,
    scale: float,
    mask: Tensor | None,
    causal: bool,
    grouped: bool,
) -> tuple[Tensor, Tensor]:
    """Scaled scores and softmax [..., heads, s, t]; rows that may see nothing are all 0, as torch has them."""
    stacked, by_head = _stacked(query, key, grouped)
    shown = reshaped(tap, by_head, STACKED)
    raw = product(lambda a, b: a @ b.transpose(-1, -2), stacked, key, how, shown, transpose_b=True)
    batch = raw.shape[:-2] if stacked is query else query.shape[:-2]
    scores = (raw * scale).reshape(*batch, query.shape[-2], key.shape[-2])
    show_scores(tap, scores)
    masked = scores.float()
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        masked = masked.masked_fill(~allowed, -torch.inf)
    if mask is not None:
        masked = masked.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else masked + mask
    blind = (masked == -torch.inf).all(-1, keepdim=True)
    probs = masked.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return scores, probs.to(query.dtype)


def _stacked(x: Tensor, other: Tensor, grouped: bool) -> tuple[Tensor, Callable[[Tensor], tuple[int, ...]]]:
    """x [..., heads, s, d] for a product with `other` [..., groups, t, d]: [..., groups, heads/groups · s, d], so that
    nothing is copied to each head; and the shape by head to show it in."""
    if not grouped or x.shape[-3] == other.shape[-3]:
        return x, lambda seen: tuple(seen.shape)
    *batch, heads, length, _ = x.shape
    groups = other.shape[-3]
    stacked = x.reshape(*batch, groups, heads // groups * length, x.shape[-1])
    return stacked, lambda seen: (*batch, heads, length, seen.shape[-1])
