"""The palette in the header: a search box that opens with Ctrl K, and the keys of the app."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import streamlit as st

from binade.app.frame import address, palette
from binade.app.frame.state import catalog
from binade.app.view.view import View


@st.cache_resource
def _component() -> Callable[..., Any]:
    css, js = (Path(__file__).with_name(f"palette.{end}").read_text(encoding="utf-8") for end in ("css", "js"))
    return st.components.v2.component("binade_palette", html='<div class="palette"></div>', css=css, js=js)


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
    result = _component()(
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
