"""Whether this process may change anything: BINADE_READ_ONLY=1 serves runs to be looked at, and nothing else.

Who acts asks `check_writable` first, so that the rule holds however the action is reached: from a page, from the
command line, from Python.
"""

from __future__ import annotations

import os

SETTING = "BINADE_READ_ONLY"
OFF = ("", "0", "false", "no", "off")


class ReadOnlyError(ValueError):
    """What was asked for would change something, and the process was started read-only."""

    exit_status = 2


def read_only() -> bool:
    """Whether BINADE_READ_ONLY is set to anything but a word for no."""
    return os.environ.get(SETTING, "").strip().lower() not in OFF


def check_writable(what: str) -> None:
    """Raise ReadOnlyError, naming what cannot be done."""
    if read_only():
        raise ReadOnlyError(f"{what} is not possible here: {SETTING} is set, so that runs can only be looked at")
