"""The session that is open in this browser tab: every page can pin charts to it, and the user saves it.

Until it is saved, it exists only in the tab's state: `Draft.changed` says whether closing the tab would lose something.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn
from urllib.parse import urlsplit

import streamlit as st

from binade.app.address import plain
from binade.app.figure import Figure
from binade.app.sessions import pins, storage
from binade.app.sessions import session as sessions
from binade.app.sessions.session import Pin, Session, SessionError, View
from binade.app.sessions.storage import Version
from binade.app.state import catalog
from binade.data.access import ReadOnlyError, reason
from binade.data.catalog import Catalog, DamagedIndexError
from binade.data.runs import RunError, resolve_root

LINK = "session"  # the address parameter that opens a saved session


@dataclass(frozen=True)
class Draft:
    """An open session, and the version on disk that it comes from; None before it is saved."""

    session: Session
    saved: Version | None = None

    @property
    def changed(self) -> bool:
        return self.saved is None or self.saved.session.content != self.session.content

    @property
    def state(self) -> str:
        """A description of whether it is saved."""
        if self.saved is None:
            return "not saved yet"
        return f"{'changed since' if self.changed else 'saved as'} version {self.saved.number}"


def current() -> Draft | None:
    return st.session_state.get("draft")


def on_a_view() -> bool:
    """Whether the page is one whose figures can be drawn again."""
    return st.session_state.get("page") in sessions.pages()


def shown_view() -> View | None:
    """The view that the page shows; None on a page that is not a view."""
    state = st.session_state
    if not on_a_view() or "shown" not in state:
        return None
    return View(state["page"], {name: list(texts) for name, texts in state["shown"].items()})


def set_current(draft: Draft | None) -> None:
    st.session_state["draft"] = draft


def change(**changes: Any) -> None:
    """Change fields of the open session."""
    if draft := current():
        set_current(replace(draft, session=replace(draft.session, **changes)))


def runs_of(pin: Pin) -> tuple[str, ...] | None:
    """The runs that a pin of the open session is drawn from: those it was saved with. None for a pin that is not saved
    yet: it is drawn from every run of the root."""
    if (draft := current()) is None:
        return None
    saved = draft.saved.session if draft.saved else draft.session
    if not draft.saved and not saved.runs:  # with runs, it was deleted in the meantime
        return None
    return saved.run_ids if pin.uncaptioned in [other.uncaptioned for other in saved.pins] else None


def notify(*notices: str) -> None:
    """Replace the notices above the page; they stay until they are closed."""
    st.session_state["notices"] = list(notices)


def toast(text: str, icon: str) -> None:
    """A short-lived message. Markdown in the text is not interpreted, since it may be someone else's."""
    st.toast(plain(text), icon=icon)


def pin(figure: Figure) -> None:
    """Pin a chart of the view that is shown, in a new session if none is open."""
    view = shown_view()
    if view is None:
        return
    draft = current() or Draft(sessions.new("Untitled", view))
    added = Pin(view.page, view.params, figure.name, figure.title)
    if len(draft.session.pins) >= sessions.MOST_PINS:
        toast(f"A session can have at most {sessions.MOST_PINS} pins.", ":material/error:")
    elif added in draft.session.pins:
        toast("This chart is already pinned.", ":material/push_pin:")
    else:
        set_current(draft)
        change(pins=(*draft.session.pins, added))
        toast(f"Pinned to “{draft.session.name}”: {figure.title or figure.name}", ":material/push_pin:")


def save(opened: Catalog, session: Session) -> None:
    """Save a session and keep it open. Versions that others saved in the meantime stay in the history."""
    before = draft.saved if (draft := current()) else None
    try:
        version = storage.save(opened.root, pins.refreshed(opened, session, before and before.session))
    except (SessionError, ReadOnlyError, RunError, DamagedIndexError) as error:
        notify(str(error))
        return
    saved, number = version
    set_current(Draft(saved, version))
    toast(f"Saved “{saved.name}”, version {number}", ":material/save:")
    found = []
    if draft and draft.session.id == saved.id and number > (before.number if before else 0) + 1:
        found.append(
            f"This session was also saved elsewhere after you opened it. Yours is now version {number}; the other "
            "versions are in its history."
        )
    if before and before.session.runs and (more := len({*saved.run_ids} - {*before.session.run_ids})):
        found.append(
            f"The session now includes {more} more run{'s' * (more != 1)}. Pins that do not select a run show "
            f"{'them' if more != 1 else 'it'}, too."
        )
    notify(*found)


