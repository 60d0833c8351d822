"""Import: index the tensor logs that other tools wrote, where they lie. Nothing is copied, nothing of them executed.

An import is a run of kind "import". Importing the same directory again goes on with the same run: files that are known
by path, size and time of change are left alone, those that changed are imported anew, those that were refused are tried
again. Each segment lists the files whose rows it holds (files.jsonl) and appears with them at once, so that whatever is
killed, and when, no file is indexed twice or half.

Files are read by processes of their own (see workers): a hostile or broken one can kill its reader, not the import.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from binade.collector.imports.logs import Log, interpret
from binade.collector.imports.workers import Death, scatter
from binade.collector.training.config import ConfigError
from binade.collector.training.memory import available_host_memory
from binade.data.access import check_writable
from binade.data.foreign import SUFFIXES, ForeignTensor, TooLargeError, opened
from binade.data.runs import CANCELLED, DONE, FAILED, IMPORT, RUNNING, RunError, RunWriter, is_unicode, list_runs
from binade.data.segment import Identity, Origin, TensorRow, drop_rows, segment_names, write_segment
from binade.data.store import TensorFileError, write_atomic
from binade.data.text import describe
from binade.quant.formats import FORMATS
from binade.quant.metrics import score
from binade.quant.summary import summarize

Say = Callable[[str], None]
Progress = Callable[[int, int], None]  # files done, of how many

ROWS_A_SEGMENT = 256
SECONDS_A_SEGMENT = 5.0
SCORE_BYTES = 28  # that scoring takes, for each element, at its peak
SMALL = 1 << 25  # a smaller file is read without asking whether there is memory for it
SHARE = 0.8  # of the free memory may be used
PICKLE = "a pickle can run any code when it is opened: it never is"


@dataclass(frozen=True)
class Job:
    """A file to read: path is absolute, name relative to the imported directory. room: see `data.foreign.opened`; alone
    says that no other file is read meanwhile, so that there will not be more room later."""

    number: int
    path: str
    name: str
    size: int
    mtime_ns: int
    run_id: str
    scores: tuple[str, ...]
    room: int | None = None
    alone: bool = False


@dataclass(frozen=True)
class Refusal:
    """A file, or one tensor of it, that was not imported."""

    file: str
    reason: str
    key: str | None = None

    @property
    def line(self) -> str:
        return f"{self.file}{f' [{self.key}]' if self.key else ''}: {self.reason}"


@dataclass(frozen=True)
class Read:
    """What came of a file. later: there was no memory for it beside the others."""

    rows: list[TensorRow] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    version: str | None = None
    later: bool = False


@dataclass(frozen=True)
class Entry:
    """A line of files.jsonl: an imported file and its tensors."""

    file: str
    size: int
    mtime_ns: int
    tensors: tuple[str, ...]
    version: str | None
    refused: tuple[tuple[str, str], ...] = ()  # keys of it, with reasons


@dataclass(frozen=True)
class Imported:
    """What an import came to: tensors and files added, files that were known, files added by version, and what was
    refused."""

    run_id: str
    directory: Path
    tensors: int
    files: int
    known: int
    bytes: int
    by_version: dict[str, int]
    refused: list[Refusal]
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether there were files and not one could be used."""
        return bool(self.refused) and not (self.files or self.known)


def read_file(job: Job) -> Read:
    """The rows of one file; what cannot be used is refused with a reason. Runs in a process of its own."""
    torch.set_num_threads(1)
    rows, refused, version = [], [], None
    try:
        with opened(Path(job.path), job.room) as tensors:
            for number, found in enumerate(tensors):
                if found.tensor is None or found.dtype is None:
                    refused.append(Refusal(job.name, found.refused or "it has no tensor", found.key))
                    continue
                log = interpret(Path(job.path), found.metadata, found.key)
                version = log.version
                tensor_id = f"f{job.number:07d}" + (f"-{number}" if found.key is not None else "")
                rows.append(_row(job, tensor_id, found, found.tensor, found.dtype, log))
    except TooLargeError as error:
        return Read(refused=[Refusal(job.name, str(error))], later=not job.alone)
    except TensorFileError as error:
        return Read(refused=[Refusal(job.name, str(error))])
    except MemoryError:
        return Read(refused=[Refusal(job.name, "there is not enough memory to read it")], later=not job.alone)
    return Read(rows, refused, version)


