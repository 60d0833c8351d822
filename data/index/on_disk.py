"""A run as the index finds it on disk, and marks that show whether its files have changed."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

from binade.data.run.directory import RUNNING, RunInfo
from binade.data.run.experiment import experiment_files
from binade.data.run.record_kinds import RECORD_KINDS

RECENT = 2.0  # seconds: a file that changed this recently may change again without a new modification time


@dataclass(frozen=True)
class RunOnDisk:
    """A run as found on disk: its segments with their modification times, a mark that shows whether it has changed,
    and what of its records and results is damaged."""

    run: RunInfo
    segments: dict[str, int]
    mark: tuple[int, ...] | None
    faults: tuple[str, ...] = ()

    @property
    def settled(self) -> bool:
        """Whether any change would change its mark."""
        return self.mark is not None and self.run.status.state != RUNNING


@dataclass(frozen=True)
class Damage:
    """Why a run is left out: a segment is damaged or, if None, missing. seen: the result of `seen_of` at that time; the
    segments are read again once it differs, or at the next call if it is None."""

    reason: str
    segment: str | None
    seen: Hashable


def mark_of(directory: str, segments: Iterable[str]) -> tuple[int, ...] | None:
    """A fingerprint of an ended run's files; None while they are too recent for their times to be reliable."""
    mark: list[int] = []
    times = []
    names = ["", "run.json", "status.json", "segments", *(f"segments/{name}" for name in segments)]
    path = Path(directory)
    names += (name for kind in RECORD_KINDS for name in kind.files(path))
    names += experiment_files(path)
    try:
        for name in names:
            status = os.stat(f"{directory}/{name}")
            mark += status.st_ino, status.st_size, status.st_mtime_ns
            times.append(status.st_mtime)
    except OSError:
        return None
    return None if max(times) > time.time() - RECENT else tuple(mark)


def seen_of(on_disk: RunOnDisk, segment: str | None) -> Hashable:
    """A fingerprint of the files of a segment or, if it is None, of the list of the run's segments and its count."""
    if segment is None:
        return *on_disk.segments.items(), on_disk.run.status.tensors
    try:
        with os.scandir(on_disk.run.directory / "segments" / segment) as entries:
            files = sorted((entry.name, entry.stat()) for entry in entries)
    except OSError:
        return None
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in files)
