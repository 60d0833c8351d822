"""Which gradients flush to zero? Forward and backward, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from binade.app.figure import Drawn, Figure, Text
from binade.app.questions.directions import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.ranking import charts as ranking_charts
from binade.app.questions.shared import board_charts, boards
from binade.app.questions.shared.selection import Board
from binade.app.report.section import ReportSelection, Section
from binade.data import evidence


def draw(board: Board, values: dict[str, Any]) -> Drawn:
    measure, board = board.measure, board.scoped()
    table = compute.directions(board.opened, board.where, board.format, measure.key)
    if table.empty:
        return board.nothing
    totals = compute.direction_totals(board.opened, board.where, board.format, measure.key)
    by_operation = dict(boards.estimates(totals, measure, "operation"))
    operations = [(name, by_operation[name]) for name in ("forward", "backward") if name in by_operation]
    backward = table[table["operation"] == "backward"]
    what = f"{board.title()} in the backward pass"
    worst = evidence.extreme(boards.estimates(backward, measure, "row"), what, lowest=measure.low_is_bad)
    figures: list[Figure] = []
    problems = []
    for operation in ("forward", "backward"):
        part = table[table["operation"] == operation]
        if part.empty:
            problems.append(f"The filter selects no {operation} operand.")
            continue
        figure = Figure(
            f"direction_{operation}",
            charts.direction(table, measure, operation, f"{len(part)} tensors · {board.scope}"),
            part,
            board.caption(f"{operation}, all layers together"),
            height=ranking_charts.ranking_height(
                table.groupby("operation").head(board_charts.BARS).query("operation == 'forward'")
            ),
            choose="tensor_id",
            group="directions",
        )
        figures.append(figure)
    note = Text(f"{board.definition} Click a bar to open its worst tensor.", "hint")
    return Drawn(
        (*figures, note), evidence.together(evidence.each_of(operations, board.title()), worst), tuple(problems)
    )


def report(selection: ReportSelection) -> Iterator[Section]:
    for board in selection.boards(("sqnr_db", "flush_to_zero")):
        figures = []
        for figure in draw(board, {}).figures:
            operation = figure.name.removeprefix("direction_")
            title: Any = figure.chart.title.copy()  # shown alone in a report, so the title includes the metric
            title.text = f"{board.measure.label} in {board.format}, {operation}"
            chart = figure.chart.properties(title=title)
            figures.append(replace(figure, name=f"{operation}_{board.name}", chart=chart))
        yield Section("comparisons", figures=figures)


DIRECTIONS = Question(
    text="Which gradients flush to zero?",
    title="Directions",
    icon=":material/swap_horiz:",
    help="The forward and backward passes, side by side",
    page="worst",
    view="directions",
    draw=draw,
    link={"metric": "flush_to_zero"},
    report=report,
)
