"""A bundle: a ZIP of runs (rows, sketches, scores, losses) with chosen raw tensors, and a few other files.

    session.json             an extra file, such as a session
    runs/<run_id>/...        run directories as they are on disk; a tensor left out has no path in its row

A bundle is untrusted input. It is unpacked under limits into a hidden directory of the root and checked like any root,
by `verify` and by indexing it. Only then are its runs renamed into the root. If anything is wrong with it, the error is
one sentence, and nothing has changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from binade.data.exchange.read_tables import UnreadableError, check_readable
from binade.data.index.cache import Done
from binade.data.index.catalog import Catalog
from binade.data.run.access import check_writable
from binade.data.run.directory import QUEUED, RUNNING, RunError, RunInfo, fingerprint, list_runs, read_run, run_names
from binade.data.run.events import EVENT, read_events
from binade.data.run.experiment import EXPERIMENT, RESULT_FILE, check_experiment, experiment_files
from binade.data.run.json_files import sealed
from binade.data.run.record_kinds import RECORD_KINDS
from binade.data.run.records import read_lines
from binade.data.run.run_notes import read_notes
from binade.data.run.segment import MANIFEST, OPTIONAL, TABLES, SegmentError, manifest, table_files
from binade.data.run.store import (
    TensorFileError,
    check_content,
    inside,
    is_inside,
    staged_file,
    staging_directory,
    sweep,
)
from binade.data.run.verify import verify
from binade.data.words.text import describe

LONGEST_TEXT = 256 << 20  # bytes of a run's JSON, losses and log, and of an extra file
MOST_FILES = 500_000
LARGEST_TABLE = 2 << 30  # bytes of one Parquet file in memory
LARGEST = 1 << 40  # bytes of all files together
MOST_PACKED = 100  # a file's size over its size in the archive: texts reach 20, bombs 1000
SMALL_TABLES = 256 << 20  # bytes that the tables of a bundle may take in memory, however small their files are
CODECS = {"UNCOMPRESSED", "LZ4", "SNAPPY"}  # of Parquet; others pack a thousand times as much into a byte
CHUNK = 1 << 20
# The exceptions of zipfile and zlib for a damaged archive.
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OverflowError, struct.error)
RUN_FILES = (
    "run.json", "status.json", "log.txt", "notes.json", *(kind.file for kind in RECORD_KINDS),
)  # fmt: skip
_NAME = r"[A-Za-z0-9_+=@,~-][A-Za-z0-9_+=@,.~-]{0,200}"
_RUN = rf"(?!index\.duckdb){_NAME}"  # the index is in the root as well
_RUN_FILE = re.compile(
    rf"runs/{_RUN}/(?:{'|'.join(map(re.escape, RUN_FILES))}"
    rf"|{EXPERIMENT}/{RESULT_FILE}|segments/{_NAME}/(?:(?:{'|'.join(TABLES)})\.parquet|{re.escape(MANIFEST)})|(?P<raw>tensors/(?:{_NAME}/){{0,3}}{_NAME}))"
)
_EXTRA = re.compile(r"[a-z]{1,40}\.json")


class BundleError(ValueError):
    """A bundle cannot be written or imported. The message is one sentence: what is wrong, and what to do if
    possible."""

    exit_status = 1


class BundleTooLargeError(BundleError):
    """A bundle would be larger than it may be. Nothing was written."""


@dataclass(frozen=True)
class WrittenBundle:
    """The content of a bundle: the number of runs, of rows of tensors, of tensors with values, of chosen ones whose
    values are not in their run's directory and were left out, the archive's bytes, and which damaged records were left
    out."""

    runs: int
    tensors: int
    with_values: int
    left_out: int
    nbytes: int
    damaged: tuple[str, ...]


@dataclass(frozen=True)
class BundleImport:
    """The result of an import: run ids that were added, those that already existed, and the extra files."""

    added: tuple[str, ...]
    kept: tuple[str, ...]
    extras: dict[str, bytes]


def _is_raw(path: str) -> bool:
    """Whether a row's path is that of a tensor file within its run's directory."""
    match = _RUN_FILE.fullmatch(f"runs/x/{path}")
    return match is not None and match["raw"] is not None


# Writing


def write(
    root: Path,
    target: Path,
    run_ids: Collection[str],
    tensor_ids: Collection[str] | None,
    extras: dict[str, bytes] | None = None,
    done: Done = lambda count, of: None,
    most: int | None = None,
) -> WrittenBundle:
    """Write runs of a root as a bundle, atomically.

    tensor_ids: tensors whose values are included, as the catalog names them ("<run_id>/..."); None for all. extras:
    other files by name. done is called with the files written so far and their number. most: bytes of tensors and
    tables, which are not compressed. Raises BundleError, and BundleTooLargeError before anything is copied.
    """
    runs = [_bundled(root, run_id) for run_id in dict.fromkeys(run_ids)]
    wanted = None if tensor_ids is None else set(tensor_ids)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            staged_file(target) as file,
            staging_directory(target) as folder,
            zipfile.ZipFile(file, "w", strict_timestamps=False) as archive,
        ):
            plan = _Plan(folder)
            for run in runs:
                plan.add(run, wanted)
                if most is not None and plan.nbytes > most:
                    raise BundleTooLargeError(f"The bundle would have {plan.nbytes:,} bytes or more, at most {most:,}.")
            for count, (name, path) in enumerate(plan.files.items(), 1):
                if digest := plan.digests.get(name):
                    check_content(path, digest)
                text = name.endswith((".json", ".jsonl", ".txt"))
                base = plan.folder if path.is_relative_to(plan.folder) else root / name.split("/")[1]
                with open(path, "rb", opener=inside(base)) as source:
                    method = zipfile.ZIP_DEFLATED if text else zipfile.ZIP_STORED
                    archive.write(f"/proc/self/fd/{source.fileno()}", name, method)
                done(count, len(plan.files))
            for name, content in (extras or {}).items():
                archive.writestr(name, content, zipfile.ZIP_DEFLATED)
    except (RunError, SegmentError, TensorFileError, OSError, pa.ArrowException) as error:
        raise BundleError(f"The bundle {target} cannot be written: {describe(error)}.") from error
    return WrittenBundle(
        len(runs), plan.tensors, plan.with_values, plan.left_out, target.stat().st_size, tuple(plan.damaged)
    )


def _bundled(root: Path, run_id: str) -> RunInfo:
    if not re.fullmatch(_RUN, run_id):
        raise BundleError(
            f"The run {run_id[:80]!a} cannot be bundled: its name may only have letters, digits and _+=@,.~-"
        )
    try:
        run = read_run(root / run_id)
    except RunError as error:
        raise BundleError(f"The run cannot be bundled: {error}.") from error
    if run.status.state in (QUEUED, RUNNING):
        raise BundleError(f"The run {run_id} is {run.status.state}: wait until it is done, or cancel it.")
    return run


@dataclass
class _Plan:
    """What a bundle will contain. Where values are left out, rows and status are rewritten in `folder`."""

    folder: Path
    files: dict[str, Path] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)  # the SHA-256 of tensor files, from their rows
    tensors: int = 0
    with_values: int = 0
    left_out: int = 0
    damaged: list[str] = field(default_factory=list)

    def add(self, run: RunInfo, wanted: set[str] | None) -> None:
        """Add the files of a run."""
        prefix, tensors, with_values = f"runs/{run.run_id}", 0, 0
        sizes: dict[str, int] = {}  # of tensor files
        for segment in run.segments:
            directory, place = run.directory / "segments" / segment, f"{prefix}/segments/{segment}"
            written = run.manifest_of(segment)
            written.check(directory)
            table = pq.read_table(directory / "tensor.parquet")
            paths = []
            for name, path in zip(table["tensor_id"].to_pylist(), table["path"].to_pylist(), strict=True):
                chosen = path is not None and (wanted is None or f"{run.run_id}/{name}" in wanted)
                here = chosen and _is_raw(path) and is_inside(run.directory, path)
                if here:
                    sizes[path] = (run.directory / path).stat().st_size
                self.left_out += chosen and not here
                paths.append(path if here else None)
            tensors += len(paths)
            with_values += sum(path is not None for path in paths)
            column = table.schema.field("path")
            rows = self._new(f"{place}/tensor.parquet")
            index = table.column_names.index("path")
            pq.write_table(table.set_column(index, column, pa.array(paths, column.type)), rows)
            packed = {f"{name}.parquet": path for name, path in (table_files(directory) | {"tensor": rows}).items()}
            self.files |= {f"{place}/{name}": path for name, path in packed.items()}
            sums = manifest(written.run_id, segment, packed, digests=written.digests)
            self._new(f"{place}/{MANIFEST}").write_bytes(sums)
            known = zip(paths, table["sha256"].to_pylist(), strict=True)
            self.digests |= {f"{prefix}/{path}": digest for path, digest in known if path and digest}
        self.files |= {f"{prefix}/{path}": run.directory / path for path in sizes}
        check_experiment(run.directory)
        for name in (*RUN_FILES, *experiment_files(run.directory)):
            if os.path.lexists(run.directory / name):
                self.files[f"{prefix}/{name}"] = run.directory / name
        without, nbytes = tensors - with_values, sum(sizes.values())
        status = replace(run.status, tensors=tensors, tensors_without_raw=without, bytes=nbytes)
        self._new(f"{prefix}/status.json").write_text(json.dumps(asdict(status)), encoding="utf-8")
        self._add_sound(run)
        if events := read_events(run.directory):  # of all ranks
            lines = b"".join(sealed(json.dumps(asdict(event)).encode()) + b"\n" for event in events)
            self._new(f"{prefix}/{EVENT.file}").write_bytes(lines)
        self.tensors += tensors
        self.with_values += with_values

    def _add_sound(self, run: RunInfo) -> None:
        """An import refuses damaged records and notes. Such records become empty lines, so that all others keep their
        numbers."""
        for kind in RECORD_KINDS:
            for name in kind.files(run.directory):
                lines = read_lines(kind, run.directory, name)
                if not lines.problem:
                    continue
                self.damaged.append(f"{run.run_id}: {lines.problem}")
                if name in RUN_FILES:
                    sound = [b""] * lines.count
                    for number, text in zip(lines.numbers, lines.texts, strict=True):
                        sound[number - 1] = sealed(text.encode())
                    self._new(f"runs/{run.run_id}/{name}").write_bytes(b"\n".join([*sound, b""]))
        try:
            read_notes(run.directory)
        except ValueError as error:
            del self.files[f"runs/{run.run_id}/notes.json"]
            self.damaged.append(f"{run.run_id}: its notes.json is damaged: {describe(error)}")

    @property
    def nbytes(self) -> int:
        """The bytes of tensors and tables."""
        return sum(path.stat().st_size for name, path in self.files.items() if name.endswith((".pt", ".parquet")))

    def _new(self, name: str) -> Path:
        """Add a file that is to be written."""
        path = self.files[name] = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


# Reading


def import_runs(
    root: Path,
    source: Path,
    check: Callable[[dict[str, bytes]], None] = lambda extras: None,
    done: Done = lambda count, of: None,
    finish: Callable[[dict[str, bytes]], None] = lambda extras: None,
) -> BundleImport:
    """Import a bundle's runs into a root, which is created if it does not exist. check may refuse the extra files by
    raising; finish keeps them once the runs are in the root, and if it raises, the runs are taken out again. done is
    called with the files read so far and their number.

    Raises BundleError (ReadOnlyError if the app is read-only), and then the root is unchanged. After a crash each run
    is complete or absent, and the import can be repeated.
    """
    check_writable("Importing a bundle")
    sweep(root)
    try:
        # On the root's disk, but not listed as a run.
        with staging_directory(root / "bundle") as staged:
            extras = _extract(source, staged, done)
            check(extras)
            _check_runs(staged / "runs")
            added, kept = _sort_out(root, staged / "runs")
            with _published(staged / "runs", root, added):
                finish(extras)
            return BundleImport(tuple(added), tuple(kept), extras)
    except OSError as error:
        raise BundleError(f"The bundle cannot be imported: {describe(error)}.") from error


def _refuse(reason: str) -> NoReturn:
    raise BundleError(f"This bundle is refused: {reason}.")


def _extract(source: Path, staged: Path, done: Done) -> dict[str, bytes]:
    """Unpack into `staged`; returns the extra files."""
    extras = {}
    with _opened(source) as archive:
        entries = _entries(archive)
        total = sum(entry.file_size for entry in entries)
        if total > shutil.disk_usage(staged).free:
            _refuse(f"its {total:,} bytes do not fit on the disk")
        for count, entry in enumerate(entries, 1):
            target = staged / entry.filename
            _unpack(archive, entry, target)
            if target.parent == staged:
                extras[target.name] = target.read_bytes()
            done(count, len(entries))
    return extras


def _opened(source: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(source)
    except DAMAGED:
        _refuse("it is not a ZIP archive, or is damaged")


def _entries(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The archive's entries, each a plain file under a name that a bundle may have."""
    infos = archive.infolist()
    if len(infos) > MOST_FILES:
        _refuse(f"it has more than {MOST_FILES:,} files")
    if not infos:
        _refuse("it is empty")
    folded: set[str] = set()
    total = 0
    for info in infos:
        name = info.filename
        if info.orig_filename != name or not (_EXTRA.fullmatch(name) or _RUN_FILE.fullmatch(name)):
            _refuse(f"{name[:80]!a} is not a valid name for a file in a bundle")
        if name.casefold() in folded:
            _refuse(f"{name[:80]!a} occurs twice")
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG):
            _refuse(f"{name[:80]!a} is a link or not a plain file")
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            _refuse(f"{name[:80]!a} is encrypted, or compressed with an unsupported method")
        limit = LARGEST if name.endswith((".pt", ".parquet")) else LONGEST_TEXT
        total += info.file_size
        if info.file_size > limit or total > LARGEST:
            _refuse(f"{name[:80]!a} is too large")
        if info.file_size > CHUNK and info.file_size > MOST_PACKED * info.compress_size:
            _refuse(f"{name[:80]!a} unpacks to more than {MOST_PACKED} times its size")
        folded.add(name.casefold())
    return infos


