"""SQL: a read-only box over a copy of the index, for questions that no page asks."""

from __future__ import annotations

import streamlit as st

from binade.app.address import plain
from binade.app.state import catalog_page, explain_empty, sandbox
from binade.data.access import reason
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


@catalog_page("SQL", needs_tensors=False)
def page(opened: Catalog) -> None:
    if why := reason():
        st.info(plain(f"SQL is off: {why}."), icon=":material/lock:")
        return
    if not opened.totals().tensors:
        explain_empty(opened)
        return
    st.caption(
        "Run one read-only SELECT on a copy of the index, in DuckDB’s SQL dialect. Queries cannot access the "
        f"network, or files other than the runs’ sketches, and are limited to {MEMORY} of memory, {SECONDS:g} s and "
        f"{ROWS:,} rows."
    )
    if st.session_state.get("page") != "sql":
        st.session_state["page"] = "sql"
        st.session_state["statement"] = st.query_params.get("q", EXAMPLE)
    with st.form("query", border=False):
        sql = st.text_area("Statement", key="statement", height=190, max_chars=LONGEST)
        st.form_submit_button("Run", type="primary", icon=":material/play_arrow:")
    st.session_state["shown"] = {"q": [sql]} if sql else {}
    if sql and sql != EXAMPLE:
        st.query_params.from_dict({"q": sql})
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
