"""Shifts the clock of Binade's processes that have this folder on their path by the seconds that the file SIEGE_CLOCK
holds at that moment. The machine's clock is never touched. Only Binade's own modules get the shifted datetime: C code,
such as pyarrow's, crashes with a subclass in its place."""

import builtins
import datetime
import os
import sys
import time

_time, _import, _real = time.time, builtins.__import__, datetime.datetime


def _shift() -> float:
    with open(os.environ["SIEGE_CLOCK"]) as file:
        return float(file.read() or 0)


class _DateTime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return _real.now(tz) + datetime.timedelta(seconds=_shift())


def _patched(name: str, *arguments: object, **others: object) -> object:
    found = _import(name, *arguments, **others)
    if name.startswith("binade"):
        for module in [each for key, each in list(sys.modules.items()) if key.startswith("binade.")]:
            if getattr(module, "datetime", None) is _real:
                module.datetime = _DateTime
    return found


if "SIEGE_CLOCK" in os.environ:
    time.time = lambda: _time() + _shift()
    builtins.__import__ = _patched
