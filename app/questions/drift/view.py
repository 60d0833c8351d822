"""Is it the format's rounding, or has the run drifted? Three tensors, matched by identity."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from binade.app import show
from binade.app.questions.drift import question
from binade.app.questions.shared.selection import SelectedTensor
from binade.quant.metrics import METRICS

WORDS = {
    "rounding": "bf16’s tensor, rounded: the format alone",
    "drift": "the quantized run’s tensor: the drift alone",
    "both": "the quantized run’s tensor, rounded: both",
}


def show_view(selected: SelectedTensor, values: dict[str, Any]) -> None:
    found = question.candidates(selected)
    if found is None:
        st.info(question.NOTHING, icon=":material/balance:")
        return
    st.session_state["against"] = question.chosen_run(selected, found.runs, st.session_state.get("against"))
    run = st.selectbox("Quantized run", found.runs, key="against", format_func=lambda name: found.labels[name])
    with st.spinner("Comparing …"):
        drawn = question.compared(selected, found, run)
    show.problems(drawn)
    if not drawn.verdict:
        return
    show.verdict(drawn.verdict)
    for figure in drawn.figures:
        show.draw(figure)
    _table(drawn.tables["three_way"])
    st.caption(
        "The quantized run’s tensor is as captured, before its own rounding. What differs from bf16’s then comes from "
        "products rounded before it, in this iteration and in those before."
    )


def _table(table: pd.DataFrame) -> None:
    number = st.column_config.NumberColumn
    st.dataframe(
        table.assign(what=table["what"].map(WORDS)),
        hide_index=True,
        placeholder="–",
        column_config={
            "what": st.column_config.TextColumn("Against bf16’s tensor", width=330),
            "sqnr_db": number("SQNR (dB)", format="%.2f", help=METRICS["sqnr_db"].definition),
            "relative_error": number("Relative error", format="%.4f", help=METRICS["relative_error"].definition),
            "cosine": number("Cosine", format="%.5f", help=METRICS["cosine"].definition),
            "gradient_bias": number("‖error‖² / ‖x‖²", format="%.5f", help=METRICS["gradient_bias"].definition),
            "ks": number("KS distance", format="%.4f", help=METRICS["ks"].definition + ", on bins of 1/8 binade"),
        },
    )
