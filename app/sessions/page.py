"""The Sessions page: open, read, edit, share, import and delete sessions."""

from __future__ import annotations

from dataclasses import replace

import streamlit as st

from binade.app.draw import show as show_items
from binade.app.draw.formatting import plain
from binade.app.frame import address, uploads
from binade.app.frame.callbacks import while_shown
from binade.app.pages.registry import PAGES, SESSION_PARTS
from binade.app.questions.shared.runs import given_names
from binade.app.sessions import notes, open_session, pins, share_view, storage
from binade.app.sessions import session as sessions
from binade.app.sessions.log import Caption, Delete, KeptPin, Move, Note, Restore
from binade.app.sessions.session import Pin, Session, SessionError
from binade.app.sessions.storage import Saved
from binade.app.view.view import Reading, View
from binade.data.index.catalog import Catalog
from binade.data.run.access import ReadOnlyError, read_only, reason
from binade.data.words.names import distinct_names

PARTS = dict(zip(SESSION_PARTS, ("Saved", "Read", "Edit", "Import"), strict=True))
MAX_LISTED = 12  # sessions


def show(opened: Catalog, view: View, reading: Reading) -> None:
    st.session_state["part"] = reading.values["part"]
    st.segmented_control(
        "Part", PARTS, key="part", required=True, format_func=lambda name: PARTS[name], label_visibility="collapsed",
        on_change=while_shown("part", lambda: _turn_to(st.session_state["part"])),
    )  # fmt: skip
    if why := reason():
        st.caption(plain(f"Sessions can be opened, but not changed or deleted: {why}."))
    match reading.values["part"]:
        case "saved":
            _saved(opened)
        case "import":
            _import(opened)
        case part:
            _open_session(opened, editing=part == "open" and not read_only())


def _turn_to(part: str) -> None:
    address.change(part=part)


# Saved


def _saved(opened: Catalog) -> None:
    found, problems = storage.list_sessions(opened.root)
    for problem in problems:
        st.warning(plain(problem), icon=":material/broken_image:")
    if not found:
        st.info("No saved sessions yet.", icon=":material/bookmarks:")
        st.markdown(
            "A session keeps the charts you pin, the page you are looking at and your notes. Choose **Pin to session** "
            "in the menu of a chart (⋯), or give the page a name with **Session** in the header."
        )
        return
    if len(found) > MAX_LISTED:
        text = st.text_input("Find", placeholder="part of the name").strip().lower()
        found = [saved for saved in found if text in saved.session.name.lower()]
        if len(found) > MAX_LISTED:
            st.caption(f"The latest {MAX_LISTED} of {len(found):,}.")
    for saved in found[:MAX_LISTED]:
        _entry(opened, saved)


def _entry(opened: Catalog, saved: Saved) -> None:
    one = saved.session
    is_open = (now := open_session.current()) is not None and now.session.id == one.id
    with st.container(border=True):
        left, right = st.columns([3, 2], vertical_alignment="center")
        count = len(one.pins)
        facts = f"{PAGES[one.view.page].title} · {count} pin{'s' * (count != 1)} · changed {_time(one)} · {one.id}"
        left.markdown(f"**{plain(one.name)}**{' · open' * is_open}  \n:small[:gray[{plain(facts)}]]")
        cells = right.columns([1, 1, 1, 1])
        if cells[0].button("Open", key=f"open_{one.id}", width="stretch"):
            open_session.open_saved(saved)
            open_session.show(one.view)
        cells[1].button("Read", key=f"read_{one.id}", on_click=_read, args=(saved,), width="stretch")
        with cells[2].popover("Share", width="stretch", key=f"share_{one.id}"):
            share_view.show(opened, one)
        if not read_only():
            with cells[3].popover("Delete", width="stretch", key=f"more_{one.id}"):
                _ask_to_delete(opened, one)


def _read(saved: Saved) -> None:
    open_session.open_saved(saved)
    _turn_to("read")


def _ask_to_delete(opened: Catalog, one: Session) -> None:
    st.caption(
        f"This deletes the session with its {len(one.pins)} pins and its notes. Runs and tensors are kept. This cannot "
        "be undone."
    )
    sure = st.checkbox("Yes, delete it", key=f"sure_{one.id}")
    st.button("Delete", key=f"delete_{one.id}", disabled=not sure, on_click=_delete, args=(opened, one))


def _delete(opened: Catalog, one: Session) -> None:
    try:
        storage.delete(opened.root, one.id)
    except (SessionError, ReadOnlyError) as error:
        open_session.notify(str(error))
        return
    if (now := open_session.current()) and now.session.id == one.id:
        open_session.close()
    open_session.toast(f"Deleted “{one.name}”", ":material/delete:")


# The open session


