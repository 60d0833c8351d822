"""Messages in one line."""

from __future__ import annotations

import re


def one_line(message: object, longest: int = 400) -> str:
    """A message without line breaks, terminal colours and the statement that DuckDB repeats after its own."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(message).split("\n\nLINE")[0])
    return " ".join(text.split())[:longest]


def describe(error: BaseException) -> str:
    """An exception as one line for people: its first line, the system's words of an OSError, or its type."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror.lower()}{where}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return (str(error) or type(error).__name__).splitlines()[0]