def _unpack(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path) -> None:
    """Unpack an entry. zipfile reads no more bytes than its header says, and compares the checksum."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with archive.open(entry) as source, open(target, "xb") as sink:
            shutil.copyfileobj(source, sink, CHUNK)
            sink.flush()
            os.fsync(sink.fileno())
    except DAMAGED:
        _refuse(f"{entry.filename!a} is damaged")


# What was unpacked


def _check_runs(runs: Path) -> None:
    """Check that each run is complete, has ended, and is what its checksums say, with rows that the index accepts."""
    if not runs.exists():
        return
    for run_id in run_names(runs):
        (runs / run_id / "segments").mkdir(exist_ok=True)
    segments = sorted(runs.glob("*/segments/*"))
    results = sorted(runs.glob(f"*/{EXPERIMENT}/*.parquet"))
    _check_sizes([*results, *(path for segment in segments for path in sorted(segment.glob("*.parquet")))])
    for segment in segments:
        try:
            _check_rows(segment)
        except BundleError:
            raise
        except (OSError, ValueError, pa.ArrowException) as error:
            _refuse(f"{segment.relative_to(runs)} cannot be read: {describe(error)[:200]}")
    for line in verify(runs).damaged:
        _refuse(line[:300])
    for run in list_runs(runs)[0]:
        if run.status.state in (QUEUED, RUNNING):
            _refuse(f"the run {run.run_id} says that it is still running")
    with Catalog.open(runs) as catalog:
        if catalog.refused:
            _refuse(f"it cannot be indexed: {catalog.refused[0][:200]}")


def _check_sizes(paths: Sequence[Path]) -> None:
    """Check that the tables take little more memory than their files: first by what they say, then by reading them."""
    largest = total = 0
    limit = SMALL_TABLES + MOST_PACKED * sum(path.stat().st_size for path in paths)
    for path in paths:
        place = path.relative_to(path.parents[3])
        try:
            metadata = pq.read_metadata(path)
        except (OSError, ValueError, pa.ArrowException) as error:
            _refuse(f"{place} cannot be read: {describe(error)[:200]}")
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            columns = [group.column(column) for column in range(group.num_columns)]
            if foreign := {column.compression for column in columns} - CODECS:
                _refuse(f"{place} is compressed with {min(foreign)}: expected one of {', '.join(sorted(CODECS))}")
            size = sum(max(column.total_uncompressed_size, 8 * column.num_values) for column in columns)
            largest, total = max(largest, size), total + size
        if total > limit:
            _refuse(f"{place} takes more than {MOST_PACKED} times its size in memory")
    try:
        check_readable(paths, SMALL_TABLES + 8 * largest)
    except UnreadableError as error:
        _refuse(str(error))


def _check_rows(segment: Path) -> None:
    """Check the columns, their size in memory, and that each path names a tensor file of the bundle."""
    for name, path in table_files(segment).items():
        schema = pq.read_schema(path)
        types = {column.name: column.type for column in schema}
        for column in TABLES[name]:
            if column.name in OPTIONAL and column.name not in types:
                continue
            if not types.get(column.name, pa.null()).equals(column.type):
                _refuse(f"{segment.name}/{name}.parquet has no column {column.name} of type {column.type}")
        if len(schema) > len(types) or types.keys() - set(TABLES[name].names):
            _refuse(f"{segment.name}/{name}.parquet has unknown columns, or one twice")
        if _in_memory(path) > LARGEST_TABLE:
            _refuse(f"{segment.name}/{name}.parquet takes more than {LARGEST_TABLE >> 30} GiB of memory")
    with pq.ParquetFile(segment / "tensor.parquet", read_dictionary=["path"]) as file:
        for batch in file.iter_batches(columns=["path"]):
            for raw in batch["path"].unique().to_pylist():
                if raw is not None and not (_is_raw(raw) and (segment.parents[1] / raw).is_file()):
                    _refuse(f"a row of {segment.name} refers to a tensor file that is not in the bundle")


def _in_memory(path: Path) -> int:
    """How many bytes a segment's table takes in memory, at most. In the file, a value that is repeated takes none."""
    texts = [field.name for field in pq.read_schema(path) if field.type == pa.string()]
    total = path.stat().st_size
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            total += 8 * sum(group.column(column).num_values for column in range(group.num_columns))
        if total <= LARGEST_TABLE:
            for batch in file.iter_batches(columns=texts):
                total += sum(pc.sum(pc.binary_length(c.dictionary).take(c.indices)).as_py() or 0 for c in batch.columns)
    return total


def _sort_out(root: Path, runs: Path) -> tuple[list[str], list[str]]:
    """(runs to add, runs that already exist with the same content)."""
    added, kept = [], []
    for run_id in run_names(runs):
        if not os.path.lexists(root / run_id):
            added.append(run_id)
            continue
        try:
            same = fingerprint(root / run_id) == fingerprint(runs / run_id)
        except RunError:
            same = False
        if not same:
            _refuse(f"the run {run_id} already exists with different content: move or delete it first")
        kept.append(run_id)
    return added, kept


@contextmanager
def _published(runs: Path, root: Path, run_ids: list[str]) -> Iterator[None]:
    """Rename the runs into the root: all of them, or none if a rename or the block raises."""
    with ExitStack() as undo:
        for run_id in run_ids:
            os.rename(runs / run_id, root / run_id)
            undo.callback(os.rename, root / run_id, runs / run_id)
        yield
        undo.pop_all()
