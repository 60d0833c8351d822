"""Which tensors suffer most? A ranked board over layer, module, operation and tensor."""

from __future__ import annotations

from typing import Any

from binade.app.figure import Drawn, Figure
from binade.app.questions.question import Question
from binade.app.questions.ranking import charts, compute
from binade.app.questions.shared import board_charts
from binade.app.questions.shared.selection import Board


def draw(board: Board, values: dict[str, Any]) -> Drawn:
    measure = board.measure
    table = compute.ranking(board.opened, board.where, board.format, measure.key)
    if table.empty:
        return board.nothing
    worst = table.iloc[0]
    verdict = f"{worst['place']} suffers most: {measure.label} {measure.quantity(worst['value'])}."
    title = board.title(", worst first")
    subtitle = f"{min(len(table), board_charts.BARS)} of {len(table):,} places · {board.POOLED}"
    figure = Figure(
        "ranking",
        charts.ranking(table, measure, title, subtitle),
        table,
        board.caption(f"{len(table):,} places (layer, module, operation, tensor)"),
        note=board.definition,
        hint="Choose a bar to look into its worst tensor.",
        height=charts.ranking_height(table),
        choose="tensor_id",
    )
    return Drawn((figure,), verdict)


RANKING = Question(
    text="Which tensors suffer most?",
    title="Ranking",
    icon=":material/leaderboard:",
    help="A ranked board over layer, module, operation and tensor",
    page="worst",
    view="board",
    draw=draw,
    layout="binade.app.questions.ranking.view",
    in_report=False,  # report/contents.py places its figures
)
