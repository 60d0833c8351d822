"""Imports tensor logs that other tools wrote: indexes them in place. No file is copied, and no code in it is executed.

An import is a run of kind "import". Importing the same directory again continues the same run: files whose path and
content are known are skipped, changed files are imported again, and refused files are tried again. The SHA-256 of a
content is computed only if the size or time of its file has changed. A segment lists the files whose rows it holds
(files.jsonl) and is published together with that list, so that no file is indexed twice or partly, whenever the import
is killed.

The id of a tensor consists of the number of its file in the import and a digest of its content, so that an id never
stands for another tensor later.

Separate processes read the files (see workers): a hostile or damaged file can kill its reader, not the import.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from binade.collector.errors import ConfigError
from binade.collector.imports.files import LEFT_OUT, File, Refusal, TensorFiles, checked, tensor_files, walk
from binade.collector.imports.log import Importer, TensorLog
from binade.collector.imports.names import distinct_modules
from binade.collector.imports.registry import interpret, statistics_of
from binade.collector.imports.run import run_of_import
from binade.collector.imports.workers import Death, scatter
from binade.collector.training.memory import available_host_memory
from binade.data.foreign import ForeignTensor, TooLargeError, opened
from binade.data.json_files import parse_json
from binade.data.runs import (
    DONE,
    FAILED,
    RunError,
    RunWriter,
)
from binade.data.segment import (
    Identity,
    LoggedRow,
    Origin,
    Score,
    TensorRow,
    Trace,
    drop_rows,
    read_tables,
    rename_modules,
    segment_names,
    write_segment,
)
from binade.data.store import FileState, TensorFileError, sha256, write_atomic
from binade.data.tensor_kinds import MAPS
from binade.data.text import counted, describe
from binade.quant.metrics import score
from binade.quant.specs import Spec
from binade.quant.summary import summarize
from binade.quant.traces import hot_channels_later

Say = Callable[[str], None]
Progress = Callable[[int, int], None]  # files done, of how many

ROWS_A_SEGMENT = 256
SECONDS_A_SEGMENT = 5.0
SCORE_BYTES = 28  # that scoring takes, for each element, at its peak
SMALL = 1 << 25  # a smaller file is read without asking whether there is memory for it
SHARE = 0.8  # of the free memory may be used
DIGITS = 10  # hexadecimal ones of the digest in a tensor's id


@dataclass(frozen=True)
class FileJob:
    """A file to read. number: the file's in this run, which it keeps when it is imported again; room: see
    `data.foreign.opened`; alone: no other file is read at the same time, so there will not be more memory later."""

    number: int
    file: File
    run_id: str
    scores: tuple[str, ...]
    room: int | None = None
    alone: bool = False


@dataclass(frozen=True)
class FileRead:
    """The result of reading a file. later: there was not enough memory for it next to the others."""

    rows: Sequence[TensorRow | LoggedRow] = ()
    refused: list[Refusal] = field(default_factory=list)
    version: str | None = None
    sha256: str | None = None
    later: bool = False


@dataclass(frozen=True)
class FileEntry:
    """A line of files.jsonl: an imported file, its tensors, and its refused keys with the reasons. without_values: of
    how many of the tensors it has statistics only."""

    file: str
    size: int
    time_ns: int
    sha256: str | None
    tensors: tuple[str, ...]
    version: str | None
    refused: tuple[tuple[str, str], ...]
    without_values: int = 0


@dataclass(frozen=True)
class ImportResult:
    """The result of an import: tensors and files added, files already known, files added by source (see
    log.Log.version), and refusals."""

    run_id: str
    directory: Path
    tensors: int
    files: int
    known: int
    bytes: int
    by_source: dict[str, int]
    refused: list[Refusal]
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether there were files but none could be used."""
        return bool(self.refused) and not (self.files or self.known)


def read_file(job: FileJob) -> FileRead:
    """The rows of one file, and refusals with reasons for what cannot be used. Runs in a separate process."""
    torch.set_num_threads(1)
    rows, refused, version = [], [], None
    path, name = Path(job.file.path), job.file.name
    if (importer := statistics_of(path)) is not None:
        return _read_statistics(job, importer)
    try:
        with opened(path, job.room) as file:
            state = file.state()
            for number, foreign in enumerate(file.tensors):
                if foreign.tensor is None or foreign.dtype is None:
                    refused.append(Refusal(name, foreign.refused or "it contains no tensor", foreign.key))
                    continue
                log = interpret(path, foreign.metadata, foreign.key)
                version = log.version
                tensor_id = _tensor_id(job, number if foreign.key is not None else None, name, state.sha256)
                order = None if log.order is None else log.order + number
                rows.append(
                    _row(job, tensor_id, state, foreign, foreign.tensor, foreign.dtype, replace(log, order=order))
                )
    except (TensorFileError, MemoryError, OSError) as error:
        reason = "there is not enough memory to read it" if isinstance(error, MemoryError) else describe(error)
        no_memory = isinstance(error, (TooLargeError, MemoryError))
        return FileRead(refused=[Refusal(name, reason)], later=no_memory and not job.alone)
    return FileRead(rows, refused, version, state.sha256)


