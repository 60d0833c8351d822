"""The rooms of a page, side by side."""

from __future__ import annotations

import streamlit as st

from binade.app.frame import address
from binade.app.frame.callbacks import while_shown
from binade.app.pages.registry import PAGES
from binade.app.view.view import View
from binade.data.run.access import read_only


def show(view: View) -> None:
    """A control with the rooms of the view's page, if it has several."""
    parts = [part for part in PAGES[view.page].parts.values() if not (part.writes and read_only())]
    titles = {part.room_name: part.room_title for part in parts}
    if len(titles) < 2:
        return
    st.session_state["page_part"] = next((part.room_name for part in parts if part.name == view.part), None)
    st.segmented_control(
        "Part of the page", list(titles), key="page_part", required=True, format_func=lambda part: titles[part],
        on_change=while_shown("page_part", _open), args=(view,), label_visibility="collapsed",
        width="content",
    )  # fmt: skip


def _open(view: View) -> None:
    if part := st.session_state["page_part"]:
        address.write(address.opened(view, view.page, part))
