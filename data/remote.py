"""Roots in an object store, s3://BUCKET/FOLDER: a read-only copy of their small files, which is opened like any root.

The copy is a folder of BINADE_CACHE_DIR, by default ~/.cache/binade, and holds the index too. `sync` brings the
runs and their segments up to date: a file is fetched again when its size or time differs. A segment appears whole, once
every file that its manifest names is in the store. Tensor files are fetched when they are first opened, and the least
recently used are deleted beyond KEPT bytes. Beyond COPIES bytes of all copies, those that no process has open are
deleted when another root is opened, the least recently used first.

Credentials and the endpoint come from the environment alone, as boto3 and the AWS command line read them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from binade.data.json_files import read_json
from binade.data.runs import RunError, is_address, is_unicode, resolve_root, run_names
from binade.data.segment import MANIFEST, Manifest
from binade.data.store import TensorFileError, locked, read_file, staging_directory, sweep, write_atomic
from binade.data.text import describe
from binade.quant.cache_directory import cache_directory

ADDRESS = ".address"  # the file of a copy that names what it is a copy of
EXPECTED = re.compile(r"s3://([A-Za-z0-9][A-Za-z0-9.-]{1,62})((?:/(?!\.{1,2}(?:/|$))[^/\0?]+)*)/*")
# What is copied of a run: its files, and those of its folders. Everything else stays in the store.
RUN_FILES = re.compile(r"(run|status|notes|parity)\.json|(loss|events|twin|effects)\.jsonl|log\.txt")
RANK_FILES = re.compile(r"rank\d+\.json")
SEGMENT_FILES = re.compile(r"[a-z]+\.parquet|manifest\.json|files\.jsonl")
SESSIONS, SESSION_FILES = ".sessions", re.compile(r"\d+\.json")
PLAIN = re.compile(r"[^./\0][^/\0]*")  # the name of a folder that is copied
LONGEST, LONGEST_KEY = 255, 4096  # bytes of a file's name, and of an address
TENSORS = "tensors"
KEPT = 16 << 30  # bytes of tensor files
COPIES = 64 << 30  # bytes of all copies
THREADS = 16
RECENT = 2.0  # seconds: a store reports times in whole seconds, so recent files may change unnoticed
PAUSE = 20  # pause between synchronizations, as a multiple of the duration of the last one: requests cost money
PIECE = 1 << 20
REASONS = {
    "NO_SUCH_BUCKET": "there is no such bucket",
    **dict.fromkeys(
        ("ACCESS_DENIED", "INVALID_ACCESS_KEY_ID", "SIGNATURE"),
        "access was denied: check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or AWS_PROFILE",
    ),
    "NETWORK_CONNECTION": "the server cannot be reached: check AWS_ENDPOINT_URL and the network",
}


def readable_root(given: str | os.PathLike[str] | None = None) -> Path:
    """As `resolve_root`; of an address in an object store the copy, up to date. Raises RunError."""
    named = given or os.environ.get("TENSOR_SAVE_DIR")
    if not is_address(named):
        return resolve_root(given)
    root = Mirror.at(str(named)).root
    refresh(root)
    return root


def is_mirror(root: Path) -> bool:
    """Whether a root is a copy of one in an object store. A copy that was moved out of the cache no longer is: runs
    added to it must stay."""
    try:
        return root.parent.name == _key(read_file(root / ADDRESS, LONGEST_KEY).decode())
    except (OSError, ValueError):
        return False


def refresh(root: Path) -> None:
    """Bring a root up to date if it is a copy, unless it was just updated. Raises RunError."""
    if is_mirror(root):
        _of(root).refresh()


def fetched(path: Path) -> Path:
    """The path of a tensor file, fetched first if its root is a copy. A file that is not in the store is missing in the
    copy, too. Raises TensorFileError."""
    path = Path(os.path.normpath(path))
    root = next(filter(is_mirror, path.parents), None)
    if root is not None:
        try:
            _of(root).fetch(path)
        except OSError as error:
            raise TensorFileError(f"{path.name} cannot be fetched: {_reason(error)}") from error
    return path


_mirrors: dict[Path, Mirror] = {}
_opening = threading.Lock()


def _of(root: Path) -> Mirror:
    with _opening:
        if root not in _mirrors:
            _mirrors[root] = Mirror((root / ADDRESS).read_text(encoding="utf-8"), root)
        return _mirrors[root]


def _drop_unused(opened: Path) -> None:
    """Delete the copies that no process has open, the least recently used first, until all take COPIES bytes."""
    with suppress(OSError):  # files come and go, since others use their copies at the same time
        copies = sorted(opened.parent.iterdir(), key=lambda copy: os.stat(copy).st_mtime_ns)
        sizes = {copy: sum(file.lstat().st_size for file in copy.rglob("*")) for copy in copies}
        for copy in copies[:-1]:
            if sum(sizes.values()) > COPIES:
                with suppress(OSError), locked(copy, fcntl.LOCK_EX | fcntl.LOCK_NB):
                    shutil.rmtree(copy)
                    del sizes[copy]


def _endpoint() -> str:
    """The address of the server, empty for AWS. Raises RunError for an invalid address."""
    name = "AWS_ENDPOINT_URL_S3" if os.environ.get("AWS_ENDPOINT_URL_S3") else "AWS_ENDPOINT_URL"
    given = os.environ.get(name, "")
    if given and not re.fullmatch(r"https?://(\[[0-9A-Fa-f:]+\]|[\w.-]+)(:\d{1,5})?/?", given):
        raise RunError(f"{name} is not the address of a server: expected http://HOST:PORT or https://HOST")
    return given


def _key(address: str) -> str:
    """The name of the folder with the copy of an address. Raises RunError as `_endpoint`."""
    return hashlib.sha256(f"{_endpoint()}\0{address}".encode()).hexdigest()[:16]


class Mirror:
    """The copy of an address. Threads and processes may share it."""

    def __init__(self, address: str, root: Path) -> None:
        from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

        self.address, self.root = address, root
        self._prefix = address.removeprefix("s3://")
        server = urlsplit(_endpoint())
        where: dict[str, Any] = {"endpoint_override": server.netloc, "scheme": server.scheme} if server.netloc else {}
        retries = AwsStandardS3RetryStrategy(max_attempts=3)
        self._store = S3FileSystem(retry_strategy=retries, connect_timeout=10, request_timeout=60, **where)
        self._due = 0.0
        self._syncing, self._fetching = threading.Lock(), threading.Lock()
        self._held = ExitStack()  # as long as this process has the copy open, nobody deletes it
        self._held.enter_context(locked(root.parent, fcntl.LOCK_SH))

    @classmethod
    def at(cls, address: str) -> Mirror:
        """The copy of an address, empty at first. Raises RunError for one that is not of the form s3://BUCKET/FOLDER,
        and if the cache cannot be written."""
        if not (match := EXPECTED.fullmatch(address)) or not is_unicode(address) or len(address.encode()) > LONGEST_KEY:
            raise RunError(
                "expected s3://BUCKET/FOLDER as the address of a root; credentials and the endpoint come from the "
                "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_PROFILE, AWS_ENDPOINT_URL)"
            )
        address = f"s3://{match[1]}{match[2]}"
        cache = cache_directory() / "roots"
        root = (cache / _key(address) / address.rpartition("/")[2]).absolute()
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache):  # or another process could delete the copy before it is open
                root.parent.mkdir(mode=0o700, exist_ok=True)
                root.mkdir(exist_ok=True)
                if not is_mirror(root):
                    write_atomic(root / ADDRESS, address.encode())  # others may be reading it
                os.utime(root.parent)
                mirror = _of(root)
                _drop_unused(root.parent)
            return mirror
        except OSError as error:
            raise RunError(
                f"the cache of {address} cannot be written: {describe(error)}; choose another folder with "
                "BINADE_CACHE_DIR"
            ) from error

    def refresh(self) -> None:
        """`sync`, unless the last one was too recent. Raises RunError."""
        with self._syncing:
            start = time.monotonic()
            if start >= self._due:
                self.sync()
                self._due = time.monotonic() + PAUSE * (time.monotonic() - start)

    def sync(self) -> None:
        """Fetch new files of the runs and drop runs that no longer exist. Raises RunError; the runs are then unchanged
        or partly updated, and each segment is complete."""
        try:
            with locked(self.root):
                sweep(self.root, ".")
                with staging_directory(self.root / "sync") as staging, _threads() as files:
                    self._sync(_Staged(self, staging, files))
        except OSError as error:
            raise RunError(f"{self.address} cannot be read: {_reason(error)}") from error

    def _sync(self, staged: _Staged) -> None:
        try:
            names = [info.base_name for info in self.listed("") if not info.is_file]
        except FileNotFoundError:
            raise RunError(f"{self.address} does not exist: expected s3://BUCKET/FOLDER of a folder of runs") from None
        runs = {name for name in names if PLAIN.fullmatch(name)}
        for gone in set(run_names(self.root)) - runs:
            staged.remove(self.root / gone)
        with _threads() as pool:
            for done in [pool.submit(self._sync_run, name, staged) for name in sorted(runs)]:
                done.result()
        staged.finish()
        sessions = self._by_folder(SESSIONS, SESSION_FILES) if SESSIONS in names else {}
        for gone in set(run_names(self.root / SESSIONS)) - sessions.keys():
            staged.remove(self.root / SESSIONS / gone)
        for folder, infos in sessions.items():
            staged.update(infos, self.root / SESSIONS / folder, SESSION_FILES)

    def _sync_run(self, run: str, staged: _Staged) -> None:
        """Fetches the status before the segments are listed, since segments are published before the status counts
        them."""
        directory = self.root / run
        here = self.listed(run)
        folders = {info.base_name for info in here if not info.is_file}
        staged.update(here, directory, RUN_FILES)
        if "ranks" in folders:
            staged.update(self.listed(f"{run}/ranks"), directory / "ranks", RANK_FILES)
        segments = self._by_folder(f"{run}/segments", SEGMENT_FILES) if "segments" in folders else {}
        (directory / "segments").mkdir(exist_ok=True)
        for gone in {path.name for path in (directory / "segments").iterdir()} - segments.keys():
            staged.remove(directory / "segments" / gone)
        for segment, infos in segments.items():
            staged.segment(infos, directory / "segments" / segment)

    def listed(self, folder: str, recursive: bool = False) -> list[Any]:
        """The files and folders of a folder, each a pyarrow.fs.FileInfo; none if it does not exist, unless it is the
        root. Those whose names are too long for a file system are left out. Raises OSError."""
        from pyarrow.fs import FileSelector

        place = f"{self._prefix}/{folder}" if folder else self._prefix
        infos: list[Any] = self._store.get_file_info(FileSelector(place, bool(folder), recursive))
        return [info for info in infos if all(len(name.encode()) <= LONGEST for name in info.path.split("/"))]

    def _by_folder(self, place: str, kept: re.Pattern[str]) -> dict[str, list[Any]]:
        """The files with such names in each folder of a folder."""
        folders: dict[str, list[Any]] = defaultdict(list)
        for info in self.listed(place, recursive=True):
            folder, _, name = str(info.path).removeprefix(f"{self._prefix}/{place}/").rpartition("/")
            if info.is_file and PLAIN.fullmatch(folder) and kept.fullmatch(name):
                folders[folder].append(info)
        return folders

    def download(self, info: Any, target: Path) -> None:
        """Download a file of the store, with its modification time. Raises OSError; FileNotFoundError if it was deleted
        meanwhile."""
        with self._store.open_input_stream(info.path) as source, open(target, "wb") as file:
            shutil.copyfileobj(source, file, PIECE)
        os.utime(target, ns=(info.mtime_ns, info.mtime_ns))

    def fetch(self, path: Path) -> None:
        """Fetch a tensor file unless it is already in the copy, or is not in the store. Raises OSError."""
        run, *places = path.relative_to(self.root).parts
        if not PLAIN.fullmatch(run) or places[:1] != [TENSORS] or "\0" in str(path):
            return  # a row may name any file: only its values are fetched, never an index or a segment
        with self._fetching:
            with suppress(FileNotFoundError):
                os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))  # so that others are deleted first
                return
            info = self._store.get_file_info(f"{self._prefix}/{path.relative_to(self.root).as_posix()}")
            if not info.is_file:
                return
            self._make_room(info.size)
            path.parent.mkdir(parents=True, exist_ok=True)
            with staging_directory(self.root / "fetch") as staging:
                self.download(info, staging / path.name)
                os.replace(staging / path.name, path)

    def _make_room(self, size: int) -> None:
        files = []
        for file in self.root.glob(f"*/{TENSORS}/**/*"):
            with suppress(FileNotFoundError):  # another process made room
                if stat.S_ISREG((status := os.stat(file)).st_mode):
                    files.append((status, file))
        total = size + sum(status.st_size for status, _ in files)
        for status, file in sorted(files, key=lambda pair: pair[0].st_atime_ns):
            if total <= KEPT:
                break
            file.unlink(missing_ok=True)
            total -= status.st_size


@contextmanager
def _threads() -> Iterator[ThreadPoolExecutor]:
    """Threads that start no new task once the block ends, also by an exception or Ctrl-C."""
    pool = ThreadPoolExecutor(THREADS)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class _Staged:
    """Files that are written to `staging`, a folder of the copy, and renamed to their places; deleted files are first
    moved there. Threads share it; files are fetched by those of the pool."""

    def __init__(self, mirror: Mirror, staging: Path, files: ThreadPoolExecutor) -> None:
        self._mirror, self._staging, self._files = mirror, staging, files
        self._started: list[Future[None]] = []

    def new(self) -> Path:
        return self._staging / secrets.token_hex(8)

    def remove(self, path: Path) -> None:
        os.rename(path, self.new())

    def update(self, infos: Iterable[Any], directory: Path, kept: re.Pattern[str]) -> None:
        """Make the files of a folder with such names equal to those in the store."""
        directory.mkdir(parents=True, exist_ok=True)
        wanted = {info.base_name: info for info in infos if info.is_file and kept.fullmatch(info.base_name)}
        for path in directory.iterdir():
            if path.name not in wanted and kept.fullmatch(path.name):
                path.unlink()
        for info in wanted.values():
            if not _is_same(directory / info.base_name, info, RECENT):
                part = self.new()
                try:
                    self._mirror.download(info, part)
                except FileNotFoundError:
                    continue
                os.replace(part, directory / info.base_name)

    def segment(self, infos: list[Any], place: Path) -> None:
        """Start to fetch a segment, unless it is already in the copy or not yet complete in the store."""
        names = {info.base_name for info in infos}
        same = place.is_dir() and names == {path.name for path in place.iterdir()}
        if not (same and all(_is_same(place / info.base_name, info) for info in infos)):
            self._started.append(self._files.submit(self._segment, infos, place))

    def _segment(self, infos: list[Any], place: Path) -> None:
        part = self.new()
        part.mkdir()
        try:
            for info in sorted(infos, key=lambda info: info.base_name != MANIFEST):
                self._mirror.download(info, part / info.base_name)
                if info.base_name == MANIFEST and not _is_complete(part / MANIFEST, infos):
                    return
        except FileNotFoundError:  # it was merged into another
            return
        if place.exists():
            self.remove(place)
        os.rename(part, place)

    def finish(self) -> None:
        """Wait until every segment is in its place. Raises OSError."""
        for done in self._started:
            done.result()


def _reason(error: OSError) -> str:
    return next((reason for word, reason in REASONS.items() if f"AWS Error {word}" in str(error)), describe(error))


def _is_same(path: Path, info: Any, since: float = 0) -> bool:
    """Whether a file is the same as in the store. since: seconds that must have passed from its change until it was
    fetched."""
    try:
        here = os.stat(path)
    except FileNotFoundError:
        return False
    unchanged = here.st_size == info.size and here.st_mtime_ns == info.mtime_ns
    return unchanged and here.st_ctime - here.st_mtime >= since


def _is_complete(manifest: Path, infos: Iterable[Any]) -> bool:
    """Whether the store has the files of a manifest. A damaged manifest is reported when the rows are read."""
    try:
        written = read_json(Manifest, manifest).files
    except (OSError, ValueError):
        return True
    return written.keys() <= {info.base_name for info in infos}
