"""The open session in the header, and sharing one: its link, and the files that hold it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from html import escape
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import streamlit as st

from binade.app.draw import show as show_items
from binade.app.draw.formatting import bytes_text, plain
from binade.app.frame import address, downloads
from binade.app.frame.downloads import DownloadError
from binade.app.frame.state import catalog
from binade.app.frame.uploads import LARGEST
from binade.app.pages.registry import PAGES
from binade.app.report import writer
from binade.app.sessions import open_session, storage
from binade.app.sessions import session as sessions
from binade.app.sessions.session import Session, SessionError
from binade.data.exchange.bundle import BundleError
from binade.data.index.cache import Done
from binade.data.index.catalog import Catalog
from binade.data.run.access import reason
from binade.data.words.filter import Filter


def address_without_page(url: str) -> str:
    """The address of the app by that of one of its pages: without the page's name and "/" at the end; "" for ""."""
    parts = urlsplit(url)
    above, _, page = parts.path.rstrip("/").rpartition("/")
    path = above if page in (*PAGES, "home") else parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}" if parts.netloc else ""


def link_to(session_id: str) -> str:
    """The link that opens a session in this app, for reading."""
    here, query = address_without_page(st.context.url or ""), open_session.READ.to_query()
    return f"{here}/{open_session.READ.page}?{urlencode(query | {address.SESSION: [session_id]}, doseq=True)}"


def show(opened: Catalog, one: Session) -> None:
    st.caption("A link that opens it in this app:")
    st.code(link_to(one.id), language=None)
    content, name = sessions.to_json(one), f"{one.id}.json"
    st.download_button("Session as JSON", content, name, "application/json", on_click="ignore", key=f"save_{name}")
    values = st.radio(
        "Tensor values in the bundle",
        storage.VALUES,
        key=f"values_{one.id}",
        format_func=lambda name: storage.VALUES[name],
        help="The runs’ rows, sketches and scores are always included",
    )
    if st.button(
        "Create report", key=f"report_{one.id}", help="Its charts, numbers and notes, for readers without the app"
    ):
        _report(opened, one)
    if st.button("Create bundle", key=f"bundle_{one.id}"):
        _bundle(opened, one, values or "charts")


def _report(opened: Catalog, one: Session) -> None:
    """The HTML report of the session as it is now."""

    def make(folder: Path, done: Done) -> None:
        command = f"binade report --session {one.id}"
        request = writer.ReportRequest(folder / "report", Filter(), command=command, session=one.id)
        writer.make(opened, request, lambda count, of, name: done(count, of))

    _offer("Drawing", make, "report/index.html", "Save the report (HTML)", f"{one.id}.html", "text/html")


def _bundle(opened: Catalog, one: Session, values: str) -> None:
    def make(folder: Path, done: Done) -> None:
        written = storage.export_bundle(opened, one, folder / "a.zip", values, done, LARGEST)
        if written.left_out:
            st.caption(f"{written.left_out} tensor files are outside their run’s directory and were left out.")
        for damaged in written.damaged:
            st.caption(f"Left out: {plain(damaged)}")

    _offer("Bundling", make, "a.zip", "Save the bundle ({size})", f"{one.id}.zip", "application/zip")


def _offer(what: str, make: Callable[[Path, Done], None], path: str, label: str, name: str, kind: str) -> None:
    """Make a file in a temporary folder and offer it. path: of the file in the folder; label: of its link, in which
    {size} is the file's; name: to save it as; kind: its MIME type."""
    with tempfile.TemporaryDirectory() as folder, show_items.progress(what) as done:
        try:
            make(Path(folder), done)
            size = (Path(folder) / path).stat().st_size
            url = downloads.offer(Path(folder) / path, name, kind)
        except (writer.ReportError, writer.RenderError, BundleError, SessionError, DownloadError, OSError) as error:
            st.error(plain(str(error)), icon=":material/error:")
            return
    here = address_without_page(st.context.url or "")
    st.link_button(label.format(size=bytes_text(size)), here + url, key=f"save_{name}")


def panel() -> None:
    """The open session in the header: its name, the number of its pins, and a menu."""
    now = open_session.current()
    if now:
        count = len(now.session.pins)
        name, state = escape(now.session.name), f"{count} pin{'s' * (count != 1)}"
        st.html(f'<div class="session" title="{name} · {state}"><b>{name}</b> · {state}</div>', width="content")
    if not (open_session.can_keep() and catalog().totals().tensors):
        return
    if why := reason():
        st.button("Session", disabled=True, help=plain(f"Not possible: {why}"))
        return
    with st.popover("Session", icon=":material/bookmark:", width="content"):
        open_session.name_field("header_name")
        if now is None:
            st.caption("A name starts a session with this page. So does a pin.")
            return
        show(catalog(), now.session)
