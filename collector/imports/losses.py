"""Imports the losses that another tool logged, from CSV, JSON lines or TensorBoard event files, as a run without
tensors. No torch.

The log is read line by line, and the run is written after the last one: a log that cannot be read leaves nothing. Only
the steps and their losses are in memory.
"""

from __future__ import annotations

import csv
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from binade.collector.errors import ConfigError, raising
from binade.collector.imports.log import LARGEST_STEP
from binade.collector.imports.run import run_of_import
from binade.data.json_files import sealed
from binade.data.runs import DONE, change_notes, is_unicode, parse_notes, read_notes
from binade.data.store import regular, set_aside, sweep_beside, temporary_file

# The columns, keys and tags that training frameworks use, in lower case. Of several, the first one here is read: W&B's
# _step counts calls of its log function, and Hugging Face's train_loss is the mean over the training.
STEPS = ("iteration", "iter", "global_step", "train/global_step", "trainer/global_step", "step", "steps", "_step")
LOSSES = ("lm loss", "lm_loss", "train/lm loss", "loss", "train/loss", "reduced_train_loss",
          "loss_metrics/global_avg_loss", "training loss", "training_loss", "train loss", "train_loss")  # fmt: skip
BLANK = ("", "None")  # cells of rows without a loss
EVENTS = "tfevents"  # in the name of each TensorBoard event file
LONGEST_LINE = 1 << 20
CUT = "it is longer than the file, so it may be cut"
MOST_STEPS = 3_000_000  # loss.jsonl is read as a whole: see data.store.MOST_BYTES
MOST_NAMED = 12  # columns in a message
Rows = Iterator[tuple[str, Mapping[str, Any]]]  # the place, for messages, and the values by column


@dataclass(frozen=True)
class LossLog:
    """The losses of a log by step.

    others    columns that might be meant as well
    repeated  the losses that another one of the same step replaces, as after a restart
    empty     the rows whose loss is empty
    cut       what was left out because it is the end of the log and may be cut, in words
    damaged   what could not be read, in words
    """

    step_column: str
    loss_column: str
    losses: Mapping[int, float]
    others: tuple[str, ...]
    repeated: int
    empty: int
    cut: tuple[str, ...]
    damaged: tuple[str, ...]


@dataclass
class _Unread:
    """What a reader leaves out: see LossLog."""

    cut: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def is_loss_log(source: Path) -> bool:
    """Whether it is a file that may have losses, or a directory with event files. Raises OSError."""
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        return any(EVENTS in name for name in os.listdir(path))
    return os.path.isfile(path) and (source.suffix in ROWS or EVENTS in source.name)


def read_log(source: Path, step_column: str | None = None, loss_column: str | None = None) -> LossLog:
    """Read a log. Without a column, the first one that is in STEPS or LOSSES. Raises ConfigError, and OSError."""
    names: dict[str, None] = {}
    losses: dict[int, float] = {}
    step_names: list[str] = []
    loss_names: list[str] = []
    step_name = loss_name = None
    read, empty, unread = 0, 0, _Unread()
    if source.is_dir() or EVENTS in source.name:
        rows, step_column = _events(source, unread), step_column or "step"
    else:
        rows = ROWS[source.suffix](source, unread)
    for place, row in rows:
        if not row.keys() <= names.keys():
            names |= dict.fromkeys(row)
            loss_names = _columns(names, loss_column, LOSSES)
            if loss_names[:1] != [loss_name]:  # earlier rows have no loss in this column
                loss_name, losses, read, empty = next(iter(loss_names), None), {}, 0, 0
            if not losses:
                step_names = _columns(names, step_column, STEPS)
                step_name = next(iter(step_names), None)
        loss = None if loss_name is None else row.get(loss_name)
        if _is_blank(loss):  # of an evaluation, or another series
            empty += loss_name in row
            continue
        if step_name is None:
            break
        if _is_blank(row.get(step_name)):
            raise ConfigError(f"{place}: there is a loss, but {step_name!r} has no step: expected a number")
        step = _number(row[step_name], f"{place}: the step")
        if not (step.is_integer() and 0 <= step <= LARGEST_STEP):
            raise ConfigError(f"{place}: the step is {step:.17g}: expected a whole number from 0 to {LARGEST_STEP:,}")
        number = _number(loss, f"{place}: the loss")
        if math.isfinite(number) or int(step) not in losses:
            losses[int(step)] = number
        read += 1
        if len(losses) > MOST_STEPS:
            raise ConfigError(f"{source} has more than {MOST_STEPS:,} steps: keep every tenth, for example")
    if not names:
        raise ConfigError(f"{source} {_nothing(source, unread)}: expected a row for each step, with its loss")
    if step_name is None or loss_name is None:
        option, what = ("--step-column", "steps") if step_name is None else ("--loss-column", "losses")
        raise ConfigError(f"{source}: no column is known to have the {what}: give {option} NAME; it has {_list(names)}")
    if not losses:
        raise ConfigError(f"{source} has no losses in {loss_name!r}")
    others = (*step_names[1:], *loss_names[1:])
    repeated, cut, damaged = read - len(losses), tuple(unread.cut), tuple(unread.damaged)
    return LossLog(step_name, loss_name, losses, others, repeated, empty, cut, damaged)


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip() in BLANK)


