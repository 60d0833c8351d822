"""One tensor: which one, its notes, and the answer to a question about it."""

from __future__ import annotations

from contextlib import nullcontext

import pandas as pd
import streamlit as st

from binade.app.frame import address, rooms
from binade.app.frame.bar import offer_to_clear
from binade.app.frame.callbacks import while_shown
from binade.app.pages.tensor_notes import show_notes
from binade.app.questions import layout
from binade.app.questions.shared.operands import gemms_of
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import MOST_LISTED, listed
from binade.app.view.view import LARGE, Reading, View
from binade.data.index.catalog import Catalog

SHOWS_ROOMS = True  # in one row with the tensor, so that the answer begins high on the page


def show(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    where, tensor_id = reading.where, reading.values["tensor"]
    labels = listed(opened, where, tensor_id)
    row = opened.rows_of([tensor_id]).iloc[0]
    gemms = gemms_of(opened, row) if "gemm" in reading.values else ()
    st.session_state["tensor"] = tensor_id
    with st.container(key="tensor_row", horizontal=True, vertical_alignment="center", gap="small"):
        rooms.show(view)
        st.selectbox(
            "Tensor", list(labels), key="tensor", format_func=lambda name: labels.get(name, name),
            on_change=while_shown("tensor", _choose),
            filter_mode="contains", label_visibility="collapsed",
        )  # fmt: skip
        if len(gemms) > 1:
            st.session_state["gemm"] = reading.values["gemm"] if reading.values["gemm"] in gemms else gemms[0]
            st.segmented_control(
                "Operand of", gemms, key="gemm", required=True, label_visibility="collapsed",
                on_change=while_shown("gemm", _choose_gemm),
                format_func="in {}".format, help="The GEMM that rounds it, along the axis that it contracts",
                width="content",
            )  # fmt: skip
        show_notes(row, str(opened.runs().set_index("run_id").at[row["run_id"], "config"]))
    if opened.totals(where).tensors > MOST_LISTED:
        st.caption(f"{MOST_LISTED:,} tensors are listed: narrow the filter to see others.")
    with (
        st.spinner("Reading the values …", show_time=True)
        if pd.notna(row["path"]) and row["numel"] > LARGE
        else nullcontext()
    ):
        scope = layout.show_room(opened, view, reading)
    if gemms and reading.values["gemm"] and reading.values["gemm"] not in gemms:
        st.button(f"Show it as an operand of {gemms[0]}", on_click=address.change, kwargs={"gemm": None})
    if opened.moments(where, "tensor_id", [tensor_id]).empty:  # the address names it
        with st.container(horizontal=True):
            st.button("Show the worst tensor of the filter", on_click=address.change, kwargs={"tensor": None})
            offer_to_clear()
    if pd.isna(row["path"]):
        address.link(view.at("explore", tensor=tensor_id), "Show its distribution", ":material/query_stats:")
    return scope


def _choose() -> None:
    address.change(tensor=st.session_state["tensor"], gemm=None)


def _choose_gemm() -> None:
    address.change(tensor=st.session_state["tensor"], gemm=st.session_state["gemm"])