def _row(job: Job, tensor_id: str, found: ForeignTensor, x: Tensor, dtype: str, log: Log) -> TensorRow:
    notes = [*log.corrections, *([found.note] if found.note else [])]
    axis = log.contracted_axis
    if axis is not None and -axis > x.dim():
        axis = None
    needed = x.numel() * SCORE_BYTES
    scores = job.scores
    if scores and job.room is not None and needed > job.room:
        if not job.alone:
            raise TooLargeError(f"scoring it takes {needed / 2**30:.1f} GiB")
        scores = ()
        notes.append(
            f"Not scored: that takes about {needed / 2**30:.1f} GiB, and {max(job.room, 0) / 2**30:.1f} GiB of memory "
            "were free."
        )
    words = {name: getattr(log, name) for name in Identity.__annotations__ if hasattr(log, name)}
    return TensorRow(
        tensor_id=tensor_id,
        run_id=job.run_id,
        identity=Identity(model=None, size=None, dataset=None, recipe=None, **words),
        captured=log.captured,
        shape=tuple(x.shape),
        dtype=dtype,
        nbytes=x.numel() * (8 if dtype == "float64" else x.element_size()),
        path=job.path,
        contracted_axis=axis,
        summary=summarize(x),
        scores={name: score(x, name, -1 if axis is None else axis) for name in scores},
        shard=None,
        origin=Origin(log.version, log.original_quant_type, log.stage, tuple(notes), found.key),
    )


def import_logs(
    source: Path,
    root: Path,
    *,
    scores: tuple[str, ...] = (),
    workers: int | None = None,
    say: Say,
    progress: Progress = lambda done, total: None,
    command: str = "",
) -> Imported:
    """Index every tensor file under source in a run of root.

    scores   formats to try on every tensor: along the axis that its GEMM contracts, the last where that is not known
    workers  processes; None for one a core

    Raises ConfigError if source is no directory, UnknownFormatError, RunError if root cannot be written or the same
    import is running; later OSError or KeyboardInterrupt, with the run marked accordingly and what was imported kept.
    """
    start = time.monotonic()
    source = _checked(source, root)
    scores = tuple(dict.fromkeys(FORMATS[name].name for name in scores))
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers is {workers}: it must be 1 or more")
    found, refused = walk(source, root)
    if not (found or refused):
        return Imported("", root, 0, 0, 0, 0, {}, [], time.monotonic() - start)
    config = {"kind": IMPORT, "source": str(source), "scores": list(scores), "command": command}
    with _locked(root, config) as writer, open(writer.directory / "log.txt", "ab", buffering=0) as log:

        def tell(line: str) -> None:
            log.write(f"{time.strftime('%H:%M:%S')} {line}\n".encode())
            say(line)

        try:
            task = _Import(writer, scores, workers or len(os.sched_getaffinity(0)), refused, tell, progress)
            task.run(found)
        except BaseException as error:
            if writer.status.state == RUNNING:  # not even begun
                writer.finish(FAILED, str(error))
            with suppress(OSError):  # a full disk must not hide what happened
                log.write(f"{time.strftime('%H:%M:%S')} ended early: {type(error).__name__}: {error}\n".encode())
            raise
    return task.result(time.monotonic() - start)


def _checked(source: Path, root: Path) -> Path:
    source = Path(os.path.expanduser(source))
    if not os.path.exists(source):
        raise ConfigError(f"there is no directory {source}: give one that holds tensor logs")
    if not os.path.isdir(source):
        raise ConfigError(f"{source} is not a directory: give the one that holds the tensor logs")
    source = source.resolve()
    if not is_unicode(str(source)):
        raise ConfigError("the directory's name is not valid Unicode: rename it, or one above it")
    if source == root.resolve():
        raise ConfigError(f"{source} is the root of the runs, which are indexed already: give a directory of logs")
    return source


@dataclass(frozen=True)
class File:
    """A tensor file as it was found; name is relative to the imported directory."""

    path: str
    name: str
    size: int
    mtime_ns: int


def walk(source: Path, root: Path) -> tuple[list[File], list[Refusal]]:
    """The tensor files under a directory, in the order of their names, and all else with the reason why it is none.

    Links are not followed: what they lead to in the directory is found by itself, the rest lies out of it. The root of
    the runs is passed over.
    """
    files: list[File] = []
    refused: list[Refusal] = []
    stack = [str(source)]
    ours = str(root.resolve())
    prefix = len(os.path.join(source, ""))
    while stack:
        directory = stack.pop()
        below = []
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except OSError as error:
            refused.append(
                Refusal(_shown(directory[prefix:] or "."), f"cannot be listed: {(error.strerror or '').lower()}")
            )
            continue
        for entry in entries:
            name = entry.path[prefix:]
            try:
                name.encode()
                status = entry.stat(follow_symlinks=False)
                reason = _no_file(entry, status, source)
            except UnicodeEncodeError:
                reason = "its name is not valid Unicode"
            except OSError as error:
                reason = (error.strerror or "cannot be looked at").lower()
            else:
                if stat.S_ISDIR(status.st_mode):
                    if entry.path != ours:
                        below.append(entry.path)
                    continue
            if reason:
                refused.append(Refusal(_shown(name), reason))
            else:
                files.append(File(entry.path, name, status.st_size, status.st_mtime_ns))
        stack.extend(reversed(below))
    return files, refused


