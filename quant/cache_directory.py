"""The directory for compiled kernels and copies of roots in object stores."""

from __future__ import annotations

import os
import stat
import tempfile
from functools import cache
from pathlib import Path


def cache_directory() -> Path:
    """BINADE_CACHE_DIR, else binade/ in XDG_CACHE_HOME or ~/.cache. A user whose home directory does not exist or
    cannot be written, as in containers, has a temporary directory."""
    if chosen := os.environ.get("BINADE_CACHE_DIR"):
        return Path(chosen)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # of pathlib, it may raise RuntimeError
    path = Path(home) / "binade"
    return writable(path) if path.is_absolute() else temporary_cache()


def writable(path: Path) -> Path:
    """This directory, which is made if it does not exist; a temporary one if it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return temporary_cache()
    return path if os.access(path, os.W_OK) else temporary_cache()


@cache
def temporary_cache() -> Path:
    """A directory in the temporary directory that belongs to this user, the same in all processes. What someone else
    may have put there is not used, since compiled code is loaded from it."""
    path = Path(tempfile.gettempdir()) / f"binade-{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            return path
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="binade-"))
