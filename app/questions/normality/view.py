"""Is it normal? Q-Q against fitted laws, another tensor or the filter's selection, and boxes."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from binade.app import show
from binade.app.address import plain
from binade.app.questions.normality import question
from binade.app.questions.normality.question import AGAINST, TITLES
from binade.app.questions.shared.selection import SelectedTensor
from binade.quant.metrics import METRICS


def show_view(selected: SelectedTensor, values: dict[str, Any]) -> None:
    against = st.segmented_control("Against", AGAINST, key="law", required=True, format_func=lambda name: TITLES[name])
    other = _other(selected) if against == "tensor" else None
    drawn = question.draw(selected, {"law": against or AGAINST[0], "other": other})
    if drawn.verdict:
        show.verdict(drawn.verdict)
        for said in drawn.problems:
            st.caption(plain(said))
    else:
        show.problems(drawn)
    if "laws" in drawn.tables:
        left, right = st.columns([3, 2], gap="large")
        with left:
            show.draw(drawn.figures[0])
        with right:
            _table(drawn.tables["laws"])
        rest = drawn.figures[1:]
    else:
        rest = drawn.figures
    for figure in rest:
        show.draw(figure)


def _table(table: pd.DataFrame) -> None:
    st.markdown("**How close each law comes**")
    st.dataframe(
        table.assign(law=table["law"].map(TITLES)),
        hide_index=True,
        column_order=("law", "ks", "parameters"),
        column_config={
            "law": st.column_config.TextColumn("Law", width=100),
            "ks": st.column_config.NumberColumn("KS distance", format="%.4f", help=METRICS["ks"].definition),
            "parameters": st.column_config.TextColumn("Fitted", width=260),
        },
    )
    st.caption("KS: the largest gap between the two cumulative shares; 0 is the same, 1 is nothing in common.")


def _other(selected: SelectedTensor) -> str | None:
    """The tensor of the filter that is chosen to compare with; None where there is no other."""
    others = [tensor_id for tensor_id in selected.labels if tensor_id != selected.row["tensor_id"]]
    if not others:
        return None
    if st.session_state.get("other") not in others:
        st.session_state["other"] = others[0]
    return st.selectbox("The other tensor", others, key="other", format_func=lambda name: selected.labels[name])
