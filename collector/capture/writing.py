"""Writes a run in the background while training continues: tensor files within a byte budget, then the segment that
names them. One thread works through a queue of tasks, in order.

A tensor's values are copied at once: on a GPU to pinned memory without waiting, and so are the results of a segment,
with one copy. The thread waits for these copies. Callers block once IN_FLIGHT bytes are queued, which bounds the pinned
memory; torch keeps it for the next copies. A failure is raised by the next call.

Ctrl-C can interrupt the training loop between any two instructions of Python, and a lock held at that moment is never
released. The conditions, events and futures of the standard library are written in Python; so the two threads share
only a queue and locks that are acquired and released in C, and variables that only one of them writes.
"""

from __future__ import annotations

import atexit
import hashlib
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread, current_thread, main_thread
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from binade.collector.capture.monitor import Monitor
from binade.collector.capture.reduction import Reduction
from binade.data.exchange.export import Sink
from binade.data.run.columns import TensorRow
from binade.data.run.run_writer import RunWriter
from binade.data.run.segment import write_segment
from binade.data.run.store import encode, write_atomic
from binade.data.words.text import describe as one_line
from binade.quant.later import Later, fetch, fetched_nbytes

# The maximum size of a file beyond its values: torch's zip archive and the description.
OVERHEAD = 1 << 13
# Values waiting to be written; callers that offer more block until there is room.
IN_FLIGHT = 1 << 30

# Rows without files are written together: after this many rows, or once the time since the last write exceeds this
# share of the run's age, at most LONGEST seconds. So a short run shows its rows at once, and the number of segments of
# a long run grows with the logarithm of its time or, if it records much, with its rows.
ROWS = 1000
SHARE, LONGEST = 0.01, 600.0

Description = Callable[[], tuple[dict[str, Any], dict[str, Any]]]  # metadata and tensor_info


@dataclass(frozen=True)
class Pending:
    """A row to be published.

    path      of the file that it names, if any, relative to the run
    row       makes the row once the file is written
    results   that the row is made of
    ring      whether it is kept in the monitor's ring, and only written if a trigger fires
    """

    path: Path | None
    row: Callable[[], TensorRow]
    results: Sequence[Later[Any]] = ()
    ring: bool = False


def _acquired() -> Lock:
    lock = Lock()
    lock.acquire()
    return lock


def _locked(queue: list[tuple[int, Lock]]) -> list[tuple[int, Lock]]:
    """What is not done; the rest is dropped. Backward passes of several devices call this, each in its own thread."""
    for entry in list(queue):
        if not entry[1].locked():
            with suppress(ValueError):  # another thread dropped it
                queue.remove(entry)
    return list(queue)


def _wait_for(entry: tuple[int, Lock]) -> None:
    while entry[1].locked():  # not acquired, which Ctrl-C might leave it
        time.sleep(0.001)


def _raise(error: Exception) -> None:
    raise error


