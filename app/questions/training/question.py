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
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.filter import Filter


def draw(board: Board, values: dict[str, Any]) -> Drawn:
    measure, board = board.measure, board.scoped("iteration")
    table = compute.training(board.opened, board.where, board.format, measure.key)
    if table.empty:
        return board.nothing
    figure = Figure(
        "training",
        charts.training(table, measure, board.title(" by iteration"), board.scope),
        table,
        board.caption(f"{len(table):,} points of iteration and layer"),
        note=board.definition,
        hint="Click a point to open its worst tensor.",
        height=420,
        choose="tensor_id",
    )
    places = compute.by_place(board.opened, board.where, board.format, measure.key)
    answer = Drawn((figure, *_losses(board.opened, board.where)), _verdict(places, board))
    return with_events(answer, board.opened, board.where)


def _verdict(table: pd.DataFrame, board: Board) -> evidence.Sentence:
    """table: `compute.by_place`."""
    iterations = sorted(table["iteration"].unique())
    if len(iterations) < 2:
        return evidence.say("Only iteration {at} is selected: there is nothing to compare.", at=int(iterations[0]))
    change = compute.changes(table)
    found: list[str] = []
    if len(change):
        low, middle, high = change.quantile([0.1, 0.5, 0.9])
        row = {"value": middle, "low": low, "high": high, "tensors": len(change)}
        spread = evidence.spread(replace(board.measure, signed=True), row)
        text = "From iteration {first} to {last}, {what} changes by {spread}."
        ends = {"first": int(iterations[0]), "last": int(iterations[-1])}
        found.append(evidence.say(text, what=board.title(), spread=spread, **ends))
    trends = compute.trends(table, board.measure)
    return evidence.together(*found, evidence.trends(trends, board.title(), "over iterations"))


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
