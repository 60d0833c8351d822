"""Work in forks of the test's process, which has imported torch already: to import it takes longer than most tests."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path

import binade.collector.training.loop  # noqa: F401  # not in every fork
from binade.cli import main
from binade.collector.training.ranks import STORE

_runs = count()


def forked(work: Callable[[], int | None], *environments: Mapping[str, str]) -> list[int]:
    """The exit statuses of work(), once for each environment, all at the same time."""
    children = [_fork(work, environment) for environment in environments]
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _fork(work: Callable[[], int | None], environment: Mapping[str, str]) -> int:
    if child := os.fork():
        return child
    try:
        os.environ.update(environment)
        os._exit(work() or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(99)


def ranks_of(store: Path, ranks: int) -> list[dict[str, str]]:
    """The environments of the ranks of a run, as `launch` sets them; a single empty one of one rank."""
    if ranks == 1:
        return [{}]
    return [
        {"RANK": str(rank), "WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo", STORE: str(store)}
        for rank in range(ranks)
    ]


def run_forked(root: Path, *arguments: str, ranks: int = 1, before: Callable[[], None] = lambda: None) -> int:
    """binade run: the exit status of the first rank. before: what each rank does first."""

    def work() -> int:
        before()
        return main(["run", *arguments, "--tensor-save-dir", str(root)])

    store = root.parent / f"{root.name}_{next(_runs)}.store"  # of one run alone: ranks would find each other's past
    return forked(work, *ranks_of(store, ranks))[0]


def kill_at(call: str, left: int) -> None:
    """From now on, die by SIGKILL at that call of a function of os."""
    real = getattr(os, call)

    def deadly(*arguments, **more):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **more)

    setattr(os, call, deadly)
