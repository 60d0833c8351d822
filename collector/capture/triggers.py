"""Conditions on the measurements of a run, parsed from text.

    sqnr_db < 12 for 3          of any tensor, three measured steps in a row
    saturated > 1%              a share; % divides by 100
    absmax > 8 × median(20)     against the same tensor's own last 20 values; x and * are × too
    loss > mean + 4 sd          against its last 20 values
    nan                         a NaN or Inf in a tensor or the loss
    zero_result > 0             a GEMM of two operands that are not all zero returned zeros alone
    last_bin > 50%              of a norm's gain, the share that an MX format rounds to the largest code of its block

A history has only values before the current one, and nothing fires until the history is full.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from binade.collector.errors import ConfigError
from binade.data.run.columns import ERROR_COLUMNS, MOMENTS

NAN, LOSS, ZERO_RESULT, LAST_BIN = "nan", "loss", "zero_result", "last_bin"
QUANTITIES = (LOSS, *ERROR_COLUMNS, *MOMENTS, ZERO_RESULT, LAST_BIN)
WARNINGS = (f"{ZERO_RESULT} > 0", f"{LAST_BIN} > 50%")  # the conditions that are watched for by default
MEANINGS = {
    ZERO_RESULT: "all values are zero, those of the operands are not",
    LAST_BIN: "the share that rounds to the largest code of its block",
}
HISTORY = 20  # values
NUMBER = r"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d{1,3})?"
HISTORIC: dict[str, Callable[[Iterable[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
}
CONDITION = re.compile(
    rf"(?P<quantity>\w+)\s*(?P<sign>[<>])\s*"
    rf"(?:(?:(?P<factor>{NUMBER})\s*[×x*]\s*)?(?P<history>{'|'.join(HISTORIC)})(?:\((?P<window>\d{{1,5}})\))?"
    rf"(?:\s*(?P<side>[+-])\s*(?P<sd>{NUMBER})\s*sd)?|(?P<number>{NUMBER})(?P<percent>\s*%)?)"
    r"(?:\s+for\s+(?P<times>[1-9]\d{0,5}))?"
)
EXPECTED = (
    "write nan, or QUANTITY < or > LIMIT, as in 'sqnr_db < 12 for 3', 'saturated > 1%', 'absmax > 8 x median(20)' or "
    f"'loss > mean + 4 sd'. QUANTITY is one of {', '.join(QUANTITIES)}; LIMIT is a number, or {', '.join(HISTORIC)} of "
    "2 to 10000 earlier values"
)


@dataclass(frozen=True)
class Trigger:
    """One condition.

    quantity   a column of the index, "loss", or "nan" for what is not finite
    above      whether it fires above its limit, not below it
    limit      the limit, or the factor of the history's value
    history    "" for a limit that is a number; else a name of HISTORIC, of the last `window` values, to which
               `deviations` of their standard deviations are added
    times      in how many measured steps in a row it must hold
    """

    text: str
    quantity: str
    above: bool = True
    limit: float = 0.0
    history: str = ""
    window: int = HISTORY
    deviations: float = 0.0
    times: int = 1

    @classmethod
    def parse(cls, text: str) -> Trigger:
        """Parse a condition. Raises ConfigError, which says what is allowed."""
        words = " ".join(text.split())
        if words == NAN:
            return cls(words, NAN)
        match = CONDITION.fullmatch(words)
        window = int((match and match["window"]) or HISTORY)
        if match is None or match["quantity"] not in QUANTITIES or not 2 <= window <= 10_000:
            raise ConfigError(f"trigger {text!r} is not valid: {EXPECTED}")
        number = float(match["number"] or match["factor"] or 1)
        return cls(
            words,
            match["quantity"],
            match["sign"] == ">",
            number / 100 if match["percent"] else number,
            match["history"] or "",
            window,
            float((match["side"] or "") + (match["sd"] or "0")),
            int(match["times"] or 1),
        )

    def limit_after(self, values: deque[float]) -> float | None:
        """The limit, given the previous values; None if there are too few."""
        if not self.history:
            return self.limit
        if len(values) < self.window:
            return None
        return self.limit * HISTORIC[self.history](values) + self.deviations * statistics.pstdev(values)


@dataclass(frozen=True)
class Fired:
    """A trigger that fired: where, and why in words."""

    trigger: Trigger
    place: str
    reason: str


@dataclass
class _Past:
    """The state of a trigger for one tensor."""

    values: deque[float]
    held: int = 0


@dataclass
class Triggers:
    """The triggers of a run, with their state. cooldown: None if each fires once at each place."""

    conditions: tuple[Trigger, ...]
    cooldown: int | None = 0
    _past: dict[tuple[Trigger, str], _Past] = field(default_factory=dict)
    _fired: dict[Trigger, int] = field(default_factory=dict)
    _places: set[tuple[Trigger, str]] = field(default_factory=set)  # where each fired, without a cooldown

    def see(self, iteration: int, measured: Mapping[str, Mapping[str, float]]) -> list[Fired]:
        """The triggers that fire, given the quantities of each place of a step; each fires once, at the first place."""
        firings = []
        for trigger in self.conditions:
            fired = [
                (place, reason)
                for place, values in measured.items()
                if trigger.quantity in values
                and (trigger, place) not in self._places
                and (reason := self._holds(trigger, place, values[trigger.quantity]))
            ]
            last = self._fired.get(trigger)
            if fired and (self.cooldown is None or last is None or iteration > last + self.cooldown):
                self._fired[trigger] = iteration
                if self.cooldown is None:
                    self._places.update((trigger, place) for place, _ in fired)
                more = f", and {len(fired) - 1} more" * (len(fired) > 1)
                where = "" if fired[0][0] == LOSS else f"{fired[0][0]}: "
                firings.append(Fired(trigger, fired[0][0], f"{where}{fired[0][1]}{more}"))
        return firings

    def _holds(self, trigger: Trigger, place: str, value: float) -> str:
        """Why it fires now; "" if it does not."""
        if trigger.quantity == NAN:
            if place == LOSS:
                return "the loss is NaN or Inf" if value else ""
            count = "some" if math.isinf(value) else f"{value:,.0f}"  # only that there are some is known
            return (f"{count} value is NaN or Inf" if value == 1 else f"{count} values are NaN or Inf") if value else ""
        past = self._past.setdefault((trigger, place), _Past(deque(maxlen=trigger.window)))
        if math.isnan(value):  # undefined, as the SQNR of zeros
            past.held = 0
            return ""
        limit = trigger.limit_after(past.values)
        held = limit is not None and (value > limit if trigger.above else value < limit)
        past.held = past.held + 1 if held else 0
        if trigger.history and math.isfinite(value):
            past.values.append(value)
        if past.held < trigger.times:
            return ""
        past.held = 0
        steps = f" in {trigger.times} measured steps in a row" * (trigger.times > 1)
        meaning = f" ({MEANINGS[trigger.quantity]})" if trigger.quantity in MEANINGS else ""
        return f"{trigger.quantity} is {value:.4g}, {'above' if trigger.above else 'below'} {limit:.4g}{meaning}{steps}"
