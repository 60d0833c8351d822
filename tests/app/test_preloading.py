"""The pages are imported while the browser loads its own scripts."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

from binade.app.frame.preloading import Preloading


def test_sessions_begin_when_the_pages_are_imported():
    imported, seen = Event(), []
    importing = Thread(target=imported.wait, daemon=True)

    async def app(scope, receive, send):
        seen.append((scope["type"], importing.is_alive()))

    async def requests():
        served = Preloading(app, importing)
        await served({"type": "lifespan"}, None, None)
        session = asyncio.create_task(served({"type": "websocket"}, None, None))
        await asyncio.sleep(0)  # the session is waiting
        await served({"type": "http"}, None, None)
        imported.set()
        await session

    with ThreadPoolExecutor(1) as pool:  # Playwright leaves an event loop running in this thread
        pool.submit(asyncio.run, requests()).result()
    assert seen == [("lifespan", True), ("http", True), ("websocket", False)]
