"""DTensor: weights that `parallelize_module` divides among ranks. Products run on each rank's parts of the operands.

Blocks, scales and recorded tensors are therefore those of the local part. After `fully_shard` a weight is a DTensor
between the passes only: within one it is plain, or the part of a rank where tensor parallelism divides it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from binade.collector.capture.adapters.layer import InstrumentError, is_a, weight_of
from binade.collector.models.parallel import ColumnParallelLinear, RowParallelLinear, heads_shard, linear_shard
from binade.collector.ranks import RankGroup
from binade.data.run.columns import Shard


def is_dtensor(x: object) -> bool:
    return is_a("torch.distributed.tensor", "DTensor", x)


def linear_on_parts(name: str, product: Callable[..., Tensor], x: Any, weight: Any, bias: Any = None) -> Tensor:
    """product(x, weight, bias), on this rank's parts if the weight is a DTensor: x [..., in], weight [out, in].

    x is redistributed to the placement that the weight requires, as DTensor's own product does. Gradients are those of
    the parts: the complete gradient of this part of a weight; for an input, this rank's summand if the weight is
    divided by rows.

    Raises InstrumentError for an input that is not a DTensor, and for a weight that is divided otherwise.
    """
    if not is_dtensor(weight):
        return product(x, weight, bias)
    if not is_dtensor(x):
        raise InstrumentError(f"{name} has a DTensor as its weight, and was called with a plain tensor")
    from torch.distributed.tensor import Partial, Replicate
    from torch.distributed.tensor import Shard as Split
    from torch.distributed.tensor.experimental import local_map

    whole, part, last = Replicate(), Partial(), Split(x.dim() - 1)
    # For each axis of the mesh: of x, weight, bias; of their gradients; of the result.
    places: list[tuple[Any, ...]] = []
    for of_x, of_weight in zip(x.placements, weight.placements, strict=True):
        if of_weight == Split(0):
            places.append((whole, Split(0), Split(0), part, Split(0), Split(0), last))
        elif of_weight == Split(1):
            places.append((last, Split(1), whole, last, Split(1), whole, part))
        elif of_weight != whole:
            raise InstrumentError(
                f"{name} has a weight placed as {of_weight}: expected Replicate(), Shard(0) or Shard(1)"
            )
        elif of_x.is_shard() and of_x != last:
            places.append((of_x, whole, whole, of_x, part, part, of_x))
        else:
            places.append((whole,) * 7)
    mesh = weight.device_mesh
    summed = math.prod(mesh.size(at) for at, place in enumerate(weight.placements) if place == Split(1))

    def on_part(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Where the ranks' results are summed, each adds its share of the bias, whose gradient is the same on all."""
        if bias is not None and summed > 1:
            bias = bias - bias.detach() + bias.detach() / summed
        return product(x, weight, bias)

    *placements, result = zip(*places, strict=True)
    operands = [x, weight] if bias is None else [x, weight, bias]
    mapped: Tensor = local_map(
        on_part,
        out_placements=list(result),
        in_placements=tuple(placements[: len(operands)]),
        in_grad_placements=tuple(placements[3 : 3 + len(operands)]),
        device_mesh=mesh,
        redistribute_inputs=True,
    )(*operands)
    return mapped


def core_on_parts(name: str, product: Callable[..., Tensor], query: Any, key: Any, value: Any) -> Tensor:
    """product(query, key, value) of an attention core, on this rank's batch and heads if they are DTensors.

    Raises InstrumentError if they are divided along another axis, or not alike.
    """
    if not any(map(is_dtensor, (query, key, value))):
        return product(query, key, value)
    from torch.distributed.tensor.experimental import local_map

    places: list[Any] = [getattr(x, "placements", None) for x in (query, key, value)]
    inner = query.dim() - 2
    if places.count(places[0]) < 3 or any(p.is_partial() or (p.is_shard() and p.dim >= inner) for p in places[0]):
        raise InstrumentError(
            f"{name or 'the model'} attends to DTensors placed as {places}: expected the same placement for all, by "
            "batch or heads"
        )
    attended: Tensor = local_map(product, out_placements=list(places[0]))(query, key, value)
    return attended


def shard_of(module: nn.Module, name: str) -> Shard:
    """The part of a linear layer's tensor that this rank has. Call it within a pass."""
    group, axis = _division(module)
    kinds = (ColumnParallelLinear if axis == 0 else RowParallelLinear).shards
    return _of_replica(linear_shard(kinds, name, group, 1), group)


def core_shard_of(module: nn.Module, name: str) -> Shard:
    """The same for attention in the module: divided by heads, if its linear layers are divided by rows."""
    divisions = [_division(layer) for layer in module.modules() if isinstance(layer, nn.Linear)]
    group = next((group for group, axis in divisions if axis == 0), RankGroup())
    return _of_replica(heads_shard(group), group)


def _division(module: Any) -> tuple[RankGroup, int | None]:
    """The ranks that the module's weight is divided among, and along which of its axes."""
    weight: Any = weight_of(module)
    if not is_dtensor(weight):
        return RankGroup(), None
    divided = [(at, place.dim) for at, place in enumerate(weight.placements) if place.is_shard()]
    if len(divided) > 1:
        raise InstrumentError(f"a weight is sharded along two mesh dimensions, as {weight.placements}: expected one")
    return next(((RankGroup(weight.device_mesh.get_group(at)), dim) for at, dim in divided), (RankGroup(), None))


def _of_replica(shard: Shard, group: RankGroup) -> Shard:
    """The shard, with the number of the replica that these ranks make up: their place on a mesh's other axis."""
    if group.handle is None:
        return shard
    ranks = dist.get_process_group_ranks(group.handle)
    return replace(shard, replica=ranks[0] // (len(ranks) if ranks == [*range(ranks[0], ranks[-1] + 1)] else 1))
