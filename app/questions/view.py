"""How the app shows the answer to a question: its controls, then what `draw` returns for their values, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal

import streamlit as st

from binade.app import show
from binade.app.address import go, plain
from binade.app.control import Control
from binade.app.figure import Controls, Drawn, Facts, Figure, Item, Table, Text
from binade.app.filters import offer_to_clear
from binade.app.params import Many, Whole
from binade.app.questions.question import Question
from binade.app.questions.shared.selection import SelectedTensor, Selection
from binade.app.state import LARGE, QUICK, SLOW, shared
from binade.data.cache import Done
from binade.data.filter import Filter


def show_question(question: Question, selected: Selection, values: dict[str, Any]) -> None:
    """Show the controls, and the answer for the selection. values: those of the page's parameters."""
    values = values | show_controls(question.controls_of(selected, values), gap="large")
    drawn = _draw_stoppable(question, selected, values) if question.slow else _draw(question, selected, values)
    if drawn is not None:
        show_answer(drawn, selected.where, values)
        if not drawn.figures and not drawn.tables and not isinstance(selected, SelectedTensor):
            _explain_absence(question, selected, values)


def _explain_absence(question: Question, selected: Selection, values: dict[str, Any]) -> None:
    """Say whether there is an answer without the filter, and offer to clear it if there may be one."""
    if not selected.where.items():
        return
    if question.slow:
        offer_to_clear()
    elif _draw(question, replace(selected, where=Filter(), tensors=()), values).figures:
        st.info("The filter hides what this view shows.", icon=":material/filter_alt_off:")
        offer_to_clear()
    else:
        st.caption("This is not due to the filter: there is nothing to show without it, either.")


def show_controls(controls: Iterable[Control], gap: Literal["small", "large"] = "small") -> dict[str, Any]:
    """Show controls, those of one row side by side, and return their values."""
    for _, row in groupby(controls, key=lambda control: control.row or control.name):
        together = list(row)
        columns = st.columns([each.width for each in together], gap=gap if len(together) < 3 else "small")
        for cell, control in zip(columns, together, strict=True):
            with cell:
                _widget(control)
    return {control.name: st.session_state[control.name] for control in controls}


def _widget(control: Control) -> None:
    """A widget with the parameter's value, limited to what is possible here."""
    name, choices = control.name, control.choices
    st.session_state[name] = control.possible(st.session_state.get(name))
    common: dict[str, Any] = {"key": name, "help": control.help, "disabled": control.disabled}
    if isinstance(control.param, Whole) and not choices:
        common["value"] = None if control.param.default is None else "min"
        low, high = control.param.low, control.param.high
        st.number_input(control.label, low, high, step=1, placeholder=control.placeholder or None, **common)
        return
    if isinstance(control.param, Many):
        common["placeholder"] = control.placeholder or None
        st.multiselect(control.label, choices, filter_mode="contains", **common)
        return
    common["format_func"] = lambda value: str(control.titles.get(value, value))
    if control.widget == "list":
        st.selectbox(control.label, choices, **common)
    elif control.widget == "slider":
        st.select_slider(control.label, choices, **common)
    else:
        st.segmented_control(control.label, choices, required=True, **common)


def _draw(
    question: Question, selected: Selection, values: dict[str, Any], step: Done = lambda count, of: None
) -> Drawn:
    """The answer, computed once for all identical requests."""
    opened = selected.opened
    given = {field.name: getattr(selected, field.name) for field in fields(selected)}
    numel = given.pop("x").numel() if "x" in given else 0
    del given["opened"]
    if isinstance(selected, SelectedTensor):
        given |= {"row": selected.row.to_dict(), "labels": selected.label}
    request = (
        question.name, repr(given), repr(sorted(values.items(), key=str)), opened.progress if question.of_runs else 0,
    )  # fmt: skip

    def compute(done: Done) -> Drawn:
        drawn: Drawn = question.draw(selected, values, done) if question.slow else question.draw(selected, values)
        return drawn.prepared()

    pool = SLOW if question.slow or numel > LARGE else QUICK
    return shared(opened, request, compute, pool, step, stays=question.of_values)


def _draw_stoppable(question: Question, selected: Selection, values: dict[str, Any]) -> Drawn | None:
    """The answer, computed with a progress bar and a stop button; None if the user has stopped this computation."""
    row = getattr(selected, "row", None)
    tensor = None if row is None else row["tensor_id"]
    wanted = repr((tensor, selected.where, sorted(values.items(), key=str)))
    if show.stopped(question.slow, wanted):
        return None
    with ExitStack() as stack:
        bar = None

        def done(count: int, of: int) -> None:
            nonlocal bar
            bar = bar or stack.enter_context(show.progress(question.slow, wanted))
            bar(count, of)

        return _draw(question, selected, values, done)


def show_answer(drawn: Drawn, where: Filter, values: Mapping[str, Any]) -> None:
    """Show the verdict, the problems, and the items in order, those of one group side by side."""
    if drawn.verdict:
        show.verdict(drawn.verdict)
    show.problems(drawn)
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
                    _show(item, where, values, left[index] if index < len(left) else None)


def _show(item: Item, where: Filter, values: Mapping[str, Any], left: Item | None) -> None:
    match item:
        case Figure() | Table():
            chosen = partial(_set, item.choose) if item.choose not in (None, "tensor_id") else None
            beside = left if isinstance(left, Figure) else None
            picked = show.draw(item, chosen, left=beside) if isinstance(item, Figure) else show.table(item, chosen)
            if item.choose == "tensor_id":
                open_tensor(picked, where, values)
        case Controls():
            show_controls(item.controls)
        case Facts():
            show.facts(item)
        case Text(kind="heading"):
            st.markdown(item.text)
        case Text(kind="error"):
            st.error(plain(item.text), icon=":material/broken_image:")
        case Text(kind="problem"):
            st.info(plain(item.text), icon=":material/info:")
        case Text():
            st.caption(plain(item.text))
    if isinstance(item, Text) and item.details:
        with st.expander("Details"):
            for line in item.details:
                st.text(line)


def open_tensor(tensor_id: str | None, where: Filter, values: Mapping[str, Any]) -> None:
    """Open the page of the chosen tensor, if any."""
    if tensor_id:
        go("tensor", where, tensor=tensor_id, format=values.get("format") or "")


def _set(name: str, value: Any) -> None:
    """Set the parameter of this name."""
    st.session_state[name] = int(value)