def _nothing(source: Path, unread: _Unread) -> str:
    """Why a log has no rows."""
    if unread.damaged:
        return f"cannot be read ({unread.damaged[0]})"
    if not source.is_dir() and not source.stat().st_size:
        return "is empty (0 bytes)"
    return f"has no complete row ({unread.cut[0]})" if unread.cut else "has no rows"


def _columns(names: Iterable[str], choice: str | None, known: tuple[str, ...]) -> list[str]:
    """The columns that may be meant, the one to read first; none if the log has not had one so far."""
    if choice:
        return [name for name in names if name == choice]
    candidates = [name for name in names if name.strip().lower() in known]
    return sorted(candidates, key=lambda name: known.index(name.strip().lower()))


def _list(names: Iterable[str]) -> str:
    every = [repr(name[:80]) for name in names]
    more = len(every) - MOST_NAMED
    return ", ".join(every[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "") or "none"


def _number(value: Any, what: str) -> float:
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{what} is {str(value)[:40]!r}: expected a number") from None


def _lines(source: Path, unread: _Unread) -> Iterator[str]:
    """The lines of a text, without a last one that has no line break: it may be incomplete while a training writes."""
    with (
        raising(ConfigError, f"{source} is not UTF-8", UnicodeDecodeError),
        open(source, encoding="utf-8-sig", newline="", opener=regular) as file,
    ):
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise ConfigError(f"{source} has a line of more than {LONGEST_LINE:,} characters")
            if line.endswith(("\n", "\r")):
                yield line
            else:
                unread.cut.append("the last line has no line break, so it may be cut")


def _csv(source: Path, unread: _Unread) -> Rows:
    reader = csv.reader(_lines(source, unread), strict=True)
    header: list[str] | None = None
    while True:
        place = f"{source}, line {reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ConfigError(f"{place} is not CSV ({error}): is a quote not closed?") from None
        if cells is None:
            return
        if any("\n" in cell or "\r" in cell for cell in cells):  # which would swallow the rows in between
            raise ConfigError(f"{place}: a value contains a line break, as if a quote is not closed: expected one line")
        if header is None:
            header = cells
            if len(set(header)) < len(header):
                raise ConfigError(f"{source} has a column name twice in its first line")
        elif any(map(str.strip, cells)):
            if len(cells) != len(header):
                which = "more" if len(cells) > len(header) else "fewer"
                raise ConfigError(
                    f"{place}: there are {which} values than columns: expected {len(header)} with commas between them"
                )
            yield place, dict(zip(header, cells, strict=True))


def _json_lines(source: Path, unread: _Unread) -> Rows:
    for number, line in enumerate(_lines(source, unread), 1):
        if line.isspace():
            continue
        place = f"{source}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{place} is not JSON") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{place} is not a JSON object")
        yield place, row


