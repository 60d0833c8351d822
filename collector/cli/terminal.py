"""Text for a terminal."""

from __future__ import annotations

import os
import sys


def one_line(text: str) -> str:
    """What a user typed may hold line breaks and escape sequences: shown, not obeyed."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def escape_unknown() -> None:
    """From here on, what is printed is escaped where the terminal lacks a character."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed
        stream.reconfigure(errors="backslashreplace")


def put(text: str) -> None:
    """Print lines at once; a reader that has seen enough (head) may leave."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        leave()


def leave() -> None:
    """The reader of stdout is gone: what is still to be printed goes nowhere, or Python would complain at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
