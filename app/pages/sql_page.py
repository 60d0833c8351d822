"""SQL: a read-only box over a copy of the index, for questions that no page asks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import streamlit as st

from binade.app.draw import show as show_items
from binade.app.draw.control import Control
from binade.app.draw.formatting import plain
from binade.app.frame import address
from binade.app.frame.state import sandbox
from binade.app.measures.map_measure import LAYER, CellQuery
from binade.app.pages import sql_chart
from binade.app.questions import layout
from binade.app.questions.map import compute
from binade.app.view.params import One
from binade.app.view.view import Reading, View
from binade.data.index.catalog import Catalog
from binade.data.index.sandbox import MEMORY, ROWS, SECONDS, QueryError
from binade.data.words.filter import FIELDS, Filter
from binade.data.words.text import counted, csv_table

EXAMPLE = """SELECT layer_index, module, tensor_name, avg(sqnr_db) AS sqnr_db, max(flush_to_zero) AS flushed
FROM tensor
WHERE format = 'mxfp4'
GROUP BY ALL
ORDER BY sqnr_db
LIMIT 20"""
LONGEST = 4000  # characters of a statement that the address can hold


def show(opened: Catalog, view: View, reading: Reading) -> None:
    st.caption(
        "Run one read-only SELECT on a copy of the index, in DuckDB’s SQL dialect. Queries cannot access the "
        f"network, or files other than the runs’ sketches, and are limited to {MEMORY} of memory, {SECONDS:g} s and "
        f"{ROWS:,} rows."
    )
    wanted = reading.values["q"] or EXAMPLE
    if st.session_state.get("statement_of") != wanted or "statement" not in st.session_state:  # or back from elsewhere
        st.session_state["statement"] = st.session_state["statement_of"] = wanted
    with st.form("query", border=False):
        sql = st.text_area("Statement", key="statement", height=190, max_chars=LONGEST)
        st.form_submit_button("Run", type="primary", icon=":material/play_arrow:")
    if sql != wanted:
        st.session_state["statement_of"] = sql
        address.write(view.changed(q=sql if sql not in ("", EXAMPLE) else None))
    try:
        box = sandbox(opened)
    except QueryError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    with st.expander("Tables and columns"):
        st.dataframe(box.columns(), hide_index=True, height=300)
    if not sql.strip():
        return
    try:
        with st.spinner("Running the query …"):
            answer = box.select(sql)
    except QueryError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    more = f"; there are more than {ROWS:,}" if answer.more else ""
    st.caption(f"{counted(len(answer.rows), 'row')}{more} · {answer.seconds:.2f} s")
    linked = not {"tensor_id", "run_id"}.isdisjoint(answer.rows)
    event: Any = st.dataframe(
        answer.rows, key=f"answer_{hash(sql)}", hide_index=True, placeholder="", selection_mode="single-row",
        on_select="rerun" if linked else "ignore", column_config=_digits(answer.rows),
    )  # fmt: skip
    with st.container(horizontal=True, vertical_alignment="center"):
        st.download_button("Save as CSV", lambda: csv_table(answer.rows, sql), "binade-query.csv", on_click="ignore")
        for row in event["selection"]["rows"] if linked else []:
            _links(opened, answer.rows.iloc[row])
    _chart(answer.rows, reading.values, f"{sql}{more}")


def _digits(rows: pd.DataFrame) -> dict[str, Any]:
    """Five digits for columns of fractions: without a format, Streamlit shows 1.99e-10 as 0.0000000002."""
    formats: dict[str, Any] = {}
    for name in map(str, rows.select_dtypes("float")):
        known = rows[name].abs().replace(math.inf, math.nan).dropna()
        if (known % 1).any():
            formats[name] = st.column_config.NumberColumn(format="%.5g" if known.max() < 1e5 else "%.4e")
    return formats


def _links(opened: Catalog, row: pd.Series) -> None:
    """Links to the tensor of a row, and to its cell of the Map or to the Map of its run."""
    tensor, run = (str(row.get(name, "")) for name in ("tensor_id", "run_id"))
    at = View("map").changed(run_id=run)
    if len(rows := opened.rows_of([tensor])):
        run, at = rows["run_id"].iloc[0], _in_map(opened, rows.iloc[0])
        address.link(
            View("tensor").changed(tensor=tensor), "Open tensor", ":material/search_insights:", width="content"
        )
    if run in set(opened.runs()["run_id"]):
        address.link(at, "Open in the Map", ":material/grid_on:", width="content")


def _in_map(opened: Catalog, tensor: pd.Series) -> View:
    """The Map of a tensor's run and iteration; at its cell, if it is an operand."""
    same = {name: tensor[name] for name in FIELDS if name in tensor and pd.notna(tensor[name])}
    at = View("map").changed(run_id=same["run_id"], iteration=same.get("iteration"))
    cells = compute.cells("absmax", CellQuery(opened, Filter(**{n: (v,) for n, v in same.items()})))
    rows = compute.rows_of(cells)  # a weight is an operand of two GEMMs: the first
    return at.changed(cell=f"{rows[0].key}/{same[LAYER]}") if rows else at


def _chart(rows: pd.DataFrame, values: Mapping[str, Any], source: str) -> None:
    """The columns to draw, and their chart."""
    columns, numbers = list(rows), [name for name in rows if sql_chart.is_number(rows[name])]
    if not numbers or rows.empty:
        return
    chosen = {"x": columns, "y": numbers, "color": columns}
    titles = {"x": "x", "y": "y", "color": "Color"}
    controls = [
        Control(name=name, label=titles[name], param=One((), ""), options=[None, *options], titles={None: "none"},
                widget="list", row="chart", placeholder="none")
        for name, options in chosen.items()
    ]  # fmt: skip
    layout.show_controls(controls, values)
    for name, options in chosen.items():
        if values[name] is not None and values[name] not in options:
            st.warning(f"{titles[name]}: the result has no column {values[name]!r} that can be drawn.")
    x, y, color = (values[name] if values[name] in options else None for name, options in chosen.items())
    if x and y:
        show_items.draw(sql_chart.figure(rows, x, y, color, source), pin=False)
