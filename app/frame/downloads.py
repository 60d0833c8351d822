"""Files that the app makes for a browser session and sends from the disk, one per session: its latest.

Streamlit's download button keeps a copy of its file in memory for each session that shows it. These files have no name
on the disk, so that the system deletes them when the session or the server ends. They have the limits of uploads.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from streamlit import runtime
from streamlit.runtime.scriptrunner import get_script_run_ctx

from binade.app.draw.formatting import bytes_text
from binade.app.frame.uploads import LARGEST, MOST

ADDRESS = "/download/{token}"  # of a route of the server
CHUNK = 1 << 20


class DownloadError(ValueError):
    """A file cannot be downloaded. The message says why, and what to do."""


@dataclass(frozen=True)
class Download:
    """An open file, its size, and the name and MIME type that the browser gets. Whoever knows the token may have it."""

    file: BinaryIO
    size: int
    name: str
    kind: str
    token: str


_lock = Lock()
_held: dict[str, Download] = {}  # by session


def offer(path: Path, name: str, kind: str) -> str:
    """Hold a file open for this session in place of its previous one; returns the path of its URL. The caller may then
    delete it. Raises DownloadError, OSError."""
    context = get_script_run_ctx()
    session = context.session_id if context else ""
    size, token = path.stat().st_size, secrets.token_urlsafe(32)
    with _lock:
        _drop(session)
        if size > LARGEST:
            raise DownloadError(f"The file has {bytes_text(size)}; the limit is {LARGEST >> 20} MiB.")
        if size + sum(other.size for other in _held.values()) > MOST:
            raise DownloadError("Other users are downloading large files: try again in a minute.")
        _held[session] = Download(os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC), "rb"), size, name, kind, token)
    return ADDRESS.format(token=token)


def close_disconnected() -> None:
    """Drop the files of sessions whose tabs are closed."""
    with _lock:
        for session in [*_held]:
            if not runtime.get_instance().is_active_session(session):
                _drop(session)


def _drop(session: str) -> None:
    if session in _held:
        _held.pop(session).file.close()


def respond(request: Request) -> Response:
    """The response to a request for ADDRESS."""
    token = request.path_params["token"].encode()
    with _lock:
        found = next((one for one in _held.values() if secrets.compare_digest(one.token.encode(), token)), None)
        own = os.fdopen(os.dup(found.file.fileno()), "rb") if found else None  # it may be dropped meanwhile
    if found is None or own is None:
        return PlainTextResponse("This file is gone: create it again\n", status_code=404)
    headers = {"Content-Disposition": f'attachment; filename="{found.name}"', "Cache-Control": "no-store"}
    headers["Content-Length"] = str(found.size)
    return StreamingResponse(_chunks(own), headers=headers, media_type=found.kind)


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    start = 0
    with file:
        while chunk := os.pread(file.fileno(), CHUNK, start):
            yield chunk
            start += len(chunk)
