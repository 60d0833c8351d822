"""Imports the pages as soon as `binade serve` listens: this takes longer than any other part of showing the first
page."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from importlib import import_module
from threading import Thread

from starlette.types import ASGIApp, Receive, Scope, Send


def import_pages() -> None:
    import_module("binade.app.main")
    for page in import_module("binade.app.pages.registry").PAGES.values():
        for part in page.parts.values():
            import_module(part.layout)


@dataclass(frozen=True)
class Preloading:
    """ASGI middleware: starts a thread that imports with the server. A session starts only after the import has
    finished, so that no two threads import at once. Meanwhile the browser gets the files that it needs to show a page.
    """

    app: ASGIApp
    importing: Thread

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self.importing.start()
        if scope["type"] == "websocket":
            await asyncio.to_thread(self.importing.join)
        await self.app(scope, receive, send)
