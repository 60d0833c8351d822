"""C++ implementations: built with the machine's compiler if that is worthwhile, kept in the user's cache, run on
torch's threads.

A build takes about a second. It is kept in BINADE_CACHE_DIR, by default binade/ in XDG_CACHE_HOME or ~/.cache, where
later processes find it. A unit is built only for a tensor of BUILD_AT values, or after the slower implementation has
processed BUILD_AFTER values, which takes as long as a build. Without a compiler, the slower implementations do all the
work, after one warning.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread

import torch

from binade.quant.cache_directory import cache_directory, writable
from binade.quant.memory import address

log = logging.getLogger(__name__)

# Strict IEEE arithmetic: contraction off; the two -fno options change errno and trap flags only, never a value. Loops
# that may add in a different order are marked with a pragma.
STRICT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fopenmp-simd", *STRICT)

BUILD_AT = 1 << 22
BUILD_AFTER = 1 << 25
# The smallest number of values that is worth another thread.
PER_THREAD = 1 << 16
PAGE = 1 << 21  # bytes of a huge page
MADV_HUGEPAGE = 14


@dataclass(frozen=True)
class Unit:
    """A source file of this package and the macros, as NAME=VALUE, of one build."""

    source: str
    macros: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        name = "-".join((Path(self.source).stem, *(macro.partition("=")[2] for macro in self.macros)))
        return directory() / f"{name}-{_stamp(self.source)}.so"


class BuildError(RuntimeError):
    """There is no C++ compiler, or the compilation failed."""


_lock = Lock()
_loaded: dict[Unit, ctypes.CDLL | None] = {}
_worked: dict[Unit, int] = {}


def built(unit: Unit, values: int | None = None) -> ctypes.CDLL | None:
    """A unit, loaded, or built if `values` more values are worth a build (None: always).

    None if a build is not worth it or fails.
    """
    if unit in _loaded:
        return _loaded[unit]
    with _lock:
        if unit in _loaded:
            return _loaded[unit]
        if values is not None and not unit.path.exists():
            _worked[unit] = _worked.get(unit, 0) + values
            if values < BUILD_AT and _worked[unit] < BUILD_AFTER:
                return None
        try:
            _loaded[unit] = _load(unit)
        except (BuildError, OSError) as error:
            if None not in _loaded.values():
                log.warning("working on the CPU without compiled kernels, several times slower: %s", error)
            _loaded[unit] = None
        return _loaded[unit]


def _load(unit: Unit) -> ctypes.CDLL:
    if not unit.path.exists():
        _build(unit)
    return ctypes.CDLL(str(unit.path))


def _build(unit: Unit) -> None:
    executable = compiler()
    if executable is None:
        raise BuildError("no C++ compiler was found (CXX, c++, g++ or clang++)")
    source, path = Path(__file__).with_name(unit.source), unit.path
    aside = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
    # Not every compiler knows these options. GCC prefers half vectors on processors that have vectors of 512 bits.
    for native in (["-march=native", "-mprefer-vector-width=512"], ["-march=native"], []):
        command = [executable, *FLAGS, *native, *(f"-D{macro}" for macro in unit.macros), str(source), "-o", str(aside)]
        result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        if result.returncode == 0:
            aside.replace(path)
            return
    raise BuildError(f"{executable} failed: {result.stderr.strip()[:200]}")


def compiler() -> str | None:
    """The first C++ compiler that is installed, CXX first; None without one."""
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))), None)


@cache
def _stamp(source: str) -> str:
    """A hash of the source, the options and the processor, for which -march=native builds."""
    processor = platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    content = Path(__file__).with_name(source).read_bytes()
    return hashlib.sha256(content + " ".join(FLAGS).encode() + processor.encode()).hexdigest()[:16]


@cache
def directory() -> Path:
    """The directory of the builds; a temporary one if it is not writable."""
    return writable(cache_directory())


@cache
def _helpers(count: int, process: int) -> SimpleQueue[Callable[[], None]]:
    """A queue of tasks for `count` new threads of this process. The process id is needed because a fork inherits no
    threads."""
    tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
    for _ in range(count):
        Thread(target=_help, args=(tasks,), name="quant", daemon=True).start()
    return tasks


def _help(tasks: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        tasks.get()()


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """torch.empty_like, in huge pages where Linux has them, as NumPy does it: a page fault for every 4 KiB takes longer
    than rounding what they hold."""
    y = torch.empty_like(x)
    at = address(y)
    start, end = -(-at // PAGE) * PAGE, (at + y.nbytes) // PAGE * PAGE
    if end > start and sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_HUGEPAGE)
    return y


def share_out(items: int, per_item: int, part: Callable[[int, int], None]) -> None:
    """Call part(first, last) for all of `items`, of per_item values each, on as many threads as torch may use and the
    work is worth. Raises the first exception of a part.

    Ctrl-C may end this at any step. SimpleQueue, written in C, then stays consistent; the standard library's futures
    may not.
    """
    threads = max(1, min(torch.get_num_threads(), items * per_item // PER_THREAD))
    cuts = [items * i // threads for i in range(threads + 1)]
    done: SimpleQueue[Exception | None] = SimpleQueue()

    def attempt(first: int, last: int) -> None:
        try:
            part(first, last)
        except Exception as error:  # raised again below, in the caller's thread
            done.put(error)
        else:
            done.put(None)

    if threads > 1:
        tasks = _helpers(torch.get_num_threads() - 1, os.getpid())
        for first, last in pairwise(cuts[1:]):
            tasks.put(partial(attempt, first, last))
    attempt(*cuts[:2])
    failures = [error for _ in range(threads) if (error := done.get())]
    if failures:
        raise failures[0]
