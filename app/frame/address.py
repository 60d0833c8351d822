"""The view in the address bar. It is read at the start of each run of a page; widgets and links replace it by another
view, and the page is drawn again from that.

What a view leaves open, such as the run, is written into the address as it was resolved, so that the address shows the
same later. The parameter RESOLVED names these. The session that wrote them ignores them when it reads the address,
since its page follows a run that goes on; any other session reads them as if they had been chosen. history.js replaces
an address by one that differs in these alone, so that Back does not meet both.
"""

from __future__ import annotations

from typing import Any, NoReturn

import streamlit as st

from binade.app.pages.registry import PAGES
from binade.app.view.params import texts_of
from binade.app.view.view import OPERAND, SCOPE, Reading, View
from binade.data.words.filter import FIELDS, Filter

VIEW = "shown_view"  # the view that the page shows, in the session's state
SESSION = "session"  # the id of the open session: in the address, and in the session's state
MOST_RESOLVED = 12  # runs or iterations that are written into the address
LAST = "last_views"  # the last view of each page and of each part
RESOLVED = "resolved"  # in an address: the names of parameters that the view leaves open, separated by commas
OPEN = "open_parameters"  # (what the view has, the parameters that it leaves open as resolved), in the session's state
GO = "to"  # in an address on the way to another page, which history.js replaces: the name of that page


def current(page: str) -> View:
    """The view of the address. On the way to another page, whose parameters it has, the page as it was shown last."""
    if st.query_params.get(GO, page) != page:
        return opened(shown() or View(page), page)
    resolved = st.query_params.get(RESOLVED, "").split(",") if shown() else []
    left_out = {SESSION, GO, RESOLVED, *resolved}
    return View(page, {name: st.query_params.get_all(name) for name in st.query_params if name not in left_out})


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


def write(view: View, reading: Reading | None = None) -> None:
    """Show this view from now on: in the address bar and in the session's state. reading: of the view, whose values are
    those that it leaves open. They stay in the address while nothing changes but what is selected in the answer."""
    state = st.session_state
    if reading:
        state[OPEN] = (_without_selected(view), left_open(view, reading))
    state[VIEW] = view
    if view.part in PAGES[view.page].parts:
        state[LAST] = state.get(LAST, {}) | {(view.page, ""): view, (view.page, view.part): view}
    query = _address(view)
    basis, resolved = state.get(OPEN, (None, {}))
    if resolved and basis == _without_selected(view):
        query |= resolved | {RESOLVED: [",".join(resolved)]}
    if {name: st.query_params.get_all(name) for name in st.query_params} != query:
        st.query_params.from_dict(query)


def _without_selected(view: View) -> View:
    """The view without the parameters on which its run, iteration and format do not depend."""
    part = PAGES[view.page].parts.get(view.part)
    names = [name for each in (part.room if part else ()) for name in (*each.selects, *each.at_once)]
    return view.changed(**dict.fromkeys(names))


def followed(view: View) -> View:
    """The view that is shown now, for a fragment that was drawn for `view`. If more than what is selected in the answer
    has changed since, the whole page is drawn again."""
    now = shown() or view
    if _without_selected(now) != _without_selected(view):
        redraw()
    return now


def left_open(view: View, reading: Reading) -> dict[str, list[str]]:
    """What a view leaves open and its answer depends on, as it was resolved: format, run, iteration, tensor, GEMM."""
    question = reading.question
    if question is None:
        return {}
    found = {name: texts_of(getattr(reading.within, name)) for name in ("run_id", "iteration")}
    names = [name for name in ("format", *(OPERAND if reading.question_of_tensor else ())) if name in question.uses]
    found |= {name: texts_of(reading.values[name] or None) for name in names}
    few = {name: texts for name, texts in found.items() if 0 < len(texts) <= MOST_RESOLVED}
    return {name: texts for name, texts in few.items() if not view.params.get(name)}


def shown() -> View | None:
    view = st.session_state.get(VIEW)
    return view if isinstance(view, View) else None


def redraw() -> NoReturn:
    """Draw the whole page, of the view that it shows, from a part of it. The browser sends its address with the part's
    rerun, and may not yet have the newest one."""
    if view := shown():
        write(view)
    st.rerun()


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


def link(view: View, label: str, icon: str | None = None, **options: Any) -> None:
    """A link to a view. Within a page it is marked as well: Streamlit shows the address only if the app changes it."""
    page, now = st.session_state["pages"][view.page], shown()
    query = _address(view) | ({GO: view.page} if now and now.page == view.page else {})
    st.page_link(page, label=label, icon=icon, query_params=query, **options)
