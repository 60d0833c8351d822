"""What the browser knows before the first answer of a page: where the app is, which Streamlit's page would otherwise
find out by asking in vain beneath the address of each page but the home page (an error 404 in the console, and a round
trip); which addresses become entries of its history; the scripts of the first view; and the styles, without which the
first elements would be drawn at places that they leave again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from binade.app.frame.first_scripts import links

# The app is where the page's path is, without what the server was asked for: a proxy may have removed the start of it.
# The browser, which opens the app without "/" at the end, would look for its files one level too high.
SCRIPT = """<script>{{
const parts = location.pathname.split('/');
if ({home} && parts.at(-1)) location.replace(location.pathname + '/' + location.search + location.hash);
window.__streamlit = {{BACKEND_BASE_URL: location.origin + parts.slice(0, -{levels}).join('/')}};
}}</script>"""
LEFT_OUT = (b"accept-encoding", b"range", b"if-none-match", b"if-modified-since", b"if-range")  # of a request
STYLES = Path(__file__).with_name("app.css").read_bytes()
HISTORY = b"<script>" + Path(__file__).with_name("history.js").read_bytes() + b"</script>"


@dataclass(frozen=True)
class OneAddress:
    """ASGI middleware, of requests without the path of a proxy: adds SCRIPT, HISTORY and `links` to the head of each
    HTML document, and STYLES to the start of its body: of equal rules the last one applies, and Streamlit adds its own
    to the head."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            return await self.app(scope, receive, send)
        accepted = MutableHeaders(scope=scope).get("accept", "")
        if "text/html" not in accepted:
            return await self.app(scope, receive, send)
        path = scope["path"]
        script = SCRIPT.format(home="true" if path == "/" else "false", levels=path.count("/")).encode()
        script += HISTORY + links(path.rstrip("/").rpartition("/")[2])
        plain = [(name, value) for name, value in scope["headers"] if name not in LEFT_OUT]
        start: Message | None = None
        body = b""

        async def answer(message: Message) -> None:
            nonlocal start, body
            starts = message["type"] == "http.response.start"
            if starts and MutableHeaders(scope=message).get("content-type", "").startswith("text/html"):
                start = message
                return
            if start is None:  # a file, however large, is passed on as it comes
                return await send(message)
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            body = body.replace(b"<head>", b"<head>" + script, 1)
            body = body.replace(b"<body>", b"<body><style>" + STYLES + b"</style>", 1)
            headers = MutableHeaders(scope=start)
            headers["content-length"] = str(len(body))
            for name in ("etag", "last-modified"):  # of the file, which does not change when what is added does
                del headers[name]
            await send(start)
            await send({"type": "http.response.body", "body": body})

        await self.app({**scope, "headers": plain}, receive, answer)
