"""Atomic writes of files and directories, and of tensor files.

A tensor file is {"tensor", "tensor_info", "metadata"} in torch's zip format. It loads with torch.load(path,
weights_only=True, mmap=True) in any script; here, `data.run.tensor_files` reads it. torch is imported only to write a
tensor, so that queries of the index need not wait for it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from torch import Tensor


MOST_BYTES = 256 << 20  # of a file that is read as a whole
SUFFIXES = (
    ".pt",
    ".pth",
    ".bin",
    ".ckpt",
    ".safetensors",
    ".npy",
    ".npz",
)  # of the tensor files that other tools write
MOST_TEXT = 1 << 20  # of a recipe or settings that a person writes
LINK = "a symbolic link, which is not followed"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
WITH_LOCKS = {"lustre": "mount it with -o flock", "nfs": "mount it with NFS 4, or start its lock service (rpc.statd)"}
HOST = re.sub(r"[^\w-]", "_", socket.gethostname())  # a root may be on a disk that several machines share
# The temporary name of a file or directory that is written or deleted: see `_new_name`.
LEFT = re.compile(r"\..+\.(?P<host>[\w-]+)\.[0-9a-f]+\.(?P<suffix>part|gone)", re.DOTALL)
ABANDONED = 86400.0  # seconds
SWEPT = 3  # folders below a root that may have leftovers: RUN/tensors/QUANT_TYPE


class TensorFileError(ValueError):
    """A tensor file is missing, truncated or invalid. The message says which."""

    exit_status = 1


def regular(path: str, flags: int, folder: int | None = None) -> int:
    """The opener of `open` for files that others may have created. OSError for a FIFO or device, which may block.
    folder: the descriptor of the directory that the path is relative to."""
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return descriptor


def inside(base: Path) -> Callable[[str, int], int]:
    """An opener of `open` for the files of a directory that others may have filled. A path that leads out of it, a
    symbolic link below it, and what is not a regular file raise OSError. `base` itself may be a link."""

    def opener(path: str, flags: int) -> int:
        *folders, name = Path(path).relative_to(base).parts
        if ".." in folders:
            raise OSError(errno.EINVAL, f"not in {base}", path)
        folder = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for place in folders:
                below = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
                os.close(folder)
                folder = below
            return regular(name, flags | os.O_NOFOLLOW, folder)
        except OSError as error:
            reason = LINK if error.errno == errno.ELOOP else error.strerror
            raise OSError(error.errno, reason, path) from None
        finally:
            os.close(folder)

    return opener


def is_inside(base: Path, path: str) -> bool:
    """Whether `inside` opens this path, which is relative to the directory."""
    try:
        os.close(inside(base)(str(base / path), os.O_RDONLY))
    except (OSError, ValueError):
        return False
    return True


def no_link(path: str, flags: int) -> int:
    """The opener `inside` of the file's folder."""
    return inside(Path(path).parent)(path, flags)


def read_file(path: Path, most: int = MOST_BYTES, base: Path | None = None, start: int = 0) -> bytes:
    """The content of a regular file from the byte `start` on. base: the directory below which no link is followed, None
    for a file that a user has named. Raises OSError, also for a file that has more than `most` bytes from there on."""
    with open(path, "rb", opener=inside(base) if base else regular) as file:
        if os.fstat(file.fileno()).st_size - start > most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        file.seek(start)
        content = file.read(most + 1)
    if len(content) > most:  # it grows
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def append_to(path: Path) -> FileIO:
    """A log that is open for appending, without a buffer. Raises OSError, also for a link."""
    return open(path, "ab", buffering=0, opener=no_link)


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """The text of a file that a user has named: a regular file of at most `most` bytes, in UTF-8. Raises OSError,
    UnicodeDecodeError."""
    return read_file(path, most).decode()


def check_regular(path: Path) -> None:
    """Raise OSError unless the file is a regular one that can be read: a library would wait for a FIFO, and read a
    device without end."""
    os.close(regular(str(path), os.O_RDONLY))


def _new_name(path: Path, suffix: str) -> Path:
    """An unused hidden name in the same folder, of at most 255 bytes."""
    return path.with_name(f".{path.name[:40]}.{HOST}.{secrets.token_hex(8)}.{suffix}")


@contextmanager
def _created(path: Path, create: Callable[[Path], int]) -> Iterator[tuple[Path, int]]:
    """A temporary file or directory in the same folder as `path`, and its descriptor. It is locked while the descriptor
    is open, so that `delete_left` leaves it alone. A name with the PID would not be unique: the threads of a process
    share it, and it is often the same in containers."""
    while True:
        part = _new_name(path, "part")
        descriptor = create(part)
        try:
            with suppress(OSError):  # on a file system without locks, nothing is deleted as a leftover either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if part.exists():  # else `delete_left` came before the lock
                yield part, descriptor
                return
        finally:
            os.close(descriptor)


