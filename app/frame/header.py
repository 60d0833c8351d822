"""The header: the pages, and the menus that belong to no page."""

from __future__ import annotations

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from binade.app.frame import address, palette_view, users
from binade.app.pages.registry import PAGES
from binade.app.sessions import share_view
from binade.app.view.view import View


def links(view: View) -> DeltaGenerator:
    """Links to the pages, each with the scope and the filter of the view that is shown. Returns the place for `menus`,
    which need the runs."""
    header = st.container(key="header", horizontal=True, vertical_alignment="center", gap="small")
    with header:
        st.markdown("**Binade**", width="content")
        for page in PAGES.values():
            label = f"**{page.title}**" if page.name == view.page else page.title
            address.link(address.opened(view, page.name), label, width="content")
        st.space("stretch")
    return header


def menus(header: DeltaGenerator) -> None:
    """The palette, the user and the session."""
    with header:
        palette_view.show()
        users.panel()
        share_view.panel()
