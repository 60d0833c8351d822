"""Imports the losses that other tools logged, each training as a run without tensors. No torch.

Which file is what, the readers know (readers/registry.py). A log is read as a whole before its run is written: a log
that cannot be read leaves nothing. Only the steps and their losses are in memory.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from binade.collector.errors import ConfigError, raising
from binade.collector.imports.files import Walked
from binade.collector.imports.names import shortened
from binade.collector.imports.readers.kind import Confidence, Kind, Start
from binade.collector.imports.readers.registry import looked_for, reader_of
from binade.collector.imports.readers.series import Columns, Series
from binade.collector.imports.registry import statistics_of
from binade.collector.imports.run import run_of_import
from binade.data.run.directory import DONE, RunError
from binade.data.run.json_files import sealed
from binade.data.run.losses import LOSS
from binade.data.run.run_notes import change_notes, parse_notes, read_notes
from binade.data.run.store import SUFFIXES, staged_file
from binade.data.words.text import describe

LONGEST_NAME = 80  # of a run
SECONDS_A_LINE = 5.0  # of progress


@dataclass(frozen=True)
class LossLog:
    """A loss log. path: absolute, a file, or a folder of which these files are one log; label: relative to the folder
    that was searched, "." for itself, None for a file that the user named."""

    path: Path
    reader: Kind
    files: tuple[Path, ...]
    label: str | None = None


@dataclass(frozen=True, eq=False)
class Training:
    """The losses of one training, in a log."""

    log: LossLog
    series: Series

    @property
    def place(self) -> str:
        """The log, for a message."""
        return self.log.path.name if self.log.label in (None, ".") else self.log.label


@dataclass(frozen=True)
class LossesRead:
    """What was read from logs. contained: the trainings that were left out, and for each another one that has all of
    its losses; refused: (log, reason)."""

    trainings: tuple[Training, ...]
    contained: tuple[tuple[Training, Training], ...]
    refused: tuple[tuple[LossLog, str], ...]


def find_logs(walked: Walked) -> tuple[LossLog, ...]:
    """The loss logs among these files. Raises ConfigError if the only file is not one."""
    source = walked.source
    if not source.is_dir():
        return (_only_log(source),)
    folders: dict[tuple[Path, Kind], list[Path]] = {}
    logs: list[LossLog] = []
    for file in walked.files:
        path = Path(file.path)
        if path.suffix in SUFFIXES:
            continue
        try:
            reader = reader_of(Start.of(path), Confidence.COLUMNS)
        except OSError:  # it was deleted meanwhile, or nobody may read it
            continue
        if reader is not None and reader.whole_folder:
            folders.setdefault((path.parent, reader), []).append(path)
        elif reader is not None:
            logs.append(LossLog(path, reader, (path,), path.relative_to(source).as_posix()))
    for (folder, reader), files in folders.items():
        logs.append(LossLog(folder, reader, tuple(files), folder.relative_to(source).as_posix()))
    return tuple(sorted(logs, key=lambda log: log.path))


def _only_log(path: Path) -> LossLog:
    with raising(ConfigError, f"{path} cannot be read", OSError):
        start = Start.of(path)
    if not start.content:
        raise ConfigError(f"{path} is empty (0 bytes): expected a row for each step, with its loss")
    if reader := reader_of(start, Confidence.POSSIBLE):
        return LossLog(path, reader, (path,))
    is_dump = path.suffix in SUFFIXES or statistics_of(path) is not None
    hint = "; tensors are imported by naming their directory" * is_dump
    raise ConfigError(f"{path} is not recognized as a loss log; looked for: {looked_for()}{hint}")


def read_logs(logs: Sequence[LossLog], columns: Columns, say: Callable[[str], None] = lambda line: None) -> LossesRead:
    """The trainings of these logs. say: called with a line of progress every few seconds. Raises OSError."""
    trainings: list[Training] = []
    refused: list[tuple[LossLog, str]] = []
    said = time.monotonic()
    for number, log in enumerate(logs):
        if time.monotonic() - said > SECONDS_A_LINE:
            said = time.monotonic()
            say(f"{number:,} of {len(logs):,} logs read")
        try:
            trainings += [Training(log, series) for series in log.reader.read(log.path, columns)]
        except ConfigError as error:
            refused.append((log, str(error)))
    contained = {
        part: whole
        for part in trainings
        if (whole := next((t for t in trainings if _contains(t, part)), None)) is not None
    }
    left = tuple(training for training in trainings if training not in contained)
    return LossesRead(left, tuple(contained.items()), tuple(refused))


def _contains(whole: Training, part: Training) -> bool:
    """Whether another log of this kind has all losses of a training, and more, as the state of a later checkpoint has;
    or the same, if it is in a folder around it. Equal ones elsewhere may be two trainings."""
    if whole.log.reader is not part.log.reader or whole.log.path == part.log.path:
        return False
    longer = len(whole.series.losses) > len(part.series.losses)
    around = whole.log.path.parent in part.log.path.parent.parents
    equal = around and len(whole.series.losses) == len(part.series.losses)
    return (longer or equal) and all(
        iteration in whole.series.losses and _same(loss, whole.series.losses[iteration])
        for iteration, loss in part.series.losses.items()
    )


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def import_trainings(
    trainings: Sequence[Training],
    root: Path,
    *,
    recipe: str | None,
    start: Mapping[str, Any],
    name: str | None = None,
    command: str = "",
) -> list[str]:
    """Write the losses of each training as a run of root; returns the ids of the runs. The same column of the same log
    is the same run, whose losses and settings are replaced.

    recipe  what the trainings were quantized to, bf16 for a baseline, None if that is unknown
    start   model, dataset and seed, None for what is unknown: runs are compared that have the same ones; like, see
            `same_data.like`, if they are those of another run

    Raises ConfigError for a name that is not allowed; RunError, and OSError.
    """
    if name is not None and len(trainings) > 1:
        places = ", ".join(training.place for training in trainings[:3])
        raise ConfigError(f"--name is for one training, but there are {len(trainings)} ({places}...): import one file")
    with raising(ConfigError, "--name", ValueError):
        parse_notes(name or "")
    names = [name] if name is not None else shortened([_name(training) for training in trainings], LONGEST_NAME)
    return [
        _write(training, root, recipe, start, given, name is not None, command)
        for training, given in zip(trainings, names, strict=True)
    ]


def _write(
    training: Training,
    root: Path,
    recipe: str | None,
    start: Mapping[str, Any],
    name: str,
    is_new: bool,
    command: str,
) -> str:
    """name: of a run that has none yet; is_new: also of one that has."""
    series = training.series
    facts: dict[str, Any] = {"recipe": recipe, "like": None, **start, "command": command}
    facts |= {"step_column": series.step_name, "not_read": series.damaged}
    facts |= {"log": training.log.reader.kind, "facts": series.facts, "loss_unit": series.unit}
    with run_of_import(root, {"source": str(training.log.path), "loss_column": series.title, **facts}) as writer:
        finite = [loss for loss in series.losses.values() if math.isfinite(loss)]
        settings = {"settings": facts}  # in the first record: one rename replaces the losses and what is said of them
        with staged_file(writer.directory / LOSS.file) as file:
            for step, loss in series.losses.items():
                record: dict[str, Any] = {"iteration": step, "loss": loss if math.isfinite(loss) else None}
                if not math.isfinite(loss):
                    record |= {"not_finite": True, "logged": str(loss)}  # "nan", "inf" or "-inf"
                if series.windows[step] != 1:
                    record["window"] = series.windows[step]
                file.write(sealed(json.dumps(record | settings).encode()) + b"\n")
                settings = {}
        writer.describe(facts)
        seen = read_notes(writer.directory)
        given = name if is_new else seen.name or _allowed(name)
        if given != seen.name:
            change_notes(writer.directory, replace(seen, name=parse_notes(given).name), seen)
        ends: tuple[float | None, float | None] = (finite[0], finite[-1]) if finite else (None, None)
        writer.update(iteration=max(series.losses), loss_first=ends[0], loss_last=ends[1])
        writer.finish(DONE)
    return writer.directory.name


def _name(training: Training) -> str:
    """The name that the log gives the training, or its place in the folder."""
    return training.series.run or ("" if training.log.label in (None, ".") else training.place)


def _allowed(name: str) -> str:
    """The name, or "" if it is not allowed."""
    try:
        return parse_notes(name).name
    except RunError:
        return ""


def refusal(source: Path, read: LossesRead) -> str:
    """Why nothing of a source can be imported."""
    if not read.refused:
        return f"{source} has no loss log; looked for: {looked_for()}"
    more = f" (and {len(read.refused) - 1} more)" if len(read.refused) > 1 else ""
    return describe(ConfigError(read.refused[0][1])) + more
