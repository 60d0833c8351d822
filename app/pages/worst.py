"""Worst: any metric over the selection, ranked, by depth, in training, forward against backward."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from app import charts, show, style
from app.address import One, follow, go, plain, write
from app.analysis import boards, recipes
from app.charts import boards as draw
from app.filters import sidebar
from app.state import catalog, explain_empty, explain_refused, first_formats, losses_of
from app.style import MEASURES, Measure
from data.catalog import Catalog
from data.filter import Filter

VIEWS = {
    "board": "Ranking",
    "depth": "By depth",
    "training": "In training",
    "directions": "Forward and backward",
}
POOLED = "all runs and iterations of the filter together"


def page() -> None:
    opened = catalog()
    st.title("Worst tensors", anchor=False)
    explain_refused(opened)
    if not opened.totals().tensors:
        explain_empty(opened)
        return
    formats = first_formats(opened)
    params = {"view": One(tuple(VIEWS)), "metric": One(boards.METRICS), "format": One(formats)}
    follow(opened, "worst", params)
    where = sidebar(opened)
    view, metric, fmt = _controls(formats)
    write(where, params)
    st.caption(f"Shown: {plain(where.sentence())}.")
    measure = MEASURES[metric]
    if boards.is_error(metric) and not fmt:
        st.info("No operand of a GEMM is scored here: choose a statistic of the values.", icon=":material/block:")
        return
    {"board": _board, "depth": _depth, "training": _training, "directions": _directions}[view](
        opened, where, fmt, measure
    )


def _controls(formats: tuple[str, ...]) -> tuple[str, str, str]:
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
    if formats:
        fmt = right.segmented_control(
            "If rounded to",
            formats,
            key="format",
            required=True,
            disabled=not boards.is_error(metric),
            help="What this format would do to each operand, as scored when it was captured",
        )
    return view or "board", metric, fmt or (formats[0] if formats else "")


def _caption(where: Filter, fmt: str, measure: Measure, what: str) -> str:
    return f"{show.source(where, what)}\n{_definition(fmt, measure)}"


def _definition(fmt: str, measure: Measure) -> str:
    if boards.is_error(measure.key):
        pooled = "of the summed powers" if measure.low_is_bad else "of all elements concerned"
        return f"{measure.label} in {fmt}: {measure.definition}; several tensors together: {pooled}."
    return f"{measure.label}: {measure.definition}; the largest of the tensors that are taken together."


def _title(fmt: str, measure: Measure, rest: str = "") -> str:
    return f"{measure.label} in {fmt}{rest}" if boards.is_error(measure.key) else f"{measure.label}{rest}"


def _nothing(measure: Measure) -> None:
    what = "operands of a GEMM, which alone are scored" if boards.is_error(measure.key) else "tensors with a value"
    st.info(f"The filter selects no {what}.", icon=":material/filter_alt_off:")


def _board(opened: Catalog, where: Filter, fmt: str, measure: Measure) -> None:
    table = boards.ranking(opened, where, fmt, measure.key)
    if table.empty:
        _nothing(measure)
        return
    worst = table.iloc[0]
    unit = f" {measure.unit}" if measure.unit and measure.text(worst["value"])[0] in "-0123456789" else ""
    show.verdict(f"{worst['place']} suffers most: {measure.label} {measure.text(worst['value'])}{unit}.")
    title = _title(fmt, measure, ", worst first")
    subtitle = f"{min(len(table), draw.BARS)} of {len(table):,} places · {POOLED}"
    chart = draw.ranking(table, measure, title, subtitle)
    caption = _caption(where, fmt, measure, f"{len(table):,} places (layer, module, operation, tensor)")
    height = draw.ranking_height(table)
    note = f"{_definition(fmt, measure)} Choose a bar to look into its worst tensor."
    chosen = show.figure(chart, "ranking", table, caption, note=note, height=height, choose="tensor_id")
    _open(where, chosen, fmt)
    _table(where, table, measure, fmt)


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
        placeholder="",
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


def _depth(opened: Catalog, where: Filter, fmt: str, measure: Measure) -> None:
    table = boards.depth(opened, where, fmt, measure.key)
    if table.empty:
        _nothing(measure)
        return
    layers = table["layer_index"].nunique()
    change = boards.slope(table)
    if layers > 1 and not change.empty:
        worse = change["change"] < 0 if measure.low_is_bad else change["change"] > 0
        first, last = int(table["layer_index"].min()), int(table["layer_index"].max())
        show.verdict(f"{int(worse.sum())} of {len(change)} tensors are worse in layer {last} than in layer {first}.")
    elif layers == 1:
        show.verdict("There is one layer in the filter: nothing to compare.")
    caption = _caption(where, fmt, measure, f"{len(table):,} cells of layer and tensor")
    chart = draw.depth(table, measure, _title(fmt, measure, " by layer and tensor"), POOLED)
    note = f"{_definition(fmt, measure)} Bright is bad. Choose a cell to look into its worst tensor."
    height = draw.depth_height(table)
    chosen = show.figure(chart, "depth", table, caption, note=note, height=height, choose="tensor_id")
    _open(where, chosen, fmt)


def _training(opened: Catalog, where: Filter, fmt: str, measure: Measure) -> None:
    table = boards.training(opened, where, fmt, measure.key)
    if table.empty:
        _nothing(measure)
        return
    iterations = sorted(table["iteration"].unique())
    if len(iterations) > 1:
        ends = [
            table[table["iteration"] == end].set_index("layer_index")["value"]
            for end in (iterations[0], iterations[-1])
        ]
        change = (ends[1] - ends[0]).dropna()
        worse = change < 0 if measure.low_is_bad else change > 0
        show.verdict(
            f"From iteration {int(iterations[0])} to {int(iterations[-1])} it gets worse in "
            f"{int(worse.sum())} of {len(change)} layers."
        )
    else:
        show.verdict(f"Only iteration {int(iterations[0])} is in the filter: nothing to compare.")
    caption = _caption(where, fmt, measure, f"{len(table):,} points of iteration and layer")
    chart = draw.training(table, measure, _title(fmt, measure, " by iteration"), "all tensors of a layer together")
    note = f"{_definition(fmt, measure)} Choose a point to look into its worst tensor."
    chosen = show.figure(chart, "training", table, caption, note=note, height=420, choose="tensor_id")
    _open(where, chosen, fmt)
    _losses(opened, where)


def _losses(opened: Catalog, where: Filter) -> None:
    """The loss of the filter's runs beneath it, over the same iterations."""
    runs = set(opened.facets(where.without("run_id")).get("run_id", []))
    if where.run_id:
        runs &= set(where.run_id)
    table = recipes.overview(opened.runs(), opened.parts())
    table = table[table["run_id"].isin(runs)].tail(style.MAX_GROUPS)
    records = losses_of(opened, table["run_id"].tolist())
    rows = [
        {"group": run.label, "iteration": record["iteration"], "loss": record["loss"]}
        for run in table.itertuples()
        for record in records[run.run_id]
    ]
    if rows:
        shown = pd.DataFrame(rows)
        height = 340 + style.legend_height(style.groups_of(shown))
        words = f"{show.source(where, 'the runs of the filter')}\nLoss: cross entropy in nats per token."
        show.figure(charts.losses(shown), "losses", shown, words, height=height)