def _create_file(part: Path) -> int:
    return os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # EXCL: no link is followed


def _create_directory(part: Path) -> int:
    part.mkdir(parents=True)
    return os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextmanager
def temporary_file(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file in the same folder as `path`, and its temporary name. At the end, that name is deleted. Raises
    OSError."""
    with _created(path, _create_file) as (part, descriptor):
        try:
            with open(descriptor, "wb", closefd=False) as file:
                yield part, file
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def staged_file(path: Path, *, sweep: bool = True) -> Iterator[BinaryIO]:
    """Write a file under a temporary name in the same folder, flush it to the disk, and rename it: a reader sees the
    old content or the new, never a part. If the block raises, nothing is left behind. Processes and threads may write
    the same file at the same time: the last one wins. With sweep, leftovers of killed processes that wrote the same
    file are deleted first, which lists the folder. Raises OSError."""
    if sweep:
        sweep_beside(path)
    with temporary_file(path) as (part, file):
        yield file
        file.flush()
        os.fsync(file.fileno())
        os.replace(part, path)


@contextmanager
def staging_directory(path: Path) -> Iterator[Path]:
    """An empty directory in the same folder as `path`, so that files in it can be renamed to `path`. At the end it is
    deleted, and so are parent folders that were created for it, unless they are no longer empty. Raises OSError."""
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        with _created(path, _create_directory) as (part, _):
            try:
                yield part
            finally:
                shutil.rmtree(part, ignore_errors=True)
    finally:
        with suppress(OSError):  # not empty
            for folder in made:
                folder.rmdir()


@contextmanager
def staged_directory(path: Path) -> Iterator[Path]:
    """Fill a directory under a temporary name in the same folder, and rename it. If the block raises, nothing is left
    behind. Raises OSError."""
    with staging_directory(path) as part:
        yield part
        os.rename(part, path)


def process_start(pid: int) -> float | None:
    """When a live process started, in clock ticks since boot; None if there is none, or it is a zombie. (psutil's
    create_time depends on the wall clock, which may change.)"""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None
    fields = stat.rpartition(")")[2].split()
    state, threads, started = fields[0], int(fields[17]), float(fields[19])
    # A process whose first thread has ended is called a zombie although the others still run.
    return None if state == "Z" and threads < 2 else started


@contextmanager
def locked(directory: Path, options: int = fcntl.LOCK_EX, *, required: bool = True) -> Iterator[None]:
    """Lock a directory without leaving a lock file in it, also against other threads. Raises OSError, which says what
    to do if the file system has no locks; if they are not required, the block then runs without one."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, options)
        except OSError as error:
            if error.errno in NO_LOCKS and required:
                raise OSError(error.errno, _no_locks(directory), str(directory)) from error
            if error.errno not in NO_LOCKS:
                raise
        yield
    finally:
        os.close(descriptor)


def _no_locks(directory: Path) -> str:
    kind = file_system(directory)
    remedy = next(
        (words for name, words in WITH_LOCKS.items() if kind.startswith(name)), "use a file system that has them"
    )
    return f"its file system ({kind}) has no file locks: {remedy}"


def file_system(path: Path) -> str:
    """The type of a path's file system, as mount names it; "unknown" if /proc does not say."""
    resolved, kinds = path.resolve(), {}
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            before, _, after = line.partition(" - ")
            place = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), before.split()[4])
            if resolved.is_relative_to(place):
                kinds[len(place)] = after.split()[0]  # a later mount hides an earlier one
    return kinds[max(kinds)] if kinds else "unknown"


def sweep_beside(path: Path) -> None:
    """Delete what killed processes left behind when they wrote or deleted `path`. See `sweep`."""
    sweep(path.parent, f".{path.name[:40]}.")


def sweep(folder: Path, start: str = ".") -> None:
    """Delete the temporary files and directories in a folder whose names start like this and that killed processes left
    behind, and what is left of interrupted deletions.

    What a process still writes is locked, and stays. Since another machine may not see that lock, what its processes
    write also stays until nothing in it has changed for ABANDONED seconds."""
    try:
        names = os.listdir(folder)
    except OSError:  # a folder that does not exist or cannot be listed has nothing to delete
        return
    for name in names:
        if name.startswith(start) and (left := LEFT.fullmatch(name)):
            with suppress(OSError):  # it is gone by now
                ours = left["host"] == HOST or left["suffix"] == "gone"
                if ours or time.time() - _last_change(folder / name) > ABANDONED:
                    delete_left(folder / name)