def _shown(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


def _no_file(entry: os.DirEntry[str], status: os.stat_result, source: Path) -> str | None:
    """Why an entry is not to be read; None for a tensor file and for a directory."""
    if stat.S_ISLNK(status.st_mode):
        return _link(entry.path, source)
    if stat.S_ISDIR(status.st_mode):
        return None
    if not stat.S_ISREG(status.st_mode):
        return "it is no regular file"
    suffix = os.path.splitext(entry.name)[1]
    if suffix in (".pkl", ".pickle"):
        return PICKLE
    if suffix not in SUFFIXES:
        return f"not a tensor file: {', '.join(SUFFIXES)} are read"
    return None if status.st_size else "it is empty (0 bytes)"


def _link(path: str, source: Path) -> str:
    try:
        target = Path(os.path.realpath(path, strict=True))
    except OSError:
        return "a symbolic link that leads nowhere, or to itself"
    if not target.is_relative_to(source):
        return "a symbolic link out of the directory: links are not followed"
    return "a symbolic link: what it leads to is found by itself"


@contextmanager
def _locked(root: Path, config: dict[str, Any]) -> Iterator[RunWriter]:
    """The run of this import, found or made, and held by this process alone."""
    check_writable("recording a run")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _flock(root):
            known = [run for run in list_runs(root)[0] if _same_import(run.config, config)]
            if known:
                directory = known[-1].directory
            else:
                label = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(config["source"]).name).strip("-.")[:40]
                writer = RunWriter.create(root, f"import_{label or 'logs'}", config)
                directory = writer.directory
            lock = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise RunError(
            f"cannot write to {root}: {error.strerror or error}; choose a directory with --tensor-save-dir"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{config['source']} is being imported into {directory.name} by another process: wait for its end"
            ) from None
        yield RunWriter.reopen(directory) if known else writer
    finally:
        os.close(lock)