def _tensor_id(job: FileJob, number: int | None, *content: object) -> str:
    """number: of the tensor in its file, if that may have several; content: what the tensor is known by."""
    digest = hashlib.sha256(repr(content).encode()).hexdigest()
    return "-".join([f"f{job.number:07d}", *([] if number is None else [str(number)]), digest[:DIGITS]])


def _read_statistics(job: FileJob, importer: Importer) -> FileRead:
    name = job.file.name
    try:
        sha = sha256(Path(job.file.path))  # first: if the file grows meanwhile, the next import reads it again
        statistics = importer.statistics(Path(job.file.path))
    except (ValueError, OSError, MemoryError) as error:
        return FileRead(refused=[Refusal(name, describe(error))])
    left_out = Counter(statistics.left_out)
    left_out.update(("", f"impossible: {tensor.impossible}") for tensor in statistics.tensors if tensor.impossible)
    refused = [
        Refusal(name, f"{LEFT_OUT}{counted(count, 'tensor')}: {reason}", statistic or None)
        for (statistic, reason), count in sorted(left_out.items())
    ]
    rows = []
    for number, tensor in enumerate(statistics.tensors):
        if tensor.impossible:
            continue
        identity = _identity(tensor.log)
        tensor_id = _tensor_id(job, number, identity, sorted(tensor.columns.items()))
        rows.append(LoggedRow(tensor_id, job.run_id, identity, _origin(tensor.log), tensor.columns))
    return FileRead(rows, refused or [Refusal(name, "it has no statistics")] * (not rows), importer.name, sha)


def _identity(log: TensorLog) -> Identity:
    words = {name: getattr(log, name) for name in Identity.__annotations__ if hasattr(log, name)}
    return Identity(model=None, size=None, dataset=None, recipe=None, **words)


def _origin(log: TensorLog, *notes: str, **of_file: Any) -> Origin:
    corrections = (*log.corrections, *notes)
    return Origin(
        log.version, log.original_quant_type, log.stage, corrections, module_path=log.path, order=log.order, **of_file
    )


def _row(
    job: FileJob, tensor_id: str, state: FileState, foreign: ForeignTensor, x: Tensor, dtype: str, log: TensorLog
) -> TensorRow:
    notes = [foreign.note] if foreign.note else []
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
            f"Not scored: that takes about {needed / 2**30:.1f} GiB, but only {max(job.room, 0) / 2**30:.1f} GiB of "
            "memory were free."
        )
    return TensorRow(
        tensor_id=tensor_id,
        run_id=job.run_id,
        identity=_identity(log),
        captured=log.captured,
        shape=tuple(x.shape),
        dtype=dtype,
        nbytes=x.numel() * (8 if dtype == "float64" else x.element_size()),
        path=job.file.path,
        contracted_axis=axis,
        summary=summarize(x),
        scores=[Score(name, score(x, name, -1 if axis is None else axis)) for name in scores],
        shard=None,
        origin=_origin(log, *notes, key=foreign.key, file_size=state.size, file_time_ns=state.time_ns),
        sha256=state.sha256,
        trace=None if log.tensor_name in MAPS else Trace(*hot_channels_later(x)()),
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
    files: TensorFiles | None = None,
) -> ImportResult:
    """Index every tensor file under source in a run of root.

    scores   formats or specs to try on every tensor: along the axis that its GEMM contracts, the last axis if that is
             unknown
    workers  processes; None for one per core
    files    the tensor files of source, if they are known already

    Raises ConfigError if source is not a directory, UnknownFormatError or SpecError, RunError if root cannot be written
    or the same import is running; later OSError or KeyboardInterrupt, with the run marked accordingly and what was
    imported kept.
    """
    start = time.monotonic()
    source = checked(source, root)
    scores = tuple(dict.fromkeys(str(Spec.of(name)) for name in scores))
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers is {workers}: it must be 1 or more")
    accepted, refused = files or tensor_files(walk(source, root))
    if not (accepted or refused):
        return ImportResult("", root, 0, 0, 0, 0, {}, [], time.monotonic() - start)
    config = {"source": str(source), "scores": list(scores), "command": command}
    with run_of_import(root, config) as writer, open(writer.directory / "log.txt", "ab", buffering=0) as log:

        def note(line: str) -> None:
            log.write(f"{time.strftime('%H:%M:%S')} {line}\n".encode())

        def report(line: str) -> None:
            note(line)
            say(line)

        try:
            task = _Import(writer, scores, workers or len(os.sched_getaffinity(0)), refused, report, progress)
            task.run(accepted)
        except BaseException as error:
            with suppress(OSError):  # a full disk must not hide what happened
                note(f"ended early: {type(error).__name__}: {error}")
            raise
    return task.result(time.monotonic() - start)


