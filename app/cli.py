"""binade serve: the app on 127.0.0.1. binade report: every chart as files, without a browser.
binade bundle: sessions with their runs from root to root.

Exit status: 0 done, 1 failed, 2 bad usage, 130 cancelled.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from binade.app.report import options

HOST = "127.0.0.1"

# As in the collector: OpenMP threads that wait asleep do not slow a busy machine down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"binade: {message}; see binade --help", file=sys.stderr)
        raise SystemExit(2)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: give a number from 1 to 65535")
    return int(text)


def in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


def serve(port: int) -> int:
    if in_use(port):
        advice = f"stop what uses it, or choose another (PORT={port + 1} make run)"
        print(f"binade: port {port} is taken: {advice}", file=sys.stderr)
        return 1
    from binade.data.runs import RunError, resolve_root

    try:
        resolve_root()
    except RunError as error:
        return _fail(str(error), 2)
    from altair.utils.schemapi import disable_debug_mode
    from streamlit.runtime.pages_manager import PagesManager
    from streamlit.web import cli

    # Our pages are declared in main.py. Left to itself, Streamlit would take app/pages for pages of its old kind until
    # main.py has run once: an address like /runs, opened first, would be blank.
    PagesManager.uses_pages_directory = False
    # The tests hold every chart to Vega-Lite's schema; doing so again for each that is drawn takes longer than drawing.
    disable_debug_mode()
    page = Path(__file__).with_name("main.py")
    print(f"Binade: http://{HOST}:{port}", flush=True)
    try:
        cli.main(["run", str(page), "--server.address", HOST, "--server.port", str(port)], standalone_mode=False)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Streamlit's threads keep DuckDB's objects alive; an ordered shutdown would print a page of leak warnings.
    os._exit(status)


def report(given: argparse.Namespace, argv: list[str]) -> int:
    """Write the report; a failure is one line on stderr."""
    from binade.app.report import headless
    from binade.data.filter import FilterError
    from binade.data.runs import RunError, resolve_root

    command = headless.command_of(argv)
    try:
        where = options.filter_of(given)
        wanted = headless.Wanted(given.output, where, given.zip, given.theme, given.jobs, command, given.session)
        return headless.run(resolve_root(given.tensor_save_dir), wanted)
    except (headless.UsageError, FilterError) as error:
        return _fail(str(error), 2)
    except (headless.ReportError, headless.PaintError, headless.SessionError, RunError) as error:
        return _fail(str(error), 1)
    except OSError as error:
        return _fail(headless.no_room(error), 1)


def bundle(given: argparse.Namespace) -> int:
    """Run a bundle command; a failure is one line on stderr."""
    if given.verb == "export" and (given.output.is_dir() or not given.output.name):
        return _fail(f"{given.output} is a folder: give --output a file's name", 2)
    from binade.app.sessions import bundles  # who only asks for help does not wait for torch
    from binade.data.runs import RunError

    try:
        return bundles.command(given)
    except RunError as error:
        return _fail(str(error), 1)


def _cancellable(work: Callable[[], int], left: str) -> int:
    """Run a command that SIGINT and SIGTERM end in order; then `left` says in one line what there is of it."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _cancel)
    try:
        return work()
    except KeyboardInterrupt:
        return _fail(f"cancelled: {left}", 130)


def _cancel(signum: int, frame: FrameType | None) -> NoReturn:
    for further in (signal.SIGTERM, signal.SIGINT):  # one is enough: let what is half-made be removed
        signal.signal(further, signal.SIG_IGN)
    raise KeyboardInterrupt


def _fail(message: str, status: int) -> int:
    print(f"binade: {' '.join(message.split())}", file=sys.stderr)
    return status


def _add_bundle(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("bundle", help="carry a session with its runs to another root")
    verbs = command.add_subparsers(dest="verb", required=True, metavar="export | import | list")
    out = verbs.add_parser("export", help="write a saved session and its runs as one .zip")
    out.add_argument("session", help="the session's id, as its link has it")
    out.add_argument("--output", type=Path, required=True, metavar="FILE.zip")
    out.add_argument(
        "--values",
        choices=("charts", "all", "none"),
        default="charts",
        help="whose values go along: of the tensors that its charts read (the default), of all of its runs, of none",
    )
    into = verbs.add_parser("import", help="take a bundle into a root")
    into.add_argument("file", type=Path)
    listed = verbs.add_parser("list", help="the saved sessions")
    for each in (out, into, listed):
        each.add_argument("--tensor-save-dir", metavar="ROOT", help="default: TENSOR_SAVE_DIR, else data/runs")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="backslashreplace")  # a path may hold what the terminal lacks
    parser = Parser(prog="binade", description="Explore recorded tensors in the browser, or draw them into files.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve | report | bundle")
    command = commands.add_parser("serve", help="open the app on 127.0.0.1")
    command.add_argument("--port", type=_port, default=8501)
    options.add_to(commands.add_parser("report", help="write every chart into a folder, with one HTML of them all"))
    _add_bundle(commands)
    given = parser.parse_args(argv)
    if given.command == "report":
        return _cancellable(lambda: report(given, argv), "nothing of the report was kept")
    if given.command == "bundle":
        return _cancellable(lambda: bundle(given), "no bundle was written or taken in")
    return serve(given.port)


if __name__ == "__main__":
    sys.exit(main())
