"""Results that several threads ask for: computed once, and kept within a bound of bytes while they are used."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
Done = Callable[[int, int], None]
IDLE = 45.0  # seconds after which what nobody asks for is dropped
LOOK = 0.2  # seconds between looks of one who waits


class AbandonedError(Exception):
    """Raised in a computation that nobody waits for any more."""


class Task(Future[Any]):
    """A result, or one that is being computed. steps: (how many are through, of how many), None if it does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: tuple[int, int] | None = None
        self.waiting = 0
        self.nbytes = 0
        self.used = time.monotonic()


class Cache:
    """Keeps results of at most `limit` bytes in all, the least recently used dropped first.

    A key is a version that the result is of, None if it holds for all, and the request. Objects of the types `outside`
    are not counted.
    """

    def __init__(self, limit: int, outside: tuple[type, ...] = ()) -> None:
        self.limit = limit
        self._outside = outside
        self._lock = threading.Lock()
        self._tasks: dict[tuple[Hashable, Hashable], Task] = {}

    @property
    def nbytes(self) -> int:
        with self._lock:
            return sum(task.nbytes for task in self._tasks.values())

    def get(
        self,
        version: Hashable,
        request: Hashable,
        compute: Callable[[Done], T],
        pool: Executor | None = None,
        step: Done | None = None,
    ) -> T:
        """What compute returns, from memory if it is there. However many threads ask at once, one computes: this one,
        or one of the pool's.

        compute takes a function to be called with (steps done, steps in all). The one that waits gets these in its own
        `step`; if that raises, as Streamlit does when a reader goes on, and nobody else waits, the computation ends.
        """
        key = version, request
        while True:
            with self._lock:
                task = self._tasks.pop(key, None)
                is_new = task is None
                task = task or Task()
                self._tasks[key] = task  # as the most recently used
                task.used = time.monotonic()
                task.waiting += 1
            try:
                if is_new and pool:
                    pool.submit(self._compute, key, task, compute)
                elif is_new:
                    self._compute(key, task, compute)
                while step and not task.done():
                    try:
                        task.exception(LOOK)
                    except TimeoutError:
                        step(*task.steps or (0, 1))
                result: T = task.result()
                return result
            except AbandonedError:  # by one who asked for more than this
                if is_new:
                    raise
            finally:
                with self._lock:
                    task.waiting -= 1

    def _compute(self, key: tuple[Hashable, Hashable], task: Task, compute: Callable[[Done], Any]) -> None:
        def done(count: int, of: int) -> None:
            task.steps = count, of
            with self._lock:
                if task.waiting:
                    return
                self._tasks.pop(key, None)  # whoever asks now has it computed again
            raise AbandonedError

        try:
            done(0, 1)  # in a pool it may have waited longer than whoever asked for it
            result = compute(done)
            nbytes = size_of(result, self._outside)
        except BaseException as error:
            with self._lock:
                if self._tasks.get(key) is task:
                    del self._tasks[key]
            task.set_exception(error)
            return
        with self._lock:
            if nbytes > self.limit:
                self._tasks.pop(key, None)
            else:
                task.nbytes = nbytes
            total = sum(each.nbytes for each in self._tasks.values())
            for oldest in list(self._tasks):
                if total <= self.limit:
                    break
                total -= self._tasks[oldest].nbytes
                if self._tasks[oldest].nbytes:
                    del self._tasks[oldest]
        task.set_result(result)

    def expire(self, version: Hashable) -> bool:
        """Drop the results of other versions and those that nobody asked for lately; whether there were any."""
        since, any_old = time.monotonic() - IDLE, False
        with self._lock:
            for key, task in list(self._tasks.items()):
                if task.nbytes and (key[0] not in (None, version) or task.used < since):
                    del self._tasks[key]
                    any_old = True
        return any_old


def give_memory_back() -> None:
    """Free what refers to itself, and return to the system what malloc keeps for later."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
        trim(0)


def size_of(value: object, outside: tuple[type, ...] = ()) -> int:
    """The bytes of an object and of all that it refers to, at least 1. Arrays, tensors and tables count their values,
    classes, functions, modules and objects of the types `outside` nothing."""
    skipped = (type, FunctionType, ModuleType, *outside)
    found, seen, total = [value], set(), 1
    while found:
        each = found.pop()
        if id(each) in seen or isinstance(each, skipped):
            continue
        seen.add(id(each))
        nbytes = getattr(each, "nbytes", None)
        if isinstance(nbytes, int):
            total += nbytes
            if getattr(getattr(each, "dtype", None), "hasobject", False):
                found += np.asarray(each).ravel().tolist()
        else:
            # pandas' tables go through their columns to say how large they are, and so does this.
            total += 64 if hasattr(each, "memory_usage") else sys.getsizeof(each, 64)
            found += gc.get_referents(each)
    return total
