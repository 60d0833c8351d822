"""Imports tensor logs that other tools wrote: indexes them in place. No file is copied, and no code in it is executed.

    walk -> tensor_files -> read_file, in processes -> rows in a temporary file -> distinct names -> a segment of a run

An import reads every file and then writes its rows once, as one segment. The next import of the same directory
replaces this segment, in the same run, by one rename: whenever a process is killed, the run has the rows of one import.
An import that ends early leaves nothing. If a file of the former import cannot be read any more, its run stays as it
is, and the new import is a run of its own, so that no statistics are lost.

Separate processes read the files (see workers): a hostile or damaged file can kill its reader, not the import.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import pyarrow as pa

from binade.collector.errors import ConfigError
from binade.collector.imports.file_rows import FileJob, FileRead, read_file
from binade.collector.imports.files import File, Refusal, TensorFiles, checked, tensor_files, walk
from binade.collector.imports.names import COLUMNS, IDENTITY, Row, distinct_modules
from binade.collector.imports.run import run_of_import
from binade.collector.imports.workers import Death, scatter
from binade.collector.training.memory import available_host_memory
from binade.data.run.columns import LoggedRow, TensorRow
from binade.data.run.directory import DONE, RunInfo
from binade.data.run.run_writer import RunWriter, unwritable
from binade.data.run.segment import TABLES, read_tables, replace_segments, tables_of, tensor_record
from binade.data.run.store import append_to, write_atomic
from binade.quant.specs import Spec

Say = Callable[[str], None]
Progress = Callable[[int, int], None]  # files done, of how many

ROWS = 1024  # that are in memory at once
SECONDS_A_LINE = 5.0  # of progress
SMALL = 1 << 25  # a smaller file is read without asking whether there is memory for it
SHARE = 0.8  # of the free memory may be used


@dataclass(frozen=True)
class ImportResult:
    """The result of an import.

    run_id     "" if there was nothing to import
    bytes      of the files with tensors
    by_source  these files by source (see log.TensorLog.version)
    unnamed    of how many tensors only the module is known
    kept       the runs of former imports that have files which could not be read again
    """

    run_id: str
    directory: Path
    tensors: int
    files: int
    bytes: int
    by_source: Mapping[str, int]
    refused: list[Refusal]
    seconds: float
    unnamed: int = 0
    kept: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether there were files but none could be used."""
        return bool(self.refused) and not self.files


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
    kind     what the tensors are that no tool has named: see `model_paths.Clues`
    files    the tensor files of source, if they are known already

    Raises ConfigError if source is not a directory, UnknownFormatError or SpecError, RunError if root cannot be written
    or the same import is being written; later OSError or KeyboardInterrupt: then the root is as it was.
    """
    start = time.monotonic()
    source = checked(source, root)
    scores = tuple(dict.fromkeys(str(Spec.of(name)) for name in scores))
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers is {workers}: it must be 1 or more")
    accepted, refused = files or tensor_files(walk(source, root))
    if not (accepted or refused):
        return ImportResult("", root, 0, 0, 0, {}, [], time.monotonic() - start)
    try:
        root.mkdir(parents=True, exist_ok=True)
        held = TemporaryFile(dir=root)  # noqa: SIM115  # closed below; it has no name, so a kill leaves nothing
    except OSError as error:
        raise unwritable(root, error) from error
    with held:
        read = _Read(held, list(refused), say)
        for job, result in _results(accepted, scores, workers or len(os.sched_getaffinity(0)), kind, read.report):
            read.add(job.file, result)
            progress(read.done, len(accepted))
        read.hold()
        if not read.files:
            return read.result("", root, start)
        config = {"source": str(source), "scores": list(scores), "command": command}
        with run_of_import(root, config, read.has_all_of) as writer:
            read.write(writer, config)
        return read.result(writer.directory.name, writer.directory, start)


def _results(
    files: list[File], scores: tuple[str, ...], workers: int, kind: str | None, report: Say
) -> Iterator[tuple[FileJob, FileRead | Death]]:
    """The result of each file. Files that do not fit into memory next to others are read again, one at a time."""

    def room(shared_by: int) -> int:
        return int(available_host_memory() * SHARE) // shared_by

    report(f"{len(files)} files to read, {workers} processes")
    jobs = (FileJob(file, scores, room(workers) if file.size > SMALL else None, kind=kind) for file in files)
    later: list[FileJob] = []
    for job, result in scatter(jobs, read_file, min(workers, max(1, len(files)))):
        if (result.status == -signal.SIGKILL) if isinstance(result, Death) else result.later:
            later.append(job)
        else:
            yield job, result
    if later:
        report(f"{len(later)} files are read one at a time: there was not enough memory to read them in parallel")
        yield from scatter((replace(job, room=room(1), alone=True) for job in later), read_file, 1)


@dataclass(eq=False)
class _Read:
    """What was read of the files.

    held     the temporary file with the rows, in parts of about ROWS
    rows     those that are not in it yet
    named    COLUMNS of each tensor
    lines    of the run's log.txt
    """

    held: IO[bytes]
    refused: list[Refusal]
    say: Say
    rows: list[TensorRow | LoggedRow] = field(default_factory=list)
    named: list[Row] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)
    done: int = 0
    files: int = 0
    bytes: int = 0
    without_values: int = 0
    unnamed: int = 0
    lines: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    reported: float = field(default_factory=time.monotonic)

    def report(self, line: str) -> None:
        self.reported = time.monotonic()
        self.lines.append(f"{time.strftime('%H:%M:%S')} {line}\n")
        self.say(line)

    def add(self, file: File, result: FileRead | Death) -> None:
        if isinstance(result, Death):
            result = FileRead(refused=[Refusal(file.name, _cause(result))])
        self.done += 1
        self.refused += result.refused
        if result.rows:
            self.files += 1
            self.bytes += file.size
            self.sources[result.version or "other names"] += 1
            self.unnamed += result.unnamed
        for row in result.rows:
            record = tensor_record(row)
            self.named.append({name: record.get(name) for name in COLUMNS})
            self.without_values += isinstance(row, LoggedRow)
            self.rows.append(row)
        if len(self.rows) >= ROWS:
            self.hold()
        if time.monotonic() - self.reported >= SECONDS_A_LINE:
            self.report(f"{self.done} files read")

    def hold(self) -> None:
        """Put the rows into the temporary file, each table as an Arrow IPC stream."""
        for table in tables_of(self.rows).values():
            with pa.ipc.new_stream(self.held, table.schema) as stream:
                stream.write_table(table)
        self.rows = []

    def write(self, writer: RunWriter, config: Mapping[str, Any]) -> None:
        """Write the rows in place of those of the import before, then what is said of them, and end the run."""
        replace_segments(writer.directory, self._tables(writer.run_id, distinct_modules(self.named)))
        self.refused.sort(key=lambda refusal: (refusal.file, refusal.key or ""))
        lines = "".join(json.dumps(asdict(refusal)) + "\n" for refusal in self.refused)
        write_atomic(writer.directory / "refused.jsonl", lines.encode())
        reasons = dict(Counter(refusal.reason for refusal in self.refused).most_common(20))
        refused = {"count": len(self.refused), "reasons": reasons}
        writer.describe({**config, "files": self._by_source(), "refused": refused})
        with append_to(writer.directory / "log.txt") as log:
            log.write("".join(self.lines).encode())
        writer.update(tensors=len(self.named), tensors_without_raw=self.without_values, bytes=self.bytes)
        writer.finish(DONE)

    def _tables(self, run_id: str, modules: Mapping[str, str]) -> Iterator[dict[str, pa.Table]]:
        """The rows, in parts, with these modules by tensor_id."""
        end = self.held.tell()
        self.held.seek(0)
        while self.held.tell() < end:
            tables = {name: pa.ipc.open_stream(self.held).read_all() for name in TABLES}
            yield tables | {"tensor": _named(tables["tensor"], run_id, modules)}

    def has_all_of(self, run: RunInfo) -> bool:
        """Whether all files of an import before were read again, and all its tensors that have statistics only."""
        tensors = {*map(_tensor, self.named)}
        try:
            if all(_tensor(row) in tensors for name in run.segments for row in _rows_of(run, name)):
                return True
        except (OSError, ValueError, pa.ArrowException):
            pass  # damaged: it stays as it is
        self.kept.append(run.run_id)
        return False

    def _by_source(self) -> dict[str, int]:
        return {name: self.sources[name] for name in sorted(self.sources, key=lambda name: (len(name) > 3, name))}

    def result(self, run_id: str, directory: Path, start: float) -> ImportResult:
        return ImportResult(
            run_id,
            directory,
            tensors=len(self.named),
            files=self.files,
            bytes=self.bytes,
            by_source=self._by_source(),
            refused=self.refused,
            seconds=time.monotonic() - start,
            unnamed=self.unnamed,
            kept=tuple(self.kept),
        )


def _named(tensors: pa.Table, run_id: str, modules: Mapping[str, str]) -> pa.Table:
    ids, usual = (tensors[name].to_pylist() for name in ("tensor_id", "module"))
    named = [modules.get(tensor_id, module) for tensor_id, module in zip(ids, usual, strict=True)]
    columns = {"run_id": [run_id] * len(ids), "module": named}
    return pa.table({**dict(zip(tensors.column_names, tensors.columns, strict=True)), **columns}, schema=tensors.schema)


def _rows_of(run: RunInfo, segment: str) -> list[Row]:
    """COLUMNS of the tensors of a segment. Raises OSError, and ValueError or pa.ArrowException if it is damaged."""
    tables = read_tables(run.directory / "segments" / segment, run.manifest_of(segment), ["tensor"])
    rows: list[Row] = tables["tensor"].select(COLUMNS).to_pylist()
    return rows


def _tensor(row: Row) -> tuple[Any, ...]:
    """The file of a tensor; of one that has statistics only, what it is."""
    if row["path"] is not None:
        return (row["path"],)
    what = {name: row[name] for name in IDENTITY} | {"module": row["module_path"] or row["module"]}
    return tuple(what.values())


def _cause(death: Death) -> str:
    causes = {
        "SIGKILL": "its reader was killed (SIGKILL), as happens when memory runs out",
        "SIGBUS": "it was truncated while it was read (SIGBUS)",
    }
    return causes.get(death.by, f"its reader crashed ({death.by})")
