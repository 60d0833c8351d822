"""Options for following a long run: which steps a Recorder measures, what makes it capture more, and for how long.

Plain data, no torch: the command-line options are declared here, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from binade.collector.capture.triggers import WARNINGS, Trigger
from binade.collector.settings import OptionGroup, Stats, check_options, option

EVERY = re.compile(r"every (?:step|([1-9]\d{0,8}) steps)")
WATCH = OptionGroup(
    "Watching a long run",
    "By default, a watched step is measured cheaply, without sketches and values. A TRIGGER is a condition on a "
    "measured property of a tensor, or on the loss: 'sqnr_db < 12 for 3', 'saturated > 1%', 'absmax > 8 x median(20)', "
    "'loss > mean + 4 sd', nan. When one fires, the following steps are recorded in full.",
)


@dataclass(frozen=True)
class WatchOptions:
    """The options that a Recorder and `binade run` share, as keywords and as command-line options."""

    # fmt: off
    watch: str | None = option(None, group=WATCH, metavar="WHEN", pattern=EVERY,
        expected="write 'every 100 steps' or 'every step'",
        help="Watch steps in addition to those that are recorded: 'every 100 steps'", default_help="none")
    stats: Stats = option(Stats.BASIC, group=WATCH, metavar="NAME",
        help="What a watched step records: basic (moments, counts and the error of the active format) or full (all)")
    trigger: tuple[str, ...] = option((), group=WATCH, metavar="TRIGGER,...", default_help="none",
        help="Record steps in full when a condition holds on a measured step")
    warn: tuple[str, ...] = option(WARNINGS, group=WATCH, metavar="TRIGGER,...",
        help="Warn when a condition holds on a measured step, once for each tensor, and record no more; '' for none")
    capture_steps: int = option(2, group=WATCH, metavar="K", minimum=0,
        help="Steps recorded in full after a trigger fires")
    ring: int = option(0, group=WATCH, metavar="N", minimum=0, maximum=10_000,
        help="Also record the N steps before a trigger fires. Every step is then measured like a watched step")
    ring_bytes: int = option(64 << 20, group=WATCH, metavar="SIZE", minimum=0, maximum=(1 << 63) - 1, unit="bytes",
        help="Memory limit for those steps", default_help="64M")
    find_nan: bool = option(False, group=WATCH,
        help="In every step, find the operation that produces the first NaN or Inf. This makes every step slower")
    cooldown: int = option(100, group=WATCH, metavar="N", minimum=0,
        help="Number of steps for which a trigger that has fired does not fire again")
    capture_bytes: int = option(1 << 30, group=WATCH, metavar="SIZE", minimum=0, maximum=(1 << 63) - 1, unit="bytes",
        help="Disk space limit for captures. Once it is reached, triggers capture nothing more", default_help="1G")
    # fmt: on

    @property
    def every(self) -> int:
        """One step in this many is watched; 0 for none."""
        match = EVERY.fullmatch(self.watch or "")
        return int(match[1] or 1) if match else 0

    @property
    def triggers(self) -> tuple[Trigger, ...]:
        """Raises ConfigError for one that cannot be read, as `check` does."""
        return tuple(map(Trigger.parse, self.trigger))

    @property
    def warnings(self) -> tuple[Trigger, ...]:
        """Raises ConfigError, as `triggers`."""
        return tuple(map(Trigger.parse, self.warn))

    @property
    def follows(self) -> bool:
        """Whether steps are measured in addition to those that are recorded."""
        return bool(self.every or self.ring)

    def follows_step(self, iteration: int) -> bool:
        """Whether a step is measured because it is watched, or for the ring."""
        return bool(self.ring) or self.watches(iteration)

    def watches(self, iteration: int) -> bool:
        return bool(self.every) and iteration % self.every == 0

    def check(self) -> WatchOptions:
        """Raise ConfigError for a value that is not allowed."""
        check_options(self)
        _ = self.triggers, self.warnings
        return self
