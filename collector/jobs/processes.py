"""Processes told apart for good: a number together with the moment it started, on one boot of one machine.

A number is given to another process once its owner is gone. Nothing here signals a process whose start differs from the
one that was recorded.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from binade.data.runs import process_start

MARK = "BINADE_JOB"  # in the environment of every process of a job, and of what these start


@dataclass(frozen=True)
class Process:
    """started is in clock ticks since the boot."""

    pid: int
    started: float

    @property
    def alive(self) -> bool:
        return process_start(self.pid) == self.started

    def send(self, signum: signal.Signals) -> None:
        """Signal it, if it is still the same process: the handle is taken before its start is compared."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return
        try:
            if self.alive:
                with suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(handle, signum)
        finally:
            os.close(handle)

    @classmethod
    def of(cls, pid: int) -> Process | None:
        started = process_start(pid)
        return None if started is None else cls(pid, started)


@cache
def boot() -> str:
    """Which boot of the machine this is: process numbers and starts mean nothing on another."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@cache
def host() -> str:
    return socket.gethostname()


def marked(token: str) -> set[Process]:
    """The live processes that carry this mark, whoever started them and whatever session they live in."""
    wanted = f"{MARK}={token}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # gone, or another user's
            continue
        if wanted in environment and (process := Process.of(int(entry.name))):
            found.add(process)
    return found


def living(processes: Iterable[Process]) -> set[Process]:
    return {process for process in processes if process.alive}


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed for memory here, ever; 0 where it does not tell."""
    for path in ("/proc/vmstat", "/sys/fs/cgroup/memory.events"):
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.strip().isdecimal():
                return int(count)
    return 0
