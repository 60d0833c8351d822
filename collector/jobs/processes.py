"""Unique identification of processes: by number, start time, and the boot of the machine.

The kernel reuses the numbers of processes that have ended. No signal is sent to a process whose start time differs from
the recorded one.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil
from pydantic.dataclasses import dataclass

from binade.data.run.directory import boot as boot
from binade.data.run.json_files import STRICT, Pid
from binade.data.run.run_writer import RUN_VARIABLE
from binade.data.run.store import process_start


@dataclass(frozen=True, config=STRICT)
class Process:
    """pid_started is in clock ticks since the boot."""

    pid: Pid
    pid_started: float

    @property
    def alive(self) -> bool:
        return process_start(self.pid) == self.pid_started

    def send(self, signum: signal.Signals) -> None:
        """Send a signal if this is still the same process."""
        handle = None
        with suppress(OSError):  # Linux before 5.3, and some containers, have none
            # A number that was compared may have been reused when it is signalled. A handle stays valid.
            handle = os.pidfd_open(self.pid)
        try:
            if self.alive:
                with suppress(ProcessLookupError, PermissionError):
                    if handle is None:
                        os.kill(self.pid, signum)
                    else:
                        signal.pidfd_send_signal(handle, signum)
        finally:
            if handle is not None:
                os.close(handle)

    @classmethod
    def of(cls, pid: int) -> Process | None:
        started = process_start(pid)
        return None if started is None else cls(pid, started)

    @classmethod
    def current(cls) -> Process:
        process = cls.of(os.getpid())
        assert process
        return process


@cache
def host() -> str:
    return socket.gethostname()


def marked(directory: Path) -> set[Process]:
    """All live processes that were started for the queued run of this directory, regardless of what started them and of
    their session."""
    processes, real = set(), os.path.realpath(directory)  # by whatever link its root was named
    for entry in psutil.process_iter():
        try:
            carries = entry.environ().get(RUN_VARIABLE) == real
        except psutil.Error:  # it has ended, or belongs to another user
            continue
        if carries and entry.pid != os.getpid() and (process := Process.of(entry.pid)):
            processes.add(process)
    return processes


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed for lack of memory since boot; 0 if unknown."""
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        with suppress(OSError):
            if match := re.search(r"^oom_kill (\d+)$", Path(path).read_text(encoding="utf-8"), re.MULTILINE):
                return int(match[1])
    return 0
