"""Which gradients flush to zero? Forward and backward, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from binade.app.figure import Drawn, Figure, Text
from binade.app.questions.directions import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.ranking import charts as ranking_charts
from binade.app.questions.shared import board_charts
from binade.app.questions.shared.selection import Board
from binade.app.report.section import ReportSelection, Section


def draw(board: Board, values: dict[str, Any]) -> Drawn:
    measure = board.measure
    table = compute.directions(board.opened, board.where, board.format, measure.key)
    if table.empty:
        return board.nothing
    by_operation = compute.direction_totals(board.opened, board.where, board.format, measure.key)
    totals = by_operation.set_index("operation")["value"]
    parts = [f"{name} {measure.quantity(totals[name])}" for name in ("forward", "backward") if name in totals]
    worst = table[table["operation"] == "backward"].head(1)
    words = f"{measure.label}: {', '.join(parts)}."
    if not worst.empty:
        words += f" Worst in the backward pass: {worst['row'].iloc[0]} ({measure.quantity(worst['value'].iloc[0])})."
    figures: list[Figure] = []
    problems = []
    for operation in ("forward", "backward"):
        part = table[table["operation"] == operation]
        if part.empty:
            problems.append(f"The filter selects no {operation} operand.")
            continue
        figure = Figure(
            f"direction_{operation}",
            charts.direction(table, measure, operation, f"{len(part)} tensors · {board.POOLED}"),
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
    return Drawn((*figures, note), words, tuple(problems))


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
