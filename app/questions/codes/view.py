"""What is the format really using? Its codes, their precision, and their entropy."""

from __future__ import annotations

from typing import Any

import streamlit as st

from binade.app import show
from binade.app.questions.codes import question
from binade.app.questions.shared.selection import SelectedTensor


def show_view(selected: SelectedTensor, values: dict[str, Any]) -> None:
    drawn = question.draw(selected, values)
    show.problems(drawn)
    if drawn.verdict:
        show.verdict(drawn.verdict)
    for cell, figure in zip(st.columns([3, 2], gap="large"), drawn.figures, strict=False):
        with cell:
            show.draw(figure)
