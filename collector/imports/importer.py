"""Imports tensor logs that other tools wrote: indexes them in place. No file is copied, and no code in it is executed.

An import is a run of kind "import". Importing the same directory again continues the same run: files whose path and
content are known are skipped, changed files are imported again, and refused files are tried again. The SHA-256 of a
content is computed only if the size or time of its file has changed. A segment lists the files whose rows it holds
(files.jsonl) and is published together with that list, so that no file is indexed twice or partly, whenever the import
is killed.

Separate processes read the files (see workers): a hostile or damaged file can kill its reader, not the import.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from binade.collector.errors import ConfigError
from binade.collector.imports.file_rows import FileJob, FileRead, read_file
from binade.collector.imports.files import File, Refusal, TensorFiles, checked, tensor_files, walk
from binade.collector.imports.names import COLUMNS, distinct_modules
from binade.collector.imports.run import run_of_import
from binade.collector.imports.workers import Death, scatter
from binade.collector.training.memory import available_host_memory
from binade.data.columns import LoggedRow, TensorRow
from binade.data.json_files import parse_json
from binade.data.runs import (
    DONE,
    FAILED,
    RunError,
    RunWriter,
)
from binade.data.segment import drop_rows, read_tables, rename_modules, segment_names, write_segment
from binade.data.store import append_to, inside, sha256, write_atomic
from binade.data.text import describe
from binade.quant.specs import Spec

Say = Callable[[str], None]
Progress = Callable[[int, int], None]  # files done, of how many

ROWS_A_SEGMENT = 256
SECONDS_A_SEGMENT = 5.0
SMALL = 1 << 25  # a smaller file is read without asking whether there is memory for it
SHARE = 0.8  # of the free memory may be used


@dataclass(frozen=True)
class FileEntry:
    """A line of files.jsonl: an imported file, its tensors, and its refused keys with the reasons. without_values: of
    how many of the tensors it has statistics only; unnamed: see FileRead; kind: what the user said that they are."""

    file: str
    size: int
    time_ns: int
    sha256: str | None
    tensors: tuple[str, ...]
    version: str | None
    refused: tuple[tuple[str, str], ...]
    without_values: int = 0
    unnamed: int = 0
    kind: str | None = None


@dataclass(frozen=True)
class ImportResult:
    """The result of an import: tensors and files added, files already known, files added by source (see
    log.Log.version), refusals, and of how many of the added tensors only the module is known."""

    run_id: str
    directory: Path
    tensors: int
    files: int
    known: int
    bytes: int
    by_source: dict[str, int]
    refused: list[Refusal]
    seconds: float
    unnamed: int = 0

    @property
    def failed(self) -> bool:
        """Whether there were files but none could be used."""
        return bool(self.refused) and not (self.files or self.known)


def import_logs(
    source: Path,
    root: Path,
    *,
    scores: tuple[str, ...] = (),
    workers: int | None = None,
    kind: str | None = None,
    say: Say,
    progress: Progress = lambda done, total: None,
    command: str = "",
    files: TensorFiles | None = None,
) -> ImportResult:
    """Index every tensor file under source in a run of root.

    scores   formats or specs to try on every tensor: along the axis that its GEMM contracts, the last axis if that is
             unknown
    workers  processes; None for one per core
    kind     what the tensors are that no tool has named: see `model_paths.Clues`. Files that were imported without it
             are imported again
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
    with run_of_import(root, config) as writer, append_to(writer.directory / "log.txt") as log:

        def note(line: str) -> None:
            log.write(f"{time.strftime('%H:%M:%S')} {line}\n".encode())

        def report(line: str) -> None:
            note(line)
            say(line)

        try:
            processes = workers or len(os.sched_getaffinity(0))
            task = _Import(writer, scores, kind, processes, refused, report, progress)
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
        kind: str | None,
        workers: int,
        refused: list[Refusal],
        report: Say,
        progress: Progress,
    ) -> None:
        self.writer, self.scores, self.kind, self.workers = writer, scores, kind, workers
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
            stale = [entry for entry in entries if entry.file in now and self._is_stale(now[entry.file], entry)]
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

    def _is_stale(self, file: File, entry: FileEntry) -> bool:
        return (self.kind is not None and self.kind != entry.kind) or _differs(file, entry)

    def _jobs(self, fresh: list[File]) -> Iterator[FileJob]:
        new = itertools.count(1 + max(self.numbers.values(), default=0))
        for file in fresh:
            room = self._room(self.workers) if file.size > SMALL else None
            number = self.numbers.get(file.name) or next(new)
            yield FileJob(number, file, self.writer.run_id, self.scores, room, kind=self.kind)

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
            self._entries.append(
                FileEntry(
                    file=file.name,
                    size=file.size,
                    time_ns=file.time_ns,
                    sha256=result.sha256,
                    tensors=ids,
                    version=result.version,
                    refused=keys,
                    without_values=logged,
                    unnamed=result.unnamed,
                    kind=job.kind,
                )
            )
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
        """Give tensors distinct names over the whole import, see `names.distinct_modules`. Raises RunError for a
        segment that cannot be read, SegmentError for one that was changed."""
        rows: dict[str, list[dict[str, Any]]] = {}
        for name in self.ledger:
            try:
                tensors = read_tables(self.segments / name, names=["tensor"])["tensor"]
            except (OSError, ValueError, pa.ArrowException) as error:
                raise RunError(f"{self.segments / name} cannot be read: {describe(error)}") from None
            is_named = pc.or_(pc.is_valid(tensors["module_path"]), pc.is_null(tensors["source_version"]))
            rows[name] = tensors.select(COLUMNS).filter(is_named).to_pylist()
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
            unnamed=sum(entry.unnamed for entry in self.added),
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
        with open(segment / "files.jsonl", "rb", opener=inside(segment.parents[1])) as file:
            return [parse_json(FileEntry, line) for line in file]
    except (OSError, ValueError) as error:
        raise RunError(
            f"{segment}/files.jsonl cannot be read ({error}): delete {segment.parents[1].name} to import again"
        ) from error
