"""Explore: filter the captured tensors, choose some, see how their values lie and what formats do to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import streamlit as st

from app import analysis, charts, show, style
from app.address import TITLES, One, follow, one_line, plain, write
from app.analysis import Distribution
from app.analysis.distribution import FINE_BIN
from app.analysis.laws import LAWS, distance_to, fit, qq
from app.filters import sidebar
from app.state import big, bytes_text, catalog, explain_empty, explain_refused
from data.catalog import Catalog, CatalogError, Totals
from data.filter import Filter
from data.store import TensorFileError
from quant.metrics import METRICS

MAX_SELECTED = style.MAX_GROUPS
MAX_ROWS = 5000
CHART = 360  # pixels, without the legend
GROUPINGS = ("quant_type", "recipe", "layer_index", "module", "operation", "tensor_name", "iteration")
AXES = {"log2": "log₂ magnitude", "linear": "linear"}
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


def page() -> None:
    opened = catalog()
    st.title("Explore", anchor=False)
    explain_refused(opened)
    if not opened.totals().tensors:
        explain_empty(opened)
        return
    params = {"by": One(GROUPINGS), "axis": One(tuple(AXES)), "law": One(LAWS)}
    follow(opened, "explore", params)
    where = sidebar(opened)
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
    by, axis = _controls(one_by_one=not chosen.empty)
    write(where, params, tensor=chosen["tensor_id"].tolist())
    _views(opened, where, totals.tensors, chosen, by, axis)


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
        placeholder="",
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


def _controls(one_by_one: bool) -> tuple[str, str]:
    """(what groups are compared by, the axis) as chosen above the charts."""
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
    right.segmented_control(
        "Q–Q against", LAWS, key="law", required=True, format_func=lambda name: charts.LAW_TITLES[name]
    )
    axis = left.segmented_control("Axis", AXES, key="axis", required=True, format_func=lambda name: AXES[name])
    return by or GROUPINGS[0], axis or next(iter(AXES))


def _views(opened: Catalog, where: Filter, total: int, chosen: pd.DataFrame, by: str, axis: str) -> None:
    """The charts and tables of what is selected."""
    ids = chosen["tensor_id"].tolist() or None
    if ids is None:
        found, by_title = analysis.distributions(opened, where, by), TITLES[by].lower()
        source = f"{total:,} tensor{'s' * (total != 1)} · from sketches"
        if len(found) > MAX_SELECTED:
            st.caption(f"{len(found)} groups: the {MAX_SELECTED} with the most values are drawn.")
            least = sorted(d.total for d in found)[-MAX_SELECTED]
            found = [d for d in found if d.total >= least][:MAX_SELECTED]
    else:
        found, source = _exact(opened, chosen)
        by_title = "tensor"
    if found := [d for d in found if d.total]:
        subtitle = f"{big(sum(d.total for d in found))} values · {source}"
        note = _left_out(opened, where, ids, axis) + _resolution(found, axis)
        _charts(found, subtitle, note, by_title, axis, show.source(where, f"{subtitle} ({_how(found)})"))
    else:
        st.info("Nothing to draw: there is no finite value.", icon=":material/block:")
    _statistics(opened, where, chosen, by)
    _formats(opened, where, ids)


def _how(found: list[Distribution]) -> str:
    """Whether the values are exact, in words."""
    exact = sum(d.exact for d in found)
    fine = any(not d.exact and d.bin_width == FINE_BIN for d in found)
    bins = "bins of 1/128 binade" if fine else "the binade sketch, bins of 1/8 binade"
    return "exact" if exact == len(found) else bins if not exact else f"partly exact, partly {bins}"


def _charts(found: list[Distribution], subtitle: str, note: str, by: str, axis: str, caption: str) -> None:
    """Histogram, Q-Q plot and boxes. Each gets all groups, so that colours agree."""
    groups = [d.group for d in found]
    height = CHART + style.legend_height(groups)
    left, right = st.columns(2, gap="large")
    with left:
        table = analysis.linear_histogram(found) if axis == "linear" else analysis.log2_histogram(found)
        draw = charts.linear_histogram if axis == "linear" else charts.log2_histogram
        if table.empty:
            st.info("No magnitudes to draw: all values are zero.", icon=":material/block:")
            st.caption(note)
        else:
            words = f"{caption}\nShares are of all values of a group. {note}"
            show.figure(draw(table, subtitle, by, groups), "histogram", table, words, note=note, height=height)
    with right:
        law = st.session_state.get("law") or LAWS[0]
        points = qq(found, law)
        if points.empty:
            st.info("No Q–Q plot: all values are equal.", icon=":material/block:")
        else:
            words = f"{caption}\nQuantiles against a fitted {charts.LAW_TITLES[law]}."
            chart = charts.qq(points, subtitle, by, groups, law)
            show.figure(chart, "qq", points, words, note=_law_note(found, law), height=height)
    log2 = axis != "linear"
    spread = analysis.boxes([analysis.magnitudes(d) for d in found] if log2 else found)
    if not spread.empty:
        marks = "box: quartiles · line: 0.1 % to 99.9 % · dots: extremes"
        chart = charts.boxes(spread, f"{marks} · {subtitle}", by, groups, log2=log2)
        show.figure(chart, "boxes", spread, f"{caption}\n{marks}.", height=charts.boxes_height(spread))


def _law_note(found: list[Distribution], law: str) -> str:
    """How to read a Q-Q plot, and what was fitted where there is one group."""
    reading = "On the dashed line values follow the law; above it at the right, the tail is heavier."
    if len(found) != 1 or not (fitted := fit(found[0], law)):
        return reading
    return f"{reading} Fitted: {fitted.text}; Kolmogorov–Smirnov distance {distance_to(found[0], fitted):.3f}."


def _exact(opened: Catalog, chosen: pd.DataFrame) -> tuple[list[Distribution], str]:
    """The chosen tensors' own values; their sketches where values were not kept or cannot be read, and it is said."""
    labels = analysis.unique_labels(chosen)
    found, not_kept, damaged = [], [], []
    for tensor_id, label in labels.items():
        exact = None
        row = chosen[chosen["tensor_id"] == tensor_id].iloc[0]
        try:
            exact = analysis.distribution_of(label, opened.load(tensor_id), (row["mean"], row["std"]))
        except CatalogError:
            not_kept.append(label)
        except TensorFileError as error:
            damaged.append((label, str(error)))
        if exact is None:
            for d in analysis.distributions(opened, Filter(), None, [tensor_id]):
                found.append(replace(d, group=label))
        else:
            found.append(exact)
    if not_kept:
        st.info(
            f"The values of {plain('; '.join(not_kept))} were not kept: drawn from the sketch instead.",
            icon=":material/info:",
        )
    if damaged:
        count = len(damaged)
        title = "A tensor file cannot be read" if count == 1 else f"{count} tensor files cannot be read"
        st.error(f"{title}: drawn from the sketch instead.", icon=":material/broken_image:")
        with st.expander("Which, and why"):
            for label, reason in damaged:
                st.text(f"{label}: {one_line(reason)}")
    own = sum(d.exact for d in found)
    fine = sum(not d.exact and d.bin_width == FINE_BIN for d in found)
    parts = [f"{own} tensor{'s' * (own != 1)}, exact"] if own else []
    if fine:
        parts.append(f"{fine} too large to sort, within 1/128 of each value")
    if own + fine < len(found):
        parts.append(f"{len(found) - own - fine} from the sketch")
    return found, " · ".join(parts)


