"""Sharing a saved session: its link, and the files that hold it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import streamlit as st

from binade.app import address
from binade.app import show as show_items
from binade.app.formatting import bytes_text, plain
from binade.app.report import writer
from binade.app.sessions import session as sessions
from binade.app.sessions import storage
from binade.app.sessions.session import Session, SessionError
from binade.data.bundle import BundleError
from binade.data.cache import Done
from binade.data.catalog import Catalog
from binade.data.filter import Filter


def link_to(session_id: str) -> str:
    """The link that opens a session in this app."""
    parts = urlsplit(st.context.url or "")
    return (
        f"{parts.scheme}://{parts.netloc}/?{address.SESSION}={session_id}"
        if parts.netloc
        else f"/?{address.SESSION}={session_id}"
    )


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
    """The HTML report of the latest saved version, and the same as a ZIP of pictures and numbers."""

    def make(folder: Path, done: Done) -> None:
        command = f"binade report --session {one.id}"
        request = writer.Request(folder / "report", Filter(), folder / "a.zip", command=command, session=one.id)
        writer.make(opened, request, lambda count, of, name: done(count, of))

    _offer(
        "Drawing",
        make,
        ("report/index.html", "Save the report (HTML)", f"{one.id}.html", "text/html"),
        ("a.zip", "Save pictures and numbers (ZIP)", f"{one.id}-report.zip", "application/zip"),
    )


def _bundle(opened: Catalog, one: Session, values: str) -> None:
    def make(folder: Path, done: Done) -> None:
        written = storage.export_bundle(opened, one, folder / "a.zip", values, done)
        if written.left_out:
            st.caption(f"{written.left_out} tensor files are outside their run’s directory and were left out.")

    _offer("Bundling", make, ("a.zip", "Save the bundle ({size})", f"{one.id}.zip", "application/zip"))


def _offer(what: str, make: Callable[[Path, Done], None], *files: tuple[str, str, str, str]) -> None:
    """Make files in a temporary folder and offer them: (path, the button's label, the name to save as, MIME type)."""
    with tempfile.TemporaryDirectory() as folder, show_items.progress(what) as done:
        try:
            make(Path(folder), done)
        except (writer.ReportError, writer.RenderError, BundleError, SessionError, OSError) as error:
            st.error(plain(str(error)), icon=":material/error:")
            return
        contents = [(Path(folder) / path).read_bytes() for path, *_ in files]
    for content, (_, label, name, kind) in zip(contents, files, strict=True):
        label = label.format(size=bytes_text(len(content)))
        st.download_button(label, content, name, kind, on_click="ignore", key=f"save_{name}")
