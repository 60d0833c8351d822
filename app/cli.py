"""binade serve: the app. binade mcp: the same for agents. binade report: every chart as files. binade bundle: sessions
with their runs."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from binade.app.report import options
from binade.data.words.filter import FilterError
from binade.filter_options import filter_of
from binade.terminal import BAD_USAGE, CANCELLED, CliOption, Command, fail, line_of, one_line, resolve_root, root_option

ARENA_MAX = -8  # M_ARENA_MAX of malloc.h


def _cannot_bind(host: str, port: int) -> str:
    """The reason why the app cannot listen on this address, or ""."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                other = f"--port {port + 1}; with make, PORT={port + 1}"
                return f"port {port} is in use: stop the program that uses it, or choose another ({other})"
            return f"cannot listen on {host}, port {port}: {error.strerror}"
    return ""


def _settings() -> dict[str, Any]:
    """Streamlit's settings. Streamlit itself reads a file only from the working directory or the user's home."""
    return tomllib.loads(Path(__file__).with_name("streamlit.toml").read_text(encoding="utf-8"))


def _options(settings: dict[str, Any], prefix: str = "--") -> list[str]:
    """Settings as options of `streamlit run`, which win over its files and variables."""
    options = []
    for name, value in settings.items():
        nested = isinstance(value, dict)
        options += _options(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}", str(value)]
    return options


def _serve(
    root: str | None,
    host: str,
    port: int,
    allow_host: tuple[str, ...],
    login: bool,
    trust_proxy_header: str | None,
    proxy: str | None,
    operators: str | None,
    read_only: bool,
    base_path: str,
) -> int:
    """Open the app on 127.0.0.1, or share it (docs/serving.md).

    ROOT is the directory that contains the runs [default: $TENSOR_SAVE_DIR, else data/runs].
    """
    # Arrow's own allocator keeps what each thread has freed. It is chosen when pyarrow is imported.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    from binade.app.frame import sharing
    from binade.data.run import access

    shared = sharing.sharing_of(host, port, allow_host, trust_proxy_header, proxy, login, operators, base_path)
    runs = resolve_root(root)
    if problem := _cannot_bind(host, port):
        return fail(problem)
    os.environ["TENSOR_SAVE_DIR"] = str(runs)
    from altair.utils.schemapi import disable_debug_mode
    from streamlit.runtime.pages_manager import PagesManager
    from streamlit.web import cli

    if login:
        shared = replace(shared, hosts=(*shared.hosts, _login_host()))
    if read_only:
        os.environ[access.SETTING] = "1"
    # Otherwise, uvicorn would believe what any program on this machine says about where a request comes from.
    os.environ["FORWARDED_ALLOW_IPS"] = ""
    sharing.current = shared
    # Each page is drawn by a thread of its own. With many arenas, what they free is never returned to the system.
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # of glibc
        mallopt(ARENA_MAX, 2)
    # Our pages are declared in main.py. By default, Streamlit would treat app/pages as pages of its older kind until
    # main.py has run once: an address like /runs, opened first, would be blank.
    PagesManager.uses_pages_directory = False
    # The tests validate every chart against Vega-Lite's schema; repeating it here takes longer than drawing.
    disable_debug_mode()
    server = Path(__file__).with_name("server.py")
    print(f"Binade: http://{f'[{host}]' if ':' in host else host}:{port}{shared.base_path}", flush=True)
    try:
        options = ["--server.address", host, "--server.port", str(port), *_options(_settings())]
        if shared.base_path:
            options += ["--server.baseUrlPath", shared.base_path]
        if shared.header:
            options += ["--server.trustedUserHeaders", json.dumps({shared.header: sharing.USER})]
        cli.main(["run", str(server), *options], standalone_mode=False)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except (KeyboardInterrupt, click.Abort):  # click raises Abort for Ctrl-C
        status = CANCELLED
    sys.stdout.flush()
    sys.stderr.flush()
    # Streamlit's threads keep DuckDB's objects alive; an ordered shutdown would print a page of leak warnings.
    os._exit(status)


def _login_host() -> str:
    """The Host header of the address that users return to after signing in. Raises SharingError if Streamlit's settings
    for the provider are incomplete."""
    from streamlit import auth_util
    from streamlit.errors import StreamlitAuthError

    from binade.app.frame.sharing import SharingError

    if not auth_util.is_authlib_installed():
        raise SharingError("--login needs the package Authlib: pip install 'binade[login]'")
    try:
        auth_util.validate_auth_credentials("default")
    except StreamlitAuthError as error:
        raise SharingError(f"--login: {' '.join(str(error).split())} See docs/serving.md") from None
    return urlsplit(str(auth_util.get_secrets_auth_section()["redirect_uri"])).netloc.lower()


def _mcp(root: str | None) -> None:
    """Serve the runs to an agent (Model Context Protocol).

    ROOT is the directory that contains the runs [default: $TENSOR_SAVE_DIR, else data/runs].
    """
    from altair.utils.schemapi import disable_debug_mode

    from binade.app.agents.server import serve as serve_agent

    runs = resolve_root(root)
    for signum in (signal.SIGINT, signal.SIGTERM):  # a thread waits for a line on standard input, and would not end
        signal.signal(signum, lambda signum, frame: os._exit(CANCELLED))
    if sys.stdin.isatty():
        print("binade mcp: waiting for an agent on standard input; Ctrl-C ends it", file=sys.stderr)
    disable_debug_mode()  # as in `binade serve`
    serve_agent(runs)


