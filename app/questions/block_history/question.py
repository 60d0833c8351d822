"""Which blocks fail over time? Scales, errors and crest factors by block, over iterations and layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from binade.app.control import Control
from binade.app.figure import Column, Drawn, Figure, Table, source
from binade.app.params import One
from binade.app.questions.block_history import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared.event_marks import with_events
from binade.app.questions.shared.selection import Board
from binade.app.report.section import ReportSelection, Section
from binade.quant.block_histograms import BLOCK_MEASURES

TITLES = {"sqnr_db": "SQNR", "scale_exponent": "Scale exponent", "crest_db": "Crest factor"}
QUANTITY = Control(name="of_blocks", label="Block statistic", param=One(tuple(TITLES)), titles=TITLES)


def draw(board: Board, values: dict[str, Any]) -> Drawn:
    measure = values["of_blocks"]
    table = compute.histogram(board.opened, board.where, board.format, measure) if board.format else pd.DataFrame()
    if table.empty:
        return Drawn(
            problems=(
                f"The filter selects no operand whose blocks were measured in {board.format or 'any format'}: choose a "
                "format with block scales, and a run recorded with “blocks” under Also measured (--measures blocks).",
            )
        )
    what = BLOCK_MEASURES[measure]
    axis = f"{what.label} ({what.unit})" if what.unit else what.label
    by, word = (compute.ITERATION, "iteration") if table["iteration"].nunique() > 1 else (compute.LAYER, "layer")
    blocks = int(table["count"].sum())
    caption = f"{source(board.where, f'{blocks:,} blocks in {board.format}')}\n{what.label}: {what.definition}."
    shares = compute.shares(table, by)
    subtitle, last = f"{blocks:,} blocks, by {word}", what.bins[1] - 1
    if measure == "sqnr_db" and (exact := table.loc[table["bin"] == last, "count"].sum()):
        subtitle += f"; not drawn: {100 * exact / blocks:.2g}% without error"
        shares = shares[shares["low"] < last * what.width]
    items: list[Figure | Table] = [
        Figure(
            "block_distribution",
            charts.distribution(shares, by, word, axis, f"{axis} in {board.format}", subtitle),
            shares,
            caption,
            note=f"{what.label}: {what.definition}.",
            height=400,
        )
    ]
    summary = compute.summary(table, (compute.ITERATION, compute.LAYER))
    if by == compute.ITERATION:
        column, which = ("low", "1st percentile") if measure == "sqnr_db" else ("median", "Median")
        chart = charts.lines(summary, column, axis, f"{which} of the blocks", "all operands of a layer together")
        items.append(Figure("block_lines", chart, summary, caption, height=360))
    columns = {
        "iteration": Column("Iteration", width=90),
        "layer_index": Column("Layer", width=80),
        "blocks": Column("Blocks", "localized"),
        **{name: Column(title, "%.1f") for name, title in (("low", "1%"), ("median", "Median"), ("high", "99%"))},
    }
    if measure == "sqnr_db":
        columns["bad"] = Column(f"Below {compute.BAD_DB} dB", text=lambda row: f"{row['bad']:.2%}", align="right")
    items.append(Table("block_summary", summary, columns, height=min(38 + 35 * len(summary), 420)))
    return with_events(Drawn(tuple(items), _verdict(table, measure, board.format)), board.opened, board.where)


def _verdict(table: pd.DataFrame, measure: str, fmt: str) -> str:
    by_iteration = compute.summary(table, (compute.ITERATION,))
    first, last = by_iteration.iloc[0], by_iteration.iloc[-1]
    when = [f"in iteration {int(row['iteration'])}" for row in (first, last)]
    several = len(by_iteration) > 1
    if measure == "sqnr_db":
        worst = compute.summary(table, (compute.LAYER,)).sort_values("bad").iloc[-1]
        if not worst["bad"]:
            least = f"1% have less than {last['low']:.1f} dB {when[1]}"
            return f"No block has less than {compute.BAD_DB} dB in {fmt}; {least}."
        text = f"{last['bad']:.2%} of the blocks have an SQNR below {compute.BAD_DB} dB in {fmt} {when[1]}"
        text += f", {first['bad']:.2%} {when[0]}" if several else ""
        return f"{text}. Layer {int(worst['layer_index'])} has the largest share ({worst['bad']:.2%})."
    unit = BLOCK_MEASURES[measure].unit
    low, middle, high = (f"{last[name]:.1f}" for name in ("low", "median", "high"))
    text = f"{TITLES[measure]} of 98% of the blocks: {low} to {high} {unit}".rstrip() + f", median {middle}, {when[1]}"
    return f"{text}; median {first['median']:.1f} {when[0]}." if several else f"{text}."


def report(selection: ReportSelection) -> Iterator[Section]:
    for board in selection.boards(("sqnr_db",)):
        drawn = draw(board, {"of_blocks": "sqnr_db"})
        if drawn.figures:
            yield Section("statistics", figures=board.named(drawn.figures[:1]), verdict=drawn.verdict)


BLOCK_HISTORY = Question(
    text="Which blocks fail over time?",
    title="Blocks",
    icon=":material/grid_view:",
    help="SQNR, scales and crest factors of blocks, over iterations and layers",
    page="worst",
    view="blocks",
    ignores=frozenset(("metric",)),
    controls=(QUANTITY,),
    draw=draw,
    of_runs=True,
    report=report,
)
