"""Which blocks fail? SQNR and scales block by block, and down to a block's values."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from binade.app import show
from binade.app.questions.blocks import question
from binade.app.questions.blocks.question import METRIC_TITLES, Blocks
from binade.app.questions.shared.selection import SelectedTensor
from binade.app.style import short
from binade.quant.metrics import METRICS


def show_view(selected: SelectedTensor, values: dict[str, Any]) -> None:
    metric = st.segmented_control(
        "Metric", METRIC_TITLES, key="block_metric", required=True, format_func=lambda name: METRIC_TITLES[name]
    )
    metric = metric or "sqnr_db"
    found, problem = question.blocks_of(selected, metric)
    if found is None:
        st.info(problem, icon=":material/block:")
        return
    drawn = question.overall(selected, found, metric)
    show.verdict(drawn.verdict)
    for cell, name in zip(st.columns(2, gap="large"), ("block_map", "scales"), strict=True):
        with cell:
            if figure := drawn.get(name):
                show.draw(figure)
            else:
                show.problems(drawn)
    _drill(selected, found)


def _drill(selected: SelectedTensor, found: Blocks) -> None:
    table, worst = found.table, found.worst
    left, right = st.columns([2, 3], gap="large")
    number = st.column_config.NumberColumn
    shown = worst.assign(flushed=worst["flush_to_zero"] * 100, clipped=worst["saturated"] * 100)

    def choose() -> None:
        rows = st.session_state["worst_blocks"]["selection"]["rows"]
        if rows:
            st.session_state["block"] = int(worst.iloc[rows[0]]["block"])

    with left:
        st.markdown(f"**The {len(worst)} worst blocks** · choose one")
        st.dataframe(
            shown,
            key="worst_blocks",
            hide_index=True,
            placeholder="",
            height=330,
            on_select=choose,
            selection_mode="single-row",
            column_order=("block", "sqnr_db", "flushed", "clipped", "scale_exponent", "absmax"),
            column_config={
                "block": number("Block", format="%d", width=80),
                "sqnr_db": number("SQNR (dB)", format="%.2f", width=90, help=METRICS["sqnr_db"].definition),
                "flushed": number("Flushed (%)", format="%.1f", width=95, help=METRICS["flush_to_zero"].definition),
                "clipped": number("Saturated (%)", format="%.1f", width=105, help=METRICS["saturated"].definition),
                "scale_exponent": number("log₂ scale", format="%d", width=85),
                "absmax": number("absmax", format="%.3g", width=85),
            },
        )
        if problem := question.beyond(found, st.session_state.get("block")):
            st.info(problem, icon=":material/block:")
            st.session_state["block"] = None
        asked = st.number_input(
            "Block",
            0,
            len(table) - 1,
            key="block",
            value=None,
            step=1,
            placeholder=f"the worst: {worst.iloc[0]['block']:.0f}",
        )
    figure, block = question.block(selected, found, None if asked is None else int(asked))
    with right:
        show.draw(figure)
    _values(figure.table, block)


def _values(values: pd.DataFrame, block: int) -> None:
    number = st.column_config.NumberColumn
    with st.expander(f"The {len(values)} values of block {block:,}, with codes and errors", expanded=True):
        st.dataframe(
            values.assign(**{name: values[name].map(short) for name in ("value", "dequantized", "error")}),
            hide_index=True,
            height=320,
            column_order=("index", "value", "bits", "code_value", "dequantized", "error"),
            column_config={
                "index": number("Place", width=60),
                "value": st.column_config.TextColumn("Value", alignment="right"),
                "bits": st.column_config.TextColumn("Code", help="The code’s bits"),
                "code_value": number("Code’s value", format="%.6g", help="On the format’s grid, before the scale"),
                "dequantized": st.column_config.TextColumn("Rounded to", alignment="right"),
                "error": st.column_config.TextColumn("Error", alignment="right"),
            },
        )
