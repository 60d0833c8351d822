"""The Sessions page: open, read, compare, share, import and delete saved sessions."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import streamlit as st

from binade.app import address, uploads
from binade.app import show as show_items
from binade.app.figure import Drawn
from binade.app.formatting import plain
from binade.app.pages.registry import PAGES, SESSION_PARTS
from binade.app.questions.shared.runs import given_names
from binade.app.sessions import draft, notes, pins, share_view, storage
from binade.app.sessions import session as sessions
from binade.app.sessions.draft import OpenSession
from binade.app.sessions.session import Pin, Session, SessionError
from binade.app.sessions.storage import Version
from binade.app.view import Reading, View
from binade.data.access import ReadOnlyError, read_only, reason
from binade.data.catalog import Catalog
from binade.data.names import distinct_names

PARTS = dict(zip(SESSION_PARTS, ("Saved", "Read", "Edit", "Compare", "Import"), strict=True))
MAX_LISTED = 12  # sessions


def show(opened: Catalog, view: View, reading: Reading) -> None:
    st.session_state["part"] = reading.values["part"]
    st.segmented_control(
        "Part", PARTS, key="part", required=True, format_func=lambda name: PARTS[name], label_visibility="collapsed",
        on_change=lambda: _turn_to(st.session_state["part"]),
    )  # fmt: skip
    if why := reason():
        st.caption(plain(f"Sessions can be opened, but not saved or deleted: {why}."))
    parts = {"saved": _saved, "read": _reading, "open": _open, "compare": _compare, "import": _import}
    parts[reading.values["part"]](opened)


def _turn_to(part: str) -> None:
    address.change(part=part)


# Saved


def _saved(opened: Catalog) -> None:
    versions, problems = storage.list_sessions(opened.root)
    for problem in problems:
        st.warning(plain(problem), icon=":material/broken_image:")
    if not versions:
        st.info("No saved sessions yet.", icon=":material/bookmarks:")
        st.markdown(
            "A session saves what you are looking at: the page with its filter and settings, the charts you pin, and "
            "your notes. Pin a chart with **Pin to session** in its menu (⋯), or **Save** above a page with charts."
        )
        return
    if len(versions) > MAX_LISTED:
        text = st.text_input("Find", placeholder="part of the name").strip().lower()
        versions = [version for version in versions if text in version.session.name.lower()]
        if len(versions) > MAX_LISTED:
            st.caption(f"The latest {MAX_LISTED} of {len(versions):,}.")
    for version in versions[:MAX_LISTED]:
        _entry(opened, version)


def _entry(opened: Catalog, version: Version) -> None:
    one = version.session
    is_open = (now := draft.current()) is not None and now.session.id == one.id
    with st.container(border=True):
        left, right = st.columns([3, 2], vertical_alignment="center")
        count = len(one.pins)
        state = f"version {version.number} · saved" if version.number else "draft ·"
        facts = (
            f"{PAGES[one.view.page].title} · {count} pin{'s' * (count != 1)} · {state} "
            f"{one.saved[:16].replace('T', ' ')} UTC · {one.id}"
        )
        left.markdown(f"**{plain(one.name)}**{' · open' * is_open}  \n:small[:gray[{plain(facts)}]]")
        cells = right.columns([1, 1, 1, 1])
        if cells[0].button("Open", key=f"open_{one.id}", width="stretch"):
            draft.open_version(version)
            draft.show(one.view)
        cells[1].button("Read", key=f"read_{one.id}", on_click=_read, args=(version,), width="stretch")
        with cells[2].popover("Share", width="stretch", key=f"share_{one.id}"):
            share_view.show(opened, one)
        with cells[3].popover("More", width="stretch", key=f"more_{one.id}"):
            _more(opened, one)


def _read(version: Version, newest: bool = True) -> None:
    draft.open_version(version, with_draft=newest)
    _turn_to("read")


def _more(opened: Catalog, one: Session) -> None:
    st.caption("History")
    versions, problems = storage.history(opened.root, one.id)
    for version in versions:
        label = f"Version {version.number} · {version.session.saved[:16].replace('T', ' ')} UTC"
        st.button(
            label, key=f"version_{one.id}_{version.number}", on_click=_read, args=(version, False), type="tertiary"
        )
    for problem in problems:
        st.caption(plain(problem))
    if read_only():
        return
    count = len(versions) + len(problems)
    st.divider()
    st.caption(
        f"This deletes the session with its {count} version{'s' * (count != 1)}, {len(one.pins)} pins and its notes. "
        f"Runs and tensors are kept. This cannot be undone."
    )
    sure = st.checkbox("Yes, delete it", key=f"sure_{one.id}")
    st.button("Delete", key=f"delete_{one.id}", disabled=not sure, on_click=_delete, args=(opened, one))


def _delete(opened: Catalog, one: Session) -> None:
    try:
        storage.delete(opened.root, one.id)
    except (SessionError, ReadOnlyError) as error:
        draft.notify(str(error))
        return
    stays = ""
    if (now := draft.current()) and now.session.id == one.id:
        draft.set_current(OpenSession(now.session) if now.saved else None)
        stays = ". It stays open as a draft." if now.saved else ""
    draft.toast(f"Deleted “{one.name}”{stays}", ":material/delete:")


# The open session


def _current() -> OpenSession | None:
    now = draft.current()
    if now is None:
        st.info("No session is open. Open a saved one, or pin a chart on any page.", icon=":material/bookmarks:")
    return now


def _reading(opened: Catalog) -> None:
    """The open session as its readers see it, without anything that changes it."""
    if (now := _current()) is None:
        return
    one = now.session
    left, right = st.container(key="reading").columns([3, 1.1], vertical_alignment="bottom")
    left.header(plain(one.name), anchor=False)
    left.caption(f"{now.state.capitalize()} · {_runs(one)}")
    with right.container(horizontal=True, horizontal_alignment="right", gap="small"):
        if st.button("Open page", help="The page as saved"):
            draft.show(one.view)
        st.button(
            "Edit a copy", type="primary", disabled=read_only(), on_click=_edit_copy, args=(one,),
            help="The copy is a draft of yours; this session stays as it is",
        )  # fmt: skip
    if text := notes.safe(one.notes):
        st.markdown(text)
    if not one.pins:
        st.info("This session has no pins.", icon=":material/push_pin:")
    for index, pin in enumerate(one.pins):
        with st.container(border=True, key=f"pin_{index}"):
            st.subheader(plain(pin.caption or "Without a caption"), anchor=False)
            if names := _tensors(opened, pin):
                st.caption(plain(names))
            _show_pin(opened, pin, index)


def _edit_copy(one: Session) -> None:
    draft.set_current(OpenSession(sessions.copied(one, f"{one.name[:110]} (copy)")))
    _turn_to("open")


def _tensors(opened: Catalog, pin: Pin) -> str:
    """The names of the tensors that a pin names, which its charts of one tensor do not repeat."""
    rows = opened.rows_of(pin.tensors(opened)[:MAX_LISTED])
    return ", ".join(distinct_names(rows, given_names(opened), long=True).values())


def _open(opened: Catalog) -> None:
    if (now := _current()) is None:
        return
    one = now.session
    key = f"{one.id}_{now.saved.number if now.saved else 0}"
    left, right = st.columns([2, 1], vertical_alignment="bottom")
    left.text_input("Name", one.name, key=f"name_{key}", max_chars=120, on_change=_rename, args=(f"name_{key}",))
    with right:
        _actions(opened, now)
    st.caption(f"{now.state.capitalize()} · {_runs(one)}")
    with st.expander("Notes", expanded=True):
        left, right = st.columns(2, gap="large")
        left.text_area(
            "Notes in Markdown",
            one.notes,
            key=f"notes_{key}",
            max_chars=sessions.LONGEST_NOTES,
            height=180,
            on_change=_note,
            args=(f"notes_{key}",),
        )
        with right:
            st.caption("Preview")
            st.markdown(notes.safe(one.notes) or "–")
    if not one.pins:
        st.info(
            "Nothing is pinned yet. Choose *Pin to session* in the menu (⋯) of a chart.", icon=":material/push_pin:"
        )
    for index in range(len(one.pins)):
        _pin(opened, one, index, key)


def _runs(one: Session) -> str:
    count = len(one.runs)
    return f"shows {count} run{'s' * (count != 1)}" if count else "save to record which runs it shows"


def _actions(opened: Catalog, now: OpenSession) -> None:
    with st.container(horizontal=True, gap="small"):
        if st.button("Open page", help="The page as saved"):
            draft.show(now.session.view)
        unchanged = read_only() or not now.changed
        st.button("Save", type="primary", disabled=unchanged, on_click=draft.save, args=(opened, now.session))
        st.button("Close", help="The draft is kept", on_click=draft.set_current, args=(None,))
        if not unchanged:
            st.button("Discard", help="Close it without unsaved changes", on_click=draft.discard)


def _rename(key: str) -> None:
    if name := st.session_state[key].strip():
        draft.change(name=name)


def _note(key: str) -> None:
    draft.change(notes=st.session_state[key])


def _pin(opened: Catalog, one: Session, index: int, key: str) -> None:
    pin, last = one.pins[index], len(one.pins) - 1
    with st.container(border=True, key=f"pin_{index}"):
        left, right = st.columns([3, 1.4], vertical_alignment="bottom")
        key = f"caption_{key}_{index}_{last}"
        left.text_input("Caption", pin.caption, key=key, max_chars=2000, on_change=_recaption, args=(index, key))
        cells = right.columns(4)
        up = cells[0].button("", icon=":material/arrow_upward:", key=f"up_{index}", disabled=not index, help="Move up")
        down = cells[1].button(
            "", icon=":material/arrow_downward:", key=f"down_{index}", disabled=index == last, help="Move down"
        )
        if cells[2].button("", icon=":material/open_in_new:", key=f"view_{index}", help="Open its page"):
            draft.show(View(pin.page, pin.params))
        gone = cells[3].button("", icon=":material/delete:", key=f"unpin_{index}", help="Remove")
        if up or down or gone:
            order = [*one.pins[:index], *one.pins[index + 1 :]]
            if not gone:
                order.insert(index - 1 if up else index + 1, pin)
            draft.change(pins=tuple(order))
            st.rerun()
        _show_pin(opened, pin, index)


def _show_pin(opened: Catalog, pin: Pin, index: int) -> None:
    drawn = _drawn(opened, pin.uncaptioned, draft.runs_of(pin), index)
    if drawn.verdict:
        show_items.verdict(drawn.verdict)
    for sentence in drawn.sentences:
        st.caption(plain(sentence))
    for figure in drawn.figures:
        show_items.draw(figure, pin=False)


def _recaption(index: int, key: str) -> None:
    if now := draft.current():
        order = list(now.session.pins)
        order[index] = replace(order[index], caption=st.session_state[key])
        draft.change(pins=tuple(order))


def _drawn(opened: Catalog, pin: Pin, runs: tuple[str, ...] | None, index: int) -> Drawn:
    drawn = pins.draw(opened, pin, runs)
    named = [replace(figure, name=f"pin{index}_{figure.name}", choose=None) for figure in drawn.figures]
    return replace(drawn, items=(*drawn.texts, *named))


# Compare


def _compare(opened: Catalog) -> None:
    versions, _ = storage.list_sessions(opened.root)
    choices = {}
    for latest in versions:
        for one, number in storage.history(opened.root, latest.session.id)[0]:
            choices[f"{one.name} · version {number} · {one.id}"] = one
    if (now := draft.current()) and now.changed:
        choices = {f"{now.session.name} · unsaved changes": now.session} | choices
    if len(choices) < 2:
        st.info(
            "There is nothing to compare. A comparison needs two sessions, or two versions of one.",
            icon=":material/compare:",
        )
        return
    left, right = st.columns(2)
    first = left.selectbox("Compare", list(choices), key="compare_first")
    second = right.selectbox("with", list(choices), index=1, key="compare_second")
    differences = sessions.differences(choices[first], choices[second])
    if not differences:
        st.success("No differences.", icon=":material/check:")
        return
    st.dataframe(
        pd.DataFrame(differences),
        hide_index=True,
        placeholder="",
        column_config={"what": "Difference", "first": "First", "second": "Second"},
    )


# Import


def _import(opened: Catalog) -> None:
    if why := reason():
        st.info(plain(f"Nothing can be imported: {why}."), icon=":material/lock:")
        return
    st.markdown(
        "A session file (.json), as exported on this page. It is checked before anything is imported. If a session "
        "with the same ID exists here, the imported one becomes its next version."
    )
    given = uploads.uploader("File", ["json"], "import_file")
    st.caption("A bundle, which has runs, is imported with `binade bundle import FILE.zip`.")
    if given is None or not st.button("Import", type="primary"):
        return
    try:
        session, number = storage.import_session(opened.root, sessions.parse(given.getvalue()))
    except (SessionError, ReadOnlyError) as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    uploads.drop()
    st.success(plain(f"“{session.name}” was imported as version {number}."), icon=":material/check:")
    for problem in pins.missing_runs(opened.root, session):
        st.warning(plain(problem), icon=":material/link_off:")
    st.button("Show saved sessions", on_click=_turn_to, args=("saved",))
