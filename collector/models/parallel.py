"""Tensor and sequence parallelism as a few autograd functions and three linear layers, as in Megatron; the identity at
one rank.

Between layers an activation [s, b, h] is whole on every rank, or, with sequence parallelism, split along s. Each
function states what it does forward and, after the slash, to the gradient; those of sequences are the identity without
sequence parallelism too:

    copy_to_ranks            identity / sum               into a column-parallel layer
    reduce_from_ranks        sum / identity               out of a row-parallel layer
    gather_sequence          all-gather / reduce-scatter  these two with sequence parallelism
    reduce_scatter_sequence  reduce-scatter / all-gather
    gather_whole_sequence    all-gather / own part        where every rank computes the whole gradient
    scatter_sequence         own part / all-gather

A ColumnParallelLinear holds rows of the weight (output features), a RowParallelLinear columns (input features), a plain
ParallelLinear all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from binade.collector.models.site import Site
from binade.collector.models.specs import LinearSpec, Split
from binade.collector.ranks import SINGLE, RankGroup
from binade.data.run.columns import Shard
from binade.quant.gemm import Rounding, Tap, linear
from binade.quant.kv_cache import cached
from binade.quant.specs import GemmFormats

UNROUNDED = Rounding(GemmFormats())


@dataclass(frozen=True)
class Call:
    """One call of a product: how its operands are rounded, and the tap that observes it (None: nothing is recorded)."""

    rounding: Rounding = UNROUNDED
    tap: Tap | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the call is neither quantized nor recorded."""
        return self.tap is None and not self.quantizes

    @property
    def quantizes(self) -> bool:
        return self.rounding.formats.quantized

    def cached(self, x: Tensor) -> tuple[Tensor, Call]:
        """The operand x that a KV cache holds, as it holds it, and the call that uses it. x itself without a cache."""
        formats = self.rounding.formats
        if formats.cache is None:
            return x, self
        x, tap = cached(x, formats.cache, self.tap, self.rounding.backend)
        return x, Call(replace(self.rounding, formats=replace(formats, cache=None)), tap)

    def of_heads(self, heads: int) -> Call:
        """The call of a product of so many heads that share the second operand, see `Rounding.heads`."""
        return replace(self, rounding=replace(self.rounding, heads=heads)) if heads > 1 else self


Begin = Callable[[], Call]  # begins a call of a product; `Call` itself begins one neither quantized nor recorded

# What a tap sees of a product whose first operand is stacked or reshaped.
STACKED = ("a", "y", "product", "grad", "grad_a", "wgrad_grad", "wgrad_a")


def reshaped(tap: Tap | None, shape: Callable[[Tensor], tuple[int, ...]], names: Sequence[str] = ()) -> Tap | None:
    """A tap that shows tensors (those of the names, if any are given) in another shape."""
    if tap is None:
        return None
    return lambda seen: tap(replace(seen, shape=shape(seen.tensor)) if not names or seen.name in names else seen)


def heads_shard(group: RankGroup) -> Shard:
    """The shard of an attention core's tensors: all are divided by heads."""
    return Shard(group.rank, group.size, "slice", 1) if group.size > 1 else Shard()


def linear_shard(kinds: Mapping[str, str], name: str, group: RankGroup, stride: int) -> Shard:
    """Which part of the whole this rank has of a linear layer's tensor, by the name that a tap sees ("a", "grad_b").
    kinds are the `shards` of a ParallelLinear."""
    if group.size == 1:
        return Shard()
    kind = kinds.get(name, "whole")
    axis = {"rows": 0, "columns": -1}.get(kind)
    if axis is None:
        return Shard(group.rank, group.size, kind)
    return Shard(group.rank, group.size, "slice", axis, stride)


GroupFunction = Callable[[RankGroup, Tensor], Tensor]


def _function(
    forward: GroupFunction, backward: GroupFunction, name: str, *, of_sequences: bool = True
) -> Callable[[Tensor, RankGroup], Tensor]:
    """An autograd function of a tensor and a group; the identity at one rank, and for one of sequences without sequence
    parallelism."""

    class Exchange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, group: RankGroup) -> Tensor:
            ctx.group = group
            return forward(group, x)

        @staticmethod
        @once_differentiable  # autograd does not see what the ranks exchange
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return backward(ctx.group, grad), None

    Exchange.__name__ = name

    def apply(x: Tensor, group: RankGroup) -> Tensor:
        if group.size == 1 or (of_sequences and not group.sequence_parallel):
            return x
        y: Tensor = Exchange.apply(x, group)  # type: ignore[no-untyped-call]  # torch has no types for it
        return y

    return apply


def _same(group: RankGroup, x: Tensor) -> Tensor:
    return x.view_as(x)


def _summed(group: RankGroup, x: Tensor) -> Tensor:
    return group.sum_(x.clone())  # the caller's tensor may have been captured


