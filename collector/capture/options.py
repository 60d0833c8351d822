"""The grouped options of a Recorder: what is watched in a long run, and how ranks are merged; and its switch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from binade.collector.capture.watching import WatchOptions
from binade.collector.errors import ConfigError
from binade.collector.ranks import Ranks
from binade.collector.settings import MergeRanks
from binade.data.exchange.export import Sink

ENABLED_VARIABLE = "TENSOR_SAVE_ENABLED"
SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Watch(WatchOptions):
    """How a long run is followed, see docs/watching.md. Raises ConfigError for a value that is not allowed.

    watch           which steps to watch, such as "every 100 steps"
    stats           what to record of a watched step: "basic" or "full"
    trigger         conditions under which the next steps are recorded in full, such as "sqnr_db < 12 for 3"
    warn            conditions under which an event is written and a warning logged, once for each tensor; () for none
    capture_steps   the number of steps to record in full after a trigger fires
    ring            how many of the steps before a trigger fires are recorded, too
    ring_bytes      the memory limit for these steps
    find_nan        whether to find the operation that produces the first NaN or Inf, in every step
    cooldown        for how many steps a trigger that has fired does not fire again
    capture_bytes   the disk space limit for captures
    sink            where else to send the rows once they are on the disk: TensorBoard, Weights & Biases or a file, see
                    `Sink`. If it fails, Binade warns once and continues to record
    """

    sink: Sink | None = None

    def __post_init__(self) -> None:
        for name in ("trigger", "warn"):
            object.__setattr__(self, name, words(name, getattr(self, name)))
        self.check()


@dataclass(frozen=True)
class Merge:
    """Whether to write one row for the shards and replicas of a tensor on all ranks. Raises ConfigError.

    Such a row has no values; values are kept for unmerged ranks and for steps that a trigger captures. The ranks
    exchange their rows at the end of each iteration, or of each `Recorder.at`.

    when       "on", "off", or "auto" for more than 8 ranks
    unmerged   ranks whose replicas keep rows and values of their own
    ranks      the ranks of the run; each has a Recorder, and rank 0 makes the directory. The default is those of
               torch.distributed and megatron.core, if they are initialized
    """

    when: str = MergeRanks.AUTO
    unmerged: Sequence[int] = ()
    ranks: Ranks | None = None

    def __post_init__(self) -> None:
        if self.when not in tuple(MergeRanks):
            raise ConfigError(f"when={self.when!r} of Merge: expected one of {', '.join(MergeRanks)}")
        check_type("unmerged of Merge", self.unmerged, Iterable, "a tuple of ranks")
        for rank in self.unmerged:
            whole("a rank in unmerged of Merge", rank)
        check_type("ranks of Merge", self.ranks, Ranks | None, "a Ranks")


def words(option: str, given: Iterable[Any], kind: Any = str) -> tuple[Any, ...]:
    """Raises ConfigError for a single string, whose letters would be taken as names, and for what is no sequence of
    names."""
    if isinstance(given, str):
        raise ConfigError(f"{option}={given!r} is a single string: expected a tuple, such as {option}=({given!r},)")
    check_type(option, given, Iterable, "a tuple of names")
    for item in (items := tuple(given)):
        check_type(f"an item of {option}", item, kind, "a name")
    return items


def check_type(name: str, value: object, kind: Any, expected: str) -> None:
    """Raise ConfigError unless an argument is an instance of `kind`, a class or a union."""
    if not isinstance(value, kind):
        shown = repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
        raise ConfigError(f"{name} is {shown}: expected {expected}")


def whole(name: str, value: Any, least: int = 0) -> int:
    """A whole number of at least this much. Raises ConfigError for any other argument."""
    expected = f"a whole number, {least} or more"
    check_type(name, value, Real, expected)
    if isinstance(value, bool) or value % 1 or value < least:
        raise ConfigError(f"{name} is {value!r}: expected {expected}")
    return int(value)


def saving_enabled() -> bool:
    """The value of TENSOR_SAVE_ENABLED; True if it is not set. Raises ValueError for a word not in SWITCH."""
    word = os.environ.get(ENABLED_VARIABLE) or "1"
    if word.lower() not in SWITCH:
        raise ValueError(f"{ENABLED_VARIABLE}={word!r} is neither on nor off: expected one of {', '.join(SWITCH)}")
    return SWITCH[word.lower()]
