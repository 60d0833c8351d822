"""Which tensors suffer most? The ranked bars, and every place as a table."""

from __future__ import annotations

from typing import Any

import streamlit as st

from binade.app.figure import Figure
from binade.app.questions.ranking.question import draw
from binade.app.questions.shared import boards
from binade.app.questions.shared.selection import Board
from binade.app.questions.view import open_tensor, show_answer
from binade.app.style import MEASURES


def show_view(board: Board, values: dict[str, Any]) -> None:
    drawn = draw(board, values)
    show_answer(drawn, board.where, values)
    if figure := drawn.get("ranking"):
        open_tensor(_chosen(board, figure), board.where, values)


def _chosen(board: Board, figure: Figure) -> str | None:
    """Show all places; the tensor of the row that is selected."""
    table, measure, number = figure.table, board.measure, st.column_config.NumberColumn
    errors = boards.is_error(measure.key)
    shown = table.assign(value=table["value"] * measure.factor)
    columns = ["rank", "place", "operation", "value", "tensors"]
    if errors:
        shown = shown.assign(flushed=table["flush_to_zero"] * 100, clipped=table["saturated"] * 100)
        columns = ["rank", "place", "operation", "sqnr_db", "flushed", "clipped", "tensors"]
    event = st.dataframe(
        shown,
        key=f"places_{measure.key}_{board.format}_{hash(board.where)}",
        hide_index=True,
        placeholder="–",
        height=min(38 + 35 * len(shown), 420),
        column_order=columns,
        on_select="rerun",
        selection_mode="single-row",
        column_config={
            "rank": number("Rank", width=60),
            "place": st.column_config.TextColumn("Tensor", width=220),
            "operation": st.column_config.TextColumn("Operation", width=110),
            "value": number(measure.axis, format="%.4g", help=measure.definition),
            "sqnr_db": number("SQNR (dB)", format="%.2f", help=MEASURES["sqnr_db"].definition),
            "flushed": number("Flushed (%)", format="%.3f", help=MEASURES["flush_to_zero"].definition),
            "clipped": number("Saturated (%)", format="%.3f", help=MEASURES["saturated"].definition),
            "tensors": number("Tensors", format="localized", width=80),
        },
    )
    rows = event["selection"]["rows"]
    return str(table.iloc[rows[0]]["tensor_id"]) if rows else None
