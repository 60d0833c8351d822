"""The app's entry: streamlit run app/main.py. Chooses the page; each page is a module in app/pages."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import streamlit as st

from binade.app import uploads, users
from binade.app.pages import question_page
from binade.app.pages.registry import MORE, PAGES, Page
from binade.app.sessions import draft
from binade.data.access import read_only
from binade.data.catalog import DamagedIndexError

# Drawn here: Streamlit's own icons would be fetched from another host.
ICON = (
    '<svg viewBox="0 0 16 16"><g fill="#6366f1"><rect x="1" y="10" width="3" height="5"/>'
    '<rect x="5" y="5" width="3" height="10"/><rect x="9" y="1" width="3" height="14"/>'
    '<rect x="13" y="7" width="2" height="8"/></g></svg>'
)


def _shown(page: Page) -> Callable[[], None]:
    """The function that shows a page. Streamlit takes the page's address from its name."""
    return import_module(page.layout).page if page.layout else question_page.page_of(page)


def _presentation(on: bool) -> None:
    """A button that hides everything except the answer and enlarges it, and one to go back."""
    place = st.container(key="present") if on else st.sidebar
    title, icon = ("End presentation", ":material/close:") if on else ("Present", ":material/slideshow:")
    place.button(
        title,
        icon=icon,
        type="tertiary",
        key="presentation",
        on_click=st.session_state.update,
        args=({"presenting": not on},),
    )


def navigate(default: str = "overview") -> None:
    """Declare the pages, so that they can link to each other, and run the page of the address."""
    st.set_page_config(page_title="Binade", page_icon=ICON, layout="wide")
    st.html(Path(__file__).with_name("app.css"))
    presenting = st.session_state.get("presenting", False)
    if presenting:
        st.html(Path(__file__).with_name("presentation.css"))
    known = users.sign_in()
    declared = {
        page.name: st.Page(
            _shown(page),
            title=page.title,
            icon=page.icon,
            url_path=None if page.name == default else page.name,
            default=page.name == default,
        )
        for page in PAGES.values()
        if not (page.writes and read_only())
    }
    st.session_state["pages"] = declared
    menu = {
        "": [page for name, page in declared.items() if name not in MORE],
        "More": [page for name, page in declared.items() if name in MORE],
    }
    chosen = st.navigation(menu, position="top" if known else "hidden")
    if not known:
        return
    users.panel()  # before the page, which may end the run with st.stop
    with uploads.page():
        try:
            draft.follow_link()
            draft.notices()
            chosen.run()
        except DamagedIndexError as error:
            st.error(f"{error}.", icon=":material/error:")
        draft.panel()
        _presentation(presenting)


if __name__ == "__main__":
    navigate()
