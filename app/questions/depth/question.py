"""Does the error grow with depth? Any metric by tensor and layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from binade.app.figure import Drawn, Figure
from binade.app.questions.depth import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared.selection import Board
from binade.app.report.section import OF_VALUES, ReportSelection, Section
from binade.data import evidence


def draw(board: Board, values: dict[str, Any]) -> Drawn:
    measure, board = board.measure, board.scoped()
    table = compute.depth(board.opened, board.where, board.format, measure.key)
    if table.empty:
        return board.nothing
    figure = Figure(
        "depth",
        charts.depth(table, measure, board.title(" by layer and tensor"), board.scope),
        table,
        board.caption(f"{len(table):,} cells of layer and tensor"),
        note=f"{board.definition} Brighter cells are worse.",
        hint="Click a cell to open its worst tensor.",
        height=charts.depth_height(table),
        choose="tensor_id",
    )
    return Drawn((figure,), evidence.trends(compute.trends(table, measure), board.title(), "with depth"))


def report(selection: ReportSelection) -> Iterator[Section]:
    figures = []
    for board in selection.boards(("sqnr_db", "flush_to_zero", "saturated"), OF_VALUES):
        drawn = draw(board, {}).figures
        if board.measure.key != "saturated" or any((figure.table["value"] > 0).any() for figure in drawn):
            figures += [replace(figure, name=board.name) for figure in drawn]
    yield Section("heatmaps", figures=figures)


DEPTH = Question(
    text="Does the error grow with depth?",
    title="Depth",
    icon=":material/layers:",
    help="Any metric by tensor and layer",
    page="worst",
    view="depth",
    draw=draw,
    report=report,
)
