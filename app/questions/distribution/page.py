"""Explore: filter the captured tensors, choose some, see how their values lie and what formats do to them."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from binade.app import show
from binade.app.address import plain, write
from binade.app.figure import Drawn
from binade.app.formatting import big, bytes_text
from binade.app.params import TITLES, Params
from binade.app.questions.distribution import question
from binade.app.questions.distribution.question import AXES, GROUPINGS, MAX_SELECTED
from binade.app.questions.shared import distribution_charts
from binade.app.questions.shared.laws import LAWS
from binade.app.state import view_page
from binade.data.catalog import Catalog, Totals
from binade.data.filter import Filter
from binade.data.text import one_line
from binade.quant.metrics import METRICS

MAX_ROWS = 5000
LARGEST_SHOWN = 2.0**53  # the largest number that a table's number column shows


def _definition(metric: str) -> str:
    return METRICS[metric].definition


def _error_columns(of_what: str = "") -> dict[str, Any]:
    """SQNR, flushed and saturated as table columns; of_what is added to the definition of SQNR."""
    number = st.column_config.NumberColumn
    sqnr = _definition("sqnr_db") + of_what
    return {
        "sqnr_db": number("SQNR (dB)", format="%.2f", width=90, help=sqnr),
        "flush_to_zero": number("Flushed (%)", format="%.3f", width=95, help=_definition("flush_to_zero")),
        "saturated": number("Saturated (%)", format="%.3f", width=110, help=_definition("saturated")),
    }


@view_page("explore", "Explore", question.params)
def page(opened: Catalog, where: Filter, params: Params) -> None:
    totals = opened.totals(where)
    _totals(totals, where)
    rows = opened.tensors(where, limit=MAX_ROWS)
    if rows.empty:
        st.info(
            f"No tensor matches: {plain(where.sentence())}. Take something out of the filter.",
            icon=":material/filter_alt_off:",
        )
        write(where, params)
        return
    chosen = _table(totals.tensors, where, rows)
    by, axis, law = _controls(one_by_one=not chosen.empty)
    write(where, params, tensor=chosen["tensor_id"].tolist())
    _views(opened, where, chosen, by, axis, law)


def _totals(totals: Totals, where: Filter) -> None:
    st.caption(f"Shown: {plain(where.sentence())}.")
    cells = st.columns(4)
    cells[0].metric("Tensors", f"{totals.tensors:,}", border=True)
    cells[1].metric("Values", big(totals.elements), border=True)
    cells[2].metric(
        "With values",
        f"{totals.with_values:,}",
        border=True,
        help="Tensors whose values are on disk; of the others, statistics and sketch are kept",
    )
    cells[3].metric("Size of the values", bytes_text(totals.nbytes), border=True)


def _table(total: int, where: Filter, rows: pd.DataFrame) -> pd.DataFrame:
    """The tensors as a table; the rows that are selected in it."""
    note = f" The first {MAX_ROWS:,} of {total:,} are listed; charts cover all." if total > MAX_ROWS else ""
    st.markdown(f"**Tensors** · choose rows to look at them one by one, none for all of them.{note}")
    shown = rows.assign(
        shape=rows["shape"].map(lambda s: " × ".join(str(n) for n in s)),
        flush_to_zero=rows["flush_to_zero"] * 100,
        saturated=rows["saturated"] * 100,
    )
    wanted = st.query_params.get_all("tensor")[:MAX_SELECTED]
    default = [index for index, tensor_id in enumerate(rows["tensor_id"]) if tensor_id in wanted]
    number = st.column_config.NumberColumn
    text = st.column_config.TextColumn
    shown, huge = _huge_as_text(shown, {"absmax": "absmax", "std": "Std"})
    event = st.dataframe(
        shown,
        # Another filter, other rows or a visit by another address: then the address says which rows are selected.
        key=f"tensors_{hash((where, tuple(rows['tensor_id']), st.session_state['visit']))}",
        hide_index=True,
        height=318,
        placeholder="–",
        on_select="rerun",
        selection_mode="multi-row",
        selection_default={"selection": {"rows": default}} if default else None,
        column_order=(
            "layer_index",
            "module",
            "tensor_name",
            "operation",
            "phase",
            "quant_type",
            "format",
            "sqnr_db",
            "flush_to_zero",
            "saturated",
            "absmax",
            "std",
            "kurtosis",
            "shape",
            "dtype",
            "iteration",
            "recipe",
            "run_id",
        ),
        column_config={
            "layer_index": number("Layer", width=60),
            "module": text("Module", width=75),
            "tensor_name": text("Tensor", width=135),
            "operation": text("Operation", width=90),
            "phase": text("Phase", width=60),
            "quant_type": text("Quant type", width=90),
            "format": text(
                "Rounded to", width=100, help="The exact format this operand was rounded to; empty for results and bf16"
            ),
            **_error_columns(),
            "absmax": number("absmax", format="%.3g", width=85),
            "std": number("Std", format="%.3g", width=85),
            "kurtosis": number("Kurtosis", format="%.2f", width=85, help=_definition("kurtosis")),
            "shape": text("Shape", width=135),
            "dtype": text("dtype", width=85),
            "iteration": number("Iteration", width=80),
            "recipe": text("Recipe", width=110),
            "run_id": text("Run", width=330),
            **huge,
        },
    )
    chosen = [index for index in event["selection"]["rows"] if index < len(rows)]
    if len(chosen) > MAX_SELECTED:
        st.warning(f"{len(chosen)} tensors are selected; the first {MAX_SELECTED} are drawn.", icon=":material/info:")
    return rows.iloc[chosen[:MAX_SELECTED]]


def _huge_as_text(table: pd.DataFrame, titles: dict[str, str]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Columns with numbers too large for a number column become text: (the table, their configuration)."""
    huge = {name: title for name, title in titles.items() if (table[name].abs() > LARGEST_SHOWN).any()}
    texts = {name: table[name].map(lambda v: "" if pd.isna(v) else f"{v:.3g}") for name in huge}
    text = st.column_config.TextColumn
    return table.assign(**texts), {name: text(title, width=90, alignment="right") for name, title in huge.items()}


