"""File uploads. Streamlit takes files for any open tab at any time and keeps them until the tab closes.

Here a session may upload files only while its page shows an uploader: one file, of which only the latest is kept, or
several. All files of a session have at most LARGEST bytes, request framing included (Streamlit limits each body too:
server.maxUploadSize), and there are at most MOST_FILES of them; all files in the server have at most MOST bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import streamlit as st
from streamlit import runtime
from streamlit.runtime.scriptrunner import RerunException, get_script_run_ctx
from streamlit.runtime.uploaded_file_manager import UploadedFile, UploadedFileRec

LARGEST = 64 << 20
MOST = 256 << 20
MOST_FILES = 2000
SHOWN = "uploader_shown"  # in the session's state
PATH = re.compile(r"/_stcore/upload_file/(?P<session>[^/]+)/(?P<file>[^/]+)/?")

_lock = Lock()
_held: dict[str, dict[str, int]] = {}  # session that may send files -> bytes of each file that is stored for it
_sending: dict[tuple[str, str], int] = {}  # (session, file) -> bytes that are being sent
_several: set[str] = set()  # sessions whose pages ask for several files


def uploader(label: str, types: list[str] | None, key: str) -> UploadedFile | None:
    """st.file_uploader for one file. The session may upload while its page shows this."""
    _show(several=False)
    return st.file_uploader(label, types, key=key)


def uploader_of_several(label: str, key: str, directory: bool) -> list[UploadedFile]:
    """The same for several files, or for those of directories, whose names are then relative paths."""
    _show(several=True)
    help_ = f"At most {LARGEST >> 20} MiB and {MOST_FILES:,} files together. Larger ones: by their path on the server"
    return st.file_uploader(label, key=key, accept_multiple_files="directory" if directory else True, help=help_)


def _show(several: bool) -> None:
    if runtime.exists():
        with _lock:
            _held.setdefault(_session(), {})
            (_several.add if several else _several.discard)(_session())
    st.session_state[SHOWN] = True


@contextmanager
def page() -> Iterator[None]:
    """Wraps the drawing of a page: drops the session's files if the page shows no uploader, also if the page stops or
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
    """Drop the files of this session: they have been used."""
    with _lock:
        if _session() in _held:
            _drop(_session())


def _session() -> str:
    context = get_script_run_ctx()
    return context.session_id if context else ""


def close(session: str) -> None:
    """Drop a session's files, and accept no more."""
    with _lock:
        if session in _held:
            _drop(session)
            del _held[session]
            _several.discard(session)


def close_disconnected() -> None:
    """Drop the files of sessions whose tabs are closed."""
    for session in [*_held]:
        if not runtime.get_instance().is_active_session(session):
            close(session)


def begin(session: str, file: str, length: str | None) -> tuple[int, str]:
    """(the HTTP status to refuse a file with, or 0; the reason). If the page asks for one file, the previous one is
    dropped to make room."""
    with _lock:
        if session not in _held:
            return 403, "Open the page that asks for a file before you upload it"
        if length is None or not length.isdecimal():
            return 411, "The request has no Content-Length header"
        sending = [size for (sender, _), size in _sending.items() if sender == session]
        held = _stored(session)
        if session not in _several:
            if sending:
                return 429, "One file at a time"
            held = {}
        if (size := int(length)) + sum(sending) + sum(held.values()) > LARGEST:
            what = "The files are together" if held or sending else "The file is"
            return 413, f"{what} larger than {LARGEST >> 20} MiB"
        if len(held) + len(sending) >= MOST_FILES:
            return 413, f"There are more than {MOST_FILES:,} files"
        others = sum(sum(files.values()) for other, files in _held.items() if other != session) + sum(_sending.values())
        if size + sum(held.values()) + others > MOST:
            return 429, "Other users are uploading large files: try again in a minute"
        if session not in _several:
            _remove(session)
        _held[session], _sending[session, file] = held, size
        return 0, ""


def end(session: str, file: str) -> None:
    """An upload has ended, successfully or not: update the count. The file is dropped if the page is gone by now."""
    with _lock:
        _sending.pop((session, file), None)
        if session in _held:
            _held[session] |= {record.file_id: len(record.data) for record in _files(session, [file])}
        else:
            _remove(session)


def _stored(session: str) -> dict[str, int]:
    """The bytes of each file that Streamlit still has: users remove files from the list."""
    return {record.file_id: len(record.data) for record in _files(session, [*_held[session]])}


def _files(session: str, files: list[str]) -> list[UploadedFileRec]:
    return runtime.get_instance().uploaded_file_mgr.get_files(session, files)


def _drop(session: str) -> None:
    _held[session] = {}
    _remove(session)


def _remove(session: str) -> None:
    runtime.get_instance().uploaded_file_mgr.remove_session_files(session)
