"""Explore: filter the captured tensors, select some, see the distribution of their values and the errors of formats."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from binade.app import show
from binade.app.address import plain, write
from binade.app.figure import Column
from binade.app.formatting import big, bytes_text
from binade.app.params import Params
from binade.app.questions.distribution.question import DISTRIBUTION, MAX_SELECTED
from binade.app.questions.shared.selection import Selection
from binade.app.questions.view import show_question
from binade.app.state import view_page
from binade.data.catalog import Catalog, Totals
from binade.data.filter import Filter

MAX_ROWS = 5000


COLUMNS = {
    "layer_index": Column("Layer", width=60),
    "module": Column("Module", width=75),
    "tensor_name": Column("Tensor", width=135),
    "operation": Column("Operation", width=90),
    "phase": Column("Phase", width=60),
    "quant_type": Column("Quant type", width=90),
    "format": Column(
        "Rounded to", width=100, help="The exact format this operand was rounded to; empty for results and bf16"
    ),
    "sqnr_db": Column(),
    "flush_to_zero": Column(),
    "saturated": Column(),
    "absmax": Column("absmax", "%.3g", 85),
    "std": Column("Std", "%.3g", 85),
    "kurtosis": Column("Kurtosis", "%.2f", 85),
    "shape": Column("Shape", width=135),
    "dtype": Column("dtype", width=85),
    "iteration": Column("Iteration", width=80),
    "recipe": Column("Recipe", width=110),
    "run_id": Column("Run", width=330),
}


@view_page("explore", "Explore", DISTRIBUTION.params)
def page(opened: Catalog, where: Filter, params: Params) -> None:
    totals = opened.totals(where)
    _totals(totals, where)
    rows, shown, config = opened.kept(("displayed", where), lambda: _displayed(opened, where))
    chosen = _table(totals.tensors, where, rows, shown, config)
    write(where, params, tensor=chosen)
    values = {name: st.session_state[name] for name in params}
    show_question(DISTRIBUTION, Selection(opened, where, tuple(chosen)), values)


def _totals(totals: Totals, where: Filter) -> None:
    st.caption(f"Shown: {plain(where.sentence())}.")
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
    shapes = rows["shape"].map(lambda shape: " × ".join(map(str, shape)))
    return rows, *show.displayed(rows.assign(shape=shapes), COLUMNS)


def _table(total: int, where: Filter, rows: pd.DataFrame, shown: pd.DataFrame, config: dict[str, Any]) -> list[str]:
    """The tensors as a table; the ids of those that are selected in it."""
    note = f" The first {MAX_ROWS:,} of {total:,} are listed; charts cover all." if total > MAX_ROWS else ""
    st.markdown(f"**Tensors** · select rows to see single tensors, or none to see all of them.{note}")
    wanted = st.query_params.get_all("tensor")[:MAX_SELECTED]
    default = [index for index, tensor_id in enumerate(rows["tensor_id"]) if tensor_id in wanted]
    event = st.dataframe(
        shown,
        # If the filter or the rows change, or another URL is opened, the URL determines which rows are selected.
        key=f"tensors_{hash((where, tuple(rows['tensor_id']), st.session_state['visit']))}",
        hide_index=True,
        height=318,
        placeholder="–",
        on_select="rerun",
        selection_mode="multi-row",
        selection_default={"selection": {"rows": default}} if default else None,
        column_config=config,
    )
    chosen = [index for index in event["selection"]["rows"] if index < len(rows)]
    if len(chosen) > MAX_SELECTED:
        st.warning(f"{len(chosen)} tensors are selected; the first {MAX_SELECTED} are drawn.", icon=":material/info:")
    return rows["tensor_id"].iloc[chosen[:MAX_SELECTED]].tolist()
