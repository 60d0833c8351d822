"""The app's entry: streamlit run app/main.py. Chooses the page; each page is a module in app/pages."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from binade.app.frame import frame, uploads, users
from binade.app.pages.registry import PAGES
from binade.app.sessions import open_session
from binade.data.index.catalog import DamagedIndexError

# Drawn here: Streamlit's own icons would be fetched from another host.
ICON = (
    '<svg viewBox="0 0 16 16"><g fill="#6366f1"><rect x="1" y="10" width="3" height="5"/>'
    '<rect x="5" y="5" width="3" height="10"/><rect x="9" y="1" width="3" height="14"/>'
    '<rect x="13" y="7" width="2" height="8"/></g></svg>'
)

# The first stops of Tab on each page, see skip.js.
SKIP = (
    '<nav class="skip" aria-label="Skip to"><a href="#filter">Skip to the filter</a>'
    '<a href="#table">Skip to the table</a><a href="#charts">Skip to the charts</a></nav>'
)
HERE = Path(__file__).with_name("frame")
SCRIPTS = "".join((HERE / name).read_text(encoding="utf-8") for name in ("skip.js", "table_names.js"))


def navigate(default: str = "map") -> None:
    """Declare the pages, so that they can link to each other, and run the page of the address."""
    st.set_page_config(page_title="Binade", page_icon=ICON, layout="wide", initial_sidebar_state="collapsed")
    st.html(f"<script>{SCRIPTS}</script>", unsafe_allow_javascript=True)
    st.html(SKIP)
    known = users.sign_in()
    shows = {name: frame.page_of(name) for name in PAGES}
    shows["home"] = frame.opens(default)  # its address with its name
    declared = {
        name: st.Page(
            show,
            title=PAGES[name].title if name in PAGES else name.capitalize(),
            url_path=None if name == default else default if name == "home" else name,
            default=name == default,
        )
        for name, show in shows.items()
    }
    st.session_state["pages"] = declared
    chosen = st.navigation(list(declared.values()), position="hidden")
    if not known:
        return
    with uploads.page():
        try:
            open_session.follow_link()
            chosen.run()
            st.session_state.pop("pin_first", None)
            open_session.show_toasts()
        except DamagedIndexError as error:
            st.error(f"{error}.", icon=":material/error:")


if __name__ == "__main__":
    navigate()
