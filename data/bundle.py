"""A bundle: runs (rows, sketches, scores, losses) with chosen raw tensors, and a few other files, as one .zip.

    bundle.json              version, the runs with their fingerprints, every file with its size and SHA-256
    session.json             an extra file, such as a session
    runs/<run_id>/...        run directories as they are on disk; a tensor left out has no path in its row

A bundle is untrusted input. It is unpacked under limits into a hidden directory of the root, checked against its own
list and by indexing it, and only then are its runs renamed into the root. If anything is wrong with it, the error is
one sentence, and nothing has changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import FailFast, Field, Strict

from binade.data import untrusted
from binade.data.access import check_writable
from binade.data.cache import Done
from binade.data.catalog import Catalog
from binade.data.events import read_events
from binade.data.remote import fetched
from binade.data.runs import RUNNING, RunError, RunInfo, check_losses, fingerprint, now, read_run
from binade.data.segment import ADDED_LATER, MANIFEST, TABLES, SegmentError, manifest, table_files
from binade.data.store import TensorFileError, owner, staged_file, sweep
from binade.data.text import describe
from binade.data.untrusted import Record, RefusedError

MARKER, VERSION = "binade_bundle", 1
LIST = "bundle.json"
LONGEST_LIST = 64 << 20  # bytes of bundle.json
LONGEST_TEXT = 256 << 20  # bytes of a run's JSON, losses and log, and of an extra file
MOST_FILES = 500_000
MOST_VALUES = 4 * MOST_FILES  # of bundle.json
LARGEST_TABLE = 2 << 30  # bytes of one Parquet file in memory
LARGEST = 1 << 40  # bytes of all files together
MOST_PACKED = 100  # a file's size over its size in the archive: texts reach 20, bombs 1000
CHUNK = 1 << 20
# The exceptions of zipfile and zlib for a damaged archive.
DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OverflowError, struct.error)
RUN_FILES = ("run.json", "status.json", "loss.jsonl", "log.txt", "events.jsonl", "twin.jsonl", "notes.json")
_NAME = r"[A-Za-z0-9_+=@,~-][A-Za-z0-9_+=@,.~-]{0,200}"
_RUN_FILE = re.compile(
    rf"runs/(?P<run>{_NAME})/(?:{'|'.join(map(re.escape, RUN_FILES))}"
    rf"|segments/{_NAME}/(?:(?:{'|'.join(TABLES)})\.parquet|{re.escape(MANIFEST)})|(?P<raw>tensors/(?:{_NAME}/){{0,3}}{_NAME}))"
)
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
_EXTRA = re.compile(r"[a-z]{1,40}\.json")


class BundleError(ValueError):
    """A bundle cannot be written or imported. The message is one sentence: what is wrong, and what to do if
    possible."""

    exit_status = 1


@dataclass(frozen=True)
class Written:
    """The content of a bundle: the number of runs, of rows of tensors, of tensors with values, of chosen ones whose
    values are not in their run's directory and were left out, and the archive's bytes."""

    runs: int
    tensors: int
    with_values: int
    left_out: int
    nbytes: int


@dataclass(frozen=True)
class Imported:
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
) -> Written:
    """Write runs of a root as a bundle, atomically.

    tensor_ids: tensors whose values are included, as the catalog names them ("<run_id>/..."); None for all. extras:
    other files by name. done is called with the files written so far and their number. Raises BundleError.
    """
    runs = [_bundled(root, run_id) for run_id in dict.fromkeys(run_ids)]
    wanted = None if tensor_ids is None else set(tensor_ids)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory() as folder,
            staged_file(target) as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
        ):
            writer = _Writer(archive, Path(folder))
            plans = [writer.plan(run, wanted) for run in runs]
            files = [file for plan in plans for file in plan.files]
            digests = {name: digest for plan in plans for name, digest in plan.digests.items()}
            for index, (name, path) in enumerate(files):
                writer.add(name, path)
                if writer.listed[name]["sha256"] != digests.get(name, writer.listed[name]["sha256"]):
                    raise SegmentError(f"{path} is damaged: binade verify checks the whole run")
                done(index + 1, len(files))
            for name, content in (extras or {}).items():
                writer.add_bytes(name, content)
            listed = {
                MARKER: VERSION,
                "created": now(),
                "runs": [{"run_id": run.run_id, "hash": fingerprint(run.directory)} for run in runs],
                "files": writer.listed,
            }
            archive.writestr(_entry(LIST), json.dumps(listed, indent=1), zipfile.ZIP_DEFLATED)
    except (RunError, SegmentError, TensorFileError, OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or describe(error)
        raise BundleError(f"The bundle {target} cannot be written: {reason}.") from error
    tensors, with_values, left_out = (
        sum(getattr(plan, name) for plan in plans) for name in ("tensors", "with_values", "left_out")
    )
    return Written(len(runs), tensors, with_values, left_out, target.stat().st_size)


def _bundled(root: Path, run_id: str) -> RunInfo:
    if not re.fullmatch(_NAME, run_id):
        raise BundleError(
            f"The run {run_id[:80]!a} cannot be bundled: its name may only have letters, digits and _+=@,.~-"
        )
    try:
        run = read_run(root / run_id)
    except RunError as error:
        raise BundleError(f"The run cannot be bundled: {error}.") from error
    if run.status.state == RUNNING:
        raise BundleError(f"The run {run_id} is still running: wait until it is done, or cancel it.")
    return run


@dataclass(frozen=True)
class _Plan:
    files: list[tuple[str, Path]]
    digests: dict[str, str]  # the SHA-256 of tensor files, as their rows have them
    tensors: int
    with_values: int
    left_out: int


class _Writer:
    def __init__(self, archive: zipfile.ZipFile, folder: Path) -> None:
        self.archive = archive
        self.folder = folder
        self.listed: dict[str, dict[str, Any]] = {}

    def plan(self, run: RunInfo, wanted: set[str] | None) -> _Plan:
        """The files of a run. Where values are left out, rows and status are rewritten accordingly."""
        prefix = f"runs/{run.run_id}"
        files, raw, left_out, tensors = [], [], 0, 0
        digests: dict[str, str] = {}
        sizes: dict[str, int] = {}  # of tensor files, which a copy of an object store may delete to make room
        for segment in run.segments:
            directory = run.directory / "segments" / segment
            written = run.manifest_of(segment)
            if written:
                written.check(directory)
            table = pq.read_table(directory / "tensor.parquet")
            paths = []
            for name, path in zip(table["tensor_id"].to_pylist(), table["path"].to_pylist(), strict=True):
                chosen = path is not None and (wanted is None or f"{run.run_id}/{name}" in wanted)
                inside = chosen and _is_raw(path) and (file := fetched(run.directory / path)).is_file()
                if inside:
                    sizes[path] = file.stat().st_size
                left_out += chosen and not inside
                paths.append(path if inside else None)
            kept = [path for path in paths if path is not None]
            raw += kept
            tensors += len(paths)
            place, field = table.schema.get_field_index("path"), table.schema.field("path")
            rows = self._temporary(f"{run.run_id}-{segment}")
            pq.write_table(table.set_column(place, field, pa.array(paths, field.type)), rows)
            packed = {f"{name}.parquet": path for name, path in (table_files(directory) | {"tensor": rows}).items()}
            if written:
                sums = self._temporary(f"{run.run_id}-{segment}-{MANIFEST}")
                sums.write_bytes(manifest(written.run_id, segment, packed, digests=written.digests))
                packed[MANIFEST] = sums
                known = zip(paths, table["sha256"].to_pylist(), strict=True)
                digests |= {f"{prefix}/{path}": digest for path, digest in known if path and digest}
            files += [(f"{prefix}/segments/{segment}/{name}", path) for name, path in packed.items()]
        files += [(f"{prefix}/{path}", run.directory / path) for path in sizes]
        status = replace(run.status, tensors=tensors, tensors_without_raw=tensors - len(raw), bytes=sum(sizes.values()))
        status_file = self._temporary(f"status-{run.run_id}")
        status_file.write_text(json.dumps(asdict(status)))
        files.append((f"{prefix}/status.json", status_file))
        if events := read_events(run.directory):  # of all ranks
            merged = self._temporary(f"events-{run.run_id}")
            merged.write_text("".join(f"{json.dumps(asdict(event))}\n" for event in events))
            files.append((f"{prefix}/events.jsonl", merged))
        for name in ("run.json", "loss.jsonl", "twin.jsonl", "log.txt", "notes.json"):
            if (run.directory / name).is_file():
                files.append((f"{prefix}/{name}", run.directory / name))
        return _Plan(files, digests, tensors, len(raw), left_out)

    def _temporary(self, name: str) -> Path:
        return self.folder / f"{len(list(self.folder.iterdir()))}-{name}"[:200]

    def add(self, name: str, path: Path) -> None:
        packed = zipfile.ZIP_DEFLATED if name.endswith((".json", ".jsonl", ".txt")) else zipfile.ZIP_STORED
        digest, size = hashlib.sha256(), 0
        entry = _entry(name)
        entry.compress_type = packed
        with open(fetched(path), "rb") as source, self.archive.open(entry, "w", force_zip64=True) as sink:
            while block := source.read(CHUNK):
                digest.update(block)
                size += len(block)
                sink.write(block)
        self.listed[name] = {"bytes": size, "sha256": digest.hexdigest()}

    def add_bytes(self, name: str, content: bytes) -> None:
        self.archive.writestr(_entry(name), content, zipfile.ZIP_DEFLATED)
        self.listed[name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.external_attr = 0o644 << 16
    return entry


# Reading


def import_runs(
    root: Path,
    source: Path,
    check: Callable[[dict[str, bytes]], None] = lambda extras: None,
    done: Done = lambda count, of: None,
) -> Imported:
    """Import a bundle's runs into a root, which is created if it does not exist. check may refuse the extra files by
    raising; done is called with the files read so far and their number.

    Raises BundleError (ReadOnlyError if the app is read-only), and then the root is unchanged.
    """
    check_writable("Importing a bundle")
    try:
        new = not root.exists()
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(f"The bundle cannot be imported: {root}: {error.strerror or error}.") from error
    try:
        # On the root's disk, but not listed as a run.
        sweep(root, ".bundle.*")
        with tempfile.TemporaryDirectory(dir=root, prefix=".bundle.", suffix=f".{owner()}") as part:
            staged = Path(part)
            hashes, extras = _extract(source, staged, done)
            check(extras)
            _check_runs(staged / "runs", hashes)
            added, kept = _sort_out(root, hashes)
            _publish(staged / "runs", root, added)
            new = False
            return Imported(tuple(added), tuple(kept), extras)
    except OSError as error:
        raise BundleError(f"The bundle cannot be imported: {error.strerror or error}.") from error
    finally:
        if new:
            with suppress(OSError):
                root.rmdir()


def _refuse(reason: str) -> NoReturn:
    raise BundleError(f"This bundle is refused: {reason}.")


def _extract(source: Path, staged: Path, done: Done) -> tuple[dict[str, str], dict[str, bytes]]:
    """Unpack into `staged`: (the runs' fingerprints, the extra files). Only files of the list are unpacked, none longer
    than stated there, with names that a bundle may have."""
    extras = {}
    with _opened(source) as archive:
        entries = _entries(archive)
        hashes, files = _read_list(archive, entries)
        if set(files) != set(entries) - {LIST}:
            _refuse("its files do not match its bundle.json")
        total = sum(file.bytes for file in files.values())
        if total > shutil.disk_usage(staged).free:
            _refuse(f"its {total:,} bytes do not fit on the disk")
        for index, (name, file) in enumerate(files.items()):
            _unpack(archive, entries[name], file, staged / name)
            if _EXTRA.fullmatch(name):
                extras[name] = (staged / name).read_bytes()
            done(index + 1, len(files))
    return hashes, extras


def _opened(source: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(source)
    except DAMAGED:
        _refuse("it is not a ZIP archive, or is damaged")


def _entries(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The archive's entries by name, each a plain file under a name that a bundle may have."""
    infos = archive.infolist()
    if len(infos) > MOST_FILES:
        _refuse(f"it has more than {MOST_FILES:,} files")
    entries: dict[str, zipfile.ZipInfo] = {}
    folded = set()
    total = 0
    for info in infos:
        name = info.filename
        if info.orig_filename != name or not (name == LIST or _EXTRA.fullmatch(name) or _RUN_FILE.fullmatch(name)):
            _refuse(f"{name[:80]!a} is not a valid name for a file in a bundle")
        if name.casefold() in folded:
            _refuse(f"{name[:80]!a} occurs twice")
        kind = stat.S_IFMT(info.external_attr >> 16)
        if kind not in (0, stat.S_IFREG):
            _refuse(f"{name[:80]!a} is a link or not a plain file")
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            _refuse(f"{name[:80]!a} is encrypted, or compressed with an unsupported method")
        limit = LONGEST_LIST if name == LIST else LARGEST if name.endswith((".pt", ".parquet")) else LONGEST_TEXT
        total += info.file_size
        if info.file_size > limit or total > LARGEST:
            _refuse(f"{name[:80]!a} is too large")
        if info.file_size > CHUNK and info.file_size > MOST_PACKED * info.compress_size:
            _refuse(f"{name[:80]!a} unpacks to more than {MOST_PACKED} times its size")
        folded.add(name.casefold())
        entries[name] = info
    return entries


@dataclass(frozen=True)
class _Run(Record):
    run_id: Annotated[str, Field(pattern=f"^{_NAME}$")]
    hash: _Hash


@dataclass(frozen=True)
class _File(Record):
    bytes: Annotated[int, Strict(), Field(ge=0)]
    sha256: _Hash


@dataclass(frozen=True)
class _List(Record):
    """bundle.json; `_read_list` checks the files one by one, since they are many."""

    created: str
    runs: Annotated[tuple[_Run, ...], FailFast()]
    files: dict[str, Any]


def _read_list(
    archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]
) -> tuple[dict[str, str], dict[str, _File]]:
    """bundle.json: (the runs' fingerprints, every file's size and hash)."""
    if LIST not in entries:
        _refuse(f"it has no {LIST}: it is another kind of archive")
    content = b"".join(_blocks(archive, entries[LIST], entries[LIST].file_size))
    try:
        listed = untrusted.parse(_List, content, MARKER, VERSION, MOST_VALUES)
        files = {name: untrusted.validate(_File, file) for name, file in listed.files.items()}
    except RefusedError as error:
        _refuse(f"{LIST}: {error}")
    hashes = {run.run_id: run.hash for run in listed.runs}
    for run_id in hashes:
        if run_id.startswith("index.duckdb"):
            _refuse(f"{run_id} is not allowed as the name of a run")
    if {match["run"] for name in files if (match := _RUN_FILE.fullmatch(name))} != set(hashes):
        _refuse("its runs do not match its bundle.json")
    return hashes, files


