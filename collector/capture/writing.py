"""What is recorded, written behind the training step: tensor files within a byte budget, then the segment that names
them. One thread does it, in the order in which it was asked for.

A tensor's values are copied at once: on a GPU to pinned memory without waiting; the thread waits for the copy, and for
the statistics that a file or row needs. Who offers faster than the disk takes waits once IN_FLIGHT bytes are on their
way. A failure is raised by the next call.

Ctrl-C can end the training loop between any two steps of Python, and a lock that it leaves taken there is taken for
good. The conditions, events and futures of the standard library are written in Python; so between the two threads there
are only a queue and locks that C takes and gives back, and what one thread alone writes.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import torch
from torch import Tensor

from binade.data.runs import RunWriter
from binade.data.segment import TensorRow, write_segment
from binade.data.store import encode, write_atomic

# What a file takes beyond its values, at most: torch's zip archive and the description.
OVERHEAD = 1 << 13
# Values waiting to be written; who offers more waits until there is room.
IN_FLIGHT = 1 << 30

Description = Callable[[], tuple[dict[str, Any], dict[str, Any]]]  # metadata and tensor_info


@dataclass(frozen=True)
class Pending:
    """A row to come: the file that it names, if any, relative to the run; and what makes it, once that is written."""

    path: Path | None
    row: Callable[[], TensorRow]


def _taken() -> Lock:
    lock = Lock()
    lock.acquire()
    return lock


@dataclass(frozen=True, eq=False)
class _OnWay:
    """Values on their way to a file. `lock` is given back once they are there, or were refused."""

    nbytes: int
    lock: Lock = field(default_factory=_taken)


class Writing:
    """The files and segments of one rank of a run, its tensor files within max_bytes in all."""

    def __init__(self, writer: RunWriter, max_bytes: int) -> None:
        self._writer = writer
        self._max_bytes = max_bytes
        self._on_way: list[_OnWay] = []
        self._asked: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failures: deque[Exception] = deque()
        # The thread's own from here on.
        self._bytes = 0
        self._published = 0
        self._without_values = 0
        self._unnamed: set[Path] = set()  # written, and in no row so far
        self._thread = Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()
        atexit.register(self._end)  # who never closes this is not to lose what was asked for

    def offer(self, relative: Path, x: Tensor, describe: Description) -> bool:
        """Have x written as <run>/relative; False if it would not fit the budget. Raises an earlier failure."""
        self._raise()
        nbytes = x.numel() * x.element_size()
        while True:
            on_way = self._on_way = [each for each in self._on_way if each.lock.locked()]
            on_way_bytes = sum(each.nbytes for each in on_way)
            # A file that takes less than was reserved for it leaves room for the next.
            fits = self._bytes + on_way_bytes + nbytes + (len(on_way) + 1) * OVERHEAD <= self._max_bytes
            if fits and (not on_way or on_way_bytes + nbytes <= IN_FLIGHT):
                break
            if not on_way:
                return False
            on_way.pop(0).lock.acquire()
        copy, arrived = _copy(x)
        own = _OnWay(nbytes)
        self._asked.put(lambda: self._file(relative, copy, arrived, describe, own.lock))
        self._on_way.append(own)
        return True

    def publish(self, pending: Sequence[Pending], **status: Any) -> None:
        """Have the rows whose files were offered published as a segment, and the run's status say so, with what else it
        is to say. Raises an earlier failure."""
        rows = list(pending)
        self._asked.put(lambda: self._segment(rows, status))
        self._raise()

    def settle(self) -> None:
        """Wait until all that was asked for is done. Raises a failure that has not been raised."""
        turn = _taken()
        self._asked.put(turn.release)
        turn.acquire()
        self._raise()

    def close(self) -> Exception | None:
        """Wait for all, delete files that no row names and end the thread; a failure that has not been raised."""
        self._end()
        atexit.unregister(self._end)
        return self._failures.popleft() if self._failures else None

    def _end(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _raise(self) -> None:
        """The first failure speaks for those that followed it."""
        if self._failures:
            first = self._failures[0]
            self._failures.clear()
            raise first

    # In the thread from here on.

    def _work(self) -> None:
        while self._attend():
            pass
        if self._unnamed:
            self._attempt(lambda: self._drop(set(self._unnamed)))
            self._attempt(self._tell)

    def _attend(self) -> bool:
        """Wait for the next thing asked for and do it, if there is more to come; then nothing holds its values."""
        asked = self._asked.get()
        if asked is None:
            return False
        self._attempt(asked)
        return True

    def _attempt(self, task: Callable[[], None]) -> bool:
        """Do it; a failure is carried to the training loop, whatever it is."""
        try:
            task()
        except Exception as error:
            self._failures.append(error)
            return False
        return True

    def _file(self, relative: Path, x: Tensor, arrived: Callable[[], None], describe: Description, lock: Lock) -> None:
        try:
            arrived()
            content = encode(x, *describe())
            path = self._writer.directory / relative
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, content)
            self._unnamed.add(relative)
            self._bytes += len(content)
        finally:
            lock.release()

    def _segment(self, pending: list[Pending], status: dict[str, Any]) -> None:
        kept = [each for each in pending if each.path is None or each.path in self._unnamed]
        named = {each.path for each in kept if each.path}
        if kept and self._attempt(lambda: self._write(kept)):
            self._unnamed -= named
            self._published += len(kept)
            self._without_values += sum(each.path is None for each in kept)
        else:
            self._drop(named)
        self._tell(**status)

    def _tell(self, **status: Any) -> None:
        counts = {"tensors": self._published, "tensors_without_raw": self._without_values, "bytes": self._bytes}
        self._writer.update(**counts, **status)

    def _write(self, kept: list[Pending]) -> None:
        rows = [each.row() for each in kept]
        write_segment(self._writer.directory / "segments", self._writer.next_segment_name(), rows)

    def _drop(self, paths: set[Path]) -> None:
        """Delete files that no row will name."""
        for relative in paths:
            self._unnamed.discard(relative)
            with suppress(FileNotFoundError):  # somebody deleted it first
                path = self._writer.directory / relative
                self._bytes -= path.stat().st_size
                path.unlink()


def _copy(x: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """x on the host in memory of its own, and what to call before it is read."""
    if x.device.type != "cuda":
        return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format), lambda: None
    x = x.detach().contiguous()
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotations there
    done.record()
    return pinned, done.synchronize
