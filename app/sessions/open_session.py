"""The session that is open in this browser tab: every page can pin charts to it.

The address names the session, and each change of it is on the disk at once: a reload, a restart or a closed tab loses
nothing. Each run of the page reads it again, so that a tab shows what others have changed.
"""

from __future__ import annotations

import zlib
from typing import NoReturn

import streamlit as st

from binade.app.draw.figure import Figure
from binade.app.draw.formatting import plain
from binade.app.frame import address
from binade.app.frame.callbacks import while_shown
from binade.app.frame.state import catalog
from binade.app.pages.registry import PAGES, PART
from binade.app.sessions import pins, storage
from binade.app.sessions import session as sessions
from binade.app.sessions.log import Add, Operation, Rename
from binade.app.sessions.session import Pin, RunReference, Session, SessionError
from binade.app.sessions.storage import Saved
from binade.app.view.view import View
from binade.data.index.catalog import DamagedIndexError
from binade.data.run.access import ReadOnlyError, read_only
from binade.data.run.directory import RunError, resolve_root

OPEN = "open_session"  # in the session's state: the open session as this tab has read it last
TOASTS = "toasts"  # the key in a session's state
READ = View("notebook", {PART: ["sessions"], "part": ["read"]})  # the open session, as its readers see it


def current() -> Saved | None:
    return st.session_state.get(OPEN)


def can_keep() -> bool:
    """Whether a session can keep the view that the page shows."""
    view = address.shown()
    part = view and PAGES[view.page].parts.get(view.part)
    return bool(part and part.kept)


def shown_view() -> View | None:
    """The view that the page shows, with every parameter; None if a session cannot keep it."""
    view = address.shown()
    return view.explicit(catalog()) if view and can_keep() else None


def set_current(saved: Saved) -> None:
    """Let a session be the open one, which the address names."""
    before = current()
    st.session_state[OPEN], st.session_state[address.SESSION] = saved, saved.session.id
    if before and before.session.id != saved.session.id:  # else `follow_link` would open the former again
        st.query_params[address.SESSION] = saved.session.id


def close() -> None:
    """Let no session be open."""
    st.session_state[OPEN] = st.session_state[address.SESSION] = None
    st.query_params.pop(address.SESSION, None)


def change(operation: Operation) -> None:
    """Add an operation to the open session. A notice says why, if it cannot be."""
    if (now := current()) is None:
        return
    try:
        set_current(storage.append(resolve_root(), now.session.id, operation))
    except (SessionError, ReadOnlyError) as error:
        notify(str(error))


def _start(session: Session) -> None:
    """Open a new session. A notice says why, if it cannot be written."""
    try:
        set_current(storage.create(resolve_root(), session))
    except (SessionError, ReadOnlyError) as error:
        notify(str(error))


def rename(name: str) -> None:
    """Rename the open session, or start one with this name at the view that is shown."""
    if current():
        change(Rename(name))
    elif (view := shown_view()) and (runs := _runs_of(view)) is not None:
        _start(sessions.new(name, view, runs=runs))


def _runs_of(view: View) -> tuple[RunReference, ...] | None:
    """References to the runs that a view shows; None, with a notice, if they cannot be read."""
    try:
        return pins.references(catalog(), [view])
    except (RunError, DamagedIndexError) as error:
        notify(f"{error}.")
        return None


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
    added, before = Pin(view.page, view.params, chart, title), current()
    if before and added in before.session.pins:
        toast("This chart is already pinned.", ":material/push_pin:")
        return
    if (runs := _runs_of(added)) is None:
        return
    if before:
        change(Add(added, runs))
    else:
        _start(sessions.new("Untitled", view, pins=(added,), runs=runs))
    if (now := current()) and now is not before:
        toast(f"Pinned to “{now.session.name}”: {title or chart}", ":material/push_pin:")
        more = len(now.session.runs) - len(before.session.runs) if before and before.session.runs else 0
        if more > 0:
            notify(
                f"The session now includes {more} more run{'s' * (more != 1)}. Pins that do not select a run show "
                f"{'them' if more != 1 else 'it'}, too."
            )


def open_saved(saved: Saved) -> None:
    """Open a session. Notices name its damaged lines, each of its runs that is missing, and how many came later."""
    set_current(saved)
    texts = [*saved.problems, *pins.missing_runs(resolve_root(), saved.session)]
    try:
        more = len(pins.other_runs(catalog(), saved.session))
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
    """Read the session that the address names, or else the open one, and open it if it is another one. If it is not
    there, a notice says so above the page; where the browser goes back to an address, a session that was deleted is
    left out."""
    now = current()
    session_id = st.query_params.get(address.SESSION, now and now.session.id)
    if session_id is None:
        return
    is_open = now is not None and now.session.id == session_id
    try:
        saved = storage.load(resolve_root(), session_id)
    except SessionError as error:
        if is_open:
            close()
            notify(str(error))
            return
        del st.query_params[address.SESSION]
        if not address.shown():
            notify(f"This link cannot be opened. {error}")
        return
    if is_open:
        set_current(saved)
    else:
        open_saved(saved)


def notices() -> None:
    """The notices about the open session or the link, above the page, until they are closed."""
    if texts := st.session_state.get("notices"):
        left, right = st.container(key="notices").columns([12, 1], vertical_alignment="top")
        text = "\n\n".join(map(plain, texts[:6]))
        more = f"\n\nand {len(texts) - 6} more." if len(texts) > 6 else ""
        left.warning(text + more, icon=":material/link_off:")
        right.button("Close", key="close_notices", on_click=notify)


def field_key(what: str, value: str) -> str:
    """The key of a text field of the open session with this value. Another value makes it another field, so that a tab
    shows what others have changed; text that could not be kept stays in its field."""
    return f"{what}_{zlib.crc32(value.encode())}"


def name_field(place: str) -> None:
    """A text field with the name of the open session, which is renamed at once; without one, a name starts one. place:
    where the field is, as a part of its key."""
    now = current()
    name = now.session.name if now else ""
    key = field_key(f"{place}_{now.session.id if now else ''}", name)

    def renamed() -> None:
        if typed := st.session_state[key].strip():
            rename(typed)

    st.text_input(
        "Name", name, key=key, max_chars=120, placeholder="What did you find?", on_change=while_shown(key, renamed)
    )
