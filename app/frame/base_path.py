"""The path that a reverse proxy serves the app under, such as /team/binade. A proxy may remove it from a request or
keep it: within the app no request has it, and Streamlit's own routes get it back."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

_PATH = re.compile(r"(/[A-Za-z0-9._~@-]+)+")


def base_path_of(text: str) -> str:
    """The path as "/team/binade"; "" for "/". Raises ValueError if a part of it would have to be escaped."""
    path = "/" + text.strip("/")
    parts = path.split("/")
    if path != "/" and (not _PATH.fullmatch(path) or "." in parts or ".." in parts):
        raise ValueError(text)
    return path.rstrip("/")


@dataclass(frozen=True)
class WithoutBasePath:
    """ASGI middleware: removes the path from the start of each request's path, if it is there."""

    app: ASGIApp
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = scope.get("path", "")
        if self.path and (found == self.path or found.startswith(f"{self.path}/")):
            scope = _at(scope, found.removeprefix(self.path) or "/")
        await self.app(scope, receive, send)


@dataclass(frozen=True)
class WithBasePath:
    """ASGI middleware: adds the path to each request's path, where Streamlit's routes are."""

    app: ASGIApp
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.path and "path" in scope:
            scope = _at(scope, self.path + scope["path"])
        await self.app(scope, receive, send)


def _at(scope: Scope, path: str) -> Scope:
    return {**scope, "path": path, "raw_path": path.encode()}
