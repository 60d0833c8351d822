"""What is recorded, written behind the training step: tensor files within a byte budget, then the segment that names
them. One thread does it, in the order in which it was asked for.

A tensor's values are copied at once: on a GPU to pinned memory without waiting; the thread waits for the copy, and for
the statistics that a file or row needs. Who offers faster than the disk takes waits once IN_FLIGHT bytes are on their
way. A failure is raised by the next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.runs import RunWriter
from data.segment import TensorRow, write_segment
from data.store import encode, write_atomic

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


class Writing:
    """The files and segments of one rank of a run, its tensor files within max_bytes in all."""

    def __init__(self, writer: RunWriter, max_bytes: int) -> None:
        self._writer = writer
        self._left = max_bytes
        self._changed = threading.Condition()  # guards all below
        self._in_flight = 0
        self._bytes = 0
        self._published = 0
        self._without_values = 0
        self._unnamed: set[Path] = set()  # offered, and in no row so far
        self._lost: set[Path] = set()  # could not be written
        self._failure: Exception | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._files: list[Future[None]] = []

    def offer(self, relative: Path, x: Tensor, describe: Description) -> bool:
        """Have x written as <run>/relative; False if it would not fit the budget. Raises an earlier failure."""
        self._raise()
        nbytes = x.numel() * x.element_size()
        reserved = nbytes + OVERHEAD
        if reserved > self._left:
            self._await_files()  # which took less than was reserved
        with self._changed:
            if reserved > self._left:
                return False
            self._changed.wait_for(lambda: not self._in_flight or self._in_flight + nbytes <= IN_FLIGHT)
            self._in_flight += nbytes
            self._left -= reserved
            self._unnamed.add(relative)
        copy, wait = _copy(x)
        self._files = [file for file in self._files if not file.done()]
        self._files.append(self._thread.submit(self._file, relative, copy, wait, describe))
        return True

    def publish(self, pending: Sequence[Pending], **status: Any) -> None:
        """Have the rows whose files were offered published as a segment, and the run's status say so, with what else it
        is to say. Raises an earlier failure."""
        self._thread.submit(self._segment, list(pending), status)
        self._raise()

    def settle(self) -> None:
        """Wait until all that was asked for is done. Raises a failure that has not been raised."""
        self._thread.submit(lambda: None).result()
        self._raise()

    def close(self) -> Exception | None:
        """Wait for all, delete files that no row names and end the thread; a failure that has not been raised."""
        self._thread.shutdown()
        self._drop(self._unnamed)
        failure, self._failure = self._failure, None
        return failure

    def _raise(self) -> None:
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failure = self._failure or error

    def _await_files(self) -> None:
        for file in self._files:
            file.result()
        self._files.clear()

    # In the thread from here on.

    def _file(self, relative: Path, x: Tensor, wait: Callable[[], None], describe: Description) -> None:
        size = 0
        nbytes = x.numel() * x.element_size()
        try:
            wait()
            content = encode(x, *describe())
            path = self._writer.directory / relative
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, content)
            size = len(content)
        except Exception as error:  # carried to the training loop, whatever it is
            self._fail(error)
            self._lost.add(relative)
        finally:
            with self._changed:
                self._bytes += size
                self._left += nbytes + OVERHEAD - size
                self._in_flight -= nbytes
                self._changed.notify_all()

    def _segment(self, pending: list[Pending], status: dict[str, Any]) -> None:
        kept = [each for each in pending if each.path not in self._lost]
        named = {each.path for each in kept if each.path}
        try:
            if kept:
                rows = [each.row() for each in kept]
                write_segment(self._writer.directory / "segments", self._writer.next_segment_name(), rows)
        except Exception as error:  # carried to the training loop, whatever it is
            self._fail(error)
            self._drop(named)
            kept = []
        with self._changed:
            self._unnamed -= named
        self._published += len(kept)
        self._without_values += sum(each.path is None for each in kept)
        try:
            counts = {"tensors": self._published, "tensors_without_raw": self._without_values, "bytes": self._bytes}
            self._writer.update(**counts, **status)
        except OSError as error:
            self._fail(error)

    def _drop(self, paths: set[Path]) -> None:
        """Delete files that no row will name."""
        for relative in paths:
            path = self._writer.directory / relative
            if relative in self._lost or not path.exists():  # who offered it was interrupted before it was asked for
                continue
            size = path.stat().st_size
            path.unlink()
            with self._changed:
                self._bytes -= size
                self._left += size


def _copy(x: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """x on the host in memory of its own, and what to call before it is read."""
    if x.device.type != "cuda":
        return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format), lambda: None
    x = x.detach().contiguous()
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return pinned, done.synchronize
