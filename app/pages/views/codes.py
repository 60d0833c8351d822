"""What is the format really using? Its codes, their precision, and their entropy."""

from __future__ import annotations

import streamlit as st

from binade.app import show
from binade.app.figures import codes
from binade.app.figures.look import Look


def view(look: Look) -> None:
    drawn = codes.drawn(look, {})
    show.problems(drawn)
    if drawn.verdict:
        show.verdict(drawn.verdict)
    for cell, figure in zip(st.columns([3, 2], gap="large"), drawn.figures, strict=False):
        with cell:
            show.draw(figure)
