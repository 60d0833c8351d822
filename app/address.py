"""The view in the address bar. It is read at the start of each run of a page; widgets and links replace it by another
view, and the page is drawn again from that."""

from __future__ import annotations

from typing import Any, NoReturn

import streamlit as st

from binade.app.pages.registry import PAGES
from binade.app.view import OPERAND, SCOPE, View
from binade.data.filter import FIELDS, Filter

VIEW = "shown_view"  # the view that the page shows, in the session's state
SESSION = "session"  # the id of the open session: in the address, and in the session's state
LAST = "last_views"  # the last view of each page and of each part
GO = "to"  # in an address on the way to another page, which history.js replaces: the name of that page


def current(page: str) -> View:
    """The view of the address. On the way to another page, whose parameters it has, the page as it was shown last."""
    if st.query_params.get(GO, page) != page:
        return opened(shown() or View(page), page)
    return View(page, {name: st.query_params.get_all(name) for name in st.query_params if name not in (SESSION, GO)})


def _address(view: View) -> dict[str, list[str]]:
    """The parameters of a view, and the open session."""
    session = st.session_state.get(SESSION)
    return view.to_query() | ({SESSION: [session]} if session else {})


def opened(before: View, page: str, part: str = "") -> View:
    """Another page or part with the filter and scope of this view, and otherwise as it was shown last."""
    last = st.session_state.get(LAST, {}).get((page, part))
    if last is None:
        return before.at(page, part)
    shared = {*FIELDS, *SCOPE, *(OPERAND if page == before.page else [])}
    params = {name: texts for name, texts in last.params.items() if name not in shared}
    return before.at(page, last.part).changed(**params)


def write(view: View) -> None:
    """Show this view from now on: in the address bar and in the session's state."""
    state = st.session_state
    state[VIEW] = view
    if view.part in PAGES[view.page].parts:
        state[LAST] = state.get(LAST, {}) | {(view.page, ""): view, (view.page, view.part): view}
    query = _address(view)
    if {name: st.query_params.get_all(name) for name in st.query_params} != query:
        st.query_params.from_dict(query)


def shown() -> View | None:
    view = st.session_state.get(VIEW)
    return view if isinstance(view, View) else None


def change(**values: Any) -> None:
    """Change parameters of the view, as the callback of a widget. In another format, the tensor that is shown stays,
    though another one may be the worst."""
    if view := shown():
        if view.page == "tensor" and "format" in values:
            for name in OPERAND:
                values.setdefault(name, st.session_state.get(name))
        write(view.changed(**values))


def narrow(where: Filter) -> None:
    """Replace the filter, as the callback of a widget."""
    if view := shown():
        write(view.filtered(where))


def go(view: View) -> NoReturn:
    """Open a view."""
    st.switch_page(st.session_state["pages"][view.page], query_params=_address(view) | {GO: view.page})


def link(view: View, label: str, icon: str | None = None, help: str | None = None, **options: Any) -> None:
    """A link to a view. Within a page it is marked as well: Streamlit shows the address only if the app changes it."""
    page, now = st.session_state["pages"][view.page], shown()
    query = _address(view) | ({GO: view.page} if now and now.page == view.page else {})
    st.page_link(page, label=label, icon=icon, help=help, query_params=query, **options)
