"""Defines attacks, and runs one.

@attack("what must hold", tries=200)
def name(attempt: Attempt) -> None: ...

The function makes one try and raises an exception if the requirement is violated. Random numbers come only from
`attempt.random`, so that the seed and the number of a try reproduce it.
"""

from __future__ import annotations

import faulthandler
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

FULL = 30.0  # minutes for which `tries` is written
T = TypeVar("T")


@dataclass
class Attempt:
    """One try. place is an empty directory of its own; shared is one for all tries of the attack; root is one for all
    attacks, with a run of each of tests.conftest.RECIPES, read only; minutes is the siege's budget; wanted is the case
    of a test. What the attack says: case, what was tried, and times, how often."""

    number: int
    random: random.Random
    place: Path
    shared: Path
    root: Path
    minutes: float = FULL
    wanted: Any = None
    case: str = ""
    times: int = 1

    def choose(self, cases: Sequence[T]) -> T:
        """The cases in a random order: each comes before any comes again."""
        if self.wanted is not None:
            return self.wanted
        order = list(range(len(cases)))
        random.Random(self.number // len(cases)).shuffle(order)
        return cases[order[self.number % len(cases)]]

    def once(self, name: str, make: Callable[[Path], object]) -> Path:
        """A directory that make(directory) fills, once for all tries."""
        place = self.shared / name
        if not place.exists():
            part = self.shared / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.rename(place)
        return place


@dataclass(frozen=True)
class Attack:
    """seconds is how long one try may take; share is of the siege's time, 1 for most."""

    name: str
    holds: str
    tries: int
    seconds: int
    share: float
    run: Callable[[Attempt], None]


@dataclass
class Outcome:
    """failures has the number, the case and the message of each."""

    tried: int = 0
    seconds: float = 0.0
    failures: list[tuple[int, str, str]] = field(default_factory=list)


ATTACKS: dict[str, Attack] = {}


def attack(
    holds: str, *, tries: int, seconds: int = 120, share: float = 1.0
) -> Callable[[Callable[[Attempt], None]], Callable[[Attempt], None]]:
    def register(function: Callable[[Attempt], None]) -> Callable[[Attempt], None]:
        name = function.__name__.replace("_", "-")
        ATTACKS[name] = Attack(name, holds, tries, seconds, share, function)
        return function

    return register


class TooSlowError(BaseException):
    """A try took longer than it may. No part of what is attacked may catch it."""


def _stop(signum: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback(sys.stderr)
    raise TooSlowError("it hangs")


def check_sentence(text: object) -> None:
    """What a user is told: one line, not a book, no traceback."""
    said = str(text)
    assert 0 < len(said) < 3000, said[:300]
    assert "\n" not in said and "Traceback" not in said, said[:300]


def run(chosen: Attack, made: Attempt) -> str:
    """Make one try; "" or what failed."""
    before = signal.signal(signal.SIGALRM, _stop)
    signal.alarm(chosen.seconds)
    try:
        chosen.run(made)
    except (Exception, TooSlowError, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:300]} ({Path(where.filename).name}:{where.lineno})"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        shutil.rmtree(made.place, ignore_errors=True)
    return ""


def besiege(name: str, numbers: Sequence[int], seed: int, root: Path, minutes: float, deadline: float) -> None:
    """Make these tries, and print an Outcome as JSON after each. deadline is of time.monotonic."""
    outcome, start = Outcome(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"siege-{name}-", ignore_cleanup_errors=True) as shared:
        for number in numbers:
            if outcome.tried and time.monotonic() > deadline:
                break
            place = Path(tempfile.mkdtemp(prefix=f"try{number:04d}-", dir=shared))
            made = Attempt(number, random.Random(f"{seed} {name} {number}"), place, Path(shared), root, minutes)
            failure = run(ATTACKS[name], made)
            outcome.tried += made.times
            outcome.seconds = time.monotonic() - start
            if failure:
                outcome.failures.append((number, made.case, failure))
            print(json.dumps(vars(outcome)), file=sys.__stdout__, flush=True)
