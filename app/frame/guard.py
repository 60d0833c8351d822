"""Rejects requests for other host names, from other origins, that bypass the proxy, or that upload files without a
page's request, and closes websockets that send anything but Streamlit's messages."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from streamlit.proto.BackMsg_pb2 import BackMsg

from binade.app.frame import downloads, uploads
from binade.app.frame.sharing import Sharing, address_of

LOG = logging.getLogger(__name__)
PROTOCOL_ERROR = 1002  # the code that closes a websocket
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True)
class Guard:
    """ASGI middleware that answers 403 if the Host is not one of `sharing.hosts` (DNS rebinding), the Origin is another
    site's, or, behind a proxy, the request does not come from the proxy or does not have exactly one user header. A
    websocket must have an Origin. No page may show the app in a frame. Files are refused as `uploads` says."""

    app: ASGIApp
    sharing: Sharing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        headers, websocket = Headers(scope=scope), scope["type"] == "websocket"
        refused, status = self._refused(headers, scope), 403

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if websocket and refused:
            return await send({"type": "websocket.close", "code": 1008})
        if websocket:

            async def received() -> Message:
                message = await receive()
                if message["type"] != "websocket.receive" or not (problem := _malformed(message)):
                    return message
                LOG.warning("A websocket was closed: %s", problem)
                await send({"type": "websocket.close", "code": PROTOCOL_ERROR})
                return {"type": "websocket.disconnect", "code": PROTOCOL_ERROR}

            try:
                return await self.app(scope, received, answer)
            finally:
                uploads.close_disconnected()
                downloads.close_disconnected()
        file = uploads.PATH.fullmatch(scope["path"]) if scope["method"] == "PUT" else None
        if file and not refused:
            length = None if "transfer-encoding" in headers else headers.get("content-length")
            status, refused = uploads.begin(**file.groupdict(), length=length)
        if refused:
            return await PlainTextResponse(refused + "\n", status_code=status)(scope, receive, answer)
        try:
            await self.app(scope, receive, answer)
        finally:
            if file:
                uploads.end(**file.groupdict())

    def _refused(self, headers: Headers, scope: Scope) -> str:
        """The reason to refuse the request, or ""."""
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if self.sharing.header:
            if not self._from_proxy(scope):
                return f"Refused: only the proxy at {self.sharing.proxy} may connect to this address"
            names = headers.getlist(self.sharing.header)
            if len(names) != 1 or not names[0].strip():
                return f"Refused: expected one header {self.sharing.header} with a name from the proxy"
        if host not in self.sharing.hosts:
            allow = f" To allow it: binade serve --allow-host {host}" if host else ""
            return f"Unknown host {host!r}; known hosts: {', '.join(self.sharing.hosts)}.{allow}"
        if (origin is not None or scope["type"] == "websocket") and origin not in (f"http://{host}", f"https://{host}"):
            return f"Refused: the Origin is {origin!r}, expected http://{host}"
        return ""

    def _from_proxy(self, scope: Scope) -> bool:
        try:
            return str(address_of((scope.get("client") or ("",))[0])) == self.sharing.proxy
        except ValueError:
            return False


def _malformed(message: Message) -> str:
    """What is wrong with a frame from a browser, or ""."""
    data = message.get("bytes")
    if data is None:
        return "it sent text where a binary message of Streamlit is expected"
    try:
        BackMsg.FromString(data)
    except DecodeError:
        return f"it sent {len(data):,} bytes that are no message of Streamlit"
    return ""
