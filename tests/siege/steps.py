"""Kills a process before its n-th change of the file system, for each n: what is not a matter of chance is tried once.

An audit hook of Python counts the changes, so that what C++ writes (the index) counts as one step with what follows it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

CHANGES = frozenset({"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate", "os.symlink"})
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def killed_before(step: int, task: Callable[[], object]) -> bool:
    """Run a task in a fork of this process that is killed before its change number `step`, from 0. Whether it was; else
    the task ended before. AssertionError if the task raises."""
    child = os.fork()
    if not child:
        _end(step, task)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "the task raised an exception: see its traceback on stderr"
    return False


def _end(step: int, task: Callable[[], object]) -> None:
    seen = -1

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES
        if event in CHANGES or (writes and not str(arguments[0]).startswith(("/dev/", "/proc/"))):
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)

    status = 1
    try:
        sys.addaudithook(watch)
        task()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        os._exit(status)


def steps(task: Callable[[], object], every: int = 1) -> Iterator[int]:
    """Kill the task before each of its changes, or each `every`-th one, until it comes to its end. Between two kills
    the caller restores what the task works on."""
    step = 0
    while killed_before(step, task):
        yield step
        step += every
    yield step
