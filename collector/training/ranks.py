"""The ranks of a run: which one this process is, and the communication outside the layers.

A run on several ranks is started by torchrun (`launch`, or by hand). Ranks are laid out as Megatron lays them: the
tensor-parallel ranks of one replica are neighbors, rank = replica · tp + tensor-parallel rank.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from pathlib import Path
from threading import Event, Thread

import torch
import torch.distributed as dist
from torch import Tensor, nn

from binade.collector.models.parallel import SINGLE, Group, PeerLostError
from binade.collector.training.config import ConfigError, Device, RunConfig
from binade.data.runs import DONE, FAILED, RunState, list_runs, settle

# Set by `launch` for the ranks that it starts: its process, and a file to meet at that no other machine can reach.
LAUNCHER = "BINADE_LAUNCHER"
STORE = "BINADE_STORE"
LAUNCHER_GONE = "the process that started the ranks has exited"
TIMEOUT = timedelta(minutes=30)
NOTICE = 10.0  # seconds that a rank has to notice by itself that the launcher is gone, or another rank to end
SILENCE = 60  # seconds without a heartbeat after which a rank on another host counts as lost
LEFT = b"left"  # instead of a heartbeat, by a rank that is done
_joined = count()  # the runs of this process


@dataclass(frozen=True)
class Ranks:
    """tensor is the group that shares this replica's layers, data the group that shares this rank's weights."""

    rank: int = 0
    size: int = 1
    tensor: Group = SINGLE
    data: Group = SINGLE

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
        try:
            dist.broadcast_object_list(shared, src=0)
        except RuntimeError as error:
            raise PeerLostError.after(error) from error
        return shared[0]

    def wait(self) -> None:
        """Wait for every rank. Raises PeerLostError."""
        if self.size > 1:
            self.share(None)
            Group(dist.group.WORLD).sum_(torch.zeros(1, device=self.device))

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
        on_gpu = self.size > 1 and dist.get_backend() == dist.Backend.NCCL
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def started_as_rank() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def current_ranks() -> Ranks:
    """This process among those of torch.distributed, laid out as megatron.core has it if it is initialized, else as
    replicas; a single one without them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Ranks()
    rank, size = dist.get_rank(), dist.get_world_size()
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.is_initialized():
        return Ranks(rank, size, data=Group(dist.group.WORLD))
    return Ranks(rank, size, Group(state.get_tensor_model_parallel_group()), Group(state.get_data_parallel_group()))


def settle_runs(root: Path, owner: int, state: RunState, reason: str | None) -> None:
    """Record the end of the unfinished run that the process `owner` started here."""
    for run in list_runs(root)[0]:
        if run.status.pid == owner and run.status.host == socket.gethostname() and run.status.state != DONE:
            settle(run.directory, state, reason)


class _Heartbeats:
    """Tells whether other ranks are alive, through the store of torchrun: rank 0 follows all, the others follow rank 0.

    Silence is counted in calls of `lost`, not in seconds: ranks that were suspended together do not lose each other.
    """

    def __init__(self, name: str, rank: int, size: int):
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # A connection of its own: the other one may be waiting for something.
        connection = dist.TCPStore(  # type: ignore[attr-defined]
            os.environ["MASTER_ADDR"], _environment_number("MASTER_PORT"), is_master=False, timeout=TIMEOUT
        )
        self._store = dist.PrefixStore(f"heartbeats {attempt} {name}", connection)  # type: ignore[attr-defined]
        self._key = str(rank)
        self._silence = dict.fromkeys(map(str, range(1, size) if rank == 0 else [0]), 0)
        self._left = Event()
        # A thread of its own: without the host of the store, an exchange never ends.
        self._thread = Thread(target=self._exchange, daemon=True)
        self._thread.start()

    def _exchange(self) -> None:
        last = dict.fromkeys(self._silence, b"")
        with suppress(RuntimeError):  # the store ends with the first host
            for number in count():
                self._store.set(self._key, str(number))
                found = dict(zip(last, self._store.multi_get(list(last)), strict=True))
                self._silence |= {rank: 0 for rank in last if found[rank] != last[rank]}
                self._silence |= {rank: -sys.maxsize for rank in last if found[rank] == LEFT}
                last = found
                if self._left.wait(1.0):
                    self._store.set(self._key, LEFT.decode())
                    return

    def lost(self) -> str | None:
        """Called once a second. Returns what was lost, if anything."""
        for rank in self._silence:
            self._silence[rank] += 1
            if self._silence[rank] > SILENCE:
                return f"lost the connection to another rank: no heartbeat of rank {rank} for {SILENCE} s"
        return None

    def leave(self) -> None:
        self._left.set()
        self._thread.join(NOTICE)