def open_version(version: Version) -> None:
    """Open a saved version, with a notice for each of its runs that is missing."""
    set_current(Draft(version.session, version))
    found = pins.missing_runs(resolve_root(), version.session)
    try:
        more = len(pins.other_runs(catalog(), version.session))
    except DamagedIndexError as error:
        more = 0
        found.append(f"{error}.")
    if more:
        runs = "1 run in this root does" if more == 1 else f"{more} runs in this root do"
        found.append(
            f"{runs} not belong to this session. The session’s page shows all runs; its pins show only its own runs."
        )
    notify(*found)


def show(view: View) -> NoReturn:
    """Go to a view; if its page is not served, go to the open session with a notice."""
    state = st.session_state
    if view.page not in state["pages"]:
        notice = (
            f"Viewers cannot open the session's page, {view.page.upper()}. The notes and pins of the session are here."
        )
        notify(*dict.fromkeys([*state.get("notices", []), notice]))
        view = View("sessions", {"part": ["open"]})
    state["page"] = None  # otherwise a view of the current page would be mistaken for a change of its widgets
    for name in ("left", "filter"):
        state.pop(name, None)
    st.switch_page(state["pages"][view.page], query_params=view.params)


def follow_link() -> None:
    """Open the session that the address names. If the address has other parameters, its view stays; else the session's
    view is shown. If there is no such session, a notice says so above the page."""
    session_id = st.query_params.get(LINK)
    if session_id is None:
        return
    alone = len(st.query_params) == 1
    del st.query_params[LINK]
    try:
        version = storage.load(resolve_root(), session_id)
    except SessionError as error:
        notify(f"This link cannot be opened. {error}")
        return
    open_version(version)
    if alone:
        show(version.session.view)


def link_to(session_id: str) -> str:
    """The link that opens a session in this app."""
    parts = urlsplit(st.context.url or "")
    return f"{parts.scheme}://{parts.netloc}/?{LINK}={session_id}" if parts.netloc else f"/?{LINK}={session_id}"


def notices() -> None:
    """The notices about the open session or the link, above the page, until they are closed."""
    if found := st.session_state.get("notices"):
        left, right = st.container(key="notices").columns([12, 1], vertical_alignment="top")
        text = "\n\n".join(map(plain, found[:6]))
        more = f"\n\nand {len(found) - 6} more." if len(found) > 6 else ""
        left.warning(text + more, icon=":material/link_off:")
        right.button("Close", key="close_notices", on_click=notify)


def panel() -> None:
    """The open session in the sidebar: its state, Save, and a link to the Sessions page."""
    view = shown_view()
    if view is None:
        return
    draft = current()
    with st.sidebar:
        st.subheader("Session", anchor=False)
        if draft:
            count = len(draft.session.pins)
            st.caption(f"**{plain(draft.session.name)}** · {count} pin{'s' * (count != 1)} · {draft.state}")
        else:
            st.caption("No session open. Pin a chart or save this view to start one.")
        left, right = st.columns(2, vertical_alignment="center")
        with left:
            if why := reason():
                st.button("Save", disabled=True, help=plain(f"Not possible: {why}"), width="stretch")
            else:
                _save(draft, view)
        with right:
            st.page_link(st.session_state["pages"]["sessions"], label="Sessions", icon=":material/bookmarks:")


def _save(draft: Draft | None, view: View) -> None:
    with st.popover("Save", icon=":material/save:", width="stretch"):
        name = st.text_input(
            "Name", draft.session.name if draft else "", max_chars=120, placeholder="What did you find?"
        )
        st.caption("Saves this page with its filter and settings, the pins and the notes.")
        unnamed = not name.strip()

        def write(as_new: bool) -> None:
            base = draft.session if draft else sessions.new(name.strip(), view)
            named = replace(base, name=name.strip(), view=view)
            save(catalog(), sessions.copied(named, name.strip()) if as_new else named)

        saved = draft and draft.saved
        st.button("Save session", type="primary", on_click=write, args=(not saved,), disabled=unnamed)
        if draft and saved:
            st.button("Save as new", on_click=write, args=(True,), disabled=unnamed)
            st.caption("Its link:")
            st.code(link_to(draft.session.id), language=None)
