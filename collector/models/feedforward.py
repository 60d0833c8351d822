"""Feed-forward layers: a dense MLP, and a mixture of them with a router, shared experts and a balance loss.

Every expert runs in every step, even without tokens. Its gradients are then zeros rather than missing, so that
optimizers and data-parallel ranks treat all experts alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.models.norm import Point
from binade.collector.models.parallel import build_linear, gather_whole_sequence, scatter_sequence
from binade.collector.models.shape import LinearSpec
from binade.collector.ranks import Group
from binade.data.tensor_kinds import Other

if TYPE_CHECKING:
    from binade.collector.models.deepseek import DeepseekShape


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up, gate and up being the halves of the last axis."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class MLP(nn.Module):
    """fc2(activation(fc1(x))). [..., hidden] -> [..., hidden]"""

    def __init__(self, fc1: LinearSpec, fc2: LinearSpec, activation: Callable[[Tensor], Tensor], group: Group) -> None:
        super().__init__()
        self.activation = activation
        self.linear_fc1 = build_linear(fc1, group)
        self.linear_fc2 = build_linear(fc2, group)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear_fc2(self.activation(self.linear_fc1(x)))
        return y


class MixtureOfExperts(nn.Module):
    """DeepSeek's mixture: softmax over all experts, the largest k taken greedily and not normalized, shared experts for
    every token.

    The router multiplies in float32, as published (MoEGate in modeling_deepseek.py), whatever the activations are. It
    is whole on every tensor-parallel rank and sees whole sequences, the experts are divided like any feed-forward.
    """

    def __init__(self, shape: DeepseekShape, layer: int, group: Group) -> None:
        super().__init__()
        self.shape, self.group = shape, group
        group = replace(group, sequence_parallel=False)
        router, *experts, shared_fc1, shared_fc2 = shape.feed_forward(layer)
        self.router = build_linear(router, group)
        self.load = Point(router.site, Other.EXPERTS)
        self.experts = nn.ModuleList(
            MLP(fc1, fc2, swiglu, group) for fc1, fc2 in zip(experts[::2], experts[1::2], strict=True)
        )
        self.shared_experts = MLP(shared_fc1, shared_fc2, swiglu, group)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [s, b, hidden] -> the same, and the balance loss, a float32 scalar"""
        if self.group.sequence_parallel:
            y, balance = self._mix(gather_whole_sequence(x, self.group))
            return scatter_sequence(y, self.group), balance
        return self._mix(x)

    def _mix(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k = self.shape.experts_per_token
        probs = self.router(x.float()).softmax(-1)  # [s, b, experts]
        weights, chosen = probs.topk(k, -1)  # [s, b, k]
        # Each token once for each of its experts, grouped by expert.
        order = chosen.flatten().argsort(stable=True)
        counts = self.load(chosen.flatten().bincount(minlength=self.shape.routed_experts))
        grouped = torch.split(x.flatten(0, 1)[order // k], counts.tolist())
        outputs = torch.cat([expert(tokens) for expert, tokens in zip(self.experts, grouped, strict=True)])
        outputs = outputs[order.argsort()].view(*chosen.shape, -1)  # [s, b, k, hidden]
        routed = (outputs.float() * (weights * self.shape.routed_scale).unsqueeze(-1)).sum(-2)
        return routed.to(x.dtype) + self.shared_experts(x), balance_loss(probs, chosen) * self.shape.balance_alpha


def balance_loss(probs: Tensor, chosen: Tensor) -> Tensor:
    """How unevenly tokens are routed, averaged over the sequences: 1 when even. The gradient flows through the
    probabilities only. As MoEGate with seq_aux in DeepSeek-V2-Lite's modeling_deepseek.py.

    probs [s, b, experts], chosen int64 [s, b, k] -> float32 scalar
    """
    _, batch, experts = probs.shape
    picks = chosen.transpose(0, 1).flatten(1)  # [b, s · k]
    counts = torch.zeros(batch, experts, device=probs.device).scatter_add_(1, picks, torch.ones_like(picks).float())
    load = counts * experts / picks.shape[1]  # 1 for each expert when even
    return (load * probs.mean(0)).sum(1).mean()