def _events(source: Path, unread: _Unread) -> Rows:
    """The scalars of event files. Those of a directory are one log: each start of a training adds a file, and their
    names sort by time."""
    try:
        from google.protobuf.message import DecodeError
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError:
        raise ConfigError(
            "reading event files needs the package tensorboard: pip install 'binade[tensorboard]'"
        ) from None
    for path in sorted(path for path in source.iterdir() if EVENTS in path.name) if source.is_dir() else [source]:
        step = None
        for place, record in _records(path):
            try:
                if isinstance(record, str):
                    raise ValueError(record)
                event = Event.FromString(record)
            except (DecodeError, ValueError) as error:
                after = "" if step is None else f" after step {step}"
                reason = "it is not an event" if isinstance(error, DecodeError) else str(error)
                (unread.cut if reason == CUT else unread.damaged).append(f"{place}{after}: {reason}")
                continue
            step = event.step
            for value in event.summary.value:
                number = value.simple_value if value.HasField("simple_value") else None
                if value.HasField("tensor") and not value.tensor.tensor_shape.dim:
                    with suppress(TypeError, ValueError):  # it is a text
                        number = float(make_ndarray(value.tensor))
                if number is not None:
                    yield place, {"step": event.step, value.tag: number}


def _records(path: Path) -> Iterator[tuple[str, bytes | str]]:
    """The place of each record of an event file, and its content, or why it cannot be read. A record is its length, 8
    bytes; a checksum of the length, 4; the content; a checksum of the content, 4. (TensorBoard's own reader ends at
    the first damaged record without a word.)"""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    with open(path, "rb", opener=regular) as file:
        left, number = os.fstat(file.fileno()).st_size, 0
        while left:
            number += 1
            place, header = f"{path}, record {number}", file.read(12)
            if len(header) < 12:
                yield place, CUT
                return
            length, checksum = struct.unpack("<QI", header)
            if checksum != masked_crc32c(header[:8]):
                yield place, f"the checksum of its length is wrong, so it and the {left - 12:,} bytes after it are lost"
                return
            left -= 16 + length
            if left < 0:
                yield place, CUT
                return
            content, (checksum,) = file.read(length), struct.unpack("<I", file.read(4))
            yield place, content if checksum == masked_crc32c(content) else "its checksum is wrong"


ROWS = {".csv": _csv, ".jsonl": _json_lines, ".ndjson": _json_lines}


def import_losses(
    source: Path,
    root: Path,
    *,
    recipe: str,
    start: Mapping[str, str | int | None],
    name: str | None = None,
    step_column: str | None = None,
    loss_column: str | None = None,
    command: str = "",
) -> tuple[str, LossLog]:
    """Write the losses of a log as a run of root; returns the run's id and the log. The same column of the same log is
    the same run, whose losses and settings are replaced.

    recipe  what the training was quantized to, bf16 for a baseline
    start   model, dataset and seed, None for what is unknown: runs are compared that have the same ones

    Raises ConfigError for a log that cannot be read; RunError, and OSError.
    """
    source = Path(os.path.expanduser(source)).resolve()
    if not is_unicode(str(source)):
        raise ConfigError("the log's path is not valid Unicode: rename the file or directory that causes this")
    with raising(ConfigError, "--name", ValueError):
        named = parse_notes(name or "")
    log = read_log(source, step_column, loss_column)
    facts = {"recipe": recipe, **start, "step_column": log.step_column, "command": command, "not_read": log.damaged}
    with run_of_import(root, {"source": str(source), "loss_column": log.loss_column, **facts}) as writer:
        finite = [log.losses[step] for step in sorted(log.losses) if math.isfinite(log.losses[step])]
        path = writer.directory / "loss.jsonl"
        sweep_beside(path)
        with temporary_file(path) as (part, file):
            for step, loss in sorted(log.losses.items()):
                record = {"iteration": step, "loss": loss if math.isfinite(loss) else None}
                file.write(sealed(json.dumps(record).encode()) + b"\n")
            file.flush()
            os.fsync(file.fileno())
            with set_aside(path):  # at no moment do the losses of one import have the settings of another
                writer.describe(facts)
                os.replace(part, path)
        if name is not None:
            seen = read_notes(writer.directory)
            change_notes(writer.directory, replace(seen, name=named.name), seen)
        ends: tuple[float | None, float | None] = (finite[0], finite[-1]) if finite else (None, None)
        writer.update(iteration=max(log.losses), loss_first=ends[0], loss_last=ends[1])
        writer.finish(DONE)
    return writer.directory.name, log
