"""How the ranks of `binade run` meet, notice that another one is lost, and what they exchange outside the layers.

A run on several ranks is started by torchrun (`launch`, or by hand).
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from itertools import count
from pathlib import Path
from threading import Event, Thread

import torch
import torch.distributed as dist
from torch import Tensor, nn

from binade.collector.capture.clock import seed_of
from binade.collector.capture.recorder import Recorder
from binade.collector.errors import ConfigError
from binade.collector.models.feedforward import MixtureOfExperts
from binade.collector.ranks import LAUNCHER_GONE, NOTICE, PeerLostError, RankGroup, Ranks
from binade.collector.settings import DeviceName
from binade.collector.training.config import RunConfig
from binade.data.run.directory import DONE, FAILED, RunState, list_runs
from binade.data.run.run_writer import settle
from binade.data.run.store import process_start
from binade.quant.quantizer import apply, fake_quantize
from binade.quant.specs import Spec

# Set by `launch` for the ranks that it starts: a file to meet at that no other machine can reach.
STORE = "BINADE_STORE"
TIMEOUT = timedelta(minutes=30)
SILENCE = 60  # seconds without a heartbeat after which a rank on another host counts as lost
LEFT = b"left"  # instead of a heartbeat, by a rank that is done
_joined = count()  # the runs of this process


def started_as_rank() -> bool:
    """Whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def this_process(pid: int | None = None) -> tuple[str, int, float]:
    """Host, number and start time of this process, or of another one that lives, as in a run's status."""
    pid = pid or os.getpid()
    return socket.gethostname(), pid, process_start(pid) or 0.0


def settle_runs(root: Path, process: tuple[str, int, float], state: RunState, reason: str | None) -> None:
    """Record the end of the unfinished run that depends on this process."""
    for run in list_runs(root)[0]:
        status = run.status
        if (status.host, status.pid, status.pid_started) == process and status.state != DONE:
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
                beats = dict(zip(last, self._store.multi_get(list(last)), strict=True))
                self._silence |= {rank: 0 for rank in last if beats[rank] != last[rank]}
                self._silence |= {rank: -sys.maxsize for rank in last if beats[rank] == LEFT}
                last = beats
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


def _end_when_lost(
    lost: Callable[[], str | None], process: tuple[str, int, float], rank: int, root: Path, left: Event
) -> None:
    """End this process if what it depends on is lost and it does not notice. gloo may not notice that a peer has died,
    and then waits for TIMEOUT in a call that no signal or exception can interrupt."""
    while not (reason := lost()):
        if left.wait(1.0):
            return
    if not left.wait(NOTICE):
        try:
            print(f"binade: {reason}", file=sys.stderr)
            if rank == 0:
                settle_runs(root, process, FAILED, reason)
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
    if config.device == DeviceName.CUDA:
        torch.cuda.set_device(_environment_number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else 0)
    name = f"run {next(_joined)}"
    store = dist.PrefixStore(name, _rendezvous(rank, size))  # type: ignore[attr-defined]  # not in __all__
    dist.init_process_group(
        "nccl" if config.device == DeviceName.CUDA else "gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT
    )
    left = Event()
    launcher = Ranks().owner
    heartbeats = None if STORE in os.environ else _Heartbeats(name, rank, size)
    lost = heartbeats.lost if heartbeats else lambda: LAUNCHER_GONE if launcher and os.getppid() != launcher else None
    # It gets no process group: one that is alive when Python exits aborts the process.
    process = this_process(launcher)
    Thread(target=_end_when_lost, args=(lost, process, rank, root, left), daemon=True).start()
    try:
        tensor = _new_group([range(first, first + config.tp) for first in range(0, size, config.tp)])
        data = _new_group([range(first, size, config.tp) for first in range(config.tp)])
        yield Ranks(rank, size, RankGroup(tensor, config.sequence_parallel), RankGroup(data))
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


def _new_group(groups: list[range]) -> dist.ProcessGroup | None:
    """Make all groups, as every rank must. Returns the group of this rank, None if it is alone in it."""
    members = [list(group) for group in groups if len(group) > 1]
    if not members:
        return None
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(members, TIMEOUT)[0]  # type: ignore[no-untyped-call]
    return group


@torch.no_grad()
def finish_gradients(model: nn.Module, ranks: Ranks, spec: Spec | None = None, *seed: int) -> None:
    """Make every gradient equal to that of a single rank: sum the partial gradients of sequence parallelism over the
    tensor-parallel ranks, and average over the replicas, whose gradients are rounded to the spec before. seed: of
    stochastic rounding in this iteration. Raises PeerLostError."""
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if getattr(parameter, "sequence_parallel", False):
            ranks.tensor.sum_(parameter.grad)
        if ranks.replicas > 1:
            if spec:
                rounding_seed = seed_of("reduce_scatter", *seed, name, ranks.replica)
                parameter.grad.copy_(apply(parameter.grad, spec, seed=rounding_seed)[0])
            ranks.data.sum_(parameter.grad).div_(ranks.replicas)


@contextmanager
def rounding_tokens(model: nn.Module, spec: Spec, recorder: Recorder, seed: int) -> Iterator[None]:
    """A context in which the tokens that routed experts receive are rounded, apart from twin steps. Their gradient is
    that of tokens which are not rounded."""
    clock, replica = recorder.clock, recorder.ranks.replica

    def received(name: str, _: nn.Module, tokens: tuple[Tensor]) -> Tensor | None:
        rounding_seed = seed_of("all_to_all", seed, clock.iteration, clock.micro_batch, name, replica)
        return None if clock.twin else fake_quantize(*tokens, spec, seed=rounding_seed)

    modules = dict(model.named_modules()).items()
    layers = [(name, module) for name, module in modules if isinstance(module, MixtureOfExperts)]
    with ExitStack() as undo:
        for name, layer in layers:
            for number, expert in enumerate(layer.experts):
                undo.callback(expert.register_forward_pre_hook(partial(received, f"{name}.{number}")).remove)
        yield


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
    total = ranks.data.sum_(torch.tensor(value, dtype=torch.float64, device=ranks.device))
    return float(total) / ranks.replicas
