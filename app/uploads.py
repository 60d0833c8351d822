"""File uploads. Streamlit takes files for any open tab at any time and keeps them until the tab closes.

Here a session may upload files only while its page shows an uploader, and only the latest one is kept. An upload has at
most LARGEST bytes, request framing included (Streamlit limits the body too: server.maxUploadSize), and all files in the
server together have at most MOST.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import streamlit as st
from streamlit import runtime
from streamlit.runtime.scriptrunner import RerunException, get_script_run_ctx
from streamlit.runtime.uploaded_file_manager import UploadedFile

LARGEST = 64 << 20
MOST = 256 << 20
SHOWN = "uploader_shown"  # in the session's state
PATH = re.compile(r"/_stcore/upload_file/(?P<session>[^/]+)/(?P<file>[^/]+)/?")

_lock = Lock()
_held: dict[str, int] = {}  # session that may send files -> bytes that are stored for it
_sending: dict[str, int] = {}  # session -> bytes that it is sending


def uploader(label: str, types: list[str] | None, key: str) -> UploadedFile | None:
    """st.file_uploader for one file. The session may upload while its page shows this."""
    if runtime.exists():
        with _lock:
            _held.setdefault(_session(), 0)
    st.session_state[SHOWN] = True
    return st.file_uploader(label, types, key=key)


@contextmanager
def page() -> Iterator[None]:
    """Wraps the drawing of a page: drops the session's file if the page shows no uploader, also if the page stops or
    fails. A page that reruns or switches to another page leaves this to that page."""
    st.session_state[SHOWN] = again = False
    try:
        yield
    except RerunException:
        again = True
        raise
    finally:
        if not (again or st.session_state[SHOWN]):
            close(_session())


def drop() -> None:
    """Drop the file of this session: it has been used."""
    with _lock:
        if _session() in _held:
            _held[_session()] = 0
            _drop(_session())


def _session() -> str:
    context = get_script_run_ctx()
    return context.session_id if context else ""


def close(session: str) -> None:
    """Drop a session's file, and accept no more."""
    with _lock:
        if _held.pop(session, None) is not None:
            _drop(session)


def close_disconnected() -> None:
    """Drop the files of sessions whose tabs are closed."""
    for session in [*_held]:
        if not runtime.get_instance().is_active_session(session):
            close(session)


def begin(session: str, length: str | None) -> tuple[int, str]:
    """(the HTTP status to refuse a file with, or 0; the reason). The session's previous file is dropped to make
    room."""
    with _lock:
        if session not in _held:
            return 403, "Open the page that asks for a file before you upload it"
        if length is None or not length.isdecimal():
            return 411, "The request has no Content-Length header"
        if (size := int(length)) > LARGEST:
            return 413, f"The file is larger than {LARGEST >> 20} MiB"
        if session in _sending:
            return 429, "One file at a time"
        others = sum(_held.values()) - _held[session] + sum(_sending.values())
        if size + others > MOST:
            return 429, "Other users are uploading large files: try again in a minute"
        _drop(session)
        _held[session], _sending[session] = 0, size
        return 0, ""


def end(session: str, file: str) -> None:
    """An upload has ended, successfully or not: update the count. The file is dropped if the page is gone by now."""
    with _lock:
        _sending.pop(session, None)
        found = runtime.get_instance().uploaded_file_mgr.get_files(session, [file])
        if session in _held:
            _held[session] = sum(len(each.data) for each in found)
        else:
            _drop(session)


def _drop(session: str) -> None:
    runtime.get_instance().uploaded_file_mgr.remove_session_files(session)
