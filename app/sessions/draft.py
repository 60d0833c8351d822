"""The session that is open in this browser tab: every page can pin charts to it, and the user saves it.

What is not saved yet is kept as a draft on disk as it is made, and the address names the session: a reload, a restart
or a closed tab loses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import streamlit as st

from binade.app import address
from binade.app.figure import Figure
from binade.app.formatting import plain
from binade.app.pages.registry import PAGES, PART
from binade.app.sessions import pins, storage
from binade.app.sessions import session as sessions
from binade.app.sessions.session import Pin, Session, SessionError
from binade.app.sessions.storage import Version
from binade.app.state import catalog
from binade.app.view import View
from binade.data.access import ReadOnlyError, read_only
from binade.data.catalog import Catalog, DamagedIndexError
from binade.data.runs import RunError, resolve_root

TOASTS = "toasts"  # the key in a session's state
READ = View("notebook", {PART: ["sessions"], "part": ["read"]})  # the open session, as its readers see it


@dataclass(frozen=True)
class OpenSession:
    """An open session, the version on disk that it comes from (None before it is saved), and the revision of the draft
    on disk that it replaces ("": none)."""

    session: Session
    saved: Version | None = None
    revision: str = ""

    @property
    def changed(self) -> bool:
        return self.saved is None or self.saved.session.content != self.session.content

    @property
    def state(self) -> str:
        """A description of whether it is saved."""
        if self.saved is None:
            return "draft"
        return f"{'changed since' if self.changed else 'saved as'} version {self.saved.number}"


def current() -> OpenSession | None:
    return st.session_state.get("draft")


def can_keep() -> bool:
    """Whether a session can keep the view that the page shows."""
    view = address.shown()
    part = view and PAGES[view.page].parts.get(view.part)
    return bool(part and part.kept)


def shown_view() -> View | None:
    """The view that the page shows, with every parameter; None if a session cannot keep it."""
    view = address.shown()
    return view.explicit(catalog()) if view and can_keep() else None


def set_current(draft: OpenSession | None) -> None:
    """Open a session, or none. What is not saved is kept as a draft on disk, and the address names the session, so that
    nothing is lost with the tab. If another tab or user has changed the draft, theirs stays and this one becomes a
    session of its own."""
    state, before = st.session_state, current()
    if draft and draft.changed and draft != before and not read_only():
        try:
            draft = _kept(draft)
        except (SessionError, ReadOnlyError) as error:
            notify(str(error))
    state["draft"], state[address.SESSION] = draft, draft.session.id if draft else None
    if before and draft and before.session.id != draft.session.id:  # else `follow_link` would open the former again
        st.query_params[address.SESSION] = draft.session.id


def _kept(draft: OpenSession) -> OpenSession:
    """The draft as it is on disk now. Raises SessionError, ReadOnlyError."""
    root, session = resolve_root(), draft.session
    try:
        return replace(draft, revision=storage.keep(root, session, draft.revision))
    except storage.DraftChangedError as error:
        copy = sessions.copied(session, f"{session.name[:110]} (copy)")
        revision = storage.keep(root, copy, "")
        notify(f"{error}. Your changes are now a session of their own, “{copy.name}”; nothing was lost.")
        return OpenSession(copy, None, revision)


def discard() -> None:
    """Close the open session without what was not saved."""
    draft = current()
    set_current(None)
    if draft and not read_only():
        try:
            storage.drop_draft(resolve_root(), draft.session.id, draft.revision)
        except (SessionError, ReadOnlyError) as error:
            notify(str(error))


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
    """A short-lived message at the end of the page's next run: Streamlit drops what the browser does not have yet when
    a run begins again. Markdown in the text is not interpreted, since it may be someone else's."""
    st.session_state.setdefault(TOASTS, []).append((plain(text), icon))


def show_toasts() -> None:
    for text, icon in st.session_state.pop(TOASTS, []):
        st.toast(text, icon=icon)


def pin(figure: Figure, view: View | None = None) -> None:
    """Pin a chart of a view, by default of the one that is shown, in a new session if none is open."""
    pin_chart(figure.name, figure.title, view)


