"""Start the ranks of a run on this machine as torchrun does, wait for them, and say how the run ended.

Each rank reads the same configurations in a process of its own, with the environment variables that torchrun sets. The
ranks meet at a file, so nothing listens but gloo or NCCL. When one fails, torchrun's process manager ends the others;
only then is it known which rank failed first, and recorded in the run's status.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std, start_processes
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from binade.collector.errors import ConfigError
from binade.collector.ranks import LAUNCHER, PeerLostError
from binade.collector.training.plan import Plan
from binade.collector.training.ranks import STORE, settle_runs, this_process
from binade.data.exchange.python import package_environment
from binade.data.run.directory import CANCELLED, FAILED
from binade.data.words.text import signal_name

PREFIX = "binade: "
REFUSED = 2  # a rank's exit status for bad usage
# Exit statuses of a rank that ended because of another one: after an error in a collective operation, or by a signal.
FOLLOWED = (PeerLostError.exit_status, 130, -signal.SIGTERM)


class RankFailedError(RuntimeError):
    """A rank ended the run. The message says which and why."""


def launch(plans: Sequence[Plan], root: Path, resume: str | None = None) -> None:
    """Train the runs, one after the other, on their ranks; a branch alone. resume: a run to continue. Raises
    RankFailedError, KeyboardInterrupt, or ConfigError if a rank refused its configuration."""
    ranks, process = plans[0].config.world_size, this_process()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the message below is enough
    with tempfile.TemporaryDirectory(prefix="binade-ranks-") as scratch:
        config = Path(scratch, "config.json")
        config.write_text(json.dumps([asdict(plan.config) for plan in plans]), encoding="utf-8")
        line = ["run", "--config", str(config), *(["--resume", resume] if resume else [])]
        line = [*(plans[0].arguments if plans[0].branch else line), "--tensor-save-dir", str(root)]
        # Rank 0 prints to the terminal; the output of the others goes to files.
        quiet = {rank: Std.ALL if rank else Std.ERR for rank in range(ranks)}
        processes = start_processes(
            name="rank",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(ranks), ("-P", "-m", "binade", *line)),
            envs={rank: _environment(rank, ranks, Path(scratch, "store")) for rank in range(ranks)},
            logs_specs=DefaultLogsSpecs(log_dir=str(Path(scratch, "logs")), redirects=quiet),
        )
        try:
            result = processes.wait()
        except SignalException as cancelled:
            processes.close(cancelled.sigval)
            settle_runs(root, process, CANCELLED, None)
            raise KeyboardInterrupt from None
        if result and result.failures:
            rank, failure = _first(result.failures)
            if failure.exitcode < 0:
                message = f"rank {rank} was killed by {signal_name(-failure.exitcode)}"
            else:
                message = f"rank {rank}: {_last_line(failure, result.stderrs[rank])}"
            settle_runs(root, process, FAILED, message)
            if failure.exitcode == REFUSED:
                raise ConfigError(message.removeprefix(f"rank {rank}: "))
            raise RankFailedError(f"the run failed: {message}")


def _environment(rank: int, ranks: int, store: Path) -> dict[str, str]:
    """A rank's variables. The ranks divide the machine's cores, and need not listen to any other machine."""
    position = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    defaults = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    if "lo" in (name for _, name in socket.if_nameindex()):
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    variables = {name: str(value) for name, value in position.items()} | {LAUNCHER: str(os.getpid()), STORE: str(store)}
    return defaults | package_environment() | variables


def _first(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank whose failure was not caused by another rank."""
    causes = {rank: failure for rank, failure in failures.items() if failure.exitcode not in FOLLOWED} or failures
    return min(causes.items(), key=lambda item: (item[1].timestamp, item[0]))


def _last_line(failure: ProcessFailure, stderr: str) -> str:
    """The last line that a rank printed. If it is not one of our messages, everything that it printed is shown."""
    printed = Path(stderr).read_text(errors="replace", encoding="utf-8").strip()
    last = printed.splitlines()[-1] if printed else f"exit status {failure.exitcode}"
    if not last.startswith(PREFIX):
        print(printed, file=sys.stderr)
    return last.removeprefix(PREFIX).removeprefix("the run failed: ")
