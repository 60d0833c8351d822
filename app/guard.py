"""Who may talk to the app: requests under its own names, from its own pages. No Streamlit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def loopback(port: int) -> tuple[str, ...]:
    """The Host headers of this machine's own browsers."""
    return tuple(name if port == 80 else f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))


@dataclass(frozen=True)
class Guard:
    """ASGI middleware that refuses (403) what names another host than `hosts`, as a page does that rebinds its own name
    to this machine, and what comes from another site's page. A websocket needs an Origin, as every browser sends one.
    No page may show the app in a frame."""

    app: ASGIApp
    hosts: Collection[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        refused = self._refused(Headers(scope=scope), scope["type"] == "websocket")

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if not refused:
            return await self.app(scope, receive, answer)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008, "reason": refused[:120]})
        await PlainTextResponse(refused + "\n", status_code=403)(scope, receive, answer)

    def _refused(self, headers: Headers, websocket: bool) -> str:
        """Why not; "" if nothing speaks against it."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self.hosts:
            return f"Binade answers at {', '.join(self.hosts)}: to reach it as {host}, binade serve --allow-host {host}"
        if (origin is not None or websocket) and origin not in (f"http://{host}", f"https://{host}"):
            return f"Binade answers its own pages, at {host}, and this request is from {origin or 'none'}"
        return ""
