"""Does rounding raise the loss? The predicted change in the loss by operand, and its SQNR."""

from __future__ import annotations

import math
from typing import Any

from binade.app import style
from binade.app.figure import Column, Drawn, Figure, Table, source
from binade.app.questions.loss import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared import board_charts, boards
from binade.app.questions.shared.board_charts import BARS
from binade.app.questions.shared.boards import LOSS_CHANGE
from binade.app.questions.shared.scope import Scope, rounding, scoped, unrounded
from binade.app.questions.shared.selection import Board, Of
from binade.app.style import MEASURES
from binade.data import evidence
from binade.data.evidence import Measure
from binade.data.reliability import PREDICTION

COLUMNS = {
    "rank": Column("Rank"),
    "place": Column("Tensor"),
    "value": Column("Predicted (nats)", field=MEASURES[LOSS_CHANGE]),
    "margin": Column("± 95%", ".3g", help="Half of the 95% interval over sequences; empty for one sequence"),
    "first": Column("First order", ".3g", help="Σg·e, the mean over micro-batches. With few tokens it is mostly noise"),
    "second": Column("Second order", ".3g", help="N·½Σg²e², the mean over micro-batches. Never negative"),
    "sqnr_db": Column(),
    "sqnr_rank": Column("SQNR rank"),
}


def draw(board: Board, values: dict[str, Any]) -> Drawn:
    measure = MEASURES[LOSS_CHANGE]
    changes = compute.costs(board.opened, board.where, board.format) if board.format else None
    if changes is None or changes.table.empty:
        return _nothing(board)
    table = changes.table
    batches = int(table["micro_batches"].max())
    over = f"the mean over {batches:,} micro-batches" if batches > 1 else "one micro-batch"
    definition = f"{measure.label} in {board.format}: {measure.definition}; for several tensors: their sum."
    caption = f"{source(board.where, f'{len(table):,} places (layer, module, tensor)')}\n{definition}"
    title = f"{measure.label} in {board.format}, largest first"
    bars = board_charts.ranking(table, measure, title, f"{min(len(table), BARS)} of {len(table):,} places · {over}")
    ranked = Figure(
        "loss_ranking",
        bars,
        table,
        caption,
        note=definition,
        hint="Click a bar to open its tensor.",
        height=board_charts.ranking_height(table),
        choose="tensor_id",
    )
    height = 380 + style.legend_height(sorted(set(table["tensor_name"].dropna())))
    against = Figure(
        "loss_against_sqnr",
        charts.scatter(table, measure, f"Loss and SQNR in {board.format}", over),
        table,
        caption,
        note="If SQNR predicted the loss, the points would fall from left to right.",
        hint="Click a point to open its tensor.",
        height=height,
        choose="tensor_id",
    )
    places = Table("loss_places", table, COLUMNS, height=min(38 + 35 * len(table), 420), choose="tensor_id")
    rounds = bool(rounding(board.opened, board.where))
    scope = Scope(board.where, ((len(table), "operand"),))
    return Drawn((ranked, against, places), _verdict(changes, board.format, measure, rounds), scope=scope)


def _nothing(board: Board) -> Drawn:
    """The answer if no operand has a predicted loss change: what the filter selects instead, and what to do."""
    if board.format:
        text = (
            f"No gradient was recorded for the selected operands that are scored in {board.format}: record a run with "
            "a backward pass and with “loss” under Also measured (--measures loss)."
        )
        return Drawn(problems=(text,))
    operands = int(board.opened.operands(board.where)["tensors"].sum())
    if operands:
        there = f'The {operands:,} selected operands were recorded with scores=() or --scores "": none is scored.'
    else:
        tensors = board.opened.totals(board.where).tensors
        there = f"The filter selects {tensors:,} tensors, but no operand of a GEMM; only operands are scored."
    return Drawn(
        problems=(
            f"{there} To rank every tensor, choose a statistic of the values, such as {MEASURES['absmax'].label}.",
        )
    )


def _verdict(changes: compute.PredictedChanges, fmt: str, measure: Measure, rounds: bool) -> evidence.Sentence:
    table = changes.table
    unknown = int(table["value"].isna().sum())
    if unknown == len(table):
        return evidence.say(
            "No change can be predicted: gradients are not finite, or no pass with sampled labels was recorded."
        )
    what = f"{measure.label} in {fmt}"
    known = table.dropna(subset=["value"])
    first = changes.reliability.doubt or evidence.extreme(boards.estimates(known, measure), what, lowest=False)
    lines: list[str] = [first]
    if rounds:
        text = (
            "This run rounds its operands, so the gradients are those of a model that is rounded already: the changes "
            "do not add up to what its recipe costs. Record a bf16 run to predict that."
        )
        lines.append(evidence.say(text))
    elif not math.isnan(changes.total.value):
        lines.append(evidence.say("The {n} operands together: {total}.", n=len(known), total=changes.total))
        if changes.missing:
            lines.append(evidence.say("Not in this sum: {missing}.", missing="; ".join(changes.missing)))
        if changes.reliability.sequences > 1:
            lines.append(changes.reliability.doubt_of_sum)
    lines += [PREDICTION, changes.caveat]
    if not math.isnan(changes.agreement.value):
        text = "Spearman’s ρ between this ranking and that by SQNR is {rho}."
        lines.append(evidence.say(text, rho=changes.agreement))
    if changes.reliability.orders:
        text = "Between two halves of the sequences, ρ is {rho}."
        lines.append(evidence.say(text, rho=changes.reliability.halves))
    if unknown:
        text = "No change is predicted for {n} operands: a gradient is not finite, or was not recorded."
        lines.append(evidence.say(text, n=unknown))
    return evidence.together(*lines)


LOSS = Question(
    text="Does rounding raise the loss?",
    title="Predicted loss",
    icon=":material/trending_down:",
    help="Predicted change in the loss by operand, and its SQNR",
    page="runs",
    of=Of.BOARD,
    view="loss",
    room="recipes",
    within=lambda opened, where, values: scoped(opened, unrounded(opened, where), scored=True),
    draw=draw,
)
