"""What `binade serve` runs: streamlit run app/server.py -- HOST:PORT ..., the Host headers that are answered."""

from __future__ import annotations

import sys
from pathlib import Path

from starlette.middleware import Middleware
from streamlit.starlette import App

from binade.app.guard import Guard

HOSTS = [host.lower() for host in sys.argv[1:]]
app = App(Path(__file__).with_name("main.py"), middleware=[Middleware(Guard, hosts=HOSTS)])
