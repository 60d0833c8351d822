"""What is the format really using? Its codes, their precision, and their entropy."""

from __future__ import annotations

import streamlit as st

from binade.app import show
from binade.app.questions.codes import question
from binade.app.questions.shared.selected_tensor import Look


def view(look: Look) -> None:
    drawn = question.drawn(look, {})
    show.problems(drawn)
    if drawn.verdict:
        show.verdict(drawn.verdict)
    for cell, figure in zip(st.columns([3, 2], gap="large"), drawn.figures, strict=False):
        with cell:
            show.draw(figure)
