"""What `binade serve` runs: streamlit run app/server.py, in its own process."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

from starlette.middleware import Middleware
from streamlit.starlette import App

from binade.app import reruns, sharing, users
from binade.app.guard import Guard
from binade.app.one_address import OneAddress
from binade.app.preloading import Preloading, import_pages
from binade.data import access
from binade.data.cache import release_memory

access.restrict(users.reason)
reruns.install(release_memory)
importing = Thread(target=import_pages, daemon=True)
app = App(
    Path(__file__).with_name("main.py"),
    middleware=[
        Middleware(Guard, sharing=sharing.current),
        Middleware(Preloading, importing=importing),
        Middleware(OneAddress),
    ],
)
