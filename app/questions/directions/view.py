"""Which gradients flush to zero? Forward and backward, side by side."""

from __future__ import annotations

from typing import Any

import streamlit as st

from binade.app import show
from binade.app.questions.directions.question import draw
from binade.app.questions.shared.selection import Board
from binade.app.questions.view import open_tensor


def show_view(board: Board, values: dict[str, Any]) -> None:
    drawn = draw(board, values)
    show.problems(drawn)
    if not drawn.figures:
        return
    show.verdict(drawn.verdict)
    for cell, operation in zip(st.columns(2, gap="large"), ("forward", "backward"), strict=True):
        with cell:
            if figure := drawn.get(f"direction_{operation}"):
                open_tensor(show.draw(figure), board.where, values)
            else:
                st.info(f"No {operation} operand is in the filter.", icon=":material/block:")
    st.caption(f"{board.definition} Choose a bar to look into its worst tensor.")
