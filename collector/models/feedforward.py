"""Feed-forward layers: a dense MLP, and a mixture of them with a router and shared experts.

Every expert runs in every step, even without tokens. Its gradients are then zeros rather than missing, so that
optimizers and data-parallel ranks treat all experts alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.models.norm import RecordingPoint
from binade.collector.models.parallel import build_linear, gather_whole_sequence, scatter_sequence
from binade.collector.models.specs import LinearSpec
from binade.collector.ranks import RankGroup
from binade.data.run.tensor_kinds import Other

Route = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) · up, gate and up being the halves of the last axis."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class MLP(nn.Module):
    """fc2(activation(fc1(x))). [..., hidden] -> [..., hidden]"""

    def __init__(
        self, fc1: LinearSpec, fc2: LinearSpec, activation: Callable[[Tensor], Tensor], group: RankGroup
    ) -> None:
        super().__init__()
        self.activation = activation
        self.linear_fc1 = build_linear(fc1, group)
        self.linear_fc2 = build_linear(fc2, group)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear_fc2(self.activation(self.linear_fc1(x)))
        return y


class MixtureOfExperts(nn.Module):
    """Each token goes through the experts that `route` chooses, and through the shared experts if there are any.

    linears are the router, fc1 and fc2 of each expert, and those of the shared experts. route turns the router's
    logits, float32 [s, b, experts], into the weights and indices of each token's experts [s, b, k] and the balance loss
    of the layer, a float32 scalar.

    The router multiplies in float32, whatever the activations are. It is whole on every tensor-parallel rank and sees
    whole sequences, the experts are divided like any feed-forward.
    """

    def __init__(
        self, linears: Sequence[LinearSpec], route: Route, activation: Callable[[Tensor], Tensor], group: RankGroup
    ) -> None:
        super().__init__()
        self.route, self.group = route, group
        group = replace(group, sequence_parallel=False)
        router, *rest = linears
        pairs = list(zip(rest[::2], rest[1::2], strict=True))
        mlps = [MLP(fc1, fc2, activation, group) for fc1, fc2 in pairs]
        routed = sum(fc1.site.expert is not None for fc1, _ in pairs)
        self.router = build_linear(router, group)
        self.load = RecordingPoint(router.site, Other.EXPERTS)
        self.experts = nn.ModuleList(mlps[:routed])
        self.shared_experts = mlps[routed] if mlps[routed:] else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [s, b, hidden] -> the same, and the balance loss"""
        x = gather_whole_sequence(x, self.group)
        weights, chosen, balance = self.route(self.router(x.float()))
        # Each token once for each of its experts, grouped by expert.
        order = chosen.flatten().argsort(stable=True)
        counts = self.load(chosen.flatten().bincount(minlength=len(self.experts)))
        grouped = torch.split(x.flatten(0, 1)[order // chosen.shape[-1]], counts.tolist())
        outputs = torch.cat([expert(tokens) for expert, tokens in zip(self.experts, grouped, strict=True)])
        outputs = outputs[order.argsort()].view(*chosen.shape, -1)  # [s, b, k, hidden]
        routed = (outputs.float() * weights.unsqueeze(-1)).sum(-2)
        y = routed.to(x.dtype)
        y = y + self.shared_experts(x) if self.shared_experts else y
        return scatter_sequence(y, self.group), balance