def _directions(opened: Catalog, where: Filter, fmt: str, measure: Measure) -> None:
    table = boards.directions(opened, where, fmt, measure.key)
    if table.empty:
        _nothing(measure)
        return
    totals = boards.direction_totals(opened, where, fmt, measure.key).set_index("operation")["value"]
    unit = f" {measure.unit}" if measure.unit else ""
    parts = [f"{name} {measure.text(totals[name])}{unit}" for name in ("forward", "backward") if name in totals]
    worst = table[table["operation"] == "backward"].head(1)
    words = f"{measure.label}: {', '.join(parts)}."
    if not worst.empty:
        words += f" Worst going backward: {worst['row'].iloc[0]} ({measure.text(worst['value'].iloc[0])}{unit})."
    show.verdict(words)
    for cell, operation in zip(st.columns(2, gap="large"), ("forward", "backward"), strict=True):
        part = table[table["operation"] == operation]
        with cell:
            if part.empty:
                st.info(f"No {operation} operand is in the filter.", icon=":material/block:")
                continue
            chart = draw.direction(table, measure, operation, f"{len(part)} tensors · {POOLED}", table)
            caption = _caption(where, fmt, measure, f"{operation}, all layers together")
            height = draw.ranking_height(table.groupby("operation").head(draw.BARS).query("operation == 'forward'"))
            chosen = show.figure(chart, f"direction_{operation}", part, caption, height=height, choose="tensor_id")
            _open(where, chosen, fmt)
    st.caption(f"{_definition(fmt, measure)} Choose a bar to look into its worst tensor.")
