"""How a page shows the answer to a question: its controls, then what `View.draw` returns, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from binade.app.draw import show as show_items
from binade.app.draw.control import Control
from binade.app.draw.figure import Controls, Drawn, Facts, Figure, Item, Offers, Table, Text
from binade.app.draw.formatting import plain
from binade.app.frame import address
from binade.app.frame.bar import offer_to_clear
from binade.app.frame.callbacks import while_shown
from binade.app.pages.registry import PAGES
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Of, select
from binade.app.view.params import Interval, Many, Specs, Whole
from binade.app.view.view import Reading, View
from binade.data.index.cache import Done
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter

MOMENT = 0.5  # seconds that an answer may take before its progress is shown
MORE = 0.9  # width of the button of folded controls, as a share of a row
AROUND = 8  # pixels of a chart beside its picture
T = TypeVar("T")


def show(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    """Show the answer of a view, with its note and the controls above it. Returns what the answer was computed from, as
    each layout does."""
    assert reading.part and reading.part.room
    if words := reading.part.room[0].note or f"Filter: {reading.where.sentence()}." * bool(reading.where.items()):
        st.caption(plain(words))
    return show_room(opened, view, reading)


def room_place(reading: Reading, page: str) -> DeltaGenerator:
    """The place of a room, beside empty ones of the page's other rooms. The elements of another room would otherwise
    stay until this one has replaced them one by one, and be moved about by it."""
    assert reading.part
    places = {}
    for name in dict.fromkeys(part.room_name for part in PAGES[page].parts.values()):
        places[name] = st.container() if name == reading.part.room_name else st.empty()
    return places[reading.part.room_name]


def show_room(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    """Show the questions of a room: the one that its control chooses, or the first with the others as sections. A
    section is computed when it is opened, which the address says. Returns the scope of the answer that is shown last.
    """
    assert reading.part and reading.question
    with room_place(reading, view.page):
        return _show_room(opened, view, reading)


def _show_room(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    assert reading.part
    first, *others = reading.part.room
    if first.choice:
        titles = {question.view: question.title for question in (first, *others)}
        st.session_state["room"] = view.part
        with st.container(key="choice", horizontal=True, vertical_alignment="top", gap="medium"):
            st.segmented_control(
                first.choice, list(titles), key="room", required=True, format_func=lambda name: titles[name],
                on_change=while_shown("room", lambda: address.change(view=st.session_state["room"])), width="content",
            )  # fmt: skip
            beside = st.container()
        return show_question(opened, view, reading, beside)
    above = first_of(opened, view, reading)
    scope = show_question(opened, above.view, above)
    return show_sections(opened, view, reading) or scope


def first_of(opened: Catalog, view: View, reading: Reading) -> Reading:
    """The first question of a room, above the section that is open, if any."""
    assert reading.part
    first = reading.part.room[0]
    return reading if reading.question is first else view.changed(view=first.view).read(opened)


def show_sections(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    """The questions of a room after the first, each folded until it is opened."""
    assert reading.part
    first, *others = reading.part.room
    selected = selected_of(opened, reading) if any(question.applies for question in others) else None
    scope = None
    for question in others:
        is_open, key = question.view == view.part, f"section_{question.view}"
        if question.applies and not is_open and (isinstance(selected, Drawn) or not question.applies(selected)):
            continue
        st.session_state[key] = is_open
        section = st.expander(
            f"**{question.title}** · {question.help}", key=key, icon=question.icon, on_change=while_shown(key, _fold),
            args=(key, question.view, first.view),
        )  # fmt: skip
        if is_open:
            with section:
                if question.note:
                    st.caption(plain(question.note))
                scope = show_question(opened, view, reading)
    return scope


def _fold(key: str, view: str, first: str) -> None:
    """Open a section, or close it."""
    address.change(view=view if st.session_state[key] else first)


def show_question(opened: Catalog, view: View, reading: Reading, above: DeltaGenerator | None = None) -> Scope | None:
    """Show the controls and the answer of a view. Returns what the answer was computed from. above: where the controls
    are, if not above the answer."""
    question = reading.question
    assert question
    selected = selected_of(opened, reading)
    if not isinstance(selected, Drawn):
        with above or nullcontext():
            show_controls(question.controls_of(selected, reading.values), reading.values)
    drawn = drawn_of(opened, reading)
    if drawn is None:
        return None
    show_answer(opened, drawn, view, reading)
    if not drawn.figures and not drawn.tables and question.of is not Of.TENSOR:
        explain_absence(opened, view, reading, said=bool(drawn.verdict))
    return drawn.scope


def explain_absence(opened: Catalog, view: View, reading: Reading, said: bool = False) -> None:
    """Say whether there is an answer without the filter, and offer to clear it if there may be one. said: whether the
    answer is in words, so that nothing is missing where no other runs have more."""
    if not reading.where.items():
        return
    if reading.question and reading.question.slow:
        offer_to_clear()
    elif view.filtered(Filter()).draw(opened).figures:
        st.info("No data for this view under the current filter.", icon=":material/filter_alt_off:")
        offer_to_clear()
    elif not said:
        st.caption("These runs have no data for this view.")


def selected_of(opened: Catalog, reading: Reading) -> Any:
    """What the question of a view is asked of; a Drawn if that does not exist."""
    assert reading.question
    return select(reading.question.of, opened, reading.where, reading.values)


def show_controls(controls: Iterable[Control], values: Mapping[str, Any]) -> None:
    """Show controls with their values, those of one row side by side. Folded ones are behind a button at its end."""
    for _, row in groupby(controls, key=lambda control: control.row or control.name):
        together = list(row)
        shown = [control for control in together if not control.folded]
        folded = together[len(shown) :]
        columns = st.columns([*(control.width for control in shown), *[MORE] * bool(folded)], gap="small")
        for cell, control in zip(columns, shown, strict=False):
            with cell:
                show_control(control, values[control.name])
        if folded:
            with columns[-1], st.container(key="more_options"), st.popover("More options", width="stretch"):
                for control in folded:
                    show_control(control, values[control.name])


def show_control(control: Control, value: Any, **more: Any) -> None:
    """A widget with the parameter's value, limited to what is possible here."""
    name, choices = control.name, control.choices
    st.session_state[name] = control.possible(value)
    common: dict[str, Any] = {"key": name, "help": control.help, "disabled": control.disabled}
    common |= {"on_change": while_shown(name, _changed), "args": (name,)} | more
    if isinstance(control.param, Whole) and not choices:
        common["value"] = None if control.param.default is None else "min"
        low, high = control.param.low, control.param.high
        st.number_input(control.label, low, high, step=1, placeholder=control.placeholder or None, **common)
        return
    if isinstance(control.param, Many):
        common["placeholder"] = control.placeholder or None
        choices = list(dict.fromkeys([*choices, *value]))
        new = isinstance(control.param, Specs)
        st.multiselect(
            control.label, choices, filter_mode="contains", select_all=False, accept_new_options=new,
            max_selections=control.param.most if new else None, **common,
        )  # fmt: skip
        return
    common["format_func"] = lambda value: str(control.titles.get(value, value))
    if control.widget == "list":
        st.selectbox(control.label, choices, placeholder=control.placeholder or None, **common)
    elif control.widget == "slider":
        st.select_slider(control.label, choices, **common)
    else:
        st.segmented_control(control.label, choices, required=True, **common)