def _end_when_lost(lost: Callable[[], str | None], owner: int, rank: int, root: Path, left: Event) -> None:
    """End this process if what it depends on is lost and it does not notice. gloo may not notice that a peer has died,
    and then waits for TIMEOUT in a call that no signal or exception can interrupt."""
    while not (reason := lost()):
        if left.wait(1.0):
            return
    if not left.wait(NOTICE):
        try:
            print(f"binade: {reason}", file=sys.stderr)
            if rank == 0:
                settle_runs(root, owner, FAILED, reason)
        finally:
            os._exit(PeerLostError.exit_status)


@contextmanager
def join(config: RunConfig, root: Path) -> Iterator[Ranks]:
    """Join the ranks of the run under this root; a single rank without torchrun. Raises ConfigError."""
    wanted = config.world_size
    size = _environment_number("WORLD_SIZE") if started_as_rank() else 1
    if size != wanted:
        raise ConfigError(
            f"--tp {config.tp} times --dp {config.dp} is {wanted} ranks, but torchrun started {size}: make them equal"
        )
    rank = _environment_number("RANK") if started_as_rank() else 0
    if rank >= size:
        raise ConfigError(f"RANK is {rank}, but torchrun started {size}: the ranks are 0 to {size - 1}")
    if wanted == 1:
        yield Ranks()
        return
    if config.device == Device.CUDA:
        torch.cuda.set_device(_environment_number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0)
    name = f"run {next(_joined)}"
    store = dist.PrefixStore(name, _rendezvous(rank, size))  # type: ignore[attr-defined]  # not in __all__
    dist.init_process_group(
        "nccl" if config.device == Device.CUDA else "gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT
    )
    left = Event()
    launcher = Ranks().owner
    heartbeats = None if STORE in os.environ else _Heartbeats(name, rank, size)
    lost = heartbeats.lost if heartbeats else lambda: LAUNCHER_GONE if launcher and os.getppid() != launcher else None
    # It gets no process group: one that is alive when Python exits aborts the process.
    Thread(target=_end_when_lost, args=(lost, launcher or os.getpid(), rank, root, left), daemon=True).start()
    try:
        tensor = _new_group([range(first, first + config.tp) for first in range(0, size, config.tp)], rank)
        data = _new_group([range(first, size, config.tp) for first in range(config.tp)], rank)
        yield Ranks(rank, size, Group(tensor, config.sequence_parallel), Group(data))
        if heartbeats:
            heartbeats.leave()
    finally:
        dist.destroy_process_group()
        left.set()


def _environment_number(name: str) -> int:
    """A variable that torchrun sets. Raises ConfigError."""
    word = os.environ[name]
    if not re.fullmatch("[0-9]{1,9}", word):
        raise ConfigError(
            f"the environment's {name} is {word!r}, not a number: torchrun sets it; without torchrun, unset it"
        )
    return int(word)


@cache
def _rendezvous(rank: int, size: int) -> dist.Store:  # type: ignore[name-defined]
    """The store in which the ranks find each other. All runs of a batch share it: otherwise a rank that starts the next
    run early would meet ranks that are still in the previous one."""
    if STORE in os.environ:
        return dist.FileStore(os.environ[STORE], size)  # type: ignore[attr-defined]
    return next(dist.rendezvous("env://", rank, size, timeout=TIMEOUT))[0]  # type: ignore[attr-defined]


def _new_group(groups: list[range], rank: int) -> dist.ProcessGroup | None:
    """Make all groups, as every rank must. Returns the group of this rank, None if it is alone in it."""
    found = None
    for members in groups:
        if len(members) > 1:
            made = dist.new_group(list(members), timeout=TIMEOUT)
            found = made if rank in members else found
    return found


@torch.no_grad()
def finish_gradients(model: nn.Module, ranks: Ranks) -> None:
    """Make every gradient equal to that of a single rank: sum the partial gradients of sequence parallelism over the
    tensor-parallel ranks, and average over the replicas. Raises PeerLostError."""
    for parameter in model.parameters():
        if parameter.grad is None:
            continue
        if getattr(parameter, "sequence_parallel", False):
            ranks.tensor.sum_(parameter.grad)
        if ranks.replicas > 1:
            ranks.data.sum_(parameter.grad).div_(ranks.replicas)


@torch.no_grad()
def clip_gradients(model: nn.Module, ranks: Ranks, largest: float) -> None:
    """torch's clip_grad_norm_, with the norm of the whole gradient. Raises PeerLostError."""
    if ranks.tensor.size == 1:
        nn.utils.clip_grad_norm_(model.parameters(), largest)
        return
    divided: list[Tensor] = []
    same: list[Tensor] = []
    for p in model.parameters():
        if p.grad is not None:
            (divided if getattr(p, "tensor_model_parallel", False) else same).append(p.grad)
    square = ranks.tensor.sum_(nn.utils.get_total_norm(divided).square())
    total = (square + nn.utils.get_total_norm(same).square()).sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), largest, total)


def mean_over_replicas(value: float, ranks: Ranks) -> float:
    if ranks.replicas == 1:
        return value
    total = ranks.data.sum_(torch.tensor(value, dtype=torch.float64, device=ranks.device))
    return float(total) / ranks.replicas
