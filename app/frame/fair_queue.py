"""Threads that compute for the sessions of a server in turn: one task of a session at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any

SESSION: ContextVar[str] = ContextVar("session", default="")  # the browser session that this thread draws for


class FairQueue(Executor):
    """An executor that runs at most one task per SESSION of the thread that submits it, and at most `workers` in all.
    Sessions take turns, so that a user waits for at most one task of each other user."""

    def __init__(self, workers: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(workers, name)
        self._lock = threading.Lock()
        self._free = workers
        self._waiting: dict[str, deque[Callable[[], object]]] = {}  # in the order of their turns
        self._running: set[str] = set()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def task() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            self._waiting.setdefault(SESSION.get(), deque()).append(task)
            self._start()
        return future

    def _start(self) -> None:
        """Start what may start. The caller holds the lock."""
        for session in [candidate for candidate in self._waiting if candidate not in self._running][: self._free]:
            task = self._waiting[session].popleft()
            if not self._waiting[session]:
                del self._waiting[session]
            self._running.add(session)
            self._free -= 1
            self._pool.submit(partial(self._run, session, task))

    def _run(self, session: str, task: Callable[[], object]) -> None:
        try:
            task()
        finally:
            with self._lock:
                self._running.discard(session)
                self._free += 1
                if session in self._waiting:
                    self._waiting[session] = self._waiting.pop(session)  # behind the others
                self._start()
