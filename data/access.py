"""Whether whoever acts may change anything. This is the one place where permission is asked.

Every action asks `check_writable` before it acts, so that the rule holds however the action is reached: from a page,
from the command line, from Python. BINADE_READ_ONLY=1 denies every change by this process; an app that knows its users
denies those of the ones who are not operators (`restrict`).
"""

from __future__ import annotations

import os
from collections.abc import Callable

SETTING = "BINADE_READ_ONLY"
OFF = ("", "0", "false", "no", "off")


class ReadOnlyError(ValueError):
    """What was asked for would change something, and whoever asked may only look."""

    exit_status = 2


_reason_of_user: Callable[[], str] = str  # of the user who acts; "" without users


def restrict(reason: Callable[[], str]) -> None:
    """Ask `reason` for the user who acts, from now on: why they may only look, or "" if they may change things."""
    global _reason_of_user
    _reason_of_user = reason


def reason() -> str:
    """Why whoever acts may only look, or "" if they may change things."""
    if os.environ.get(SETTING, "").strip().lower() not in OFF:
        return f"the app was started read-only ({SETTING} is set)"
    return _reason_of_user()


def read_only() -> bool:
    """Whether whoever acts may only look."""
    return bool(reason())


def check_writable(what: str) -> None:
    """Raise ReadOnlyError, naming what cannot be done."""
    if why := reason():
        raise ReadOnlyError(f"{what} is not possible here: {why}")
