"""SQL: a read-only box over a copy of the index, for questions that no page asks."""

from __future__ import annotations

import streamlit as st

from binade.app import address
from binade.app.formatting import plain
from binade.app.state import sandbox
from binade.app.view import Reading, View
from binade.data.catalog import Catalog
from binade.data.sandbox import MEMORY, ROWS, SECONDS, QueryError
from binade.data.text import csv_table

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
    if st.session_state.get("statement_of") != wanted:
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
    rows = len(answer.rows)
    st.caption(f"{rows:,} row{'s' * (rows != 1)}{more} · {answer.seconds:.2f} s")
    st.dataframe(answer.rows, hide_index=True, placeholder="")
    st.download_button("Save as CSV", lambda: csv_table(answer.rows, sql), "binade-query.csv", on_click="ignore")
