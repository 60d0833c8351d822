"""Feed-forward layers: the dense SwiGLU, and a mixture of them with a router, shared experts and a balance loss.

Every expert runs in every step, on no tokens if none was routed to it: its gradients are then zeros and not missing, so
that optimizers and data-parallel ranks treat all experts alike.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.models.parallel import (
    ColumnParallelLinear,
    Group,
    ReplicatedLinear,
    RowParallelLinear,
    Site,
    gather_sequence,
    scatter_sequence,
)
from binade.collector.models.shapes import DeepseekShape


class MLP(nn.Module):
    """fc2(silu(gate) · up), gate and up being the halves of fc1. [..., hidden] -> [..., hidden]

    prefix goes before the modules' names, expert is the expert's index.
    """

    def __init__(
        self, layer_index: int, hidden: int, ffn: int, group: Group, *, prefix: str = "", expert: int | None = None
    ) -> None:
        super().__init__()
        self.linear_fc1 = ColumnParallelLinear(Site(layer_index, f"{prefix}fc1", expert), hidden, 2 * ffn, group, 2)
        self.linear_fc2 = RowParallelLinear(Site(layer_index, f"{prefix}fc2", expert), ffn, hidden, group)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(F.silu(gate) * up)


class MixtureOfExperts(nn.Module):
    """DeepSeek's mixture: softmax over all experts, the largest k taken greedily and not normalized, shared experts for
    every token. Modules are router, fc1 and fc2 with the expert's index, and shared_fc1 and shared_fc2.

    The router multiplies in float32, as published (MoEGate in modeling_deepseek.py), whatever the activations are. It
    is whole on every tensor-parallel rank and sees whole sequences, the experts are divided like any feed-forward.
    """

    def __init__(self, layer_index: int, shape: DeepseekShape, group: Group) -> None:
        super().__init__()
        self.shape, self.group = shape, group
        group = group.whole_sequences
        self.router = ReplicatedLinear(Site(layer_index, "router"), shape.hidden, shape.routed_experts, group)
        self.experts = nn.ModuleList(
            MLP(layer_index, shape.hidden, shape.expert_ffn, group, expert=index)
            for index in range(shape.routed_experts)
        )
        width = shape.shared_experts * shape.expert_ffn
        self.shared_experts = MLP(layer_index, shape.hidden, width, group, prefix="shared_")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [s, b, hidden] -> the same, and the balance loss, a float32 scalar"""
        if self.group.sequence_parallel:
            y, balance = self._mix(gather_sequence(x, self.group, gradient_is_whole=True))
            return scatter_sequence(y, self.group), balance
        return self._mix(x)

    def _mix(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k = self.shape.experts_per_token
        probs = self.router(x.float()).softmax(-1)  # [s, b, experts]
        weights, chosen = probs.topk(k, -1)  # [s, b, k]
        # Each token once for each of its experts, grouped by expert.
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=self.shape.routed_experts).tolist()
        grouped = x.flatten(0, 1)[order // k].split(counts)
        outputs = torch.cat([expert(tokens) for expert, tokens in zip(self.experts, grouped, strict=True)])
        outputs = outputs[order.argsort()].view(*chosen.shape, -1)  # [s, b, k, hidden]
        routed = (outputs.float() * (weights * self.shape.routed_scale).unsqueeze(-1)).sum(-2)
        return routed.to(x.dtype) + self.shared_experts(x), balance_loss(probs, chosen) * self.shape.balance_alpha


def balance_loss(probs: Tensor, chosen: Tensor) -> Tensor:
    """How unevenly tokens are routed, averaged over the sequences: 1 when even. The gradient flows through the
    probabilities only. As MoEGate with seq_aux in DeepSeek-V2-Lite's modeling_deepseek.py.

    probs [s, b, experts], chosen int64 [s, b, k] -> float32 scalar
    """
    length, batch, experts = probs.shape
    picks = chosen.transpose(0, 1).flatten(1)  # [b, s · k]
    counts = torch.zeros(batch, experts, device=probs.device).scatter_add_(1, picks, torch.ones_like(picks).float())
    load = counts * experts / picks.shape[1]  # 1 for each expert when even
    return (load * probs.mean(0)).sum(1).mean()
