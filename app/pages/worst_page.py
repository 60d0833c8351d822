"""Worst: any metric over the selection, ranked, by depth, in training, forward against backward."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from binade.app import show
from binade.app.address import follow, go, plain, write
from binade.app.figure import Drawn
from binade.app.filters import sidebar
from binade.app.pages import worst
from binade.app.pages.worst import VIEWS
from binade.app.params import One
from binade.app.questions.shared import boards
from binade.app.questions.shared.board_charts import definition
from binade.app.state import catalog_page
from binade.app.style import MEASURES, Measure
from binade.data.catalog import Catalog
from binade.data.filter import Filter


@catalog_page("Worst tensors")
def page(opened: Catalog) -> None:
    params = worst.params(opened)
    follow(opened, "worst", params)
    where = sidebar(opened)
    values = _controls(params["format"])
    write(where, params)
    st.caption(f"Shown: {plain(where.sentence())}.")
    drawn = worst.drawn(opened, where, values, [])
    for problem in drawn.problems:
        st.info(problem, icon=":material/block:")
    if drawn.verdict:
        show.verdict(drawn.verdict)
    fmt, measure = values["format"], MEASURES[values["metric"]]
    if values["view"] == "directions" and drawn.figures:
        _directions(where, drawn, fmt, measure)
        return
    for figure in drawn.figures:
        _open(where, show.draw(figure), fmt)
        if figure.name == "ranking":
            _table(where, figure.table, measure, fmt)


def _controls(formats: One) -> dict[str, str]:
    view = st.segmented_control("View", VIEWS, key="view", required=True, format_func=lambda name: VIEWS[name])
    left, right = st.columns([1, 2])
    metric = left.selectbox(
        "Metric",
        boards.METRICS,
        key="metric",
        format_func=lambda name: MEASURES[name].axis,
        help="\n\n".join(f"**{MEASURES[m].label}**: {plain(MEASURES[m].definition)}" for m in boards.METRICS),
    )
    fmt = ""
    if formats.allowed:
        fmt = right.segmented_control(
            "If rounded to",
            formats.allowed,
            key="format",
            required=True,
            disabled=not boards.is_error(metric),
            help="What this format would do to each operand, as scored when it was captured",
        )
    return {"view": view or "board", "metric": metric, "format": fmt or formats.default or ""}


def _table(where: Filter, table: pd.DataFrame, measure: Measure, fmt: str) -> None:
    number = st.column_config.NumberColumn
    errors = boards.is_error(measure.key)
    shown = table.assign(value=table["value"] * measure.factor)
    columns = ["rank", "place", "operation", "value", "tensors"]
    if errors:
        shown = shown.assign(flushed=table["flush_to_zero"] * 100, clipped=table["saturated"] * 100)
        columns = ["rank", "place", "operation", "sqnr_db", "flushed", "clipped", "tensors"]
    event = st.dataframe(
        shown,
        key=f"places_{measure.key}_{fmt}_{hash(where)}",
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
    if rows := event["selection"]["rows"]:
        _open(where, table.iloc[rows[0]]["tensor_id"], fmt)


def _open(where: Filter, tensor_id: str | None, fmt: str) -> None:
    if tensor_id:
        go("tensor", where, tensor=tensor_id, **({"format": fmt} if fmt else {}))


def _directions(where: Filter, drawn: Drawn, fmt: str, measure: Measure) -> None:
    for cell, operation in zip(st.columns(2, gap="large"), ("forward", "backward"), strict=True):
        with cell:
            if figure := drawn.get(f"direction_{operation}"):
                _open(where, show.draw(figure), fmt)
            else:
                st.info(f"No {operation} operand is in the filter.", icon=":material/block:")
    st.caption(f"{definition(fmt, measure)} Choose a bar to look into its worst tensor.")
