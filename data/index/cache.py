"""Results that several threads request: computed once, and kept within a limit of bytes while they are used."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future
from contextvars import copy_context
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
Done = Callable[[int, int], None]
IDLE = 45.0  # seconds after which unused results are dropped
LOOK = 0.2  # seconds between checks of a waiting thread


class AbandonedError(Exception):
    """Raised in a computation whose result nobody waits for any more."""


class CachedTask(Future[Any]):
    """A result, or one that is being computed. steps: (steps done, steps in all), None if unknown."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: tuple[int, int] | None = None
        self.waiting = 0
        self.nbytes = 0
        self.used = time.monotonic()


class ResultCache:
    """Keeps results of at most `limit` bytes in all, the least recently used dropped first.

    A key consists of the version that the result is for (None for all versions) and the request. Objects of the types
    `outside` are not counted.
    """

    def __init__(self, limit: int, outside: tuple[type, ...] = ()) -> None:
        self.limit = limit
        self._outside = outside
        self._lock = threading.Lock()
        self._tasks: dict[tuple[Hashable, Hashable], CachedTask] = {}

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
        """The result of compute, from memory if it is there. If several threads ask at once, only one computes: this
        one, or one of the pool.

        compute takes a function to be called with (steps done, steps in all). A waiting thread gets these in its own
        `step`; if that raises, as Streamlit does when a user leaves the page, and nobody else waits, the computation
        ends.
        """
        key = version, request
        while True:
            with self._lock:
                task = self._tasks.pop(key, None)
                is_new = task is None
                task = task or CachedTask()
                self._tasks[key] = task  # as the most recently used
                task.used = time.monotonic()
                task.waiting += 1
            try:
                if is_new and pool:
                    pool.submit(copy_context().run, self._compute, key, task, compute)
                elif is_new:
                    self._compute(key, task, compute)
                while step and not task.done():
                    try:
                        task.exception(LOOK)
                    except TimeoutError:
                        step(*task.steps or (0, 1))
                result: T = task.result()
                return result
            except AbandonedError:  # the computation was part of a larger request
                if is_new:
                    raise
            finally:
                with self._lock:
                    task.waiting -= 1

    def _compute(self, key: tuple[Hashable, Hashable], task: CachedTask, compute: Callable[[Done], Any]) -> None:
        def done(count: int, of: int) -> None:
            task.steps = count, of
            with self._lock:
                if task.waiting:
                    return
                self._tasks.pop(key, None)  # the next request computes it again
            raise AbandonedError

        try:
            done(0, 1)  # in a pool, it may have started only after the caller gave up
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
            total = sum(task.nbytes for task in self._tasks.values())
            for oldest in list(self._tasks):
                if total <= self.limit:
                    break
                total -= self._tasks[oldest].nbytes
                if self._tasks[oldest].nbytes:
                    del self._tasks[oldest]
        task.set_result(result)

    def expire(self, version: Hashable) -> bool:
        """Drop the results of other versions and those that were not requested recently. Returns whether there were
        any."""
        since, any_old = time.monotonic() - IDLE, False
        with self._lock:
            for key, task in list(self._tasks.items()):
                if task.nbytes and (key[0] not in (None, version) or task.used < since):
                    del self._tasks[key]
                    any_old = True
        return any_old


def release_memory() -> None:
    """Collect reference cycles, and return the memory that malloc keeps to the system."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
        trim(0)


def size_of(value: object, outside: tuple[type, ...] = ()) -> int:
    """The bytes of an object and of everything that it refers to, at least 1. Arrays, tensors and tables count their
    values; classes, functions, modules and objects of the types `outside` do not count."""
    skipped = (type, FunctionType, ModuleType, *outside)
    referents, seen, total = [value], set(), 1
    while referents:
        referent = referents.pop()
        if id(referent) in seen or isinstance(referent, skipped):
            continue
        seen.add(id(referent))
        nbytes = getattr(referent, "nbytes", None)
        if isinstance(nbytes, int):
            total += nbytes
            if getattr(getattr(referent, "dtype", None), "hasobject", False):
                referents += np.asarray(referent).ravel().tolist()
        else:
            # pandas goes through a table's columns to find out its size, and so does this function.
            total += 64 if hasattr(referent, "memory_usage") else sys.getsizeof(referent, 64)
            referents += gc.get_referents(referent)
    return total
