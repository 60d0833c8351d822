"""Which pairs of query and key the softmax of attention does not see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from binade.collector.models.attention import hiding
from binade.collector.models.parallel import Call
from binade.quant.memory import without_modes

SOFTMAXES = (torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax, torch._safe_softmax)
# The smallest of the numbers that masks add in place of -inf is -10000, rounded to bfloat16 and with a score added.
MASKED = -9000.0


def hidden_by(scores: Sequence[int], mask: Tensor | None, causal: bool, device: torch.device) -> Tensor | None:
    """Which pairs of scores [..., s, t] the softmax does not see, as F.scaled_dot_product_attention masks them."""
    hidden = None
    with without_modes():
        if causal:
            hidden = torch.ones(*scores[-2:], dtype=torch.bool, device=device).tril().logical_not()
        if mask is not None:
            masked = ~mask if mask.dtype == torch.bool else mask.detach() <= MASKED
            hidden = masked if hidden is None else hidden | masked
    return hidden


def lowered(x: Tensor, scores: Tensor, added: Tensor | None) -> Tensor | None:
    """Which scores are behind a mask in what the softmax gets, x, which may have more columns, as for sinks.
    added: what they contain of it already."""
    *rows, keys = scores.shape
    if x.shape[-1] < keys or x.shape[:-1].numel() != scores.shape[:-1].numel():
        return None
    with without_modes():
        x = x.detach()[..., :keys].reshape(*rows, keys)
        hidden = (x <= MASKED) & ((scores > MASKED) | x.isneginf())
        return hidden if added is None else hidden | (added <= MASKED)


def permuted(hidden: Tensor | None, order: Sequence[int]) -> Tensor | None:
    """With its axes in this order, if it has as many."""
    with without_modes():
        return hidden.permute(*order) if hidden is not None and hidden.dim() == len(order) else hidden


def never_seen(probs: Tensor) -> Tensor | None:
    """Without a softmax of torch: the pairs whose probability is 0 in all sequences and heads."""
    with without_modes():
        return (probs.detach() == 0).flatten(0, -3).all(0) if probs.dim() > 2 else None


def hiding_of(call: Call, names: Sequence[str], hidden: Tensor | None) -> Call:
    return replace(call, tap=hiding(call.tap, names, lambda _: hidden))
