"""Read Parquet files of someone else in a process of its own, whose memory the operating system limits.

A page of a Parquet file says how large it is, and its encodings repeat a value without taking space: a small file may
need any amount of memory, and its metadata may not say so. What this process has read, others can read as well.

    python -m binade.data.exchange.read_tables BYTES < paths, one per line
    stdout   a line for the first file that cannot be read
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from binade.data.exchange.python import package_environment
from binade.data.words.text import describe

MOST_SECONDS = 600


class UnreadableError(ValueError):
    """A file is damaged or takes too much memory."""


def check_readable(paths: Sequence[Path], most: int) -> None:
    """Raise UnreadableError, one line with the file's name, unless each row group of each file can be read with `most`
    bytes of memory."""
    # Each thread and each allocator would reserve address space.
    environment = package_environment() | {"MALLOC_ARENA_MAX": "2", "ARROW_DEFAULT_MEMORY_POOL": "system"}
    command = [sys.executable, "-P", "-m", __name__, str(most)]
    names = "\n".join(map(str, paths)).encode("utf-8", "surrogateescape")
    try:
        done = subprocess.run(
            command, input=names, capture_output=True, env=environment, timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UnreadableError(f"its tables take more than {MOST_SECONDS} seconds to read") from None
    if problem := done.stdout.decode(errors="replace").strip():
        raise UnreadableError(problem)
    if done.returncode:
        raise UnreadableError(f"its tables cannot be read within {most >> 20:,} MiB of memory")


def _read(path: str) -> str:
    """Read a file; returns what is wrong with it, or ""."""
    try:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                file.read_row_group(group, use_threads=False)
    except (MemoryError, pa.ArrowMemoryError):
        return "takes too much memory"
    except (OSError, ValueError, pa.ArrowException) as error:
        return f"cannot be read: {describe(error)[:200]}"
    return ""


def main() -> None:
    data = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[5]) * resource.getpagesize()
    most = data + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in sys.stdin.buffer.read().decode("utf-8", "surrogateescape").splitlines():
        if problem := _read(name):
            place = "/".join(Path(name).parts[-4:])
            print(f"{place} {problem}".encode("ascii", "backslashreplace").decode(), flush=True)
            break
    os._exit(0)  # there is nothing to clean up


if __name__ == "__main__":
    main()
