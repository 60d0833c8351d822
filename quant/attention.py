"""softmax(S) V as flash kernels compute it.

Forward, for tiles of keys from the first to the last, m being the maximum of a row over the tiles so far:

    P̃ = exp(S − m)                                    rounded to the spec of the product's first operand
    O ← O · exp(m_before − m) + P̃ V                   float32
    l ← l · exp(m_before − m) + rowsum(P̃)             float32, P̃ before it is rounded

and at the end O / l; rows without keys are 0. `softmax=flash(keys=reversed)` takes the tiles from the last to the
first, as FlashAttention-3 does. Backward, with the normalized P = exp(S − m − log l) computed again:

    dV = Pᵀ dO              P rounded to the spec of wgrad's operand
    dP = dO Vᵀ              float32
    dS = P ∘ (dP − rowsum(dO ∘ O))      P before it is rounded, O as it was returned

With `softmax=flash(backward=rounded)`, the backward pass is that of Attn-QAT: dV takes the normalized P rounded along
the keys to the spec of the forward product, and the sum is rowsum(dO ∘ O_hp), with O_hp = P̃ V / l of the P̃ before it
is rounded and the rounded V. `smoothed` subtracts means from keys and queries before QKᵀ rounds them.

Kernels read for the forward pass: `ops/tilelang_sparse_mla_fwd.py` and `ops/tilelang_sparse_mla_bwd.py` of Megatron-LM
d98e8a6 (megatron/core/transformer/experimental_attention_variant), in bfloat16. Within a tile, float32 sums are in
torch's order. `attention.py` of ucker/why-low-precision-training-fails 02f0ab6 is the same algorithm. For the rest:
FastVideo 2f3d407 (Attn-QAT) and SageAttention d1a57a5 (SageAttention3), in what they compute and not bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from binade.quant.gemm import Observed, Rounding, Tap, gradients
from binade.quant.specs import GemmFormats, Smooth, Softmax

GROUP = 128  # tokens whose queries share a mean


def flash(scores: Tensor, value: Tensor, how: Rounding, tap: Tap | None = None) -> Tensor:
    """softmax(scores [..., m, keys]) · value [..., keys, v] -> [..., m, v], in value's dtype.

    scores are scaled and masked (-inf), in float32; the batch axes must be equal. `how.formats` are those of the
    product, and their `softmax` gives the tile. The tap sees P̃ as "a", its gradient as "grad_a" and P as "wgrad_a": in
    float32 where they are rounded to a spec, in value's dtype otherwise.
    """
    return cast(Tensor, _Flash.apply(scores, value, how, tap))  # type: ignore[no-untyped-call]  # torch


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, value: Tensor, how: Rounding, tap: Tap | None) -> Tensor:
        ctx.softmax, how = how.formats.softmax, how.begun()
        softmax: Softmax = ctx.softmax
        maxima = _running_maxima(scores, softmax)  # [..., m, tiles]
        if softmax.reversed:
            before = torch.cat((maxima[..., 1:], maxima[..., -1:]), -1)
        else:
            before = torch.cat((maxima[..., :1], maxima[..., :-1]), -1)
        factors = (before - maxima).exp()
        weights = (scores - _by_key(maxima, softmax, scores)).exp()
        total = _over_tiles(softmax, factors, weights, None)

        def product(a: Tensor, b: Tensor) -> Tensor:
            sums = _over_tiles(softmax, factors, a.to(value.dtype), b)
            return torch.where(total == 0, 0.0, sums / total).to(value.dtype)

        a = how.operand(_operand(weights, how, "forward_a", value), "forward_a", -1, tap, "a")
        b = how.operand(value, "forward_b", -2, tap, "b")
        output = product(a, b)
        if tap:
            tap(Observed("y", output, exact=how.exact("forward", lambda: product(weights, value.detach()))))
        log_sum = torch.where(total == 0, torch.inf, maxima.amax(-1, keepdim=True) + total.log())
        unrounded = output
        if softmax.rounded:
            unrounded = torch.where(total == 0, 0.0, _over_tiles(softmax, factors, weights, b) / total)
        ctx.save_for_backward(scores, value, unrounded, log_sum)
        ctx.how, ctx.tap = how, tap
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        how: Rounding = ctx.how
        how.check_differentiable()
        scores, value, output, log_sum = ctx.saved_tensors
        tap: Tap | None = ctx.tap
        probs = (scores - log_sum).exp()
        if tap:
            factors = (_running_maxima(scores, ctx.softmax) - log_sum).exp()
            tap = _scaled(tap, lambda x: x * _by_key(factors, ctx.softmax, scores))
        rounded = how.rounded_forward(probs, "forward_a", -1) if ctx.softmax.rounded else None
        grad_probs, grad_value = gradients(
            _operand(probs, how, "wgrad_a", value), value, grad, how, ctx.needs_input_grad, tap=tap,
            dgrad_dtype=torch.float32, rounded_a=None if rounded is None else _operand(rounded, how, "wgrad_a", value),
        )  # fmt: skip
        if grad_probs is None:
            return None, grad_value, None, None
        delta = (grad.float() * output.float()).sum(-1, keepdim=True)
        return probs * (grad_probs - delta), grad_value, None, None


def smoothed(
    query: Tensor, key: Tensor, formats: GemmFormats
) -> tuple[Tensor, Tensor, Callable[[Tensor, float], Tensor]]:
    """(Q − q̄, K − k̄, a function that completes factor · (Q − q̄)(K − k̄)ᵀ) of queries [..., heads, s, d] and keys
    [..., heads or groups, t, d]: k̄ is the mean over the tokens of a head, q̄ that of GROUP tokens. As they are, if
    `formats` rounds neither in the forward product or smooths neither.

    Completed are q̄(K − k̄)ᵀ, in float32, and not Q k̄ᵀ, which is the same for all keys of a row: the softmax does not
    see it. Means have no gradient, but Q has that of Q k̄ᵀ: rowsum(dS) k̄ᵀ, which is 0 if dS is not rounded.
    """
    smooth = formats.smooth
    if smooth is Smooth.NONE or not (formats.forward_a or formats.forward_b):
        return query, key, lambda scores, factor: scores
    mean = key.detach().float().mean(-2, keepdim=True).to(key.dtype)
    rest, of_groups, source = key - mean, None, query
    if smooth is Smooth.BOTH:
        parts = torch.split(query.detach().float(), GROUP, -2)
        of_groups = torch.cat([part.mean(-2, keepdim=True).expand_as(part) for part in parts], -2).to(query.dtype)
        query = query - of_groups

    def of_each_head(x: Tensor) -> Tensor:
        heads = source.shape[-3] // x.shape[-3] if x.dim() > 2 else 1
        return x.repeat_interleave(heads, -3) if heads > 1 else x

    def complete(scores: Tensor, factor: float) -> Tensor:
        of_mean = (source.float() * of_each_head(mean).float()).sum(-1, keepdim=True)
        added = of_mean - of_mean.detach()  # 0, with a gradient
        if of_groups is not None:
            added = added + of_groups.float() @ of_each_head(rest).float().transpose(-1, -2)
        return (scores.float() + added * factor).to(scores.dtype)

    return query, rest, complete


def _running_maxima(scores: Tensor, softmax: Softmax) -> Tensor:
    """[..., m, tiles]: for each tile, the maximum of each row over it and the tiles taken before it, finite even where
    all keys are masked."""
    maxima = torch.stack([part.amax(-1) for part in _tiles(scores, softmax)], -1)
    so_far = maxima.flip(-1).cummax(-1).values.flip(-1) if softmax.reversed else maxima.cummax(-1).values
    return so_far.clamp(min=torch.finfo(scores.dtype).min)


def _tiles(x: Tensor, softmax: Softmax, dim: int = -1) -> tuple[Tensor, ...]:
    """x in tiles of keys, the first keys first."""
    return torch.split(x, cast(int, softmax.tile), dim)


def _by_key(x: Tensor, softmax: Softmax, scores: Tensor) -> Tensor:
    """x [..., m, tiles] for each key."""
    return x.repeat_interleave(cast(int, softmax.tile), -1)[..., : scores.shape[-1]]


def _over_tiles(softmax: Softmax, factors: Tensor, a: Tensor, b: Tensor | None) -> Tensor:
    """a · b, or the sums of a's rows, in float32: what the tiles before contribute is multiplied by each factor."""
    result = torch.zeros((), dtype=torch.float32, device=a.device)
    parts = _tiles(a, softmax)
    values_of: Sequence[Tensor | None] = [None] * len(parts) if b is None else _tiles(b, softmax, -2)
    order = list(zip(factors.unbind(-1), parts, values_of, strict=True))
    if softmax.reversed:
        order.reverse()
    for factor, part, values in order:
        part = part.float()
        of_tile = part.sum(-1, keepdim=True) if values is None else part @ values.float()
        result = result * factor[..., None] + of_tile
    return result


def _operand(x: Tensor, how: Rounding, which: str, value: Tensor) -> Tensor:
    """x as it is rounded: to the spec directly, or to value's dtype."""
    return x if how.formats[which] else x.to(value.dtype)


def _scaled(tap: Tap, scale: Callable[[Tensor], Tensor]) -> Tap:
    """A tap that gets the gradient of P as that of P̃."""
    return lambda seen: tap(replace(seen, tensor=scale(seen.tensor), exact=None) if seen.name == "grad_a" else seen)
