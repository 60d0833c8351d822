"""Compares files on disk with the checksums that were written with them, for `binade verify`.

The index does this for rows when it adds a segment, and for a tensor's values when they are read. This module reads
everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from binade.data.index.cache import Done
from binade.data.run.directory import (
    RUNNING,
    NotBegunError,
    RunError,
    RunInfo,
    check_names,
    check_root,
    read_run,
    run_directories,
)
from binade.data.run.experiment import check_experiment
from binade.data.run.record_kinds import RECORD_KINDS
from binade.data.run.records import RecordLines, read_lines
from binade.data.run.segment import read_tables
from binade.data.run.store import inside, sha256
from binade.data.words.text import describe

UNREADABLE = (OSError, ValueError, TypeError, pa.ArrowException)


@dataclass
class Verified:
    """The number of runs and files read; damaged: a line for each file that differs from what was written or imported;
    gone: the number of imported files that are no longer there, whose statistics are kept; torn: how many records a
    kill has cut short, which are left out."""

    runs: int = 0
    files: int = 0
    damaged: list[str] = field(default_factory=list)
    gone: int = 0
    torn: int = 0


def verify(
    root: Path,
    run_ids: Sequence[str] = (),
    damaged: Callable[[str], None] = lambda line: None,
    done: Done = lambda count, of: None,
) -> Verified:
    """Read every file of these runs of a root, of all if none are named. damaged is called with each line as it is
    found, done with the segments read so far and their number. Runs that are being recorded may be among them.

    Raises RunError if the root is not a directory or has no such run.
    """
    check_root(root)
    directories = run_directories(root)
    check_names(root, run_ids)
    verified = Verified()

    def refuse(path: Path, reason: str) -> None:
        verified.damaged.append(f"{path.relative_to(root)} {reason}")
        damaged(verified.damaged[-1])

    runs: list[tuple[RunInfo, list[str]]] = []
    for directory in directories:
        if not run_ids or directory.name in run_ids:
            try:
                run = read_run(directory)  # before its segments are listed: more may have been published since
                runs.append((run, run.segments))
            except NotBegunError:
                pass
            except RunError as error:
                refuse(directory, f"cannot be read: {error}")
    count, total = 0, sum(len(segments) for _, segments in runs)
    for run, names in runs:
        verified.runs += 1
        before, rows = len(verified.damaged), dict[str, int]()
        while new := [name for name in names if name not in rows]:
            for name in new:
                rows[name] = _check_segment(run, name, verified, refuse)
                count += 1
                done(min(count, total), total)
            if run.status.state != RUNNING:
                names = run.segments  # some may have been merged meanwhile
        for kind in RECORD_KINDS:
            for file in kind.files(run.directory):
                try:
                    lines = read_lines(kind, run.directory, file)
                except OSError as error:
                    lines = RecordLines(problem=describe(error))
                verified.torn += lines.torn
                if lines.problem:
                    refuse(run.directory, f"is damaged: {lines.problem}")
        try:
            check_experiment(run.directory)
        except (RunError, OSError) as error:
            refuse(run.directory, f"is damaged: {describe(error)}")
        missing = run.missing(names, sum(rows[name] for name in names))
        if before == len(verified.damaged) and missing:
            refuse(run.directory, f"is damaged: {missing}")
    return verified


def _check_segment(run: RunInfo, name: str, verified: Verified, refuse: Callable[[Path, str], None]) -> int:
    """Check a segment's files and the tensor files that it names; returns the number of its tensors. A segment that
    disappears meanwhile is not damaged: it was merged, or an import has replaced it."""
    segment = run.directory / "segments" / name
    try:
        written = run.manifest_of(name)
        damaged = written.differences(segment)
        if "tensor.parquet" not in damaged:
            rows = read_tables(segment, names=("tensor",))["tensor"]
        if damaged and run.manifest_of(name) != written:  # which raises if it is gone by now
            return _check_segment(run, name, verified, refuse)
    except UNREADABLE as error:
        if segment.exists():
            refuse(segment, f"is damaged: {describe(error)}")
        return 0
    for file, reason in damaged.items():
        refuse(segment / file, reason)
    verified.files += len(written.files)
    if "tensor.parquet" in damaged:
        return 0
    imported = set()
    for row in rows.select(["path", "sha256", "dtype", "shape"]).to_pylist():
        path, digest = row["path"], row["sha256"]
        if path is not None and not Path(path).is_absolute():
            _check_tensor(run.directory, row, verified, refuse)
        elif path is not None and (path, digest) not in imported:  # a file may have several tensors
            imported.add((path, digest))
            _check_imported(Path(path), digest, verified, lambda reason: refuse(segment, reason))
    return len(rows)


def _check_tensor(run: Path, row: Mapping[str, Any], verified: Verified, refuse: Callable[[Path, str], None]) -> None:
    """Compare a tensor file with its row: first its SHA-256, then what `tensor_files.load` compares."""
    from binade.data.run.tensor_files import load  # imports torch

    verified.files += 1
    file = run / row["path"]
    try:
        with open(file, "rb", opener=inside(run)) as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if row["sha256"] not in (None, digest):
            refuse(file, f"has SHA-256 {digest[:12]}…, expected {row['sha256'][:12]}…")
        else:
            load(file, {**row, "sha256": None}, run)
    except FileNotFoundError:
        refuse(file, "is missing")
    except (OSError, ValueError) as error:
        refuse(file, f"is damaged: {describe(error).removeprefix(f'{file} cannot be read as a tensor file: ')}")


def _check_imported(file: Path, digest: str | None, verified: Verified, refuse: Callable[[str], None]) -> None:
    """digest: when it was imported, None where it is not known."""
    try:
        if not file.is_file():
            verified.gone += 1
        elif digest is not None:
            verified.files += 1
            if sha256(file) != digest:
                refuse(f"names {file}, which has changed since it was imported: import its directory again")
    except OSError as error:
        refuse(f"names {file}, which cannot be read: {describe(error)}")
