"""RMSNorm, the models' only normalization, and points where `instrument` observes tensors that no module returns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from binade.collector.models.site import Site
from binade.data.tensor_kinds import Other


class Point(nn.Identity):
    """Passes a tensor on. site and product are the place at which `instrument` records it."""

    def __init__(self, site: Site, product: Other) -> None:
        super().__init__()
        self.site, self.product = site, product


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last axis, in float32, returned in x's dtype.

    sequence_parallel marks the weight as one whose gradient is summed over the tensor-parallel ranks: each sees a part
    of every sequence.
    """

    def __init__(self, width: int, eps: float, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]  # Megatron's mark
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)
