"""Explore: filter the captured tensors, choose some, see how their values lie and what formats do to them."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app import analysis, charts
from app.analysis import Distribution
from app.filters import TITLES, sidebar, to_address
from app.state import big, bytes_text, catalog, explain_empty, explain_refused
from data.catalog import Catalog, CatalogError
from data.filter import Filter
from data.store import TensorFileError

MAX_SELECTED = charts.MAX_GROUPS
MAX_ROWS = 5000
CHART = 400  # pixels
GROUPINGS = ("quant_type", "recipe", "layer_index", "module", "operation", "tensor_name", "iteration")


def show() -> None:
    opened = catalog()
    st.title("Explore", anchor=False)
    explain_refused(opened)
    if not opened.totals().tensors:
        explain_empty(opened)
        return
    where = sidebar(opened)
    _totals(opened, where)
    rows = opened.tensors(where, limit=MAX_ROWS)
    if rows.empty:
        st.info(f"No tensor matches: {where.sentence()}. Take something out of the filter.", icon=":material/filter_alt_off:")
        to_address(where)
        return
    chosen = _table(opened, where, rows)
    by = _views(opened, where, chosen)
    to_address(where, tensor=chosen["tensor_id"].tolist(), by=by)


def _totals(opened: Catalog, where: Filter) -> None:
    totals = opened.totals(where)
    st.caption(f"Shown: {where.sentence()}.")
    cells = st.columns(4)
    cells[0].metric("Tensors", f"{totals.tensors:,}", border=True)
    cells[1].metric("Values", big(totals.elements), border=True)
    cells[2].metric(
        "With values", f"{totals.with_values:,}", border=True,
        help="Tensors whose values are on disk; of the others, statistics and sketch are kept",
    )
    cells[3].metric("Size of the values", bytes_text(totals.nbytes), border=True)


def _table(opened: Catalog, where: Filter, rows: pd.DataFrame) -> pd.DataFrame:
    """The tensors as a table; the rows that are selected in it."""
    total = opened.totals(where).tensors
    note = f" The first {MAX_ROWS:,} of {total:,} are listed; charts cover all." if total > MAX_ROWS else ""
    st.markdown(f"**Tensors** · choose rows to look at them one by one, none for all of them.{note}")
    shown = rows.assign(
        shape=rows["shape"].map(lambda s: " × ".join(str(n) for n in s)),
        flush_to_zero=rows["flush_to_zero"] * 100,
        saturated=rows["saturated"] * 100,
    )
    wanted = st.query_params.get_all("tensor")
    default = [index for index, tensor_id in enumerate(rows["tensor_id"]) if tensor_id in wanted]
    number = st.column_config.NumberColumn
    text = st.column_config.TextColumn
    event = st.dataframe(
        shown,
        key=f"tensors_{hash(where)}",
        hide_index=True,
        height=318,
        placeholder="",
        on_select="rerun",
        selection_mode="multi-row",
        selection_default={"selection": {"rows": default[:MAX_SELECTED]}} if default else None,
        column_order=(
            "layer_index", "module", "tensor_name", "operation", "phase", "quant_type", "format", "sqnr_db",
            "flush_to_zero", "saturated", "absmax", "std", "kurtosis", "shape", "dtype", "iteration", "recipe", "run_id",
        ),
        column_config={
            "layer_index": number("Layer", width=60),
            "module": text("Module", width=75),
            "tensor_name": text("Tensor", width=135),
            "operation": text("Operation", width=90),
            "phase": text("Phase", width=60),
            "quant_type": text("Quant type", width=90),
            "format": text("Rounded to", width=100, help="The exact format this operand was rounded to; empty for results and bf16"),
            "sqnr_db": number("SQNR (dB)", format="%.2f", width=90, help="10·log₁₀(Σx² / Σ(q−x)²) of the rounding that was done here"),
            "flush_to_zero": number("Flushed (%)", format="%.3f", width=95, help="Nonzero values that became zero, of the nonzero"),
            "saturated": number("Saturated (%)", format="%.3f", width=105, help="Values above the format's largest once scaled, of all"),
            "absmax": number("absmax", format="%.3g", width=85),
            "std": number("Std", format="%.3g", width=85),
            "kurtosis": number("Kurtosis", format="%.2f", width=85, help="E(x−μ)⁴/σ⁴: 3 for a normal"),
            "shape": text("Shape", width=135),
            "dtype": text("dtype", width=85),
            "iteration": number("Iteration", width=80),
            "recipe": text("Recipe", width=110),
            "run_id": text("Run", width=330),
        },
    )
    chosen = [index for index in event["selection"]["rows"] if index < len(rows)]
    if len(chosen) > MAX_SELECTED:
        st.warning(f"{len(chosen)} tensors are selected; the first {MAX_SELECTED} are drawn.", icon=":material/info:")
    return rows.iloc[chosen[:MAX_SELECTED]]


def _views(opened: Catalog, where: Filter, chosen: pd.DataFrame) -> str | None:
    """The charts; returns the grouping, for the address."""
    ids = chosen["tensor_id"].tolist() or None
    by = None
    if ids is None:
        by = _grouping(opened, where)
        found, by_title = analysis.distributions(opened, where, by), TITLES[by].lower()
        source = f"{opened.totals(where).tensors:,} tensors · from sketches"
        if len(found) > MAX_SELECTED:
            st.caption(f"{len(found)} groups: the {MAX_SELECTED} with the most values are drawn.")
            largest = sorted(found, key=lambda d: -d.total)[:MAX_SELECTED]
            found = [d for d in found if d in largest]
    else:
        found, source = _exact(opened, chosen)
        by_title = "tensor"
    if not any(d.total for d in found):
        st.info("Nothing to draw: there is no finite value.", icon=":material/block:")
        return by
    subtitle = f"{big(sum(d.total for d in found))} values · {source}"
    left, right = st.columns(2, gap="large")
    with left:
        scale = st.segmented_control(
            "Axis", ["log₂ magnitude", "linear"], default="log₂ magnitude", required=True, key="axis", label_visibility="collapsed"
        )
        if scale == "linear":
            st.altair_chart(charts.linear_histogram(analysis.linear_histogram(found), subtitle, by_title), key="histogram", height=CHART)
            st.caption("The axis leaves out 0.01 % of the values, at its ends." + _resolution(found))
        else:
            st.altair_chart(charts.log2_histogram(analysis.log2_histogram(found), subtitle, by_title), key="histogram", height=CHART)
            st.caption(_left_out(opened, where, ids))
    with right:
        st.html("<div style='height:1.65rem'></div>")
        points = analysis.qq_normal(found)
        if points.empty:
            st.info("No Q–Q plot: all values are equal.", icon=":material/block:")
        else:
            st.altair_chart(charts.qq_normal(points, subtitle, by_title), key="qq", height=CHART)
            st.caption("On the dashed line values are normal; above it at the right, the tail is heavier.")
    spread = analysis.boxes(found)
    marks = f"box: quartiles · line: 0.1 % to 99.9 % · dots: extremes · {subtitle}"
    st.altair_chart(charts.boxes(spread, marks, by_title), key="boxes", height=charts.boxes_height(spread))
    _statistics(opened, where, chosen, by)
    _formats(opened, where, ids)
    return by


def _grouping(opened: Catalog, where: Filter) -> str:
    wanted = st.query_params.get("by")
    if "by" not in st.session_state:
        st.session_state["by"] = wanted if wanted in GROUPINGS else "quant_type"
    return st.segmented_control(
        "Compare by", GROUPINGS, key="by", required=True, format_func=lambda name: TITLES[name]
    ) or "quant_type"


def _exact(opened: Catalog, chosen: pd.DataFrame) -> tuple[list[Distribution], str]:
    """The chosen tensors' own values; their sketches where values were not kept or cannot be read, and it is said."""
    labels = analysis.unique_labels(chosen)
    found, from_sketch = [], 0
    for tensor_id, label in labels.items():
        exact = None
        try:
            exact = analysis.distribution_of(label, opened.load(tensor_id))
        except CatalogError as error:
            st.info(f"{error}.", icon=":material/info:")
        except TensorFileError as error:
            st.error(f"{error}. Drawn from its sketch instead.", icon=":material/broken_image:")
        if exact is None:
            from_sketch += 1
            for d in analysis.distributions(opened, Filter(), None, [tensor_id]):
                found.append(Distribution(label, d.low, d.high, d.count, d.mean, d.std, exact=False))
        else:
            found.append(exact)
    own = len(labels) - from_sketch
    parts = [f"{own} tensor{'s' * (own != 1)}, exact"] if own else []
    if from_sketch:
        parts.append(f"{from_sketch} from the sketch")
    return found, " · ".join(parts)