def _left_out(opened: Catalog, where: Filter, ids: list[str] | None, axis: str) -> str:
    """What the charts do not show of the values."""
    row = opened.moments(where if ids is None else Filter(), None, ids).iloc[0]
    odd = [f"{int(row[name]):,} {title}" for name, title in (("nans", "NaN"), ("infs", "infinite")) if row[name]]
    also = f" Left out: {' and '.join(odd)}." if odd else ""
    if axis == "linear":
        return f"The histogram's axis leaves out 0.01 % of the values, at its ends.{also}"
    if not row["zeros"]:
        return f"No value is zero.{also}"
    share = row["zeros"] / row["numel"]
    text = f"{share:.2%}" if share >= 1e-4 else f"{int(row['zeros']):,}"
    return f"Zeros have no magnitude and are not drawn: {text} of the values.{also}"


def _resolution(found: list[Distribution], axis: str) -> str:
    if axis != "linear" or all(d.exact for d in found):
        return ""
    return " Sketches count values in bins of 1/8 binade, spread evenly here."


def _statistics(opened: Catalog, where: Filter, chosen: pd.DataFrame, by: str) -> None:
    if chosen.empty:
        table = opened.moments(where, by)
        table["group"] = table["group"].map(analysis.group_name)
        first = TITLES[by]
    else:
        ids = chosen["tensor_id"].tolist()
        table = opened.moments(Filter(), "tensor_id", ids).set_index("group").loc[ids].reset_index()
        table["group"] = table["group"].map(analysis.unique_labels(chosen))
        first = "Tensor"
    table = table.assign(flush_to_zero=table["flush_to_zero"] * 100, saturated=table["saturated"] * 100)
    number = st.column_config.NumberColumn
    st.markdown("**Statistics** · over the finite values")
    titles = {"mean": "Mean", "std": "Std", "min": "Min", "max": "Max", "absmin": "Smallest |x| > 0"}
    table, huge = _huge_as_text(table, titles)
    st.dataframe(
        table,
        hide_index=True,
        placeholder="",
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
            "numel": number("Values", format="localized", width=100),
            "mean": number("Mean", format="%.3g", width=105),
            "std": number("Std", format="%.3g", width=100),
            "min": number("Min", format="%.3g", width=100),
            "max": number("Max", format="%.3g", width=95),
            "absmin": number("Smallest |x| > 0", format="%.2e", width=130),
            "zeros": number("Zeros", format="localized", width=85),
            "nans": number("NaN", format="localized", width=60),
            "infs": number("Inf", format="localized", width=60),
            **_error_columns(", of the operands that were quantized, powers summed"),
            **huge,
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
    words = show.source(where, f"{operands:,} operands, from the index") + "".join(
        f"\n{METRICS[name].label}: {METRICS[name].definition}." for name, *_ in charts.ERROR_PANELS
    )
    show.panels(charts.format_panels(table), "formats", table, words, charts.format_height(table))
    st.caption("SQNR hides how a format fails: read it with the values flushed to zero and saturated.")