def sweep_tree(folder: Path, depth: int = SWEPT) -> None:
    """`sweep` a folder and those in it, down to the folders of a run's tensors. Links are not followed."""
    sweep(folder)
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries if depth else ():
            if entry.is_dir(follow_symlinks=False):
                sweep_tree(folder / entry.name, depth - 1)


def _last_change(path: Path) -> float:
    """When a file, or anything in a directory, was last written. Raises OSError."""
    return max(os.lstat(each).st_mtime for each in (path, *path.rglob("*")))


def delete_left(left: Path) -> None:
    """Delete a temporary file or directory, or what is left of a deletion, unless a process is still at it or it cannot
    be locked."""
    with suppress(OSError):
        if left.is_symlink():  # a link that was to be deleted
            return left.unlink()
        directory = left.is_dir()
        access = os.O_RDONLY if directory else os.O_RDWR  # NFS locks no file that is open for reading
        descriptor = os.open(left, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if directory:
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()
        finally:
            os.close(descriptor)


@contextmanager
def _moving_aside(path: Path) -> Iterator[Path]:
    """Rename a file or directory to a hidden name. It is locked during the block, so that `sweep` leaves it alone, if
    it is neither a link nor locked by someone else. Raises OSError."""
    aside = _new_name(path, "gone")
    with ExitStack() as stack:
        with suppress(OSError):  # what cannot be opened or locked may be moved all the same
            access = os.O_RDWR if path.is_file() else os.O_RDONLY
            descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(path, aside)
        yield aside


def remove_directory(path: Path) -> None:
    """Delete a directory: it disappears at once under its name, then its content is deleted. So are leftovers of killed
    processes beside it. Of a symbolic link, only the link is deleted. Raises OSError."""
    sweep(path.parent)
    with _moving_aside(path) as gone:
        if gone.is_symlink():
            gone.unlink()
        else:
            _delete_tree(gone)


def _delete_tree(path: Path) -> None:
    """Delete a directory, which another process may be deleting as well. Raises OSError."""
    while path.exists():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


def write_atomic(path: Path, content: bytes | memoryview, *, sweep: bool = True) -> None:
    """Replace a file as `staged_file` does."""
    with staged_file(path, sweep=sweep) as file:
        file.write(content)


def write_new(path: Path, content: bytes) -> None:
    """Write a file that does not exist yet; it appears complete. Raises FileExistsError, OSError."""
    sweep_beside(path)
    with temporary_file(path) as (part, file):
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        os.link(part, path)


def encode(tensor: Tensor, metadata: dict[str, Any], tensor_info: dict[str, Any]) -> memoryview:
    """The content of a tensor file.

    The tensor is stored contiguous, on the CPU, in a storage of its own: for a view, only its own values are stored.
    """
    import torch

    values = tensor.detach()
    whole = (
        values.device.type == "cpu" and values.is_contiguous() and values.untyped_storage().nbytes() == values.nbytes
    )
    if not whole:
        values = values.to("cpu", copy=True, memory_format=torch.contiguous_format)
    buffer = io.BytesIO()
    torch.save({"tensor": values, "tensor_info": tensor_info, "metadata": metadata}, buffer)
    return buffer.getbuffer()


def save_state(state: dict[str, Any], file: BinaryIO) -> None:
    """torch.save. Raises the OSError of a file that cannot be written, such as that of a full disk; torch raises an
    error about its own position in the file instead."""
    import torch

    try:
        torch.save(state, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=1 << 14)
def _digest(path: Path, state: tuple[int, ...]) -> str:
    return sha256(path)


def changed_ns(status: os.stat_result) -> int:
    """When a file last changed, in nanoseconds: the later of its two times, since tools such as rsync set the first."""
    return max(status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class FileState:
    """The content of a file: its SHA-256, and with which size in bytes and time (`changed_ns`) it has it."""

    sha256: str
    size: int
    time_ns: int


def check_content(path: Path, expected: str, known: FileState | None = None) -> None:
    """Raise TensorFileError if the file has another SHA-256. A file is read once per process, and again if its size or
    time has changed; not at all if it has those of `known`. Raises OSError."""
    now = os.stat(path)
    if known == FileState(expected, now.st_size, changed_ns(now)):
        return
    digest = _digest(path, (now.st_dev, now.st_ino, now.st_size, changed_ns(now)))
    if digest != expected:
        raise TensorFileError(f"it is damaged: it has SHA-256 {digest[:12]}…, expected {expected[:12]}…")