def pin_chart(chart: str, title: str, view: View | None = None) -> None:
    """Pin a chart by its name, with its title as the caption."""
    view = view.explicit(catalog()) if view else shown_view()
    if view is None:
        return
    draft = current() or OpenSession(sessions.new("Untitled", view))
    added = Pin(view.page, view.params, chart, title)
    if len(draft.session.pins) >= sessions.MOST_PINS:
        toast(f"A session can have at most {sessions.MOST_PINS} pins.", ":material/error:")
    elif added in draft.session.pins:
        toast("This chart is already pinned.", ":material/push_pin:")
    else:
        set_current(draft)
        change(pins=(*draft.session.pins, added))
        toast(f"Pinned to “{draft.session.name}”: {title or chart}", ":material/push_pin:")


def save(opened: Catalog, session: Session) -> None:
    """Save a session and keep it open. Versions that others saved in the meantime stay in the history."""
    before = draft.saved if (draft := current()) else None
    try:
        version = storage.save(opened.root, pins.refreshed(opened, session, before and before.session))
        storage.drop_draft(opened.root, session.id, draft.revision if draft else "")
    except (SessionError, ReadOnlyError, RunError, DamagedIndexError) as error:
        notify(str(error))
        return
    saved, number = version
    set_current(OpenSession(saved, version))
    toast(f"Saved “{saved.name}”, version {number}", ":material/save:")
    texts = []
    if draft and draft.session.id == saved.id and number > (before.number if before else 0) + 1:
        texts.append(
            f"This session was also saved elsewhere after you opened it. Yours is now version {number}; the other "
            "versions are in its history."
        )
    if before and before.session.runs and (more := len({*saved.run_ids} - {*before.session.run_ids})):
        texts.append(
            f"The session now includes {more} more run{'s' * (more != 1)}. Pins that do not select a run show "
            f"{'them' if more != 1 else 'it'}, too."
        )
    notify(*texts)


def open_version(version: Version, with_draft: bool = True) -> None:
    """Open a saved version, with its draft if there is one. A notice names each of its runs that is missing."""
    try:
        draft = storage.draft_of(resolve_root(), version.session.id)
    except SessionError as error:
        draft = None
        notify(str(error))
    saved = version if version.number else None
    set_current(
        OpenSession(draft.session, saved, draft.revision)
        if draft and with_draft
        else OpenSession(version.session, saved)
    )
    texts = pins.missing_runs(resolve_root(), version.session)
    if draft and not with_draft:
        texts.append(
            "This session has unsaved changes, kept as a draft. Changes to this version become a session of their own."
        )
    try:
        more = len(pins.other_runs(catalog(), version.session))
    except DamagedIndexError as error:
        more = 0
        texts.append(f"{error}.")
    if more:
        runs = "1 run in this root does" if more == 1 else f"{more} runs in this root do"
        texts.append(
            f"{runs} not belong to this session. The session’s page shows all runs; its pins show only its own runs."
        )
    notify(*texts)


def show(view: View) -> NoReturn:
    """Go to a view; if its part is not served, go to the open session with a notice."""
    part = PAGES[view.page].parts.get(view.part)
    if part and part.writes and read_only():
        notice = f"Viewers cannot open the session's page, {part.title}. The notes and pins of the session are here."
        notify(*dict.fromkeys([*st.session_state.get("notices", []), notice]))
        view = READ
    address.go(view)


def follow_link() -> None:
    """Open the session that the address names, at the view that it names. If there is no such session, a notice says so
    above the page; where the browser goes back to an address, a session that was deleted is left out."""
    session_id, draft = st.query_params.get(address.SESSION), current()
    if session_id is None or (draft and draft.session.id == session_id):
        return
    entered = not address.shown()
    try:
        version = storage.load(resolve_root(), session_id)
    except SessionError as error:
        del st.query_params[address.SESSION]
        if entered:
            notify(f"This link cannot be opened. {error}")
        return
    open_version(version)


def notices() -> None:
    """The notices about the open session or the link, above the page, until they are closed."""
    if texts := st.session_state.get("notices"):
        left, right = st.container(key="notices").columns([12, 1], vertical_alignment="top")
        text = "\n\n".join(map(plain, texts[:6]))
        more = f"\n\nand {len(texts) - 6} more." if len(texts) > 6 else ""
        left.warning(text + more, icon=":material/link_off:")
        right.button("Close", key="close_notices", on_click=notify)
