"""Does the error grow with depth? Any metric by tensor and layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from binade.app.figure import Drawn, Figure
from binade.app.questions.depth import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared.selection import Board
from binade.app.report.section import OF_VALUES, ReportSelection, Section
from binade.data.evidence import Measure


def draw(board: Board, values: dict[str, Any]) -> Drawn:
    measure = board.measure
    table = compute.depth(board.opened, board.where, board.format, measure.key)
    if table.empty:
        return board.nothing
    figure = Figure(
        "depth",
        charts.depth(table, measure, board.title(" by layer and tensor"), board.POOLED),
        table,
        board.caption(f"{len(table):,} cells of layer and tensor"),
        note=f"{board.definition} Brighter cells are worse.",
        hint="Click a cell to open its worst tensor.",
        height=charts.depth_height(table),
        choose="tensor_id",
    )
    return Drawn((figure,), _depth_verdict(table, measure))


def _depth_verdict(table: pd.DataFrame, measure: Measure) -> str:
    layers = table["layer_index"].nunique()
    change = compute.slope(table)
    if layers > 1 and not change.empty:
        worse = change["change"] < 0 if measure.low_is_bad else change["change"] > 0
        first, last = int(table["layer_index"].min()), int(table["layer_index"].max())
        return f"{int(worse.sum())} of {len(change)} tensors are worse in layer {last} than in layer {first}."
    return "The filter selects only one layer: there is nothing to compare." if layers == 1 else ""


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
