"""Code shared by all commands: their class with grouped help, one-line errors, exit statuses and signals.

Exit status: 0 done, 1 failed, 2 bad usage, 130 cancelled.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click

FAILED, BAD_USAGE, CANCELLED = 1, 2, 130
_report = sys.unraisablehook
WIDTH = {"max_content_width": 100}


class CliOption(click.Option):
    """An option that --help lists under `title`, below `about`. Its help ends with the default, unless it says itself
    what happens without the option."""

    def __init__(self, *names: Any, title: str = "Options", about: str = "", **settings: Any) -> None:
        text, default = settings.get("help"), settings.get("default")
        if text and default not in (None, "", ()) and "[default:" not in text:
            settings["help"] = f"{text}  [default: {default}]"
        super().__init__(*names, **settings)
        self.title, self.about = title, about

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        cast = super().type_cast_value(ctx, value)
        if isinstance(cast, float) and not math.isfinite(cast):
            raise click.BadParameter(f"{value!r} is not a finite number", ctx, self)
        return cast


class Command(click.Command):
    """Help is grouped, and by default the callback's docstring. An error that a user can cause gives one line on stderr
    and an exit status, without a traceback.

    cancelled  the message after SIGINT or SIGTERM; catches_signals is False if SIGTERM ends the process at once
    failed     the text before an error of the operating system
    """

    def __init__(
        self,
        *arguments: Any,
        cancelled: str = "cancelled",
        failed: str = "the command failed",
        catches_signals: bool = True,
        **settings: Any,
    ) -> None:
        if callback := settings.get("callback"):
            settings.setdefault("help", callback.__doc__)
        super().__init__(*arguments, **settings)
        self.context_settings = {**WIDTH, **self.context_settings}
        self.cancelled, self.failed, self.catches_signals = cancelled, failed, catches_signals

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        titles: dict[str, list[tuple[str, str]]] = {}
        about: dict[str, str] = {}
        for param in (param for param in self.get_params(ctx) if isinstance(param, click.Option)):
            title: str = getattr(param, "title", "Options")
            if record := param.get_help_record(ctx):
                titles.setdefault(title, []).append(record)
                about.setdefault(title, getattr(param, "about", ""))
        for title, records in titles.items():
            with formatter.section(title):
                if about[title]:
                    formatter.write_text(about[title])
                    formatter.write_paragraph()
                formatter.write_dl(records)
        if isinstance(self, click.Group):
            self.format_commands(ctx, formatter)

    def invoke(self, ctx: click.Context) -> int:
        catch_signals((signal.SIGTERM, signal.SIGINT) if self.catches_signals else (signal.SIGINT,))
        try:
            status = super().invoke(ctx) or 0
            if sys.stdout is not None:
                sys.stdout.flush()
            return status
        except BrokenPipeError:
            discard_output()
            return 0
        except KeyboardInterrupt:
            return fail(self.cancelled, CANCELLED)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except Exception as error:
            status = getattr(error, "exit_status", None)
            if status is None and not isinstance(error, (OSError, RuntimeError, MemoryError)):
                raise  # a bug
            message = str(error).partition("\n")[0] or type(error).__name__
            if isinstance(error, OSError):
                where = f" ({error.filename})" if error.filename else ""
                message = f"{self.failed}: {error.strerror or message}{where}"
            return fail(message, status or FAILED)


def root_option(title: str = "Options") -> CliOption:
    return CliOption(
        ["--tensor-save-dir", "root"],
        title=title,
        metavar="DIR",
        help="Root of the runs  [default: $TENSOR_SAVE_DIR, else data/runs]",
    )


def resolve_root(given: str | None, *, exists: bool = False) -> Path:
    """The root of the runs. exists: whether it must exist. Raises RunError."""
    from binade.data.run.directory import check_root, check_usable, resolve_root  # for which --help does not wait

    root = resolve_root(given)
    (check_root if exists else check_usable)(root)
    return root


def usage_message(error: click.UsageError) -> str:
    """Click's message in our form: "no such option '--fast'; see binade run --help"."""
    message = " ".join(error.format_message().split()).rstrip(".")
    where = error.ctx.command_path if error.ctx else "binade"
    return f"{one_line(message[:1].lower() + message[1:])}; see {where} --help"


def one_line(text: str) -> str:
    """Escape line breaks and control characters, which may come from user input."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def fail(message: str, status: int = FAILED) -> int:
    """Print an error as one line on stderr; returns the exit status."""
    print(f"binade: {one_line(message)}", file=sys.stderr)
    return status


def print_text(text: str) -> None:
    """Print lines at once. If the reader of stdout has gone (head), the rest is discarded."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_output()


@contextmanager
def quiet() -> Iterator[None]:
    """Discard what libraries write to stdout. For commands only: it affects the whole process."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def discard_output() -> None:
    """Send stdout to /dev/null: its reader has gone, and Python would complain when it flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def end_process(status: int) -> NoReturn:
    """End as a process of multiprocessing does: wait for threads and call what is to be called at exit, but leave all
    objects to the system. To free those of torch takes one to three seconds, in which a cancelled run seems to go
    on."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed
        stream.flush()
    os._exit(status)


def escape_unknown() -> None:
    """From now on, escape characters that the terminal cannot show."""
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None if it was closed
        stream.reconfigure(errors="backslashreplace")


def ensure_home() -> None:
    """Set HOME for a user who has no home directory, as in containers: libraries look for it when they are imported."""
    if not os.path.isabs(os.path.expanduser("~")):
        from binade.quant.cache_directory import temporary_cache

        os.environ["HOME"] = str(temporary_cache())


def catch_signals(caught: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> None:
    """Turn the first of these signals into KeyboardInterrupt, and ignore further ones while the command cleans up."""
    sys.unraisablehook = _interrupt_again
    for signum in caught:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    for further in (signal.SIGTERM, signal.SIGINT):
        signal.signal(further, signal.SIG_IGN)
    raise KeyboardInterrupt


def _interrupt_again(lost: Any) -> None:
    """Python only reports an exception in a destructor or in a callback of its import system, and goes on. After a
    KeyboardInterrupt there, interrupt once more, a moment later."""
    if lost.exc_type is KeyboardInterrupt:
        try:
            signal.signal(signal.SIGTERM, _interrupt)
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        except KeyboardInterrupt:  # on a busy machine, the moment passes before this function has ended
            _interrupt_again(lost)
    else:
        _report(lost)


def names(text: str) -> tuple[str, ...]:
    """The items of a comma-separated list. Commas in parentheses, as in a spec's options, do not separate items."""
    return tuple(part.strip() for part in re.split(r",(?![^()]*\))", text) if part.strip())


def line_of(argv: Sequence[str]) -> str:
    """The command line, quoted for a shell."""
    import shlex

    return shlex.join(["binade", *argv])
