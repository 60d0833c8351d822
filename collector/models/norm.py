"""The models' norms, and points where `instrument` observes tensors that no module returns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.models.parallel import parameter
from binade.collector.models.site import Site
from binade.data.run.tensor_kinds import Other


class RecordingPoint(nn.Identity):
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
        self.weight = parameter(torch.ones(width), sequence_parallel=sequence_parallel)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


class LayerNorm(RMSNorm):
    """(x − mean(x)) / std(x) · weight + bias over the last axis, in float32, returned in x's dtype."""

    def __init__(self, width: int, eps: float, *, sequence_parallel: bool = False) -> None:
        super().__init__(width, eps, sequence_parallel=sequence_parallel)
        self.bias = parameter(torch.zeros(width), sequence_parallel=sequence_parallel)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)
