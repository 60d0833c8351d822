"""Tensor parallelism as two autograd functions and two linear layers, as in Megatron; the identity at one rank.

`copy_to_ranks` is the identity forward and sums gradients; `reduce_from_ranks` sums forward and passes gradients on.
A ColumnParallelLinear holds rows of the weight (output features), a RowParallelLinear columns (input features), a
ReplicatedLinear all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collector.site import Site
from quant.formats import GemmFormats
from quant.gemm import Tap, linear

Group = dist.ProcessGroup | None  # None is a single rank


@dataclass
class Quantization:
    """How a layer's GEMMs run. tap gives the observer of the next call, or None when nothing is recorded."""

    formats: GemmFormats = GemmFormats()
    backend: str = "auto"
    tap: Callable[[], Tap | None] = lambda: None


def group_size(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return _summed(grad, ctx.group), None


class _ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return _summed(x, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _summed(x: Tensor, group: Group) -> Tensor:
    total = x.clone()  # the caller's tensor may have been captured
    dist.all_reduce(total, group=group)
    return total


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    return x if group_size(group) == 1 else _CopyToRanks.apply(x, group)


def reduce_from_ranks(x: Tensor, group: Group) -> Tensor:
    return x if group_size(group) == 1 else _ReduceFromRanks.apply(x, group)


class ParallelLinear(nn.Module):
    """A linear layer without bias whose three GEMMs run as `quantization` says.

    The weight is kept in float32 (the optimizer's master copy) and used in the input's dtype.
    """

    def __init__(self, site: Site, inputs: int, outputs: int, group: Group = None) -> None:
        super().__init__()
        self.site = site
        self.group = group
        self.quantization = Quantization()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def _multiply(self, x: Tensor) -> Tensor:
        how = self.quantization
        return linear(x, self.weight.to(x.dtype), how.formats, backend=how.backend, tap=how.tap())


class ColumnParallelLinear(ParallelLinear):
    """[..., inputs] -> this rank's [..., outputs / ranks]."""

    def __init__(self, site: Site, inputs: int, outputs: int, group: Group = None) -> None:
        super().__init__(site, inputs, outputs // group_size(group), group)

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(copy_to_ranks(x, self.group))


class RowParallelLinear(ParallelLinear):
    """This rank's [..., inputs / ranks] -> [..., outputs], summed over the ranks."""

    def __init__(self, site: Site, inputs: int, outputs: int, group: Group = None) -> None:
        super().__init__(site, inputs // group_size(group), outputs, group)

    def forward(self, x: Tensor) -> Tensor:
        return reduce_from_ranks(self._multiply(x), self.group)


class ReplicatedLinear(ParallelLinear):
    """[..., inputs] -> [..., outputs], whole on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x)
