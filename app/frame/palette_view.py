"""The palette in the header: a search box that opens with Ctrl K, and the keys of the app."""

from __future__ import annotations

import streamlit as st

from binade.app.draw.components import inline
from binade.app.frame import address, palette
from binade.app.frame.state import catalog
from binade.app.view.view import View


@st.fragment
def show() -> None:
    """The search box. What is typed is searched here, without drawing the page again."""
    opened, view = catalog(), address.shown() or View("map")
    text = str((st.session_state.get("palette") or {}).get("text") or "")
    entries = palette.find(opened, view, text)
    data = {
        "text": text,
        "entries": [[entry.kind, entry.title, entry.detail] for entry in entries],
        "keys": list(palette.KEYS.items()),
    }
    result = inline("palette", "frame/palette")(
        key="palette", data=data, on_text_change=lambda: None, on_chosen_change=lambda: None,
        on_pressed_change=lambda: None, width=290,
    )  # fmt: skip
    if result.chosen is not None and result.chosen["text"] == text and result.chosen["index"] < len(entries):
        address.go(entries[result.chosen["index"]].view)
    if result.pressed == "p":
        st.session_state["pin_first"] = True
        address.redraw()
    if result.pressed and (target := palette.pressed(opened, view, result.pressed)):
        address.go(target)