copy_to_ranks = _function(_same, _summed, "CopyToRanks", of_sequences=False)
reduce_from_ranks = _function(_summed, _same, "ReduceFromRanks", of_sequences=False)
reduce_scatter_sequence = _function(RankGroup.reduce_scatter, RankGroup.gather, "ReduceScatterSequence")
scatter_sequence = _function(RankGroup.part, RankGroup.gather, "ScatterSequence")
gather_sequence = _function(RankGroup.gather, RankGroup.reduce_scatter, "GatherSequence")
gather_whole_sequence = _function(RankGroup.gather, RankGroup.part, "GatherWholeSequence")


def parameter(x: Tensor, **marks: bool) -> nn.Parameter:
    """A parameter with Megatron's marks. tensor_model_parallel: the tensor-parallel ranks divide it. sequence_parallel:
    each of them has the gradient of its part of the tokens."""
    made = nn.Parameter(x)
    for name, mark in marks.items():
        setattr(made, name, mark)
    return made


class ParallelLinear(nn.Module):
    """[..., inputs] -> [..., outputs], whole on every rank. The three GEMMs run as the call that `begin` begins says. A
    bias is no part of them: it is added to the result, as in Megatron, and what is recorded as output is without it.

    Weight and bias are kept in float32 (the optimizer's master copy) and used in the input's dtype. split_axis is the
    axis of the weight that is divided among the ranks, None if every rank holds all of it; `stride` as in Megatron:
    the weight is that many matrices, one after the other along the axis, and each is divided (2 for SwiGLU's gate and
    up).
    """

    split_axis: int | None = None
    # How the ranks' tensors of a GEMM make the whole, by the name that the tap sees.
    shards: ClassVar[dict[str, str]] = {}

    def __init__(
        self, site: Site, inputs: int, outputs: int, group: RankGroup = SINGLE, stride: int = 1, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.site = site
        self.group = group
        self.stride = stride
        self.begin: Begin = Call
        self.whole_shape = (outputs, inputs)
        shape = list(self.whole_shape)
        divided = self.split_axis is not None and group.size > 1
        if self.split_axis is not None:
            shape[self.split_axis] //= group.size
        self.weight = parameter(torch.empty(shape), tensor_model_parallel=divided)
        self.bias: nn.Parameter | None = None
        if bias:
            by_row, summed = divided and self.split_axis == 0, group.sequence_parallel and self.split_axis == 1
            self.bias = parameter(torch.empty(shape[0]), tensor_model_parallel=by_row, sequence_parallel=summed)

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part of a weight [outputs, inputs] or bias [outputs]."""
        axis = self.split_axis
        if axis is None or axis >= whole.dim() or self.group.size == 1:
            return whole
        pieces = whole.chunk(self.stride, axis)
        return torch.cat([piece.chunk(self.group.size, axis)[self.group.rank] for piece in pieces], axis)

    def shard(self, name: str) -> Shard:
        return linear_shard(self.shards, name, self.group, self.stride)

    def forward(self, x: Tensor) -> Tensor:
        x, call = self.begin().cached(self._enter(x))
        y = self._leave(linear(x, self.weight.to(x.dtype), call.rounding, tap=call.tap))
        return y if self.bias is None else add_bias(y, self.bias)

    def _enter(self, x: Tensor) -> Tensor:
        return x

    def _leave(self, y: Tensor) -> Tensor:
        return y


def add_bias(y: Tensor, bias: Tensor) -> Tensor:
    """y [..., outputs] + bias [outputs], in y's dtype."""
    # Two axes: the bias' gradient is then one sum over tokens, in the order in which torch and Megatron take it.
    return (y.flatten(0, -2) + bias.to(y.dtype)).view(y.shape) if y.dim() > 1 else y + bias.to(y.dtype)


class ColumnParallelLinear(ParallelLinear):
    """[..., inputs] -> this rank's [..., outputs / ranks]."""

    split_axis = 0
    shards: ClassVar = {"b": "rows", "grad_b": "rows", "y": "columns", "grad": "columns", "grad_a": "partial"}

    def _enter(self, x: Tensor) -> Tensor:
        return (gather_sequence if self.group.sequence_parallel else copy_to_ranks)(x, self.group)


class RowParallelLinear(ParallelLinear):
    """This rank's [..., inputs / ranks] -> [..., outputs], summed over the ranks. The bias is whole on every rank."""

    split_axis = 1
    shards: ClassVar = {"a": "columns", "b": "columns", "grad_a": "columns", "grad_b": "columns", "y": "partial"}

    def _leave(self, y: Tensor) -> Tensor:
        return (reduce_scatter_sequence if self.group.sequence_parallel else reduce_from_ranks)(y, self.group)


_LINEARS = {Split.COLUMN: ColumnParallelLinear, Split.ROW: RowParallelLinear, Split.REPLICATED: ParallelLinear}


def build_linear(spec: LinearSpec, group: RankGroup = SINGLE) -> ParallelLinear:
    return _LINEARS[spec.split](spec.site, spec.inputs, spec.outputs, group, spec.stride, bias=spec.bias)