class _Import:
    """One import into an open run: the files that it holds, those that are added, and rows to be published."""

    def __init__(
        self,
        writer: RunWriter,
        scores: tuple[str, ...],
        workers: int,
        refused: list[Refusal],
        report: Say,
        progress: Progress,
    ) -> None:
        self.writer, self.scores, self.workers = writer, scores, workers
        self.refused = list(refused)
        self.report, self.progress = report, progress
        self.segments = writer.directory / "segments"
        self.ledger = {name: _entries(self.segments / name) for name in segment_names(writer.directory)}
        self.numbers = {e.file: _number(i) for e in self._known_entries() for i in e.tensors[:1]}
        self.added: list[FileEntry] = []
        self.known = 0
        self._rows: list[TensorRow | LoggedRow] = []
        self._entries: list[FileEntry] = []
        self._segment: str | None = None
        self._published = self._reported = time.monotonic()

    def run(self, files: list[File]) -> None:
        """Import what is new, and end the run."""
        try:
            fresh = self._fresh(files)
            self.report(f"{len(fresh)} files to read, {self.known} known, {self.workers} processes")
            for done, (job, result) in enumerate(self._results(fresh), 1):
                self._take(job, result, done, len(fresh))
            self._publish()
            self._distinguish()
            self._conclude()
        except BaseException:
            with suppress(OSError):  # of a full disk: published segments stay
                self._publish()
                self._conclude()
            raise
        nothing = not (self.added or self.known)
        self.writer.finish(FAILED if nothing else DONE, "every file was refused: refused.jsonl" if nothing else None)

    def _known_entries(self) -> list[FileEntry]:
        return [entry for entries in self.ledger.values() for entry in entries]

    def _fresh(self, files: list[File]) -> list[File]:
        """The files that are not in the run yet. Rows of those that have changed since are dropped."""
        now = {file.name: file for file in files}
        for name, entries in self.ledger.items():
            stale = [entry for entry in entries if entry.file in now and _differs(now[entry.file], entry)]
            if stale:
                self.report(f"{len(stale)} files of segment {name} have changed and are imported again")
                kept = [entry for entry in entries if entry not in stale]
                drop_rows(self.segments, name, {i for entry in stale for i in entry.tensors}, _lines(kept))
                self.ledger[name] = kept
        known = {entry.file: entry for entry in self._known_entries()}
        self.known = sum(name in known for name in now)
        for entry in known.values():
            self.refused += [Refusal(entry.file, reason, key) for key, reason in entry.refused]
        return [file for file in files if file.name not in known]

    def _jobs(self, fresh: list[File]) -> Iterator[FileJob]:
        new = itertools.count(1 + max(self.numbers.values(), default=0))
        for file in fresh:
            room = self._room(self.workers) if file.size > SMALL else None
            number = self.numbers.get(file.name) or next(new)
            yield FileJob(number, file, self.writer.run_id, self.scores, room)

    @staticmethod
    def _room(shared_by: int) -> int:
        return int(available_host_memory() * SHARE) // shared_by

    def _results(self, fresh: list[File]) -> Iterator[tuple[FileJob, FileRead | Death]]:
        """The result of each file. Files that do not fit into memory next to others are read again, one at a time."""
        later: list[FileJob] = []
        for job, result in scatter(self._jobs(fresh), read_file, min(self.workers, max(1, len(fresh)))):
            if (result.status == -signal.SIGKILL) if isinstance(result, Death) else result.later:
                later.append(job)
            else:
                yield job, result
        if later:
            self.report(
                f"{len(later)} files are read one at a time: there was not enough memory to read them in parallel"
            )
            yield from scatter((replace(job, room=self._room(1), alone=True) for job in later), read_file, 1)

    def _take(self, job: FileJob, result: FileRead | Death, done: int, total: int) -> None:
        file = job.file
        if isinstance(result, Death):
            result = FileRead(refused=[Refusal(file.name, _cause(result))])
        self.refused += result.refused
        if result.rows:
            ids = tuple(row.tensor_id for row in result.rows)
            keys = tuple((refusal.key or "", refusal.reason) for refusal in result.refused)
            self._rows += result.rows
            logged = sum(isinstance(row, LoggedRow) for row in result.rows)
            entry = FileEntry(file.name, file.size, file.time_ns, result.sha256, ids, result.version, keys, logged)
            self._entries.append(entry)
        self.progress(done, total)
        now = time.monotonic()
        if len(self._rows) >= ROWS_A_SEGMENT or now - self._published >= SECONDS_A_SEGMENT:
            self._publish()
            self._published = now
        if now - self._reported >= SECONDS_A_SEGMENT:
            self.report(f"{done} of {total} files read")
            self._reported = now

    def _publish(self) -> None:
        """Publish the pending rows as a segment. It may be called again after an interrupt: the segment keeps its name
        until it is published."""
        if self._rows:
            self._segment = self._segment or self.writer.next_segment_name()
            if not (self.segments / self._segment).exists():
                write_segment(self.segments, self._segment, self._rows, _lines(self._entries))
            self.ledger[self._segment] = self._entries
            self.added, self._rows, self._entries, self._segment = [*self.added, *self._entries], [], [], None
        entries = self._known_entries()
        self.writer.update(
            tensors=sum(len(e.tensors) for e in entries),
            tensors_without_raw=sum(e.without_values for e in entries),
            bytes=sum(e.size for e in entries),
        )

    def _distinguish(self) -> None:
        """Where modules at different paths have the same name in the same layer, name them by their paths, over the
        whole import. Raises RunError for a segment that cannot be read, SegmentError for one that was changed."""
        columns = ["tensor_id", "layer_index", "module", "expert", "module_path"]
        rows: dict[str, list[dict[str, Any]]] = {}
        for name in self.ledger:
            try:
                tensors = read_tables(self.segments / name, names=["tensor"])["tensor"]
            except (OSError, ValueError, pa.ArrowException) as error:
                raise RunError(f"{self.segments / name} cannot be read: {describe(error)}") from None
            rows[name] = tensors.select(columns).filter(pc.is_valid(tensors["module_path"])).to_pylist()
        for name, modules in distinct_modules(rows).items():
            rename_modules(self.segments / name, modules, _lines(self.ledger[name]))

    def _conclude(self) -> None:
        """Write refused.jsonl, and the counts in run.json."""
        self.refused.sort(key=lambda refusal: (refusal.file, refusal.key or ""))
        write_atomic(self.writer.directory / "refused.jsonl", _lines(self.refused))
        reasons = dict(Counter(refusal.reason for refusal in self.refused).most_common(20))
        refused = {"count": len(self.refused), "reasons": reasons}
        self.writer.describe({"files": _by_source(self._known_entries()), "refused": refused})

    def result(self, seconds: float) -> ImportResult:
        return ImportResult(
            self.writer.directory.name,
            self.writer.directory,
            tensors=sum(len(entry.tensors) for entry in self.added),
            files=len(self.added),
            known=self.known,
            bytes=sum(entry.size for entry in self.added),
            by_source=_by_source(self.added),
            refused=self.refused,
            seconds=seconds,
        )


