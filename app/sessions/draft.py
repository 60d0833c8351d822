"""The session that is open in this browser tab: pinned to on every page, saved when its reader says so.

It lives in the tab's state until it is saved: `Draft.changed` says whether something would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn
from urllib.parse import urlsplit

import streamlit as st

from binade.app.address import plain
from binade.app.figure import Figure
from binade.app.sessions import session as sessions
from binade.app.sessions.pins import Pin
from binade.app.sessions.session import Session, SessionError, View
from binade.app.state import catalog
from binade.data.access import ReadOnlyError, read_only
from binade.data.catalog import Catalog
from binade.data.runs import RunError, resolve_root

LINK = "session"  # the address parameter that opens a saved session


@dataclass(frozen=True)
class Draft:
    """An open session, the version of it that is on disk (0: none), and what that said."""

    session: Session
    number: int = 0
    on_disk: Session | None = None

    @property
    def changed(self) -> bool:
        return self.on_disk is None or self.on_disk.said != self.session.said

    @property
    def state(self) -> str:
        """In words, whether it is saved."""
        if not self.number:
            return "not saved yet"
        return f"changed since version {self.number}" if self.changed else f"saved as version {self.number}"


def current() -> Draft | None:
    return st.session_state.get("draft")


def on_a_view() -> bool:
    """Whether the page is one whose figures can be drawn again; which figures, it may say only at its end."""
    return st.session_state.get("page") in sessions.PAGES


def shown_view() -> View | None:
    """The view that the page shows; None on a page that is none."""
    state = st.session_state
    if not on_a_view() or "shown" not in state:
        return None
    return View(state["page"], {name: list(texts) for name, texts in state["shown"].items()})


def put(draft: Draft | None) -> None:
    st.session_state["draft"] = draft


def change(**changes: object) -> None:
    """Change the open session."""
    if draft := current():
        put(replace(draft, session=replace(draft.session, **changes)))


def runs_of(pin: Pin) -> tuple[str, ...] | None:
    """The runs that a pin of the open session is drawn from: those it was saved with; None for a pin that is not saved
    yet, which shows what is here."""
    if (draft := current()) is None:
        return None
    saved = draft.on_disk or (draft.session if draft.session.runs else None)  # deleted since, its runs are known
    return saved.run_ids if saved and _place(pin) in map(_place, saved.pins) else None


def _place(pin: Pin) -> Pin:
    return replace(pin, caption="")


def tell(text: str, icon: str) -> None:
    """A word in passing. It may hold someone's text, which stays text."""
    st.toast(plain(text), icon=icon)


def pin(figure: Figure) -> None:
    """Pin a chart of the view that is shown; a session is begun if none is open."""
    view = shown_view()
    if view is None:
        return
    draft = current() or Draft(sessions.new("Untitled", view))
    added = Pin(view.page, view.params, figure.name, figure.title)
    if len(draft.session.pins) >= sessions.MOST_PINS:
        tell(f"A session holds {sessions.MOST_PINS} pins at most.", ":material/error:")
    elif added in draft.session.pins:
        tell("This chart is pinned already.", ":material/push_pin:")
    else:
        put(replace(draft, session=replace(draft.session, pins=(*draft.session.pins, added))))
        tell(f"Pinned to “{draft.session.name}”: {figure.title or figure.name}", ":material/push_pin:")


def save(catalog: Catalog, session: Session) -> bool:
    """Save and keep open what was saved; whether it went well. What others saved meanwhile stays in the history."""
    draft = current()
    before = draft.on_disk if draft else None
    try:
        saved, number = sessions.save(catalog.root, sessions.marked(catalog, session, before))
    except (SessionError, ReadOnlyError, RunError) as error:
        st.session_state["notices"] = [str(error)]
        return False
    put(Draft(saved, number, saved))
    st.session_state["notices"] = []
    tell(f"Saved “{saved.name}”, version {number}", ":material/save:")
    if draft and draft.session.id == saved.id and number > draft.number + 1:
        st.session_state["notices"] = [
            f"This session was saved elsewhere since you opened it: yours is now version {number}, theirs are in its "
            "history."
        ]
    if before and before.runs and (more := len(set(saved.run_ids) - set(before.run_ids))):
        st.session_state["notices"].append(
            f"The session speaks of {more} more run{'s' * (more != 1)} now: pins that name no run show "
            f"{'them' if more != 1 else 'it'} too."
        )
    return True


def open_version(version: sessions.Version) -> None:
    """Open a saved version, and say what it speaks of that is missing."""
    assert version.session
    put(Draft(version.session, version.number, version.session))
    found = sessions.missing_runs(resolve_root(), version.session)
    if more := len(sessions.strangers(catalog(), version.session)):
        run, is_ = ("run", "is") if more == 1 else ("runs", "are")
        found.append(f"{more} {run} here {is_} not of this session: its page shows what is here, its pins do not.")
    st.session_state["notices"] = found


def show(view: View) -> NoReturn:
    """Go to a view; where its page is not served, to the open session, and say so."""
    state = st.session_state
    if view.page not in state["pages"]:
        word = f"The session's page, {view.page.upper()}, is not served read-only: its notes and pins are here."
        state["notices"] = [*(one for one in state.get("notices", []) if one != word), word]
        view = View("sessions", {"part": ["open"]})
    state["page"] = None  # or a view of the page that was shown last would be taken for a move of its widgets
    for name in ("left", "filter"):
        state.pop(name, None)
    st.switch_page(state["pages"][view.page], query_params=view.params)


def follow_link() -> None:
    """Open the session that the address names. With other parameters beside it, the address's view stays; without, the
    session's is shown. A session that is not there is said, and the page is shown all the same."""
    asked = st.query_params.get(LINK)
    if asked is None:
        return
    alone = len(st.query_params) == 1
    del st.query_params[LINK]
    try:
        version = sessions.load(resolve_root(), asked)
    except SessionError as error:
        st.session_state["notices"] = [f"The link opens nothing. {error}"]
        return
    open_version(version)
    if alone and version.session:
        show(version.session.view)


def link_to(session_id: str) -> str:
    """The link that opens a session in this app."""
    parts = urlsplit(st.context.url or "")
    return f"{parts.scheme}://{parts.netloc}/?{LINK}={session_id}" if parts.netloc else f"/?{LINK}={session_id}"


def notices() -> None:
    """What is to be said of the open session or the link, above the page, until it is put away."""
    if found := st.session_state.get("notices"):
        left, right = st.container(key="notices").columns([12, 1], vertical_alignment="top")
        text = "\n\n".join(map(plain, found[:6]))
        more = f"\n\nand {len(found) - 6} more." if len(found) > 6 else ""
        left.warning(text + more, icon=":material/link_off:")
        right.button("Close", key="close_notices", on_click=lambda: st.session_state.update(notices=[]))


def panel(opened: Callable[[], Catalog]) -> None:
    """Beneath the filter: the session that is open, saving, and where the others are."""
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
            st.caption("None is open. Pin a chart, or save this view, to begin one.")
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
        named = bool(name.strip())

        def write(as_new: bool) -> None:
            base = draft.session if draft else sessions.new(name.strip(), view)
            wanted = replace(base, name=name.strip(), view=view)
            fresh = as_new or not draft or not draft.number
            save(opened(), sessions.copied(wanted, name.strip()) if fresh else wanted)

        st.button("Save session", type="primary", on_click=write, args=(False,), disabled=not named)
        if draft and draft.number:
            st.button("Save as new", on_click=write, args=(True,), disabled=not named)
        if draft and draft.number:
            st.caption("Its link:")
            st.code(link_to(draft.session.id), language=None)
