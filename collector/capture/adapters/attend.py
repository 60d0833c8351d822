"""F.scaled_dot_product_attention as two products, QKᵀ and PV, that are rounded or shown to taps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from binade.collector.capture.adapters.hidden_pairs import (
    hidden_by,
    hiding_of,
)
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.capture.adapters.products import (
    Product,
    by_head,
    computing,
    listen_to_result,
    listened,
    observed_product,
    product_dtype,
)
from binade.collector.models.attention import PROB_NAMES, SCORE_NAMES
from binade.collector.models.parallel import STACKED, Call, reshaped
from binade.quant.attention import flash, smoothed
from binade.quant.gemm import Observed, Tap, matmul
from binade.quant.memory import without_modes

PIECE = 1 << 26  # values


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
