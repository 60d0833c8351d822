"""What `binade serve` runs: streamlit run app/server.py, in its own process."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

from starlette.middleware import Middleware
from starlette.routing import Route
from streamlit.starlette import App

from binade.app.draw.components import routes
from binade.app.frame import downloads, reruns, sharing, users
from binade.app.frame.base_path import WithBasePath, WithoutBasePath
from binade.app.frame.guard import Guard
from binade.app.frame.one_address import OneAddress
from binade.app.frame.preloading import Preloading, import_pages
from binade.data.index.cache import release_memory
from binade.data.run import access
from binade.data.run.directory import resolve_root
from binade.data.run.store import sweep_tree

may_sweep = not access.read_only()  # of the process, not of a user
access.restrict(users.reason)
reruns.install(release_memory)


def prepare() -> None:
    import_pages()
    if may_sweep:
        Thread(target=sweep_root, daemon=True).start()


def sweep_root() -> None:
    """Delete what killed processes left in the root."""
    from binade.app.sessions.storage import sweep_sessions  # imported with the pages

    root = resolve_root()
    sweep_tree(root)
    sweep_sessions(root)


importing = Thread(target=prepare, daemon=True)
app = App(
    Path(__file__).with_name("main.py"),
    routes=[
        Route(sharing.current.base_path + downloads.ADDRESS, downloads.respond),
        *routes(sharing.current.base_path),
    ],
    middleware=[
        Middleware(WithoutBasePath, path=sharing.current.base_path),
        Middleware(Guard, sharing=sharing.current),
        Middleware(Preloading, importing=importing),
        Middleware(OneAddress),
        Middleware(WithBasePath, path=sharing.current.base_path),
    ],
)
