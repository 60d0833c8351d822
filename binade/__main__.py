"""The command `binade` as a process of its own; also `python -m binade`."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def program() -> NoReturn:
    """Run the command. SIGINT and SIGTERM end the process at once, with status 130, except where it catches them."""
    _end_on_signals()
    from binade.cli import main  # imports click and more
    from binade.terminal import end_process

    status = main()
    _end_on_signals()
    end_process(status)


def _end_on_signals() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda signum, frame: os._exit(130))


if __name__ == "__main__":
    program()
