"""The losses of one training, as they are read from a log, and what is chosen and noted while they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from itertools import islice, pairwise
from typing import Any

from binade.collector.errors import ConfigError
from binade.collector.imports.log import LARGEST_STEP
from binade.collector.imports.readers.numbers import number_of, whole_of

NATS, UNKNOWN_UNIT = "nats per token", "unknown"  # of losses, in run.json
UNITS = {"nats": NATS, "unknown": UNKNOWN_UNIT}  # by the word of the command line
# The columns, keys and tags that training frameworks use, in lower case. Of several, the first one here is read: W&B's
# _step counts calls of its log function, and Hugging Face's train_loss is the mean over the training.
STEPS = ("iteration", "iter", "global_step", "train/global_step", "trainer/global_step", "current_steps", "step",
         "steps", "_step", "num_updates")  # fmt: skip
LOSSES = ("lm loss", "lm_loss", "train/lm loss", "loss", "train/loss", "reduced_train_loss", "train/ce loss",
          "loss_metrics/global_avg_loss", "train_loss_step", "train/loss_step", "loss_step", "training loss",
          "training_loss", "train loss", "train_loss", "loss/train/total")  # fmt: skip
MOST_NAMED = 12  # columns in a message
Rows = Iterator[tuple[str, Mapping[str, Any]]]  # the place, for messages, and the values by column


class Window(Enum):
    """How many iterations each loss of a log is the mean of."""

    ONE = "the loss of the iteration"
    INTERVAL = "the mean of the iterations since the previous loss"
    UNKNOWN = "unknown, except where every iteration is logged"


class Repeats(StrEnum):
    """What several losses of one step are."""

    LAST = "last"  # the last one replaces the others, as after a training resumed from a checkpoint
    FIRST = "first"
    MEAN = "mean"  # of micro-batches or ranks
    CONTINUE = "continue"  # each time the steps go back, another epoch starts: its steps follow those before


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """What a tool calls its steps and losses, and what they are.

    steps, losses  the known names of columns in lower case, the best first
    unit           UNKNOWN_UNIT if the tool does not log nats per token; not_nats: why
    repeats        what several losses of a step are, if the tool determines it
    """

    steps: tuple[str, ...] = STEPS
    losses: tuple[str, ...] = LOSSES
    window: Window = Window.UNKNOWN
    unit: str = NATS
    not_nats: str = ""
    repeats: Repeats | None = None


@dataclass(frozen=True)
class Columns:
    """What the user has chosen; None or nothing for what is found by itself. rows: only rows with these values of these
    columns; unit: of the losses."""

    step: str | None = None
    loss: str | None = None
    rows: tuple[tuple[str, str], ...] = ()
    repeats: Repeats | None = None
    unit: str | None = None


@dataclass(frozen=True)
class Series:
    """The losses of one training.

    name      the column, key or tag of the losses; step_name: that of the iterations
    losses    by iteration, in order
    windows   of how many iterations each loss is the mean; None if unknown
    unit      NATS or UNKNOWN_UNIT
    run       the name that the log gives the training
    where     the values that tell its rows from others of the log, "seed=1"
    others    columns that might be meant as well
    repeated  the losses that another one of the same iteration replaces, as after a restart
    empty     the rows whose loss is empty
    cut       what was left out because it is the end of the log and may be cut, in words
    damaged   what could not be read, in words
    facts     what else is known, in words
    """

    name: str
    step_name: str
    losses: Mapping[int, float]
    windows: Mapping[int, int | None]
    unit: str = NATS
    run: str | None = None
    where: str = ""
    others: tuple[str, ...] = ()
    repeated: int = 0
    empty: int = 0
    cut: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The column, and which of its rows."""
        return f"{self.name}, {self.where}" if self.where else self.name


@dataclass
class Notes:
    """What is noted while rows are read: see Series. window replaces that of the kind; decimal_comma: commas are
    decimal points; not_nats: what shows that the losses are not in nats per token; validation: lines that were left out
    as their losses are of validation data."""

    cut: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    window: Window | None = None
    decimal_comma: bool = False
    not_nats: str = ""
    validation: int = 0


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


def step_of(value: Any, place: str, column: str, decimal_comma: bool = False) -> int:
    """A step, also one that is written "3/20". Raises ConfigError."""
    try:
        step = whole_of(value, decimal_comma)
    except ValueError as error:
        raise unread(place, "step", value, column, error) from None
    if not (step.is_integer() and 0 <= step <= LARGEST_STEP):
        raise ConfigError(f"{place}: the step is {step:.17g}: expected a whole number from 0 to {LARGEST_STEP:,}")
    return int(step)


def loss_of(value: Any, place: str, column: str, decimal_comma: bool = False) -> float:
    """Raises ConfigError."""
    try:
        return number_of(value, decimal_comma)
    except ValueError as error:
        raise unread(place, "loss", value, column, error) from None


def unread(place: str, what: str, value: Any, column: str, error: ValueError) -> ConfigError:
    return ConfigError(f"{place}: the {what} is {str(value)[:40]!r} in column {column[:80]!r}: {error}")


def listed(names: Iterable[str]) -> str:
    every = [repr(name[:80]) for name in islice(names, 10_000)]
    more = len(every) - MOST_NAMED
    return ", ".join(every[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "") or "none"
