"""Which tensors lose precision? Layers, modules, operations and tensors, ranked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from binade.app.figure import Column, Drawn, Figure, Table
from binade.app.questions.question import Question
from binade.app.questions.ranking import charts, compute
from binade.app.questions.shared import board_charts, boards
from binade.app.questions.shared.selection import Board
from binade.app.questions.shared.unscaled import with_scale
from binade.app.report.section import OF_VALUES, ReportSelection, Section
from binade.app.report.section import Table as ReportTable
from binade.data import evidence
from binade.data.catalog import SHOWN_ERRORS
from binade.data.text import plain_name

MAX_WORST = 200  # places in a report's table


def draw(board: Board, values: dict[str, Any]) -> Drawn:
    measure, board = board.measure, board.scoped()
    table = compute.ranking(board.opened, board.where, board.format, measure.key)
    if table.empty:
        return board.nothing
    verdict = evidence.extreme(boards.estimates(table, measure), board.title(), lowest=measure.low_is_bad)
    scaled = with_scale(board.format) if measure.key == "sqnr_db" and table["flush_to_zero"].iloc[0] else None
    if scaled and str(scaled) in board.opened.scored_formats(board.where):
        same = dict(boards.estimates(compute.ranking(board.opened, board.where, str(scaled), "sqnr_db"), measure))
        place = table["place"].iloc[0]
        if place in same:
            text = "With a tensor scale, {spec}, {place} has {value}."
            added = evidence.say(text, spec=str(scaled), place=place, value=same[place])
            verdict = evidence.together(verdict, added)
    title = board.title(", worst first")
    subtitle = f"{min(len(table), board_charts.BARS)} of {len(table):,} places · {board.scope}"
    figure = Figure(
        "ranking",
        charts.ranking(table, measure, title, subtitle),
        table,
        board.caption(f"{len(table):,} places (layer, module, operation, tensor)"),
        note=board.definition,
        hint="Click a bar to open its worst tensor.",
        height=charts.ranking_height(table),
        choose="tensor_id",
    )
    return Drawn((figure, _places(board, table)), verdict)


def _places(board: Board, table: pd.DataFrame) -> Table:
    """Every place; a row opens its worst tensor."""
    metric = board.measure.key
    metrics = {name: Column() for name in SHOWN_ERRORS} if metric in SHOWN_ERRORS else {}
    columns = {
        "rank": Column("Rank", width=60),
        "place": Column("Tensor", width=220),
        "operation": Column("Operation", width=110),
        **(metrics or {"value": Column(format="%.4g", metric=metric)}),
        "tensors": Column("Tensors", "localized", 80),
    }
    return Table("places", table, columns, height=min(38 + 35 * len(table), 420), choose="tensor_id")


def report(selection: ReportSelection) -> Iterator[Section]:
    for board in selection.boards(("sqnr_db",), OF_VALUES):
        drawn = draw(board, {})
        figures = board.named(drawn.figures)
        tables, verdict, fmt = [], evidence.Sentence(), board.format
        if fmt:
            verdict = evidence.prefixed(f"{fmt}: ", drawn.verdict)
            places = [figure.table.head(MAX_WORST).drop(columns=["value"]) for figure in figures]
            tables = [ReportTable(f"ranking_{plain_name(fmt)}", f"Worst in {fmt}", table) for table in places]
        yield Section("statistics", figures=figures, tables=tables, verdict=verdict)


RANKING = Question(
    text="Which tensors lose precision?",
    title="Ranking",
    icon=":material/leaderboard:",
    help="Layers, modules, operations and tensors, ranked",
    page="worst",
    view="board",
    draw=draw,
    report=report,
)
