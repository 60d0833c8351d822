"""What a reader of loss logs is, and the series that it returns. No torch.

A reader is one file here with one class, and one line in registry.py. `recognize` looks at the start of a file, never
at its name alone; `read` returns its series. Most logs have rows: their readers are a TableReader, whose `rows` yields
the values by column, and the columns of steps and losses are found by known names. Files are untrusted: `read` raises
ConfigError, whose message is one line, for one that it cannot read.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from binade.collector.errors import ConfigError
from binade.collector.imports.log import LARGEST_STEP
from binade.data.store import regular

# The columns, keys and tags that training frameworks use, in lower case. Of several, the first one here is read: W&B's
# _step counts calls of its log function, and Hugging Face's train_loss is the mean over the training.
STEPS = ("iteration", "iter", "global_step", "train/global_step", "trainer/global_step", "current_steps", "step",
         "steps", "_step")  # fmt: skip
LOSSES = ("lm loss", "lm_loss", "train/lm loss", "loss", "train/loss", "reduced_train_loss", "train/ce loss",
          "loss_metrics/global_avg_loss", "train_loss_step", "train/loss_step", "loss_step", "training loss",
          "training_loss", "train loss", "train_loss")  # fmt: skip
# Other names that may be meant. They are read if there is only one, and else the user chooses.
_LIKE_STEP = re.compile(r"(?<![a-z])(?:step|steps|iter|iters|iteration|iterations)(?![a-z])")
_NO_STEP = re.compile(r"time|speed|second|per|max|total|skipped|nan|[(]")
_LIKE_LOSS = re.compile(r"(?<![a-z])loss(?![a-z])")
_NO_LOSS = re.compile(r"val|eval|test|scale|aux|balanc|mtp|z[ _-]loss|epoch|min|max|best| vs ")
_VALIDATION = re.compile(r"(?<![a-z])(?:val|valid|validation|eval|tel)(?![a-z])")
BLANK = ("", "None")  # cells of rows without a loss
MOST_STEPS = 3_000_000  # loss.jsonl is read as a whole: see data.store.MOST_BYTES
MOST_NAMED = 12  # columns in a message
HEAD = 1 << 20  # bytes by which a file is recognized: some logs begin with the source of their program
_OF = re.compile(r"(\d{1,16})/\s*\d{1,16}", re.ASCII)  # a step "3/20"
Rows = Iterator[tuple[str, Mapping[str, Any]]]  # the place, for messages, and the values by column


class Confidence(IntEnum):
    """How sure a reader is that a file is of its kind. The files of a folder are read from COLUMNS on. POSSIBLE is
    enough for a file that the user names, since the reader then says what is missing."""

    NONE = 0
    POSSIBLE = 1
    COLUMNS = 2
    SIGNATURE = 3


class Window(Enum):
    """How many iterations each loss of a log is the mean of."""

    ONE = "the loss of the iteration"
    INTERVAL = "the mean of the iterations since the previous loss"
    UNKNOWN = "unknown, except where every iteration is logged"


@dataclass(frozen=True)
class Start:
    """The beginning of a file: at most HEAD bytes, and their lines; no lines if they are not text."""

    path: Path
    content: bytes
    lines: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> Start:
        """Raises OSError, also for what is not a regular file."""
        with open(path, "rb", opener=regular) as file:
            content = file.read(HEAD)
        if b"\0" in content:
            return cls(path, content, ())
        lines = re.split("\r\n|\n|\r", content.decode("utf-8-sig", errors="replace"))
        cut = len(content) == HEAD and len(lines) > 1
        return cls(path, content, tuple(lines[:-1] if cut else lines))

    @property
    def first(self) -> str:
        """The first line that is not blank."""
        return next((line for line in self.lines if line.strip()), "")


@dataclass(frozen=True)
class Columns:
    """The columns that the user has chosen, None for those that are found by their names."""

    step: str | None = None
    loss: str | None = None


@dataclass(frozen=True)
class Series:
    """The losses of one training.

    name      the column, key or tag of the losses; step_name: that of the iterations
    losses    by iteration, in order
    windows   of how many iterations each loss is the mean; None if unknown
    run       the name that the log gives the training
    others    columns that might be meant as well
    repeated  the losses that another one of the same iteration replaces, as after a restart
    empty     the rows whose loss is empty
    cut       what was left out because it is the end of the log and may be cut, in words
    damaged   what could not be read, in words
    facts     what else the reader knows, in words
    """

    name: str
    step_name: str
    losses: Mapping[int, float]
    windows: Mapping[int, int | None]
    run: str | None = None
    others: tuple[str, ...] = ()
    repeated: int = 0
    empty: int = 0
    cut: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()


@dataclass
class Notes:
    """What a reader notes while it yields rows: see Series. window replaces that of its class."""

    cut: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    window: Window | None = None


class Reader(ABC):
    """Reads one kind of loss log.

    kind          what it is, in words
    example       a file of this kind, as in a command
    columns       what is read, for the documentation
    whole_folder  whether all such files of a folder are one log
    """

    kind: ClassVar[str]
    example: ClassVar[str]
    columns: ClassVar[str]
    window: ClassVar[Window] = Window.UNKNOWN
    whole_folder: ClassVar[bool] = False

    @abstractmethod
    def recognize(self, start: Start) -> Confidence: ...

    @abstractmethod
    def read(self, path: Path, columns: Columns) -> tuple[Series, ...]:
        """Raises ConfigError, and OSError."""


class TableReader(Reader):
    """A log of rows, which is one series. steps, losses: the known names in lower case, the best first."""

    steps: ClassVar[tuple[str, ...]] = STEPS
    losses: ClassVar[tuple[str, ...]] = LOSSES

    @abstractmethod
    def rows(self, path: Path, notes: Notes) -> Rows: ...

    def read(self, path: Path, columns: Columns) -> tuple[Series, ...]:
        notes = Notes()
        return (self.collect(path, self.rows(path, notes), notes, columns),)

    def collect(self, path: Path, rows: Rows, notes: Notes, columns: Columns, run: str | None = None) -> Series:
        """The series in these rows."""
        table = LossTable(self, path, columns)
        for place, row in rows:
            table.add(place, row)
        return self.series(table, notes, run)

    def series(self, table: LossTable, notes: Notes, run: str | None = None) -> Series:
        """The series of a table that has all rows."""
        table.check(notes)
        losses, step_names, loss_names = table.losses, table.step_names, table.loss_names
        step_name, loss_name = step_names[0], loss_names[0]
        known = loss_name.strip().lower() in self.losses
        window = (notes.window or self.window) if known else Window.UNKNOWN
        steps = sorted(losses)
        validation = _VALIDATION.search(loss_name.lower())
        return Series(
            name=loss_name,
            step_name=step_name,
            losses={step: losses[step] for step in steps},
            windows=dict(zip(steps, windows_of(steps, window), strict=True)),
            run=run,
            others=(*step_names[1:], *loss_names[1:]),
            repeated=table.read - len(losses),
            empty=table.empty,
            cut=tuple(notes.cut),
            damaged=tuple(notes.damaged),
            facts=(*notes.facts, *[f"{loss_name} is a loss of validation data"] * bool(validation)),
        )

    @classmethod
    def losses_of(cls, names: Iterable[str], choice: str | None = None) -> list[str]:
        """The columns that may be the losses, the best first; several that are not known by name are a question."""
        return _columns(names, choice, cls.losses, _LIKE_LOSS, _NO_LOSS)

    @classmethod
    def steps_of(cls, names: Iterable[str], choice: str | None = None) -> list[str]:
        return _columns(names, choice, cls.steps, _LIKE_STEP, _NO_STEP)

    @classmethod
    def has_columns(cls, names: Iterable[str]) -> bool:
        names = list(names)
        return bool(cls.losses_of(names) and cls.steps_of(names))


class LossTable:
    """The losses by iteration of the rows so far. A row may bring a column that is meant rather than the one before:
    then earlier rows have no loss. read: the losses, repeated ones too; empty: see Series."""

    def __init__(self, reader: TableReader, path: Path, columns: Columns) -> None:
        self._reader, self._path, self.columns = reader, path, columns
        self._names: dict[str, None] = {}
        self._step: str | None = None
        self._loss: str | None = None
        self.step_names: list[str] = []
        self.loss_names: list[str] = []
        self.losses: dict[int, float] = {}
        self.read = self.empty = 0

    def add(self, place: str, row: Mapping[str, Any]) -> None:
        if not row.keys() <= self._names.keys():
            self._see(row)
        loss = None if self._loss is None else row.get(self._loss)
        if self._loss is None or _is_blank(loss):  # of an evaluation, or another series
            self.empty += self._loss in row
            return
        if self._step is None:
            return
        if _is_blank(row.get(self._step)):
            raise ConfigError(f"{place}: there is a loss, but {self._step!r} has no step: expected a number")
        step = step_of(row[self._step], place)
        number = number_of(loss, f"{place}: the loss")
        if math.isfinite(number) or step not in self.losses:
            self.losses[step] = number
        self.read += 1
        if len(self.losses) > MOST_STEPS:
            raise ConfigError(f"{self._path} has more than {MOST_STEPS:,} steps: keep every tenth, for example")

    def _see(self, row: Mapping[str, Any]) -> None:
        """Choose the columns, of which there are new ones."""
        self._names |= dict.fromkeys(row)
        self.loss_names = self._reader.losses_of(self._names, self.columns.loss)
        best = _only(self.loss_names, self._reader.losses)
        if best != self._loss:
            self._loss, self.losses, self.read, self.empty = best, {}, 0, 0
        if not self.losses:
            self.step_names = self._reader.steps_of(self._names, self.columns.step)
            self._step = _only(self.step_names, self._reader.steps)

    def check(self, notes: Notes) -> None:
        """Raise ConfigError if there are no losses, or if it is unknown which column they are in."""
        path = self._path
        if not self._names:
            raise ConfigError(f"{path} {_nothing(path, notes)}: expected a row for each step, with its loss")
        for candidates, name, option, what in (
            (self.step_names, self._step, "--step-column", "steps"),
            (self.loss_names, self._loss, "--loss-column", "losses"),
        ):
            if name is None and candidates:
                raise ConfigError(f"{path}: {listed(candidates)} may be the {what}: choose one with {option} NAME")
            if name is None:
                every = listed(self._names)
                raise ConfigError(f"{path}: no column is known to have the {what}: give {option} NAME; it has {every}")
        if not self.losses:
            raise ConfigError(f"{path} has no losses in {self._loss!r}")


def windows_of(steps: Sequence[int], window: Window) -> list[int | None]:
    """Of how many iterations each loss is the mean, of losses that were logged at these iterations, in order. A loss
    that follows the one of the iteration before it is that of one iteration, whatever the log is."""
    if window == Window.ONE:
        return [1] * len(steps)
    gaps = [later - step for step, later in pairwise(steps)]
    if window == Window.INTERVAL:
        from_start = steps[:1] == gaps[:1] or steps[0] == 1
        return [max(1, steps[0]) if from_start or steps[0] == 0 else None, *gaps]
    return [1 if steps[0] <= 1 or gaps[:1] == [1] else None, *(1 if gap == 1 else None for gap in gaps)]


def step_of(value: Any, place: str) -> int:
    """A step, also one that is written "3/20". Raises ConfigError."""
    if isinstance(value, str) and (of := _OF.fullmatch(value.strip())):
        value = of[1]
    step = number_of(value, f"{place}: the step")
    if not (step.is_integer() and 0 <= step <= LARGEST_STEP):
        raise ConfigError(f"{place}: the step is {step:.17g}: expected a whole number from 0 to {LARGEST_STEP:,}")
    return int(step)


def number_of(value: Any, what: str) -> float:
    """Raises ConfigError."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{what} is {str(value)[:40]!r}: expected a number") from None


def listed(names: Iterable[str]) -> str:
    every = [repr(name[:80]) for name in names]
    more = len(every) - MOST_NAMED
    return ", ".join(every[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "") or "none"


def _columns(
    names: Iterable[str], choice: str | None, known: tuple[str, ...], like: re.Pattern[str], unlike: re.Pattern[str]
) -> list[str]:
    if choice:
        return [name for name in names if name == choice]
    lower = {name: name.strip().lower() for name in names}
    if usual := [name for name in lower if lower[name] in known]:
        return sorted(usual, key=lambda name: known.index(lower[name]))
    return [name for name in lower if like.search(lower[name]) and not unlike.search(lower[name])]


def _only(names: Sequence[str], known: Sequence[str]) -> str | None:
    """The column to read: the best known one, or the only one."""
    return names[0] if names and (len(names) == 1 or names[0].strip().lower() in known) else None


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.strip() in BLANK)


def _nothing(path: Path, notes: Notes) -> str:
    """Why a log has no rows."""
    if notes.damaged:
        return f"cannot be read ({notes.damaged[0]})"
    return f"has no complete row ({notes.cut[0]})" if notes.cut else "has no rows"