@contextmanager
def _flock(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _same_import(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.get("kind") == IMPORT and one.get("source") == other["source"]


class _Import:
    """One import into an open run: what is known of it, what comes, and what is still to be published."""

    def __init__(
        self,
        writer: RunWriter,
        scores: tuple[str, ...],
        workers: int,
        refused: list[Refusal],
        tell: Say,
        progress: Progress,
    ) -> None:
        self.writer, self.scores, self.workers = writer, scores, workers
        self.refused = list(refused)
        self.tell, self.progress = tell, progress
        self.segments = writer.directory / "segments"
        self.ledger = {name: _entries(self.segments / name) for name in segment_names(writer.directory)}
        self.added: list[Entry] = []
        self.known = 0
        self._rows: list[TensorRow] = []
        self._entries: list[Entry] = []
        self._segment: str | None = None
        self._published = self._told = time.monotonic()

    def run(self, found: list[File]) -> None:
        """Import what is new, and end the run."""
        try:
            fresh = self._fresh(found)
            self.tell(f"{len(fresh)} files to read, {self.known} known, {self.workers} processes")
            self._read(fresh)
            self._publish()
            self._conclude()
        except BaseException as error:
            with suppress(OSError):  # a full disk: what was published before stays
                self._publish()
                self._conclude()
            if isinstance(error, KeyboardInterrupt):
                self.writer.finish(CANCELLED)
            else:
                self.writer.finish(FAILED, describe(error))
            raise
        nothing = not (self.added or self.known)
        self.writer.finish(FAILED if nothing else DONE, "every file was refused: refused.jsonl" if nothing else None)

    def _fresh(self, found: list[File]) -> list[File]:
        """The files that are not in the run yet. Rows of those that have changed since are dropped."""
        now = {file.name: (file.size, file.mtime_ns) for file in found}
        for name, entries in self.ledger.items():
            stale = [e for e in entries if now.get(e.file, (e.size, e.mtime_ns)) != (e.size, e.mtime_ns)]
            if stale:
                self.tell(f"{len(stale)} files of segment {name} have changed since: they are imported anew")
                kept = [entry for entry in entries if entry not in stale]
                drop_rows(self.segments, name, {i for entry in stale for i in entry.tensors}, _lines(kept))
                self.ledger[name] = kept
        known = {entry.file: entry for entries in self.ledger.values() for entry in entries}
        self.known = sum(name in known for name in now)
        for entry in known.values():
            self.refused += [Refusal(entry.file, reason, key) for key, reason in entry.refused]
        return [file for file in found if file.name not in known]

    def _jobs(self, fresh: list[File]) -> Iterator[Job]:
        known = (i for entries in self.ledger.values() for entry in entries for i in entry.tensors)
        first = 1 + max((int(i[1:].partition("-")[0]) for i in known), default=0)
        for number, file in enumerate(fresh, first):
            room = self._room(self.workers) if file.size > SMALL else None
            yield Job(number, file.path, file.name, file.size, file.mtime_ns, self.writer.run_id, self.scores, room)

    @staticmethod
    def _room(shared_by: int) -> int:
        return int(available_host_memory() * SHARE) // shared_by

    def _read(self, fresh: list[File]) -> None:
        done = 0
        later: list[Job] = []
        for job, result in scatter(self._jobs(fresh), read_file, min(self.workers, max(1, len(fresh)))):
            if (result.status == -9) if isinstance(result, Death) else result.later:
                later.append(job)
                continue
            done += 1
            self._take(job, result, done, len(fresh))
        if later:
            self.tell(f"{len(later)} files are read alone: there was no memory for them beside others")
        alone = (replace(job, room=self._room(1), alone=True) for job in later)
        for job, result in scatter(alone, read_file, 1):
            done += 1
            self._take(job, result, done, len(fresh))

    def _take(self, job: Job, result: Read | Death, done: int, total: int) -> None:
        if isinstance(result, Death):
            result = Read(refused=[Refusal(job.name, _cause(result))])
        self.refused += result.refused
        if result.rows:
            ids = tuple(row.tensor_id for row in result.rows)
            keys = tuple((refusal.key or "", refusal.reason) for refusal in result.refused)
            self._rows += result.rows
            self._entries.append(Entry(job.name, job.size, job.mtime_ns, ids, result.version, keys))
        self.progress(done, total)
        now = time.monotonic()
        if len(self._rows) >= ROWS_A_SEGMENT or now - self._published >= SECONDS_A_SEGMENT:
            self._publish()
            self._published = now
        if now - self._told >= SECONDS_A_SEGMENT:
            self.tell(f"{done} of {total} files read")
            self._told = now

    def _publish(self) -> None:
        """Make the pending rows a segment. What breaks in on it may call it again: the segment's name stays the same
        until it is known to be there."""
        if self._rows:
            self._segment = self._segment or self.writer.next_segment_name()
            if not (self.segments / self._segment).exists():
                write_segment(self.segments, self._segment, self._rows, _lines(self._entries))
            self.ledger[self._segment] = self._entries
            self.added, self._rows, self._entries, self._segment = [*self.added, *self._entries], [], [], None
        entries = [entry for entries in self.ledger.values() for entry in entries]
        self.writer.update(tensors=sum(len(e.tensors) for e in entries), bytes=sum(e.size for e in entries))

    def _conclude(self) -> None:
        """Keep what was refused, and the counts in run.json."""
        directory = self.writer.directory
        self.refused.sort(key=lambda refusal: (refusal.file, refusal.key or ""))
        write_atomic(directory / "refused.jsonl", _lines(self.refused))
        config = json.loads((directory / "run.json").read_bytes())
        config["files"] = _by_version(entry for entries in self.ledger.values() for entry in entries)
        config["refused"] = {
            "count": len(self.refused),
            "reasons": dict(Counter(refusal.reason for refusal in self.refused).most_common(20)),
        }
        write_atomic(directory / "run.json", json.dumps(config, indent=1).encode())

    def result(self, seconds: float) -> Imported:
        return Imported(
            self.writer.run_id,
            self.writer.directory,
            tensors=sum(len(entry.tensors) for entry in self.added),
            files=len(self.added),
            known=self.known,
            bytes=sum(entry.size for entry in self.added),
            by_version=_by_version(self.added),
            refused=self.refused,
            seconds=seconds,
        )


def _cause(death: Death) -> str:
    causes = {
        "SIGKILL": "its reader was killed (SIGKILL), as happens when memory runs out",
        "SIGBUS": "it was cut while it was read (SIGBUS)",
    }
    return causes.get(death.by, f"its reader crashed ({death.by})")


def _by_version(entries: Iterator[Entry] | list[Entry]) -> dict[str, int]:
    counts = Counter(entry.version or "other names" for entry in entries)
    return {version: counts[version] for version in sorted(counts, key=lambda name: (len(name) > 3, name))}


def _lines(records: list[Entry] | list[Refusal]) -> bytes:
    return "".join(json.dumps(asdict(record)) + "\n" for record in records).encode()


def _entries(segment: Path) -> list[Entry]:
    """The files of a segment. Raises RunError if they cannot be read: what is known could not be told from new."""
    try:
        found = []
        for line in (segment / "files.jsonl").read_bytes().splitlines():
            record = json.loads(line)
            refused = tuple((key, reason) for key, reason in record.pop("refused"))
            found.append(Entry(**record | {"tensors": tuple(record["tensors"]), "refused": refused}))
        return found
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(
            f"{segment}/files.jsonl cannot be read ({error}): delete {segment.parents[1].name} to import anew"
        ) from error
