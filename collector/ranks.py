"""The ranks of a run: which one this process is, and with which others it shares a model's layers or its batches.

Ranks are laid out as Megatron lays them: the tensor-parallel ranks of one replica are neighbors,
rank = replica · tp + tensor-parallel rank.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LAUNCHER = "BINADE_LAUNCHER"  # set by `launch` for the ranks that it starts: its process
LAUNCHER_GONE = "the process that started the ranks has exited"
NOTICE = 10.0  # seconds that a rank has to notice by itself that the launcher is gone, or another rank to end


class PeerLostError(RuntimeError):
    """A collective operation failed because the connection to another rank was lost."""

    exit_status = 75  # tells the launcher that another rank failed first

    @classmethod
    def after(cls, error: RuntimeError) -> PeerLostError:
        reason = re.sub(r"^\[[^]]*\] *", "", str(error).splitlines()[0])  # gloo begins with its source line
        return cls(f"lost the connection to another rank: {reason.partition('. ')[0]}")


@dataclass(frozen=True)
class RankGroup:
    """The ranks that share a model's layers, or its batches. handle None is a single rank."""

    handle: dist.ProcessGroup | None = None
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        return 1 if self.handle is None else dist.get_world_size(self.handle)

    @property
    def rank(self) -> int:
        """This rank's index in the group."""
        return 0 if self.handle is None else dist.get_rank(self.handle)

    def sum_(self, x: Tensor) -> Tensor:
        """x summed over the ranks, in place. Raises PeerLostError."""
        if self.size > 1:
            _collective(dist.all_reduce, x, group=self.handle)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' x, concatenated along axis 0."""
        whole = x.new_empty(self.size * len(x), *x.shape[1:])
        _collective(dist.all_gather_into_tensor, whole, x.contiguous(), group=self.handle)
        return whole

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of x along axis 0."""
        return x.chunk(self.size)[self.rank].contiguous()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's part of the sum of the ranks' x. Gloo has no reduce-scatter: there it is sum, then part."""
        if dist.get_backend(self.handle) == dist.Backend.GLOO:
            return self.part(self.sum_(x.clone()))
        part = x.new_empty(len(x) // self.size, *x.shape[1:])
        _collective(dist.reduce_scatter_tensor, part, x.contiguous(), group=self.handle)
        return part


SINGLE = RankGroup()


def _collective(operation: Callable[..., object], *values: Any, **options: Any) -> None:
    try:
        operation(*values, **options)
    except RuntimeError as error:
        raise PeerLostError.after(error) from error


@dataclass(frozen=True)
class Ranks:
    """tensor is the group that shares this replica's layers, data the group that shares this rank's weights."""

    rank: int = 0
    size: int = 1
    tensor: RankGroup = SINGLE
    data: RankGroup = SINGLE

    @property
    def replica(self) -> int:
        """Which data-parallel copy of the model this rank belongs to."""
        return self.data.rank

    @property
    def replicas(self) -> int:
        return self.data.size

    @property
    def owner(self) -> int | None:
        """The process that the run depends on, if it is not rank 0's own."""
        return int(os.environ[LAUNCHER]) if LAUNCHER in os.environ else None

    def share(self, text: str | None) -> str | None:
        """Broadcast rank 0's text to every rank. Raises PeerLostError."""
        if self.size == 1:
            return text
        shared = [text]
        _collective(dist.broadcast_object_list, shared, src=0)
        return shared[0]

    def wait(self) -> None:
        """Wait for every rank. Raises PeerLostError."""
        if self.size > 1:
            self.share(None)
            RankGroup(dist.group.WORLD).sum_(torch.zeros(1, device=self.device))

    @property
    def launcher_decides(self) -> bool:
        """Whether `launch`, if it still lives, records how the run ended: only it knows which rank failed first."""
        return self.owner is not None and os.getppid() == self.owner

    def check_launcher(self) -> None:
        """Raises PeerLostError if the process that started the ranks has exited: nothing else would end them."""
        if self.owner is not None and not self.launcher_decides:
            raise PeerLostError(LAUNCHER_GONE)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """A context that, if the launcher is gone, reports this instead of the rank that ended first because of it. If
        it is not, a rank that lost another waits to be ended: the other may close its connections long before its
        process ends, and the launcher must find that one first."""
        try:
            yield
        except PeerLostError:
            end = time.monotonic() + NOTICE
            while self.launcher_decides and time.monotonic() < end:
                time.sleep(0.05)
            self.check_launcher()
            raise

    @property
    def device(self) -> torch.device:
        """The device of tensors in collective operations."""
        kinds = dist.Backend.backend_capability.get(dist.get_backend(), ["cpu"]) if self.size > 1 else ["cpu"]
        return torch.device("cpu" if "cpu" in kinds else kinds[0])


def current_ranks() -> Ranks:
    """This process among those of torch.distributed, laid out as megatron.core has it if it is initialized, else as
    replicas; a single one without them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()
    rank, size = dist.get_rank(), dist.get_world_size()
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.is_initialized():
        return Ranks(rank, size, data=RankGroup(dist.group.WORLD))
    return Ranks(
        rank, size, RankGroup(state.get_tensor_model_parallel_group()), RankGroup(state.get_data_parallel_group())
    )