def _left_out(opened: Catalog, where: Filter, ids: list[str] | None) -> str:
    row = opened.moments(where if ids is None else Filter(), None, ids).iloc[0]
    share = row["zeros"] / row["numel"] if row["numel"] else 0
    odd = [f"{int(row[name]):,} {title}" for name, title in (("nans", "NaN"), ("infs", "infinite")) if row[name]]
    text = f"Zeros have no magnitude and are not drawn: {share:.2%} of the values."
    return text + (f" Also left out: {' and '.join(odd)}." if odd else "")


def _resolution(found: list[Distribution]) -> str:
    return "" if all(d.exact for d in found) else " Sketches count values in bins of 1/8 binade, spread evenly here."


def _statistics(opened: Catalog, where: Filter, chosen: pd.DataFrame, by: str | None) -> None:
    if chosen.empty:
        table = opened.moments(where, by)
        table["group"] = table["group"].astype(str)
        first = TITLES[by]
    else:
        table = opened.moments(Filter(), "tensor_id", chosen["tensor_id"].tolist())
        table["group"] = table["group"].map(analysis.unique_labels(chosen))
        first = "Tensor"
    table = table.assign(flush_to_zero=table["flush_to_zero"] * 100, saturated=table["saturated"] * 100)
    number = st.column_config.NumberColumn
    st.markdown("**Statistics** · over the finite values")
    st.dataframe(
        table,
        hide_index=True,
        placeholder="",
        column_order=("group", "tensors", "numel", "mean", "std", "min", "max", "absmin", "zeros", "nans", "infs", "sqnr_db", "flush_to_zero", "saturated"),
        column_config={
            "group": st.column_config.TextColumn(first),
            "tensors": number("Tensors"),
            "numel": number("Values", format="localized"),
            "mean": number("Mean", format="%.3g"),
            "std": number("Std", format="%.3g"),
            "min": number("Min", format="%.3g"),
            "max": number("Max", format="%.3g"),
            "absmin": number("Smallest |x| > 0", format="%.2e"),
            "zeros": number("Zeros", format="localized"),
            "nans": number("NaN"),
            "infs": number("Inf"),
            "sqnr_db": number("SQNR (dB)", format="%.2f", help="Of the operands that were quantized, powers summed"),
            "flush_to_zero": number("Flushed (%)", format="%.3f"),
            "saturated": number("Saturated (%)", format="%.3f"),
        },
    )


def _formats(opened: Catalog, where: Filter, ids: list[str] | None) -> None:
    scores = opened.scores(where if ids is None else Filter(), ids)
    if scores.empty:
        st.caption("No format comparison: only the operands of a GEMM are scored, and none is selected.")
        return
    table = analysis.format_comparison(scores)
    operands = scores["tensor_id"].nunique()
    st.markdown(
        f"**What each format would do to it** · {operands:,} operand{'s' * (operands != 1)}, "
        "each rounded along the axis it is contracted over"
    )
    for cell, panel in zip(st.columns(3), charts.format_panels(table), strict=True):
        cell.altair_chart(panel, height=charts.format_height(table))
    st.caption("SQNR hides how a format fails: read it with the values flushed to zero and saturated.")
