"""binade serve: the app on 127.0.0.1. binade report: every chart as files. binade bundle: sessions with their runs."""

from __future__ import annotations

import os
import socket
import sys
import tomllib
from pathlib import Path
from typing import Any

import click

from binade.app.report import options
from binade.data.filter import FilterError
from binade.filter_options import filter_of
from binade.terminal import BAD_USAGE, Command, Option, fail, line_of, resolve_root, root_option

HOST = "127.0.0.1"


def in_use(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


def _settings() -> dict[str, Any]:
    """Streamlit's settings. Streamlit itself reads a file only from the working directory or the user's home."""
    return tomllib.loads(Path(__file__).with_name("streamlit.toml").read_text())


def _options(settings: dict[str, Any], prefix: str = "--") -> list[str]:
    """Settings as options of `streamlit run`, which win over its files and variables."""
    options = []
    for name, value in settings.items():
        nested = isinstance(value, dict)
        options += _options(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}", str(value)]
    return options


def _serve(port: int, allow_host: tuple[str, ...]) -> int:
    """Open the app on 127.0.0.1."""
    if in_use(port):
        advice = f"stop what uses it, or choose another (PORT={port + 1} make run)"
        return fail(f"port {port} is taken: {advice}")
    from binade.app.guard import loopback
    from binade.data.runs import RunError, is_a_file

    try:
        root = resolve_root(None)
    except RunError as error:
        return fail(str(error), BAD_USAGE)
    if root.is_file():
        return fail(is_a_file(root), BAD_USAGE)
    from altair.utils.schemapi import disable_debug_mode
    from streamlit.runtime.pages_manager import PagesManager
    from streamlit.web import cli

    # Our pages are declared in main.py. By default, Streamlit would treat app/pages as pages of its older kind until
    # main.py has run once: an address like /runs, opened first, would be blank.
    PagesManager.uses_pages_directory = False
    # The tests validate every chart against Vega-Lite's schema; repeating it here takes longer than drawing.
    disable_debug_mode()
    server = Path(__file__).with_name("server.py")
    print(f"Binade: http://{HOST}:{port}", flush=True)
    try:
        options = ["--server.address", HOST, "--server.port", str(port), *_options(_settings())]
        cli.main(["run", str(server), *options, "--", *loopback(port), *allow_host], standalone_mode=False)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    # Streamlit's threads keep DuckDB's objects alive; an ordered shutdown would print a page of leak warnings.
    os._exit(status)


@click.pass_context
def _report(context: click.Context, /, root: str | None, **given: Any) -> int:
    """Write every chart into a folder, with one HTML of all of them."""
    where = filter_of(given)
    if given["session"] and where.items():
        raise FilterError("a session has its own filter: give --session without others")
    from binade.app.report import writer

    request = writer.Request(
        given["output"],
        where,
        given["archive"],
        given["theme"],
        given["jobs"],
        line_of(context.find_root().obj),
        given["session"],
    )
    try:
        return writer.run(resolve_root(root), request)
    except OSError as error:
        return fail(writer.no_room(error))


def _export(root: str | None, session: str, output: Path, values: str) -> int:
    """Write a saved session and its runs as one ZIP file."""
    if output.is_dir() or not output.name:
        return fail(f"{output} is a folder: give --output a file's name", BAD_USAGE)
    from binade.app.sessions import storage
    from binade.data.catalog import Catalog

    where = resolve_root(root)
    found = storage.load(where, session).session
    with Catalog.open(where) as catalog:
        written = storage.export_bundle(catalog, found, output, values)
    left = f", {written.left_out} left out: their files lie outside their run" if written.left_out else ""
    print(
        f"{output}: {found.name}, {written.runs} runs, {written.tensors} tensors, {written.with_values} with "
        f"their values{left}, {written.nbytes:,} bytes"
    )
    return 0


def _import(root: str | None, file: Path) -> None:
    """Add the session and the runs of a bundle to a root."""
    from binade.app.sessions import storage

    imported, version = storage.import_bundle(resolve_root(root), file)
    print(storage.summary(imported))
    if version:
        print(f"session {version.session.id}, version {version.number}: {version.session.name}")


def _list(root: str | None) -> None:
    """List the saved sessions."""
    from binade.app.sessions import storage

    found, problems = storage.list_sessions(resolve_root(root))
    for one, number in found:
        print(f"{one.id}  {one.saved[:19]}  version {number}  {len(one.pins)} pins  {one.name}")
    for problem in problems:
        fail(problem)


BUNDLE: dict[str, Any] = {"cancelled": "cancelled: no bundle was written or imported", "failed": "the bundle failed"}
serve = Command(
    "serve",
    params=[
        Option(["--port"], type=click.IntRange(1, 65535), default=8501, metavar="N", help="Port  [default: 8501]"),
        Option(
            ["--allow-host"],
            multiple=True,
            metavar="HOST[:PORT]",
            help="Also accept this host name, as the browser shows it: localhost:9000 with ssh -L 9000:localhost:8501",
        ),
    ],
    callback=_serve,
    help=_serve.__doc__,
    catches_signals=False,
)
report = Command(
    "report",
    params=options.params(),
    callback=_report,
    help=_report.__doc__,
    cancelled="cancelled: nothing of the report was kept",
)
bundle = click.Group("bundle", help="Copy a saved session with its runs to another root.")
bundle.add_command(
    Command(
        "export",
        params=[
            click.Argument(["session"], metavar="SESSION"),
            Option(["--output"], type=Path, required=True, metavar="FILE.zip", help="File to write"),
            Option(
                ["--values"],
                type=click.Choice(("charts", "all", "none")),
                default="charts",
                help="Which tensors keep their values: those of the session's charts, all of its runs, or none  "
                "[default: charts]",
            ),
            root_option(),
        ],
        callback=_export,
        help=_export.__doc__,
        **BUNDLE,
    )
)
bundle.add_command(
    Command(
        "import",
        params=[click.Argument(["file"], type=Path, metavar="FILE.zip"), root_option()],
        callback=_import,
        help=_import.__doc__,
        **BUNDLE,
    )
)
bundle.add_command(Command("list", params=[root_option()], callback=_list, help=_list.__doc__, **BUNDLE))
