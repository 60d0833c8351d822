"""Whether the current user may change anything. Permission is checked only here.

Every action calls `check_writable` first, so that the rule holds for pages, the command line and Python alike.
BINADE_READ_ONLY=1 denies every change by this process; an app that knows its users denies the changes of those who are
not operators (`restrict`).
"""

from __future__ import annotations

import os
from collections.abc import Callable

SETTING = "BINADE_READ_ONLY"
OFF = ("", "0", "false", "no", "off")


class ReadOnlyError(ValueError):
    """The request would change something, and the current user has read-only access."""

    exit_status = 2


_reason_of_user: Callable[[], str] = str  # of the user who acts; "" without users


def restrict(reason: Callable[[], str]) -> None:
    """From now on, call `reason` for the current user's restriction: why access is read-only, or "" if it is not."""
    global _reason_of_user
    _reason_of_user = reason


def reason() -> str:
    """Why the current user has read-only access, or "" if they may change things."""
    if os.environ.get(SETTING, "").strip().lower() not in OFF:
        return f"Binade is read-only ({SETTING} is set)"
    return _reason_of_user()


def read_only() -> bool:
    """Whether the current user has read-only access."""
    return bool(reason())


def check_writable(what: str) -> None:
    """Raise ReadOnlyError, which names the denied action, if access is read-only."""
    if why := reason():
        raise ReadOnlyError(f"{what} is not possible here: {why}")
