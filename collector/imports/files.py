"""Which files are in a directory, which of them have tensors, and why an import refuses the others."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from binade.collector.errors import ConfigError, raising
from binade.collector.imports.registry import beside, statistics_of
from binade.data.run.directory import RUN_FILE, STATUS_FILE, is_unicode
from binade.data.run.store import SUFFIXES, changed_ns

LEFT_OUT = "left out of "  # starts the reason
RUN = "a run of Binade: copy its directory into the root of the runs"
PICKLE = "a pickle can run code when it is opened, so it is not opened"


@dataclass(frozen=True)
class File:
    """A file as it was found: an absolute path, and a name relative to the imported directory."""

    path: str
    name: str
    size: int
    time_ns: int  # see data.run.store.changed_ns


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


@dataclass(frozen=True)
class Walked:
    """The regular files under a directory in the order of their names, and the refusals of its other entries. source:
    the directory, or the only file; absolute."""

    source: Path
    files: tuple[File, ...]
    refused: tuple[Refusal, ...] = ()


TensorFiles = tuple[list[File], list[Refusal]]  # those to read, and why the others are not


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


def walk(source: Path, root: Path) -> Walked:
    """The files under a directory, or a file itself.

    Links are not followed: targets inside the directory are found anyway. The root of the runs is left out, and so are
    runs. Raises ConfigError for a path that cannot be read.
    """
    source = Path(os.path.expanduser(source)).resolve()
    if not is_unicode(str(source)):
        raise ConfigError("the path is not valid Unicode: rename the file or directory that causes this")
    if not source.is_dir():
        with raising(ConfigError, f"{source} cannot be read", OSError):
            status = os.stat(source)
        return Walked(source, (File(str(source), source.name, status.st_size, changed_ns(status)),))
    files: list[File] = []
    refused: list[Refusal] = []
    ours = str(root.resolve())
    prefix = len(os.path.join(source, ""))

    def refuse(path: str, reason: str) -> None:
        refused.append(Refusal(path[prefix:].encode(errors="backslashreplace").decode() or ".", reason))

    def refuse_listing(error: OSError) -> None:
        refuse(error.filename, f"cannot be listed: {(error.strerror or '').lower()}")

    for directory, below, names in os.walk(str(source), onerror=refuse_listing):
        entries, below[:] = sorted([*below, *names]), []
        if RUN_FILE in names and STATUS_FILE in names:
            if str(source) != ours:
                refuse(directory, RUN)
            continue
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
            elif stat.S_ISLNK(status.st_mode):
                refuse(path, _why_not_followed(path, source))
            elif not stat.S_ISREG(status.st_mode):
                refuse(path, "it is not a regular file")
            else:
                files.append(File(path, path[prefix:], status.st_size, changed_ns(status)))
    return Walked(source, tuple(files), tuple(refused))


def _why_not_followed(path: str, source: Path) -> str:
    try:
        target = Path(os.path.realpath(path, strict=True))
    except OSError:
        return "a symbolic link whose target does not exist, or that points to itself"
    if not target.is_relative_to(source):
        return "a symbolic link out of the directory: links are not followed"
    return "a symbolic link: its target is found separately"


def tensor_files(walked: Walked, apart: Collection[Path] = ()) -> TensorFiles:
    """The files with tensors or their statistics, and the refusals of all others except those that a tool writes next
    to its tensors, and `apart`, absolute paths."""
    files: list[File] = []
    refused = [*walked.refused]
    left = {str(path) for path in apart}
    for file in walked.files:
        if file.path in left:
            continue
        reason = _refusal(file)
        if reason is None:
            files.append(file)
        elif reason:
            refused.append(Refusal(file.name, reason))
    return files, refused


def _refusal(file: File) -> str | None:
    """Why a file is not read, "" if this need not be reported; None for a tensor file."""
    path = Path(file.path)
    if path.suffix in (".pkl", ".pickle"):
        return PICKLE
    if path.suffix not in SUFFIXES and statistics_of(path) is None:
        if (reason := beside(path)) is not None:
            return reason
        return f"not a tensor file, of {', '.join(SUFFIXES)}, and not recognized as a loss log"
    return None if file.size else "it is empty (0 bytes)"
