"""Does rounding raise the loss? The predicted change in the loss by operand, and its SQNR."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from binade.app import style
from binade.app.figure import Column, Drawn, Figure, Table
from binade.app.questions.loss import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.ranking import charts as ranking_charts
from binade.app.questions.shared.board_charts import BARS
from binade.app.questions.shared.boards import LOSS_CHANGE
from binade.app.questions.shared.selection import Board
from binade.app.report.section import ReportSelection, Section
from binade.app.style import MEASURES
from binade.data.text import fixed, short

RELIABLE = 0.8  # between halves of the micro-batches, from which a ranking is called reliable
COLUMNS = {
    "rank": Column("Rank", width=60),
    "place": Column("Tensor", width=180),
    "value": Column("Predicted (nats)", "%.2e", 120, metric=LOSS_CHANGE),
    "spread": Column("± std. error", "%.1e", 95, "Of the mean over micro-batches; empty if there is only one"),
    "first": Column("First order", "%.2e", 95, "Σg·e, the mean over micro-batches. With few tokens it is mostly noise"),
    "second": Column("Second order", "%.2e", 105, "N·½Σg²e², the mean over micro-batches. Never negative"),
    "sqnr_db": Column(),
    "sqnr_rank": Column("SQNR rank", width=85),
}


def draw(board: Board, values: dict[str, Any]) -> Drawn:
    measure = MEASURES[LOSS_CHANGE]
    board = replace(board, measure=measure)
    found = compute.costs(board.opened, board.where, board.format) if board.format else None
    if found is None or found.table.empty:
        return board.nothing
    table = found.table
    batches = int(table["micro_batches"].max())
    over = f"the mean over {batches:,} micro-batches" if batches > 1 else "one micro-batch"
    bars = ranking_charts.ranking(
        table, measure, board.title(", largest first"), f"{min(len(table), BARS)} of {len(table):,} places · {over}"
    )
    ranked = Figure(
        "loss_ranking",
        bars,
        table,
        board.caption(f"{len(table):,} places (layer, module, tensor)"),
        note=board.definition,
        hint="Click a bar to open its tensor.",
        height=ranking_charts.ranking_height(table),
        choose="tensor_id",
    )
    height = 380 + style.legend_height(sorted(set(table["tensor_name"].dropna())))
    against = Figure(
        "loss_against_sqnr",
        charts.scatter(table, measure, f"Loss and SQNR in {board.format}", over),
        table,
        board.caption(f"{len(table):,} places (layer, module, tensor)"),
        note="If SQNR predicted the loss, the points would fall from left to right.",
        hint="Click a point to open its tensor.",
        height=height,
        choose="tensor_id",
    )
    places = Table("loss_places", table, COLUMNS, height=min(38 + 35 * len(table), 420), choose="tensor_id")
    return Drawn((ranked, against, places), _verdict(found, board.format))


def _verdict(found: compute.Costs, fmt: str) -> str:
    table = found.table
    unknown = int(table["value"].isna().sum())
    if unknown == len(table):
        return (
            "No change can be predicted: gradients are not finite, or the number of tokens in a micro-batch is "
            "unknown (record the inputs of linear layers)."
        )
    worst, of = table.iloc[0], len(table)
    lines = [f"{worst['place']} costs the most in {fmt}: {short(worst['value'], 2, '+')} nats predicted"]
    total = table["value"].sum()
    lines.append(
        f", {short(total, 2, '+')} over all {of:,} operands. Its SQNR rank is {int(worst['sqnr_rank'])} of {of}"
    )
    if not math.isnan(found.agreement):
        lines.append(f"; Spearman’s ρ between the two rankings is {fixed(found.agreement, 2)}")
    lines.append(". ")
    if math.isnan(found.reliability):
        lines.append(
            "The ranking cannot be checked: that takes two micro-batches and three operands. It may hold only for "
            "these tokens."
        )
    elif found.reliability < RELIABLE:
        lines.append(
            f"Spearman’s ρ between two halves of the micro-batches is only {fixed(found.reliability, 2)}: record more "
            "tokens before you rely on the ranking."
        )
    else:
        lines.append(f"Between two halves of the micro-batches, ρ is {fixed(found.reliability, 2)}.")
    if unknown:
        lines.append(f" No change is predicted for {unknown} operand{'s' * (unknown != 1)}: a gradient is not finite.")
    return "".join(lines)


def report(selection: ReportSelection) -> Iterator[Section]:
    for board in selection.boards((LOSS_CHANGE,)):
        drawn = draw(board, {})
        if drawn.figures:
            yield Section("statistics", figures=board.named(drawn.figures), verdict=drawn.verdict)


LOSS = Question(
    text="Does rounding raise the loss?",
    title="Loss",
    icon=":material/trending_down:",
    help="Predicted change in the loss by operand, and its SQNR",
    page="worst",
    view="loss",
    ignores=frozenset(("metric",)),
    draw=draw,
    report=report,
)