@click.pass_context
def _report(context: click.Context, /, root: str | None, **given: Any) -> int:
    """Write every chart into a folder, with an HTML page."""
    where = filter_of(given)
    if given["session"] and where.items():
        raise FilterError("a session has its own filter: do not combine --session with filter options")
    from binade.app.report import writer

    request = writer.ReportRequest(
        given["output"],
        where,
        given["theme"],
        given["jobs"],
        line_of(context.find_root().obj),
        given["session"],
        given["papers"],
    )
    try:
        return writer.run(resolve_root(root, exists=True), request)
    except OSError as error:
        return fail(writer.no_room(error))


def _export(root: str | None, session: str, output: Path, values: str) -> int:
    """Write a saved session and its runs as one ZIP file."""
    if output.is_dir() or not output.name:
        return fail(f"{output} is a folder: pass a file name to --output", BAD_USAGE)
    from binade.app.sessions import storage
    from binade.data.index.catalog import Catalog

    where = resolve_root(root, exists=True)
    saved = storage.load(where, session).session
    with Catalog.open(where) as catalog:
        written = storage.export_bundle(catalog, saved, output, values)
    left = f", {written.left_out} left out: their files are outside the run's directory" if written.left_out else ""
    print(
        f"{output}: {saved.name}, {written.runs} runs, {written.tensors} tensors, {written.with_values} with "
        f"their values{left}, {written.nbytes:,} bytes"
    )
    for damaged in written.damaged:
        print(f"left out: {one_line(damaged)}")
    return 0


def _import(root: str | None, file: Path) -> int:
    """Add the session and the runs of a bundle to a root."""
    if not file.is_file():
        return fail(f"{str(file)!r} {'is no file' if file.exists() else 'does not exist'}: give a bundle", BAD_USAGE)
    from binade.app.sessions import storage

    imported, saved = storage.import_bundle(resolve_root(root), file)
    print(storage.summary(imported))
    if saved:
        print(f"session {saved.session.id}: {saved.session.name}")
    return 0


def _list(root: str | None) -> None:
    """List the saved sessions."""
    from binade.app.sessions import storage

    found, problems = storage.list_sessions(resolve_root(root))
    for saved in found:
        one = saved.session
        print(f"{one.id}  {one.saved[:19]}  {len(one.pins)} pins  {one.name}")
    for problem in problems:
        fail(problem)


BUNDLE: dict[str, Any] = {"cancelled": "cancelled: no bundle was written or imported", "failed": "the command failed"}
serve = Command(
    "serve",
    params=[
        click.Argument(["root"], required=False, metavar="[ROOT]"),
        CliOption(["--port"], type=click.IntRange(1, 65535), default=8501, metavar="N", help="Port  [default: 8501]"),
        CliOption(
            ["--host"],
            default="127.0.0.1",
            metavar="ADDRESS",
            help="Address to listen on; one that other machines can reach needs --login or --trust-proxy-header  "
            "[default: 127.0.0.1]",
        ),
        CliOption(
            ["--allow-host"],
            multiple=True,
            metavar="HOST[:PORT]",
            help="Also accept this host name, as the browser shows it: localhost:9000 with ssh -L 9000:localhost:8501",
        ),
        CliOption(
            ["--base-path"],
            default="",
            metavar="PATH",
            help="Path of the app's address behind a reverse proxy that keeps it in requests: /team/binade",
        ),
        CliOption(
            ["--login"],
            is_flag=True,
            help="Require users to sign in with the OpenID Connect provider in .streamlit/secrets.toml",
        ),
        CliOption(
            ["--trust-proxy-header"],
            metavar="NAME",
            help="Header with the user's name, such as X-Forwarded-User, from the proxy that authenticates users",
        ),
        CliOption(["--proxy"], metavar="ADDRESS", help="The IP address that this proxy connects from"),
        CliOption(
            ["--operators"],
            metavar="FILE|NAMES",
            help="Users who can launch, cancel, delete, save, upload and use SQL; others only view [default: all]",
        ),
        CliOption(
            ["--read-only"], is_flag=True, help="Make the app read-only for all users; same as BINADE_READ_ONLY=1"
        ),
    ],
    callback=_serve,
    help=_serve.__doc__,
    catches_signals=False,
)
mcp = Command(
    "mcp",
    params=[click.Argument(["root"], required=False, metavar="[ROOT]")],
    callback=_mcp,
    help=_mcp.__doc__,
    catches_signals=False,
)
report = Command(
    "report",
    params=options.params(),
    callback=_report,
    help=_report.__doc__,
    cancelled="cancelled: no report was written",
)
bundle = click.Group("bundle", help="Copy a saved session with its runs to another root.")
bundle.add_command(
    Command(
        "export",
        params=[
            click.Argument(["session"], metavar="SESSION"),
            CliOption(["--output"], type=Path, required=True, metavar="FILE.zip", help="File to write"),
            CliOption(
                ["--values"],
                type=click.Choice(("charts", "all", "none")),
                default="charts",
                help="Tensors whose values are included: those of the session's charts, all of its runs, or none  "
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
