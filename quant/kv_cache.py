"""Keys, values and latents as a KV cache holds them: rounded once, where they are written, before a product uses them.

A tensor that is written is [sequences, heads, tokens, head size], or [..., latent size] of multi-head latent attention.
Blocks lie along the last axis, so that they stay within a head of a token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from binade.quant.gemm import Observed, Tap
from binade.quant.quantizer import apply
from binade.quant.specs import KVCache
from binade.quant.transform import transform, transform_back, untransformed

SEEN = {"forward_a": "a", "forward_b": "b"}  # what a tap calls the operands of the forward product


class _Through(torch.autograd.Function):
    """The rounded tensor; the gradient is that of the original (straight-through estimator)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def cached(x: Tensor, cache: KVCache, tap: Tap | None = None, backend: str = "auto") -> tuple[Tensor, Tap | None]:
    """x as the cache holds it, and a tap that shows it as what the product's operand was rounded from.

    An operand that the product rounds once more is shown by the product: as rounded from the cached value.
    Raises ValueError for scales of heads where x has no axis of heads.
    """
    spec, plain, values = cache.spec, untransformed(cache.spec), x.detach()
    coded = transform(values, spec, -1, 0)
    if cache.by_head:
        q, scales = _by_head(coded, cache, backend), None
    else:
        q, scales = apply(coded, plain, -1, backend, tap is not None)
    rounded = transform_back(q, values, spec, -1, 0).to(x.dtype) if spec.transforms else q
    y = cast(Tensor, _Through.apply(x, rounded)) if x.requires_grad else rounded  # type: ignore[no-untyped-call]  # torch
    if tap is None:
        return y, None
    show_product = tap

    def show(seen: Observed) -> None:
        if seen.name == SEEN[cache.operand] and seen.spec is None:
            seen = replace(seen, tensor=values, spec=spec, quantized=q, coded=coded, scales=scales, dim=-1)
            seen = replace(seen, rounded=lambda: rounded)
        show_product(seen)

    return y, show


def _by_head(x: Tensor, cache: KVCache, backend: str) -> Tensor:
    if x.dim() != 4:
        raise ValueError(
            "a cache with a scale for each head needs keys and values [sequences, heads, tokens, size], not "
            f"{list(x.shape)}: write scale_of = 'layer'"
        )
    plain = untransformed(cache.spec)
    return torch.stack([apply(head, plain, -1, backend)[0] for head in x.unbind(1)], 1)
