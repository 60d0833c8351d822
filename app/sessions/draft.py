"""The session that is open in this browser tab: every page can pin charts to it, and the user saves it.

It lives in the tab's state until it is saved: `Draft.changed` says whether closing the tab would lose something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from urllib.parse import urlsplit

import streamlit as st

from binade.app.address import plain
from binade.app.figure import Figure
from binade.app.sessions import references, storage
from binade.app.sessions import session as sessions
from binade.app.sessions.session import Pin, Session, SessionError, View
from binade.app.state import catalog
from binade.data.access import ReadOnlyError, read_only
from binade.data.catalog import Catalog
from binade.data.runs import RunError, resolve_root

LINK = "session"  # the address parameter that opens a saved session


@dataclass(frozen=True)
class Draft:
    """An open session, the number of its version on disk (0: none), and that version."""

    session: Session
    number: int = 0
    on_disk: Session | None = None

    @property
    def changed(self) -> bool:
        return self.on_disk is None or self.on_disk.content != self.session.content

    @property
    def state(self) -> str:
        """In words, whether it is saved."""
        if not self.number:
            return "not saved yet"
        return f"changed since version {self.number}" if self.changed else f"saved as version {self.number}"


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
    """The runs that a pin of the open session is drawn from: those that it was saved with. None for a pin that is not
    saved yet: it shows every run that is here."""
    if (draft := current()) is None:
        return None
    saved = draft.on_disk or (draft.session if draft.session.runs else None)  # deleted meanwhile
    return saved.run_ids if saved and _place(pin) in map(_place, saved.pins) else None


def _place(pin: Pin) -> Pin:
    return replace(pin, caption="")


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
        toast(f"A session holds {sessions.MOST_PINS} pins at most.", ":material/error:")
    elif added in draft.session.pins:
        toast("This chart is pinned already.", ":material/push_pin:")
    else:
        set_current(replace(draft, session=replace(draft.session, pins=(*draft.session.pins, added))))
        toast(f"Pinned to “{draft.session.name}”: {figure.title or figure.name}", ":material/push_pin:")


def save(catalog: Catalog, session: Session) -> None:
    """Save a session and keep it open. Versions that others saved meanwhile stay in the history."""
    draft = current()
    before = draft.on_disk if draft else None
    try:
        saved, number = storage.save(catalog.root, references.refreshed(catalog, session, before))
    except (SessionError, ReadOnlyError, RunError) as error:
        st.session_state["notices"] = [str(error)]
        return
    set_current(Draft(saved, number, saved))
    st.session_state["notices"] = []
    toast(f"Saved “{saved.name}”, version {number}", ":material/save:")
    if draft and draft.session.id == saved.id and number > draft.number + 1:
        st.session_state["notices"] = [
            f"This session was saved elsewhere since you opened it: yours is now version {number}, theirs are in its "
            "history."
        ]
    if before and before.runs and (more := len(set(saved.run_ids) - set(before.run_ids))):
        st.session_state["notices"].append(
            f"The session includes {more} more run{'s' * (more != 1)} now: pins that name no run show "
            f"{'them' if more != 1 else 'it'} too."
        )


def open_version(version: storage.Version) -> None:
    """Open a saved version, with a notice for each of its runs that is missing."""
    assert version.session
    set_current(Draft(version.session, version.number, version.session))
    found = references.missing_runs(resolve_root(), version.session)
    if more := len(references.other_runs(catalog(), version.session)):
        runs = "1 run here does" if more == 1 else f"{more} runs here do"
        found.append(f"{runs} not belong to this session: its page shows every run, its pins do not.")
    st.session_state["notices"] = found


def show(view: View) -> NoReturn:
    """Go to a view; if its page is not served, go to the open session with a notice."""
    state = st.session_state
    if view.page not in state["pages"]:
        notice = f"The session's page, {view.page.upper()}, is not served read-only: its notes and pins are here."
        state["notices"] = [*(one for one in state.get("notices", []) if one != notice), notice]
        view = View("sessions", {"part": ["open"]})
    state["page"] = None  # or a view of the page that was shown last would be taken for a move of its widgets
    for name in ("left", "filter"):
        state.pop(name, None)
    st.switch_page(state["pages"][view.page], query_params=view.params)


def follow_link() -> None:
    """Open the session that the address names. If the address has other parameters, its view stays; else the session's
    view is shown. If there is no such session, a notice says so above the page."""
    asked = st.query_params.get(LINK)
    if asked is None:
        return
    alone = len(st.query_params) == 1
    del st.query_params[LINK]
    try:
        version = storage.load(resolve_root(), asked)
    except SessionError as error:
        st.session_state["notices"] = [f"The link does not open a session. {error}"]
        return
    open_version(version)
    if alone and version.session:
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
        right.button("Close", key="close_notices", on_click=lambda: st.session_state.update(notices=[]))


def panel(opened: Callable[[], Catalog]) -> None:
    """The open session in the sidebar: its state, Save, and a link to the Sessions page."""
    view = shown_view()
    if view is None:
        return
    draft = current()
    with st.sidebar:
        st.subheader("Session", anchor=False)
        if draft:
            pins = len(draft.session.pins)
            st.caption(f"**{plain(draft.session.name)}** · {pins} pin{'s' * (pins != 1)} · {draft.state}")
        else:
            st.caption("No session open. Pin a chart or save this view to start one.")
        left, right = st.columns(2, vertical_alignment="center")
        with left:
            if read_only():
                st.button("Save", disabled=True, help="The app was started read-only", width="stretch")
            else:
                _save(opened, draft, view)
        with right:
            st.page_link(st.session_state["pages"]["sessions"], label="Sessions", icon=":material/bookmarks:")


def _save(opened: Callable[[], Catalog], draft: Draft | None, view: View) -> None:
    with st.popover("Save", icon=":material/save:", width="stretch"):
        name = st.text_input("Name", draft.session.name if draft else "", max_chars=120, placeholder="what was found")
        st.caption("Keeps this page with its filter and settings, the pins and the notes.")
        unnamed = not name.strip()

        def write(as_new: bool) -> None:
            base = draft.session if draft else sessions.new(name.strip(), view)
            named = replace(base, name=name.strip(), view=view)
            fresh = as_new or not draft or not draft.number
            save(opened(), sessions.copied(named, name.strip()) if fresh else named)

        st.button("Save session", type="primary", on_click=write, args=(False,), disabled=unnamed)
        if draft and draft.number:
            st.button("Save as new", on_click=write, args=(True,), disabled=unnamed)
        if draft and draft.number:
            st.caption("Its link:")
            st.code(link_to(draft.session.id), language=None)
