"""Which blocks fail over time? Scales, errors and crest factors by block, over iterations and layers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import pandas as pd

from binade.app.control import Control
from binade.app.figure import Column, Drawn, Figure, Table, source
from binade.app.params import One
from binade.app.questions.block_history import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared.event_marks import with_events
from binade.app.questions.shared.scope import Scope, scoped
from binade.app.questions.shared.selection import Board, Of
from binade.data import evidence
from binade.data.evidence import SHARE, Sentence, exact, say
from binade.quant.block_histograms import BLOCK_MEASURES

TITLES = {"sqnr_db": "SQNR", "scale_exponent": "Scale exponent", "crest_db": "Crest factor"}
DRAWN = {"sqnr_db": ("low", "1st percentile"), "scale_exponent": ("median", "median"), "crest_db": ("median", "median")}
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
    definition = f"{what.label}: {what.definition}."
    axis = f"{what.label} ({what.unit})" if what.unit else what.label
    by, word = (compute.ITERATION, "iteration") if table["iteration"].nunique() > 1 else (compute.LAYER, "layer")
    blocks = int(table["count"].sum())
    words = f"{source(board.where, f'{blocks:,} blocks in {board.format}')}\n"
    caption = f"{words}{definition}"
    shares = compute.shares(table, by)
    subtitle, last = f"{blocks:,} blocks, by {word} · {board.scope}", what.bins[1] - 1
    if measure == "sqnr_db" and (lossless := table.loc[table["bin"] == last, "count"].sum()):
        high = last * what.width
        subtitle += f"; not drawn: {100 * lossless / blocks:.2g}% without error or above {high:g} dB"
        shares, definition = shares[shares["low"] < high], f"{definition.partition(';')[0]}."
    items: list[Figure | Table] = [
        Figure(
            "block_distribution",
            charts.distribution(shares, by, word, axis, f"{axis} in {board.format}", subtitle),
            shares,
            f"{words}{definition}",
            note=definition,
            height=400,
        )
    ]
    summary = compute.summary(table, (compute.ITERATION, compute.LAYER))
    if by == compute.ITERATION:
        column, which = DRAWN[measure]
        title = f"{which[:1].upper()}{which[1:]} of the blocks"
        chart = charts.lines(summary, column, axis, title, "all operands of a layer together")
        items.append(Figure("block_lines", chart, summary, caption, height=360))
    columns = {
        "iteration": Column("Iteration"),
        "layer_index": Column("Layer"),
        "blocks": Column("Blocks", "d"),
        **{name: Column(title, ".1f") for name, title in (("low", "1%"), ("median", "Median"), ("high", "99%"))},
    }
    if measure == "sqnr_db":
        columns["bad"] = Column(
            f"Below {compute.BAD_DB} dB", text=lambda row: SHARE.quantity(row["bad"]), align="right"
        )
    items.append(Table("block_summary", summary, columns, height=min(38 + 35 * len(summary), 420)))
    scope = Scope(board.where, ((blocks, "block"),))
    answer = Drawn(tuple(items), _verdict(table, summary, measure, board), scope=scope)
    return with_events(answer, board.opened, board.where)


def _verdict(table: pd.DataFrame, by_layer: pd.DataFrame, measure: str, board: Board) -> Sentence:
    """table: `compute.histogram`. by_layer: its summary by iteration and layer."""
    by_iteration = compute.summary(table, (compute.ITERATION,)).to_dict("records")
    sentences = [_bad(by_iteration, board.format) if measure == "sqnr_db" else _range(by_iteration[-1], measure)]
    quantity = compute.quantity(measure)
    column, which = DRAWN[measure]
    what = f"{which} of {quantity.label} in {board.format}"
    if measure == "sqnr_db":
        sentences.append(evidence.extreme(compute.levels(by_layer, column, quantity), what, lowest=True))
    if len(by_iteration) > 1:
        slopes = compute.trends(by_layer, column, quantity)
        sentences.append(evidence.trends(slopes, f"The {what}", "over iterations", "layers"))
    if lost := board.opened.overflowing(board.format, board.where):
        sentences.append(say("Blocks with NaN or Inf are not measured (operands that hold some: {lost}).", lost=lost))
    return evidence.together(*sentences)


def _bad(by_iteration: list[dict[Hashable, Any]], fmt: str) -> Sentence:
    """How many blocks are below BAD_DB in the last iteration, and in the first."""
    last, first = (
        {"at": int(row["iteration"]), "count": round(row["bad"] * row["blocks"]), "blocks": int(row["blocks"]),
         "share": exact(SHARE, row["bad"], of="blocks")}
        for row in (by_iteration[-1], by_iteration[0])
    )  # fmt: skip
    text = "In iteration {at}, {count} of {blocks} measured blocks ({share}) have an SQNR below {limit} dB in {fmt}."
    sentence = say(text, limit=compute.BAD_DB, fmt=fmt, **last)
    before = say("In iteration {at}: {count} of {blocks} ({share}).", **first)
    return evidence.together(sentence, before) if len(by_iteration) > 1 else sentence


def _range(last: dict[Hashable, Any], measure: str) -> Sentence:
    quantity = compute.quantity(measure)
    return say(
        "In iteration {at}, {what} is between {low} and {high} for all blocks but the lowest and highest 1 in 100; "
        "median {median}.",
        at=int(last["iteration"]),
        what=quantity.label,
        **{name: exact(quantity, last[name], of="blocks") for name in ("low", "median", "high")},
    )


BLOCK_HISTORY = Question(
    text="Which blocks fail over time?",
    title="Blocks over time",
    icon=":material/grid_view:",
    help="SQNR, scales and crest factors of blocks, over iterations and layers",
    page="map",
    room="map",
    within=lambda opened, where, values: scoped(opened, where, ("iteration",), scored=True),
    of=Of.BOARD,
    view="blocks",
    controls=(QUANTITY,),
    draw=draw,
    of_runs=True,
)
