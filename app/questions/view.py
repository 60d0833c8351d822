"""How the app shows the answer to a question: laid out by the question's own module, else one thing after another."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from itertools import groupby
from typing import Any

import streamlit as st

from binade.app import show
from binade.app.address import go
from binade.app.figure import Drawn
from binade.app.questions.question import Question
from binade.app.questions.shared.selection import Selection
from binade.data.filter import Filter


def show_question(question: Question, selected: Selection, values: dict[str, Any]) -> None:
    """Show the answer for what is selected. values: of the page's parameters."""
    if question.layout:
        import_module(question.layout).show_view(selected, values)
    else:
        show_answer(question.draw(selected, values), selected.where, values)


def show_answer(drawn: Drawn, where: Filter, values: Mapping[str, Any]) -> None:
    """The verdict, the problems, the figures (those of one group side by side) and the tables. A mark that stands for a
    tensor opens it."""
    if drawn.verdict:
        show.verdict(drawn.verdict)
    show.problems(drawn)
    for _, group in groupby(drawn.figures, key=lambda figure: figure.group or figure.name):
        together = list(group)
        for cell, figure in zip(st.columns(len(together), gap="large"), together, strict=True):
            with cell:
                open_tensor(show.draw(figure), where, values)
    for title, table in drawn.tables.items():
        st.markdown(f"**{title}**")
        st.dataframe(table, hide_index=True, placeholder="–")


def open_tensor(tensor_id: str | None, where: Filter, values: Mapping[str, Any]) -> None:
    """Go to the page of the tensor that was chosen, if one was."""
    if tensor_id:
        go("tensor", where, tensor=tensor_id, format=values.get("format") or "")