def _open_session(opened: Catalog, editing: bool) -> None:
    """The open session as its readers see it, or with what changes it."""
    if (saved := open_session.current()) is None:
        st.info("No session is open. Open a saved one, or pin a chart on any page.", icon=":material/bookmarks:")
        return
    one = saved.session
    left, right = st.container(key="reading").columns([3, 1.4], vertical_alignment="bottom")
    with left:
        if editing:
            open_session.name_field("page_name")
        else:
            st.header(plain(one.name), anchor=False)
    with right.container(horizontal=True, horizontal_alignment="right", gap="small"):
        if st.button("Open page", help="The page on which the session was started"):
            open_session.show(one.view)
        st.button("Close", on_click=open_session.close)
        with st.popover("Share", key=f"share_{one.id}"):
            share_view.show(opened, one)
    count = len(one.runs)
    st.caption(f"Changed {_time(one)} · shows {count} run{'s' * (count != 1)}")
    if editing:
        _notes_field(one)
    if text := notes.safe(one.notes):
        st.markdown(text)
    if editing and (deleted := saved.state.last_deleted):
        _offer_undo(deleted)
    if not one.pins:
        st.info(
            "This session has no pins. Choose *Pin to session* in the menu (⋯) of a chart.", icon=":material/push_pin:"
        )
    for index, kept in enumerate(saved.state.shown):
        with st.container(border=True, key=f"pin_{index}"):
            if editing:
                _pin_fields(saved, index)
            else:
                st.subheader(plain(kept.pin.caption or "Without a caption"), anchor=False)
            if names := _tensors(opened, kept.pin):
                st.caption(plain(names))
            _show_pin(opened, one, index)


def _time(one: Session) -> str:
    return f"{one.saved[:16].replace('T', ' ')} UTC"


def _tensors(opened: Catalog, pin: Pin) -> str:
    """The names of the tensors that a pin names, which its charts of one tensor do not repeat."""
    rows = opened.rows_of(pin.tensors(opened)[:MAX_LISTED])
    return ", ".join(distinct_names(rows, given_names(opened), long=True).values())


def _notes_field(one: Session) -> None:
    before, key = one.notes, open_session.field_key(f"notes_{one.id}", one.notes)
    st.text_area(
        "Notes in Markdown", before, key=key, max_chars=sessions.LONGEST_NOTES, height=180,
        on_change=while_shown(key, lambda: open_session.change(Note(st.session_state[key], before))),
    )  # fmt: skip


def _offer_undo(deleted: KeptPin) -> None:
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.caption(plain(f"Deleted: {deleted.pin.caption or 'a pin without a caption'}"), width="content")
        st.button(
            "Undo", key="undo", icon=":material/undo:", type="tertiary",
            on_click=lambda: open_session.change(Restore(deleted.pin_id)),
        )  # fmt: skip


def _pin_fields(saved: Saved, index: int) -> None:
    """The caption of a pin, and the buttons that move, open and delete it."""
    pins_shown, kept = saved.state.shown, saved.state.shown[index]
    ids: list[str | None] = [*(each.pin_id for each in pins_shown), None]
    key = open_session.field_key(f"caption_{saved.session.id}_{kept.pin_id}", kept.pin.caption)
    left, right = st.columns([3, 1.4], vertical_alignment="bottom")
    left.text_input(
        "Caption", kept.pin.caption, key=key, max_chars=sessions.LONGEST_CAPTION,
        on_change=while_shown(key, lambda: open_session.change(Caption(kept.pin_id, st.session_state[key]))),
    )  # fmt: skip
    cells = right.columns(4)
    is_first, is_last = index == 0, index == len(pins_shown) - 1
    cells[0].button(
        "", icon=":material/arrow_upward:", key=f"up_{kept.pin_id}", disabled=is_first, help="Move up",
        on_click=lambda: open_session.change(Move(kept.pin_id, ids[index - 1])),
    )  # fmt: skip
    cells[1].button(
        "", icon=":material/arrow_downward:", key=f"down_{kept.pin_id}", disabled=is_last, help="Move down",
        on_click=lambda: open_session.change(Move(kept.pin_id, ids[index + 2])),
    )  # fmt: skip
    if cells[2].button("", icon=":material/open_in_new:", key=f"view_{kept.pin_id}", help="Open its page"):
        open_session.show(View(kept.pin.page, kept.pin.params))
    cells[3].button(
        "", icon=":material/delete:", key=f"unpin_{kept.pin_id}", help="Delete",
        on_click=lambda: open_session.change(Delete(kept.pin_id)),
    )  # fmt: skip


def _show_pin(opened: Catalog, one: Session, index: int) -> None:
    drawn = pins.draw(opened, one.pins[index].uncaptioned, one.run_ids)
    if drawn.verdict:
        show_items.verdict(drawn.verdict)
    for sentence in drawn.sentences:
        st.caption(plain(sentence))
    for figure in drawn.figures:
        show_items.draw(replace(figure, name=f"pin{index}_{figure.name}", choose=None), pin=False)


# Import


def _import(opened: Catalog) -> None:
    if why := reason():
        st.info(plain(f"Nothing can be imported: {why}."), icon=":material/lock:")
        return
    st.markdown(
        "A session file (.json), as exported on this page. It is checked before anything is imported. If another "
        "session with its ID exists here, the imported one gets a new ID."
    )
    given = uploads.uploader("File", ["json"], "import_file")
    st.caption("A bundle, which has runs, is imported with `binade bundle import FILE.zip`.")
    if given is None or not st.button("Import", type="primary"):
        return
    try:
        one = storage.import_session(opened.root, sessions.parse(given.getvalue())).session
    except (SessionError, ReadOnlyError) as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    uploads.drop()
    st.success(plain(f"“{one.name}” was imported."), icon=":material/check:")
    for problem in pins.missing_runs(opened.root, one):
        st.warning(plain(problem), icon=":material/link_off:")
    st.button("Show saved sessions", on_click=_turn_to, args=("saved",))