def _changed(name: str) -> None:
    address.change(**{name: st.session_state[name]})


def drawn_of(opened: Catalog, reading: Reading) -> Drawn | None:
    """The answer; None if the user has stopped it."""
    assert reading.question
    return awaited(reading, lambda done: reading.draw(opened, done))


def awaited(reading: Reading, compute: Callable[[Done], T]) -> T | None:
    """What is computed for a view. If it takes longer than a moment, its progress is shown with a stop button. None if
    the user has stopped it. Not for fragments: while the page is drawn, their buttons wait."""
    assert reading.question
    what, asked = reading.question.slow or reading.question.title, repr(reading.view)
    if show_items.stopped(what, asked):
        return None
    with show_items.progress(what, asked, after=MOMENT) as done:
        return compute(done)


def show_answer(opened: Catalog, drawn: Drawn, view: View, reading: Reading) -> None:
    """Show the verdict, the problems, and the items in order, those of one group side by side."""
    if drawn.verdict:
        show_items.verdict(drawn.verdict)
    for problem in drawn.problems:
        if problem not in reading.problems:  # these are shown above
            st.info(plain(problem))
    _reserve(drawn.figures)
    for _, group in groupby(drawn.items, key=lambda item: item.group or id(item)):
        cells: list[list[Item]] = []
        for item in group:
            if cells and isinstance(cells[-1][-1], Controls):
                cells[-1].append(item)
            else:
                cells.append([item])
        widths = [max(item.width for item in cell) for cell in cells]
        places = st.columns(widths, gap="large" if len(cells) < 3 else "small")
        for place, cell, left in zip(places, cells, [[], *cells], strict=False):
            with place:
                for index, item in enumerate(cell):
                    _show(opened, item, view, reading, left[index] if index < len(left) else None)


def _reserve(figures: Iterable[Figure]) -> None:
    """Give each figure its height before it is drawn."""
    rules = [
        f".st-key-card_{figure.name} {{min-height: {height + AROUND}px}}"
        f".st-key-card_{figure.name} .chart[data-state=drawing] {{min-height: {height}px}}"
        for figure in figures
        if (height := figure.height)
    ]
    if rules:
        st.html(f"<style>{''.join(rules)}</style>")


def _show(opened: Catalog, item: Item, view: View, reading: Reading, left: Item | None) -> None:
    match item:
        case Figure() | Table():
            chosen = partial(_set, item.choose) if item.choose not in (None, "tensor_id") else None
            beside = left if isinstance(left, Figure) else None
            picked = (
                show_items.draw(item, chosen, partial(_set, item.brush) if item.brush else None, left=beside, view=view)
                if isinstance(item, Figure)
                else show_items.table(item, chosen)
            )
            if item.choose == "tensor_id":
                open_tensor(picked, view)
        case Controls():
            show_controls(item.controls, reading.values)
        case Offers():
            with st.container(horizontal=True, vertical_alignment="center", gap="small"):
                st.markdown(plain(item.text), width="content")
                for label, params in item.choices.items():
                    st.button(label, key=f"offer_{label}", on_click=address.change, kwargs=dict(params))
        case Facts():
            show_items.facts(item)
        case Text():
            show_text(item)


def show_text(item: Text) -> None:
    match item.kind:
        case "heading":
            st.markdown(item.text)
        case "error":
            st.error(plain(item.text), icon=":material/broken_image:")
        case "problem":
            st.info(plain(item.text), icon=":material/info:")
        case _:
            st.caption(plain(item.text))
    if item.details:
        with st.expander("Details"):
            for line in item.details:
                st.text(line)


def open_tensor(tensor_id: str | None, view: View) -> None:
    """Open the page of the chosen tensor, if any."""
    if tensor_id:
        address.go(view.at("tensor", tensor=tensor_id))


def _set(name: str, value: Any) -> None:
    """Set the parameter of this name to a text, a whole number or a range; None clears it."""
    address.change(**{name: value if value is None or isinstance(value, str | Interval) else int(value)})