def _differs(file: File, entry: FileEntry) -> bool:
    """Whether a file has another content than when it was imported."""
    if (file.size, file.time_ns) == (entry.size, entry.time_ns):
        return False
    try:
        return file.size != entry.size or sha256(Path(file.path)) != entry.sha256
    except OSError:  # which is reported when it is read
        return True


def _number(tensor_id: str) -> int:
    """The number of a tensor's file in its import."""
    return int(tensor_id[1:].partition("-")[0])


def _cause(death: Death) -> str:
    causes = {
        "SIGKILL": "its reader was killed (SIGKILL), as happens when memory runs out",
        "SIGBUS": "it was truncated while it was read (SIGBUS)",
    }
    return causes.get(death.by, f"its reader crashed ({death.by})")


def _by_source(entries: list[FileEntry]) -> dict[str, int]:
    counts = Counter(entry.version or "other names" for entry in entries)
    return {version: counts[version] for version in sorted(counts, key=lambda name: (len(name) > 3, name))}


def _lines(records: list[FileEntry] | list[Refusal]) -> bytes:
    return "".join(json.dumps(asdict(record)) + "\n" for record in records).encode()


def _entries(segment: Path) -> list[FileEntry]:
    """The files of a segment. Raises RunError if they cannot be read: known files would be imported twice."""
    try:
        return [parse_json(FileEntry, line) for line in (segment / "files.jsonl").read_bytes().splitlines()]
    except (OSError, ValueError) as error:
        raise RunError(
            f"{segment}/files.jsonl cannot be read ({error}): delete {segment.parents[1].name} to import again"
        ) from error