def _blocks(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int) -> Iterator[bytes]:
    """An entry's content, refused if it is too long or its checksum is wrong."""
    size = 0
    try:
        with archive.open(entry) as source:
            while block := source.read(CHUNK):
                size += len(block)
                if size > most:
                    _refuse(f"{entry.filename!a} is longer than its header says")
                yield block
    except BundleError:
        raise
    except (*DAMAGED, OSError):
        _refuse(f"{entry.filename!a} is damaged")


def _unpack(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, listed: _File, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with open(target, "xb") as sink:
        for block in _blocks(archive, entry, listed.bytes):
            digest.update(block)
            size += len(block)
            sink.write(block)
        sink.flush()
        os.fsync(sink.fileno())
    if size != listed.bytes or digest.hexdigest() != listed.sha256:
        _refuse(f"{entry.filename!a} does not match {LIST}")


# What was unpacked


def _check_runs(runs: Path, hashes: dict[str, str]) -> None:
    """Check that each run is complete, has valid losses, rows that the catalog accepts, and the listed fingerprint."""
    for run_id, wanted in hashes.items():
        directory = runs / run_id
        (directory / "tensors").mkdir(exist_ok=True)
        (directory / "segments").mkdir(exist_ok=True)
        try:
            state = read_run(directory).status.state
            check_losses(directory)
            _check_rows(directory)
            found = fingerprint(directory)
        except (RunError, OSError, ValueError, pa.ArrowException) as error:
            if isinstance(error, BundleError):
                raise
            _refuse(f"the run {run_id} cannot be read: {describe(error)[:200]}")
        if state == RUNNING:
            _refuse(f"the run {run_id} says that it is still running")
        if found != wanted:
            _refuse(f"the run {run_id} does not match {LIST}")
    if not hashes:
        return
    with Catalog.open(runs) as catalog:
        if catalog.refused:
            _refuse(f"it cannot be indexed: {catalog.refused[0][:200]}")


def _check_rows(directory: Path) -> None:
    """Check the columns, their size in memory, and that each path names a tensor file of the bundle."""
    for segment in sorted((directory / "segments").iterdir()):
        for name, path in table_files(segment).items():
            schema = pq.read_schema(path)
            found = {field.name: field.type for field in schema}
            for field in TABLES[name]:
                if field.name in ADDED_LATER and field.name not in found:
                    continue
                if not found.get(field.name, pa.null()).equals(field.type):
                    _refuse(f"{segment.name}/{name}.parquet has no column {field.name} of type {field.type}")
            if len(schema) > len(found) or found.keys() - set(TABLES[name].names):
                _refuse(f"{segment.name}/{name}.parquet has unknown columns, or one twice")
            if _in_memory(path) > LARGEST_TABLE:
                _refuse(f"{segment.name}/{name}.parquet takes more than {LARGEST_TABLE >> 30} GiB of memory")
        with pq.ParquetFile(segment / "tensor.parquet", read_dictionary=["path"]) as file:
            for batch in file.iter_batches(columns=["path"]):
                for raw in batch["path"].unique().to_pylist():
                    if raw is not None and not (_is_raw(raw) and (directory / raw).is_file()):
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


def _sort_out(root: Path, hashes: dict[str, str]) -> tuple[list[str], list[str]]:
    """(runs to add, runs that already exist with the same content)."""
    added, kept = [], []
    for run_id, wanted in hashes.items():
        if not os.path.lexists(root / run_id):
            added.append(run_id)
            continue
        try:
            same = fingerprint(root / run_id) == wanted
        except RunError:
            same = False
        if not same:
            _refuse(f"the run {run_id} already exists with different content: move or delete it first")
        kept.append(run_id)
    return added, kept


def _publish(runs: Path, root: Path, run_ids: list[str]) -> None:
    """Rename the runs into the root: all of them, or none."""
    with ExitStack() as undo:
        for run_id in run_ids:
            os.rename(runs / run_id, root / run_id)
            undo.callback(os.rename, root / run_id, runs / run_id)
        undo.pop_all()
