"""Rejects requests to other host names, and from other origins. No Streamlit."""

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
    """ASGI middleware that answers 403 if the Host is not one of `hosts`, in lower case (DNS rebinding), or the Origin
    is another site's. A websocket must have an Origin. No page may show the app in a frame."""

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
            return await send({"type": "websocket.close", "code": 1008})
        await PlainTextResponse(refused + "\n", status_code=403)(scope, receive, answer)

    def _refused(self, headers: Headers, websocket: bool) -> str:
        """The reason to refuse the request, or ""."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if host not in self.hosts:
            allow = f" To allow it: binade serve --allow-host {host}" if host else ""
            return f"Unknown host {host!r}; known are {', '.join(self.hosts)}.{allow}"
        if (origin is not None or websocket) and origin not in (f"http://{host}", f"https://{host}"):
            return f"Refused: the Origin is {origin!r}, expected http://{host}"
        return ""
