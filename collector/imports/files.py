"""Which files of a directory an import reads, and why it refuses the others."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from binade.collector.errors import ConfigError
from binade.collector.imports.registry import beside, statistics_of
from binade.data.runs import is_unicode
from binade.data.store import SUFFIXES, changed_ns

LEFT_OUT = "left out of "  # starts the reason
PICKLE = "a pickle can run code when it is opened, so it is not opened"


@dataclass(frozen=True)
class File:
    """A tensor file as it was found: an absolute path, and a name relative to the imported directory."""

    path: str
    name: str
    size: int
    time_ns: int  # see data.store.changed_ns


@dataclass(frozen=True)
class Refusal:
    """A file, or one tensor or statistic of it, that was not imported."""

    file: str
    reason: str
    key: str | None = None

    @property
    def is_left_out(self) -> bool:
        """Whether it is a statistic that is left out on purpose, of a file that was read."""
        return self.reason.startswith(LEFT_OUT)

    @property
    def line(self) -> str:
        return f"{self.file}{f' [{self.key}]' if self.key else ''}: {self.reason}"


Walked = tuple[list[File], list[Refusal]]


def checked(source: Path, root: Path) -> Path:
    """The absolute path of a directory to import into this root. Raises ConfigError."""
    source = Path(os.path.expanduser(source))
    if not os.path.exists(source):
        raise ConfigError(f"there is no directory {source}: give one that contains tensor logs")
    if not os.path.isdir(source):
        raise ConfigError(f"{source} is not a directory of tensor logs")
    source = source.resolve()
    if not is_unicode(str(source)):
        raise ConfigError(
            "the directory's name is not valid Unicode: rename it or the parent directory that causes this"
        )
    if source == root.resolve():
        raise ConfigError(f"{source} is the root of the runs, which are indexed already: give a directory of logs")
    return source


def walk(source: Path, root: Path, apart: Collection[Path] = ()) -> Walked:
    """The tensor files under a directory in the order of their names, and the refusals of all other files except those
    that a tool writes next to its tensors, and `apart`, absolute paths.

    Links are not followed: targets inside the directory are found anyway. The root of the runs is left out.
    """
    files: list[File] = []
    refused: list[Refusal] = []
    ours = str(root.resolve())
    left = {str(path) for path in apart}
    prefix = len(os.path.join(source, ""))

    def refuse(path: str, reason: str) -> None:
        refused.append(Refusal(path[prefix:].encode(errors="backslashreplace").decode() or ".", reason))

    def refuse_listing(error: OSError) -> None:
        refuse(error.filename, f"cannot be listed: {(error.strerror or '').lower()}")

    for directory, below, names in os.walk(str(source), onerror=refuse_listing):
        entries, below[:] = sorted([*below, *names]), []
        for entry in entries:
            path = os.path.join(directory, entry)
            try:
                status = os.lstat(path)
            except OSError as error:
                refuse(path, (error.strerror or "cannot be accessed").lower())
                continue
            if not is_unicode(entry):
                refuse(path, "its name is not valid Unicode")
            elif stat.S_ISDIR(status.st_mode):
                if path != ours:
                    below.append(entry)
            elif path in left:
                continue
            elif (reason := _refusal(path, status, source)) is not None:
                if reason:
                    refuse(path, reason)
            else:
                files.append(File(path, path[prefix:], status.st_size, changed_ns(status)))
    return files, refused


def _refusal(path: str, status: os.stat_result, source: Path) -> str | None:
    """Why an entry other than a directory is not read, "" if this need not be reported; None for a tensor file."""
    if stat.S_ISLNK(status.st_mode):
        try:
            target = Path(os.path.realpath(path, strict=True))
        except OSError:
            return "a symbolic link whose target does not exist, or that points to itself"
        if not target.is_relative_to(source):
            return "a symbolic link out of the directory: links are not followed"
        return "a symbolic link: its target is found separately"
    if not stat.S_ISREG(status.st_mode):
        return "it is not a regular file"
    suffix = os.path.splitext(path)[1]
    if suffix in (".pkl", ".pickle"):
        return PICKLE
    if suffix not in SUFFIXES and statistics_of(Path(path)) is None:
        if (reason := beside(Path(path))) is not None:
            return reason
        return f"not a tensor file: expected {', '.join(SUFFIXES)}"
    return None if status.st_size else "it is empty (0 bytes)"