class Writing:
    """The files and segments of one rank of a run, its tensor files within max_bytes in all. The rows of a segment go
    to the sink once it is on the disk; a sink that fails is not used again, with a warning. The monitor sees every row.
    before: the counts of a run that is continued, see `counts`."""

    def __init__(
        self,
        writer: RunWriter,
        max_bytes: int,
        sink: Sink | None = None,
        monitor: Monitor | None = None,
        reduction: Reduction | None = None,
        before: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._writer = writer
        self._max_bytes = max_bytes
        self._sink = sink
        self._monitor = monitor
        self._reduction = reduction
        # Bytes of each queued file, and of each segment's results; a lock that is released once that is done or failed.
        self._queued: list[tuple[int, Lock]] = []
        self._fetched: list[tuple[int, Lock]] = []
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._failures: deque[Exception] = deque()
        # Only the thread writes the following variables.
        self._bytes = before.get("bytes", 0)
        self._published = before.get("tensors", 0)
        self._without_values = before.get("tensors_without_raw", 0)
        self._unnamed: dict[Path, str] = {}  # written, and not in a segment yet: the SHA-256 of each
        self._rows: list[TensorRow] = []  # that wait to be written
        self._began = self._wrote = time.monotonic()
        self._thread = Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()
        atexit.register(self._end)  # without `close`, the queued tasks are still done

    def offer(self, relative: Path, x: Tensor, describe: Description, results: Sequence[Later[Any]] = ()) -> bool:
        """Queue x to be written as <run>/relative; False if it would exceed the budget. results: that the description
        needs. Raises an earlier failure."""
        self._raise()
        nbytes = x.numel() * x.element_size()
        while True:
            queued = _locked(self._queued)
            alone = self._bytes + nbytes + OVERHEAD  # read after the queue: what has left that is counted
            if alone + sum(size + OVERHEAD for size, _ in queued) <= self._max_bytes:
                break
            if not queued or alone > self._max_bytes:
                return False
            _wait_for(queued[0])  # a file that takes less than was reserved for it leaves room for the next
        self._make_room(nbytes)
        copy, arrived = copy_later(x)
        described = fetch(results)
        lock = _acquired()

        def both() -> None:
            arrived()
            described()

        self._tasks.put(lambda: self._file(relative, copy, both, describe, lock))
        self._queued.append((nbytes, lock))
        return True

    def _make_room(self, nbytes: int) -> None:
        """Wait until so many bytes may be in flight, or nothing else is."""
        while waiting := [*_locked(self._queued), *_locked(self._fetched)]:
            if sum(size for size, _ in waiting) + nbytes <= IN_FLIGHT:
                break
            _wait_for(waiting[0])

    def publish(self, pending: Sequence[Pending], **status: Any) -> None:
        """Queue rows, whose files were offered, to be published as a segment, and the run's status to be updated, also
        with `status`. Raises an earlier failure."""
        rows, (arrived, fetched) = list(pending), self._fetch(pending)
        self._tasks.put(lambda: self._segment(rows, arrived, status))
        self._fetched += fetched
        self._raise()

    def publish_reduced(self, iteration: int, pending: Sequence[Pending]) -> None:
        """Queue the rows of a watched step to be reduced over ranks. Each rank calls this for the same steps, and then
        `publish`, which raises any failure."""
        rows, (arrived, fetched) = list(pending), self._fetch(pending)
        self._tasks.put(lambda: self._segment(rows, arrived, {}, iteration))
        self._fetched += fetched

    def _fetch(self, pending: Sequence[Pending]) -> tuple[Callable[[], None], list[tuple[int, Lock]]]:
        """Copy the results of rows, once there is room: a function that waits for them, to be called once, and what to
        add to the queue once it will be called."""
        results = [result for draft in pending for result in draft.results]
        nbytes = fetched_nbytes(results)
        if not nbytes:
            return lambda: None, []
        self._make_room(nbytes)
        try:
            arrived = fetch(results)
        except RuntimeError as refused:  # no memory: the thread that writes says so, with the other ranks served
            arrived = partial(_raise, refused)
        lock = _acquired()

        def once() -> None:
            try:
                arrived()
            finally:
                lock.release()

        return once, [(nbytes, lock)]

    def run(self, task: Callable[[], None]) -> None:
        """Queue a task of the monitor."""
        self._tasks.put(task)

    def settle(self) -> None:
        """Wait until all queued tasks are done and all rows written. Raises a failure that has not been raised."""
        done = _acquired()
        self._tasks.put(self._write)
        self._tasks.put(self._update_status)
        self._tasks.put(done.release)
        done.acquire()
        self._raise()

    @property
    def counts(self) -> dict[str, int]:
        """The counts of the status; valid once `settle` has returned."""
        return {"tensors": self._published, "tensors_without_raw": self._without_values, "bytes": self._bytes}

    def close(self) -> Exception | None:
        """Finish all tasks, delete files that no row names, end the thread. Returns a failure that was not raised."""
        self._end()
        atexit.unregister(self._end)
        return self._failures.popleft() if self._failures else None

    def _end(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _raise(self) -> None:
        """Raise the first failure; later ones are dropped."""
        if self._failures:
            first = self._failures[0]
            self._failures.clear()
            raise first

    # The thread runs the methods below.

    def _work(self) -> None:
        for task in iter(self._tasks.get, None):
            self._attempt(task)
            del task  # it holds the tensor's values
        published = self._published
        self._attempt(lambda: self._take([]))
        self._attempt(self._write)
        unnamed = set(self._unnamed)
        self._attempt(lambda: self._drop(unnamed))
        if unnamed or self._published > published:
            self._attempt(self._update_status)
        self._attempt(lambda: self._send(None))

    def _attempt(self, task: Callable[[], None]) -> bool:
        """Whether the task succeeded; any failure is raised in the training loop later."""
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
            write_atomic(path, content, sweep=False)  # a folder of many files
            self._unnamed[relative] = hashlib.sha256(content).hexdigest()
            self._bytes += len(content)
        finally:
            lock.release()

    def _segment(
        self,
        pending: list[Pending],
        arrived: Callable[[], None],
        status: dict[str, Any],
        watched: int | None = None,
    ) -> None:
        kept = [draft for draft in pending if draft.path is None or draft.path in self._unnamed]
        take = self._take if watched is None else partial(self._take_reduced, watched)
        if not self._attempt(lambda: take(kept, arrived)):
            self._drop({draft.path for draft in kept if draft.path})
        if self._due:
            self._attempt(self._write)
        self._update_status(**status)

    def _update_status(self, **status: Any) -> None:
        self._writer.update(**self.counts, **status)

    def _take(self, kept: list[Pending], arrived: Callable[[], None] = lambda: None) -> None:
        """Make rows, and add those of the monitor's ring if a trigger has fired in the meantime."""
        arrived()
        rows = self._made(kept)
        ring = [row for row, draft in zip(rows, kept, strict=True) if draft.ring]
        self._rows += self._monitor.see(rows, ring) if self._monitor else rows

    def _take_reduced(self, iteration: int, kept: list[Pending], arrived: Callable[[], None]) -> None:
        """Like `_take`, for the rows of a watched step, which do not belong to the ring."""
        rows: list[TensorRow] = []
        try:
            arrived()
            rows = self._made(kept)
            seen = self._monitor.see(rows, []) if self._monitor else rows
            self._rows += seen[: len(seen) - len(rows)]  # what was in the ring
        finally:  # the other ranks wait for this one, and have their own rows
            self._rows += self._reduction(iteration, rows) if self._reduction else rows

    def _made(self, kept: list[Pending]) -> list[TensorRow]:
        rows = [draft.row() for draft in kept]
        named = zip(rows, kept, strict=True)
        return [replace(row, sha256=self._unnamed[draft.path]) if draft.path else row for row, draft in named]

    @property
    def _due(self) -> bool:
        """Whether the pending rows should be written now."""
        now = time.monotonic()
        waited, longest = now - self._wrote, min(SHARE * (now - self._began), LONGEST)
        captured = self._monitor is not None and self._monitor.captured(self._rows)
        return len(self._rows) >= ROWS or waited >= longest or captured or any(row.path for row in self._rows)

    def _write(self) -> None:
        """Write the pending rows as a segment."""
        if not self._rows:
            return
        rows, self._rows = self._rows, []
        self._wrote = time.monotonic()
        named = {Path(row.path) for row in rows if row.path}
        segments, name = self._writer.directory / "segments", self._writer.next_segment_name()
        try:
            write_segment(segments, name, rows)
        except Exception:
            self._drop(named)
            raise
        for relative in named:
            del self._unnamed[relative]
        self._published += len(rows)
        self._without_values += sum(row.path is None for row in rows)
        if monitor := self._monitor:
            self._attempt(lambda: monitor.wrote(segments / name, rows))  # the files of this segment stay
        self._attempt(lambda: self._send(rows))  # a warning may have been made an error

    def _send(self, rows: list[TensorRow] | None) -> None:
        """Send rows to the sink, or close it for None."""
        sink = self._sink
        if sink is None:
            return
        try:
            if rows is None:
                sink.close()
            else:
                sink.write(self._writer.directory, self._writer.rank, rows)
        except Exception as error:
            self._sink = None
            with suppress(Exception):  # the same error again, or a consequence of it
                sink.close(error)
            warnings.warn(
                f"the sink failed and is no longer used: {one_line(error)}; write the data later with binade export",
                stacklevel=2,
            )

    def _drop(self, paths: set[Path]) -> None:
        """Delete files that no row will name."""
        for relative in paths:
            self._unnamed.pop(relative, None)
            with suppress(FileNotFoundError):  # another process deleted it
                path = self._writer.directory / relative
                self._bytes -= path.stat().st_size
                path.unlink()


@contextmanager
def signals_later() -> Iterator[None]:
    """A context that delays SIGINT and SIGTERM until it ends. In Python 3.11, an interrupted Thread.join treats a
    running thread as one that has ended."""
    if current_thread() is not main_thread():  # which alone handles signals
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    caught = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in caught:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def copy_later(x: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """A copy of x on the host, and a function to call before the copy is read."""
    if x.device.type != "cuda":
        return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format), lambda: None
    x = x.detach().contiguous()
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no annotations there
    done.record()
    return pinned, done.synchronize
