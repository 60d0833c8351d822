"""softmax(S) V as flash kernels compute it.

Forward, for tiles of keys from the first to the last, m being the maximum of a row over the tiles so far:

    P̃ = exp(S − m)                                    rounded to the spec of the product's first operand
    O ← O · exp(m_before − m) + P̃ V                   float32
    l ← l · exp(m_before − m) + rowsum(P̃)             float32, P̃ before it is rounded

and at the end O / l; rows without keys are 0. Backward, with the normalized P = exp(S − m − log l) computed again:

    dV = Pᵀ dO              P rounded to the spec of wgrad's operand
    dP = dO Vᵀ              float32
    dS = P ∘ (dP − rowsum(dO ∘ O))      P before it is rounded, O as it was returned

Kernels read for this: `ops/tilelang_sparse_mla_fwd.py` and `ops/tilelang_sparse_mla_bwd.py` of Megatron-LM d98e8a6
(megatron/core/transformer/experimental_attention_variant), in bfloat16. Within a tile, float32 sums are in torch's
order. `attention.py` of ucker/why-low-precision-training-fails 02f0ab6 is the same algorithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from binade.quant.gemm import Observed, Rounding, Tap, gradients


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
        ctx.tile = tile = cast(int, how.formats.softmax.tile)
        maxima = _running_maxima(scores, tile)  # [..., m, tiles]
        before = torch.cat((maxima[..., :1], maxima[..., :-1]), -1)
        factors = (before - maxima).exp()
        weights = (scores - _by_key(maxima, tile, scores)).exp()
        total = _over_tiles(tile, factors, weights, None)

        def product(a: Tensor, b: Tensor) -> Tensor:
            sums = _over_tiles(tile, factors, a.to(value.dtype), b)
            return torch.where(total == 0, 0.0, sums / total).to(value.dtype)

        a = how.operand(_operand(weights, how, "forward_a", value), "forward_a", -1, tap, "a")
        b = how.operand(value, "forward_b", -2, tap, "b")
        output = product(a, b)
        if tap:
            tap(Observed("y", output, exact=how.exact("forward", lambda: product(weights, value.detach()))))
        log_sum = torch.where(total == 0, torch.inf, maxima[..., -1:] + total.log())
        ctx.save_for_backward(scores, value, output, log_sum)
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
            factors = (_running_maxima(scores, ctx.tile) - log_sum).exp()
            tap = _scaled(tap, lambda x: x * _by_key(factors, ctx.tile, scores))
        wgrad_a = _operand(probs, how, "wgrad_a", value)
        grad_probs, grad_value = gradients(
            wgrad_a, value, grad, how, ctx.needs_input_grad, tap=tap, dgrad_dtype=torch.float32
        )
        if grad_probs is None:
            return None, grad_value, None, None
        delta = (grad.float() * output.float()).sum(-1, keepdim=True)
        return probs * (grad_probs - delta), grad_value, None, None


def _running_maxima(scores: Tensor, tile: int) -> Tensor:
    """[..., m, tiles]: the maximum of each row over the tiles so far, finite even where all keys are masked."""
    maxima = torch.stack([part.amax(-1) for part in torch.split(scores, tile, -1)], -1)
    return maxima.cummax(-1).values.clamp(min=torch.finfo(scores.dtype).min)


def _by_key(x: Tensor, tile: int, scores: Tensor) -> Tensor:
    """x [..., m, tiles] for each key."""
    return x.repeat_interleave(tile, -1)[..., : scores.shape[-1]]


def _over_tiles(tile: int, factors: Tensor, a: Tensor, b: Tensor | None) -> Tensor:
    """a · b, or the sums of a's rows, in float32: what the tiles before contribute is multiplied by each factor."""
    result = torch.zeros((), device=a.device)
    for number, part in enumerate(torch.split(a, tile, -1)):
        keys = slice(number * tile, number * tile + tile)
        part = part.float()
        of_tile = part.sum(-1, keepdim=True) if b is None else part @ b[..., keys, :].float()
        result = result * factors[..., number, None] + of_tile
    return result


def _operand(x: Tensor, how: Rounding, which: str, value: Tensor) -> Tensor:
    """x as it is rounded: to the spec directly, or to value's dtype."""
    return x if how.formats[which] else x.to(value.dtype)


def _scaled(tap: Tap, scale: Callable[[Tensor], Tensor]) -> Tap:
    """A tap that gets the gradient of P as that of P̃."""
    return lambda seen: tap(replace(seen, tensor=scale(seen.tensor), exact=None) if seen.name == "grad_a" else seen)