def _controls(one_by_one: bool) -> tuple[str, str, str]:
    """(what groups are compared by, the axis, the law) as chosen above the charts."""
    by = st.segmented_control(
        "Compare by",
        GROUPINGS,
        key="by",
        required=True,
        format_func=lambda name: TITLES[name],
        disabled=one_by_one,
        help="Each selected tensor is shown by itself: clear the selection to compare groups" if one_by_one else None,
    )
    left, right = st.columns(2, gap="large")
    law = right.segmented_control(
        "Q–Q against", LAWS, key="law", required=True, format_func=lambda name: distribution_charts.LAW_TITLES[name]
    )
    axis = left.segmented_control("Axis", AXES, key="axis", required=True, format_func=lambda name: AXES[name])
    return by or GROUPINGS[0], axis or next(iter(AXES)), law or LAWS[0]


def _views(opened: Catalog, where: Filter, chosen: pd.DataFrame, by: str, axis: str, law: str) -> None:
    """The charts and tables of what is selected."""
    ids = chosen["tensor_id"].tolist() or None
    shown = question.groups_of(opened, where, chosen, by)
    if ids is None and shown.of > MAX_SELECTED:
        st.caption(f"{shown.of} groups: the {MAX_SELECTED} with the most values are drawn.")
    _explain_missing(shown)
    _charts(question.values_lie(opened, where, ids, shown, axis, law))
    _statistics(question.moments(opened, where, chosen, by), "Tensor" if ids else TITLES[by])
    _formats(opened, where, ids)


def _explain_missing(shown: question.Groups) -> None:
    if shown.not_kept:
        st.info(
            f"The values of {plain('; '.join(shown.not_kept))} were not kept: drawn from the sketch instead.",
            icon=":material/info:",
        )
    if shown.damaged:
        count = len(shown.damaged)
        title = "A tensor file cannot be read" if count == 1 else f"{count} tensor files cannot be read"
        st.error(f"{title}: drawn from the sketch instead.", icon=":material/broken_image:")
        with st.expander("Which, and why"):
            for label, reason in shown.damaged:
                st.text(f"{label}: {one_line(reason)}")


def _charts(drawn: Drawn) -> None:
    for problem in drawn.problems:
        st.info(problem, icon=":material/block:")
    for cell, name in zip(st.columns(2, gap="large"), ("histogram", "qq"), strict=True):
        if figure := drawn.get(name):
            with cell:
                show.draw(figure)
    if figure := drawn.get("boxes"):
        show.draw(figure)


def _statistics(table: pd.DataFrame, first: str) -> None:
    table = table.assign(flush_to_zero=table["flush_to_zero"] * 100, saturated=table["saturated"] * 100)
    number = st.column_config.NumberColumn
    st.markdown("**Statistics** · over the finite values")
    titles = {"mean": "Mean", "std": "Std", "min": "Min", "max": "Max", "absmin": "Smallest |x| > 0"}
    table, huge = _huge_as_text(table, titles)
    st.dataframe(
        table,
        hide_index=True,
        placeholder="–",
        column_order=(
            "group",
            "tensors",
            "numel",
            "mean",
            "std",
            "min",
            "max",
            "absmin",
            "zeros",
            "nans",
            "infs",
            "sqnr_db",
            "flush_to_zero",
            "saturated",
        ),
        column_config={
            "group": st.column_config.TextColumn(first),
            "tensors": number("Tensors", format="localized", width=70),
            "numel": number("Values", format="localized", width=125),
            "mean": number("Mean", format="%.3g", width=85),
            "std": number("Std", format="%.3g", width=80),
            "min": number("Min", format="%.3g", width=80),
            "max": number("Max", format="%.3g", width=80),
            "absmin": number("Smallest |x| > 0", format="%.2e", width=130),
            "zeros": number("Zeros", format="localized", width=115),
            "nans": number("NaN", format="localized", width=60),
            "infs": number("Inf", format="localized", width=60),
            **_error_columns(", of the operands that were quantized, powers summed"),
            **huge,
        },
    )


def _formats(opened: Catalog, where: Filter, ids: list[str] | None) -> None:
    figures, operands = question.formats(opened, where, ids)
    if not figures:
        st.caption("No format comparison: only the operands of a GEMM are scored, and none is selected.")
        return
    st.markdown(
        f"**What each format would do to it** · {operands:,} operand{'s' * (operands != 1)}, "
        "each rounded along the axis it is contracted over"
    )
    show.side_by_side(figures)
    st.caption("SQNR hides how a format fails: read it with the values flushed to zero and saturated.")
