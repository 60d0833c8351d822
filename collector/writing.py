"""Tensor files written behind the training step: copied at once, encoded and written by a thread, within a byte budget.

On a GPU the copy goes to pinned memory without waiting; the thread waits for it. What a file says of its tensor may be
fetched from the GPU, so that is asked for in the thread too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.store import encode, write_atomic

# What a file takes beyond its values, at most: torch's zip archive and the description.
OVERHEAD = 1 << 13
# Values waiting to be written; who offers more waits until there is room.
IN_FLIGHT = 1 << 30

Description = Callable[[], tuple[dict[str, Any], dict[str, Any]]]  # metadata and tensor_info


class TensorFiles:
    """The tensor files of one rank under `directory`. `bytes` is what those written so far take, at most max_bytes."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.bytes = 0
        self.offered: set[Path] = set()  # since the last `forget`
        self.lost: set[Path] = set()  # could not be written
        self._left = max_bytes
        self._room = threading.Condition()
        self._in_flight = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensor-files")
        self._waiting: dict[Path, tuple[Future[int], int]] = {}  # the file's size to come, and what is reserved for it

    def offer(self, relative: Path, x: Tensor, describe: Description) -> bool:
        """Have x written as directory/relative; False if it would not fit the budget. Raises OSError if an earlier file
        could not be written."""
        nbytes = x.numel() * x.element_size()
        reserved = nbytes + OVERHEAD
        if reserved > self._left or any(future.done() for future, _ in self._waiting.values()):
            self._collect(wait=reserved > self._left)
        if reserved > self._left:
            return False
        with self._room:
            self._room.wait_for(lambda: not self._in_flight or self._in_flight + nbytes <= IN_FLIGHT)
            self._in_flight += nbytes
        copy, wait = _copy(x)
        self._left -= reserved
        self.offered.add(relative)
        self._waiting[relative] = self._thread.submit(self._write, relative, copy, wait, describe), reserved
        return True

    def _write(self, relative: Path, x: Tensor, wait: Callable[[], None], describe: Description) -> int:
        """In the thread: one file; its size."""
        try:
            wait()
            content = encode(x, *describe())
            path = self.directory / relative
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, content)
            return len(content)
        finally:
            with self._room:
                self._in_flight -= x.numel() * x.element_size()
                self._room.notify_all()

    def _collect(self, *, wait: bool) -> None:
        """Count the files that are written, or wait for all. Raises the first new failure."""
        failure: OSError | None = None
        for relative, (future, reserved) in list(self._waiting.items()):
            if not (wait or future.done()):
                break  # they are written in order
            size = 0
            try:
                size = future.result()
            except OSError as error:
                self.lost.add(relative)
                failure = failure or error
            del self._waiting[relative]
            self.bytes += size
            self._left += reserved - size
        if failure:
            raise failure

    def settle(self) -> None:
        """Wait until all that was offered is written. Raises OSError if a file could not be, once; it is in `lost`."""
        self._collect(wait=True)

    def forget(self, named: set[Path]) -> None:
        """After `settle`: keep the named files, delete the others that were offered since the last time."""
        for relative in self.offered - named:
            path = self.directory / relative
            if path.exists():
                self.bytes -= path.stat().st_size
                path.unlink()
        self.offered.clear()

    def close(self) -> None:
        self._thread.shutdown()


def _copy(x: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """x on the host in memory of its own, and what to call before it is read."""
    if x.device.type != "cuda":
        return x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format), lambda: None
    x = x.detach().contiguous()
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return pinned, done.synchronize
