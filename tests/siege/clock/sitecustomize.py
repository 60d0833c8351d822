"""Shifts the clock of a Python process that has this folder on its path by the seconds that the file SIEGE_CLOCK holds
at that moment. The machine's clock is never touched."""

import datetime
import os
import time

_time, _time_ns = time.time, time.time_ns


def _shift() -> float:
    with open(os.environ["SIEGE_CLOCK"]) as file:
        return float(file.read() or 0)


class _DateTime(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return super().now(tz) + datetime.timedelta(seconds=_shift())


if "SIEGE_CLOCK" in os.environ:
    time.time = lambda: _time() + _shift()
    time.time_ns = lambda: _time_ns() + int(_shift() * 1e9)
    datetime.datetime = _DateTime  # type: ignore[misc]
