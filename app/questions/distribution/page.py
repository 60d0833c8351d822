"""Explore: filter the captured tensors, select some, see the distribution of their values and the errors of formats."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from binade.app import address
from binade.app import show as show_items
from binade.app.figure import Column
from binade.app.formatting import big, bytes_text, plain
from binade.app.questions import layout
from binade.app.questions.distribution.question import MAX_SELECTED
from binade.app.view import Reading, View
from binade.data.catalog import Catalog, Totals
from binade.data.filter import Filter

MAX_ROWS = 5000


COLUMNS = {
    "layer_index": Column("Layer", width=55),
    "module": Column("Module", width=65),
    "tensor_name": Column("Tensor", width=130),
    "recipe": Column("Recipe", width=105),
    "iteration": Column("Iteration", width=72),
    "format": Column(
        "Rounded to", width=90, help="The exact format this operand was rounded to; empty for results and bf16"
    ),
    "sqnr_db": Column(width=105),
    "flush_to_zero": Column(width=105),
    "saturated": Column(width=110),
    "absmax": Column("absmax", "%.3g", 95),
    "std": Column("Std", "%.3g", 95),
    "kurtosis": Column("Kurtosis", "%.2f", 75),
    "operation": Column("Operation", width=85),
    "phase": Column("Phase", width=55),
    "quant_type": Column("Quant type", width=90),
    "shape": Column("Shape", width=135),
    "dtype": Column("dtype", width=85),
    "run_id": Column("Run", width=330),
}


def show(opened: Catalog, view: View, reading: Reading) -> None:
    where = reading.where
    totals = opened.totals(where)
    if where.items():
        st.caption(plain(f"Filter: {where.sentence()}."))
    _totals(totals, where)
    rows, shown, config = opened.kept(("displayed", where), lambda: _displayed(opened, where))
    _table(totals.tensors, view, rows, shown, config)
    layout.show_question(opened, view, reading)


def _totals(totals: Totals, where: Filter) -> None:
    cells = st.columns(4)
    cells[0].metric("Tensors", f"{totals.tensors:,}", border=True)
    cells[1].metric("Values", big(totals.elements), border=True)
    cells[2].metric(
        "With values",
        f"{totals.with_values:,}",
        border=True,
        help="Tensors whose values are on disk; for the others, only statistics and sketches are kept",
    )
    cells[3].metric("Size of the values", bytes_text(totals.nbytes), border=True)


def _displayed(opened: Catalog, where: Filter) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """The filter's tensors, and what `show.displayed` makes of them."""
    rows = opened.tensors(where, limit=MAX_ROWS)
    shapes = rows["shape"].map(lambda shape: " × ".join(map(str, shape)), na_action="ignore")
    return rows, *show_items.displayed(rows.assign(shape=shapes), COLUMNS)


def _table(total: int, view: View, rows: pd.DataFrame, shown: pd.DataFrame, config: dict[str, Any]) -> None:
    """The tensors as a table; those that the view names are selected in it."""
    note = f" The first {MAX_ROWS:,} of {total:,} are listed." if total > MAX_ROWS else ""
    st.markdown(f"**Tensors** · select rows to see single tensors, or none to see all of them.{note}")
    ids = rows["tensor_id"].tolist()
    wanted = view.params.get("tensor", [])
    default = [index for index, tensor_id in enumerate(ids) if tensor_id in wanted]
    state = st.session_state
    # If the rows change, or the view was changed elsewhere, the view determines which rows are selected.
    known = (hash(tuple(ids)), tuple(wanted))
    if state.get("tensors_known") != known:
        state["tensors_visit"] = state.get("tensors_visit", 0) + 1
        state["tensors_known"] = known
    key = f"tensors_{state['tensors_visit']}"

    def choose() -> None:
        chosen = [ids[index] for index in state[key]["selection"]["rows"] if index < len(ids)]
        if len(chosen) > MAX_SELECTED:
            st.toast(f"{len(chosen)} tensors are selected; the first {MAX_SELECTED} are drawn.", icon=":material/info:")
        chosen = chosen[:MAX_SELECTED]
        state["tensors_known"] = (known[0], tuple(chosen))
        address.change(tensor=chosen)

    st.dataframe(
        shown,
        key=key,
        hide_index=True,
        height=318,
        placeholder="–",
        on_select=choose,
        selection_mode="multi-row",
        selection_default={"selection": {"rows": default}} if default else None,
        column_config=config,
    )
