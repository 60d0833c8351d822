"""The frame of every page: the header, the runs that cannot be read, the scope and the filter, the parts of the page,
and the part that the address names. What the address asks for and does not exist is said in place of the part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from importlib import import_module

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from binade.app.draw.formatting import plain
from binade.app.frame import address, header, rooms
from binade.app.frame.bar import bar, explain_nothing, selects
from binade.app.frame.state import (
    SYNC_SECONDS,
    catalog,
    explain_empty,
    explain_refused,
    redraw_on_change,
    redraw_when,
    tell,
)
from binade.app.pages.registry import PAGES, PagePart
from binade.app.questions.shared.scope import Scope
from binade.app.sessions import open_session
from binade.app.view.params import read
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.index.opened import OutdatedError
from binade.data.run.access import read_only, reason
from binade.data.words.filter import FIELDS

MOST_IGNORED = 5  # parameters of an address that are named


def page_of(name: str) -> Callable[[], None]:
    """The function that shows a page."""

    def shown() -> None:
        _show(name)

    return shown


def opens(name: str) -> Callable[[], None]:
    """The function that opens a page with the parameters of the address."""

    def redirect() -> None:
        address.go(address.current(name))

    return redirect


def _show(name: str) -> None:
    page, view = PAGES[name], address.current(name)
    st.session_state[address.VIEW] = view  # also if the part is refused
    place = header.links(view)
    open_session.notices()
    opened = catalog()
    header.menus(place)
    part = page.parts.get(view.part)
    st.title(page.title if part is None else f"{page.title} › {part.room_title}", anchor=False)
    if part is None:
        rooms.show(view)
        st.error(plain(f"{page.title} has no part {view.part[:40]!r}."), icon=":material/link_off:")
        return
    if part.writes and read_only():
        rooms.show(view)
        st.info(plain(f"{part.title} is off: {reason()}."), icon=":material/lock:")
        return
    try:
        with opened.snapshot():
            _show_part(part, view, opened)
    except OutdatedError as error:
        st.info(plain(f"Not drawn: {error}. The page is drawn again."), icon=":material/refresh:")
        redraw_when(lambda: True, SYNC_SECONDS)


def _show_part(part: PagePart, view: View, opened: Catalog) -> None:
    module = import_module(part.layout)
    start = time.monotonic()
    shows = "progress" if part.empty and part.question else "version"
    before = getattr(opened, shows)
    named = {*FIELDS, *view.params_in(opened), "tensor"}
    ignored = [name[:40] for name in view.params if name not in named]
    unknown = [f"{part.room_title} has no parameter {name!r}: it was ignored." for name in ignored[:MOST_IGNORED]]
    if len(ignored) > MOST_IGNORED:
        unknown.append(f"{len(ignored) - MOST_IGNORED:,} more parameters were ignored.")
    view = view.short(opened)
    recorded = bool(opened.totals().tensors)
    reading = view.read(opened) if recorded or part.empty else None
    address.write(view, reading)
    _warn(unknown)
    explain_refused(opened)
    if reading is None:
        rooms.show(view)
        explain_empty(opened)
        tell(opened)
        redraw_on_change(opened, shows, before, start)
        return
    if part.question:
        if recorded:
            bar(opened, view, reading)
        scope = st.empty()  # filled once the answer is known, which says what it used
        if reading.gone or not getattr(module, "SHOWS_ROOMS", False):
            rooms.show(view)
        if reading.gone:
            _explain_gone(view, reading.problems)
        elif not (part.question.of_fields or part.empty or selects(opened, reading.where)):
            explain_nothing(reading.where)
        else:
            _warn(reading.problems)
            if not (reading.question_of_tensor or part.question.says_scope):
                scope.caption("&nbsp;")  # its line, so that nothing moves once the answer says it
            _say(scope, module.show(opened, view, reading))
    else:
        rooms.show(view)
        _warn(read(part.params(opened), view.params)[1])  # a tool has no filter
        module.show(opened, view, reading)
    tell(opened)
    if part.question:
        redraw_on_change(opened, shows, before, start)


def _say(place: DeltaGenerator, scope: Scope | None) -> None:
    if scope and (scope.tensors or scope.counts):
        place.caption(plain(scope.sentence))
    else:
        place.empty()


def _warn(problems: Iterable[str]) -> None:
    for problem in problems:
        st.warning(plain(problem), icon=":material/link_off:")


def _explain_gone(view: View, problems: tuple[str, ...]) -> None:
    """What the address asks for and does not exist, and the way out."""
    st.error("\n\n".join(map(plain, problems)), icon=":material/link_off:")
    st.caption("Nothing else is shown in its place. It may belong to another root, or may have been deleted.")
    kept = {name: None for name in (*FIELDS, *view.params) if name != "view"}
    st.button(
        "Open the page without it", icon=":material/restart_alt:", key="without_what_is_gone", on_click=address.write,
        args=(view.changed(**kept),),
    )  # fmt: skip
