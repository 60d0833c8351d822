"""A pool of processes. If one dies, only its current job is lost, and the death is reported with that job.

Two libraries were tried. A killed worker breaks a whole concurrent.futures pool, and no job is named. The workers of
pebble share one pipe: one that is killed while it sends its result stalls all others.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Generic, TypeVar

from binade.data.words.text import signal_name

J = TypeVar("J")
R = TypeVar("R")

DEPTH = 2  # jobs that a process holds: the current and the next one


@dataclass(frozen=True)
class Death:
    """The worker died on this job, by a signal (a negative exit status) or by exiting."""

    status: int

    @property
    def by(self) -> str:
        """SIGKILL, SIGBUS, exit status 1"""
        return f"exit status {self.status}" if self.status >= 0 else signal_name(-self.status)


class _Worker(Generic[J]):
    def __init__(self, context: ForkServerContext, work: Callable[[J], object]) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        self.process.start()
        theirs.close()  # now only the worker has that end, so reading fails here when it dies
        self.held: deque[J] = deque()

    def give(self, job: J) -> None:
        self.held.append(job)
        with suppress(OSError):  # it is dead; this is noticed when its result is read
            self.connection.send(job)

    def stop(self) -> int:
        """Kill the process and return its exit status."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        return self.process.exitcode or 0


def _serve(connection: Connection, work: Callable[[J], object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal signals all processes; the parent decides
    with suppress(EOFError, OSError):  # the parent is gone
        while True:
            connection.send(work(connection.recv()))


def prepare(module: str) -> None:
    """Start the common parent of the processes, which imports that module while the caller continues."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([module])
    resource_tracker.ensure_running()  # forkserver would start it, and starting it unblocks SIGINT
    # The mask is inherited: a new process ignores Ctrl-C only once it serves.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def scatter(jobs: Iterable[J], work: Callable[[J], R], count: int) -> Iterator[tuple[J, R | Death]]:
    """Each job with its result, as they come, from `count` processes; with a Death if a job killed its process.

    work is a function of a module: it is imported there, once for all processes. An exception in it kills its process.
    Jobs are taken as they are needed. Ending the iteration early ends the processes.
    """
    prepare(work.__module__)
    context = multiprocessing.get_context("forkserver")
    source, again = iter(jobs), deque[J]()
    crew: list[_Worker[J]] = []

    def next_job() -> J | None:
        return again.popleft() if again else next(source, None)

    try:
        while True:
            while len(crew) < count and (job := next_job()) is not None:
                crew.append(_Worker(context, work))
                crew[-1].give(job)
            for worker in crew:
                while len(worker.held) < DEPTH and (job := next_job()) is not None:
                    worker.give(job)
            busy = [worker for worker in crew if worker.held]
            if not busy:
                return
            ready = wait([worker.connection for worker in busy])
            for worker in busy:
                if worker.connection not in ready:
                    continue
                try:
                    result: R = worker.connection.recv()
                except (EOFError, OSError):
                    worker.process.join()  # before `stop` kills it: its own exit status is needed
                    crew.remove(worker)
                    job = worker.held.popleft()
                    again.extend(worker.held)
                    yield job, Death(worker.stop())
                else:
                    yield worker.held.popleft(), result
    finally:
        for worker in crew:
            worker.stop()
