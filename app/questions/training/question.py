"""Does the error grow in training? Any metric by iteration and layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from binade.app import style
from binade.app.figure import Drawn, Figure, source
from binade.app.formatting import losses_of
from binade.app.questions.question import Question
from binade.app.questions.shared import loss_chart
from binade.app.questions.shared.event_marks import with_events
from binade.app.questions.shared.labels import thinned_note
from binade.app.questions.shared.runs import every_run, run_colors
from binade.app.questions.shared.selection import Board
from binade.app.questions.training import charts, compute
from binade.app.report.section import ReportSelection, Section
from binade.data.catalog import Catalog
from binade.data.evidence import Measure
from binade.data.filter import Filter


def draw(board: Board, values: dict[str, Any]) -> Drawn:
    measure = board.measure
    table = compute.training(board.opened, board.where, board.format, measure.key)
    if table.empty:
        return board.nothing
    figure = Figure(
        "training",
        charts.training(table, measure, board.title(" by iteration"), "all tensors of a layer together"),
        table,
        board.caption(f"{len(table):,} points of iteration and layer"),
        note=board.definition,
        hint="Click a point to open its worst tensor.",
        height=420,
        choose="tensor_id",
    )
    answer = Drawn((figure, *_losses(board.opened, board.where)), _training_verdict(table, measure))
    return with_events(answer, board.opened, board.where)


def _training_verdict(table: pd.DataFrame, measure: Measure) -> str:
    iterations = sorted(table["iteration"].unique())
    if len(iterations) < 2:
        return f"The filter selects only iteration {int(iterations[0])}: there is nothing to compare."
    ends = [
        table[table["iteration"] == end].set_index("layer_index")["value"] for end in (iterations[0], iterations[-1])
    ]
    change = (ends[1] - ends[0]).dropna()
    worse = change < 0 if measure.low_is_bad else change > 0
    return (
        f"From iteration {int(iterations[0])} to {int(iterations[-1])}, {measure.label} gets worse in "
        f"{int(worse.sum())} of {len(change)} layers."
    )


def _losses(opened: Catalog, where: Filter) -> list[Figure]:
    """The loss of the filter's runs, over the same iterations."""
    runs = set(opened.facets(where.without("run_id")).get("run_id", []))
    if where.run_id:
        runs &= set(where.run_id)
    table = every_run(opened)
    table = table[table["run_id"].isin(runs)].tail(style.MAX_GROUPS)
    records = losses_of(opened, table["run_id"].tolist())
    labels = dict(zip(table["run_id"], table["label"], strict=True))
    shown, step = loss_chart.loss_table({labels[run_id]: found for run_id, found in records.items()}, style.MARKS)
    if shown.empty:
        return []
    height = 340 + style.legend_height(style.groups_of(shown))
    words = f"{source(where, 'the runs of the filter')}\nLoss: cross entropy in nats per token."
    chart = loss_chart.losses(shown, run_colors(table))
    return [Figure("losses", chart, shown, words, note=thinned_note(step), height=height)]


def report(selection: ReportSelection) -> Iterator[Section]:
    found: dict[str, Figure] = {}
    for board in selection.boards(("sqnr_db",), ("absmax",)):
        for figure in draw(board, {}).figures:
            name = figure.name if figure.name == "losses" else f"{figure.name}_{board.name}"
            found[name] = replace(figure, name=name)
    yield Section("statistics", figures=[*found.values()])


TRAINING = Question(
    text="Does the error grow in training?",
    title="Training",
    icon=":material/timeline:",
    help="Any metric by iteration and layer",
    page="worst",
    view="training",
    draw=draw,
    of_runs=True,
    report=report,
)
