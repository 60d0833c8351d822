"""Runs: the loss of the newest runs."""

from __future__ import annotations

from typing import Any

from binade.app import style
from binade.app.figure import Drawn, Figure
from binade.app.formatting import losses_of
from binade.app.params import Param
from binade.app.questions.shared import loss_chart
from binade.app.questions.shared.event_marks import events_of, marked
from binade.app.questions.shared.labels import thinned_note
from binade.app.questions.shared.runs import run_colors, runs_with_reference
from binade.app.questions.shared.selection import Selection
from binade.data.catalog import Catalog


def params(opened: Catalog) -> dict[str, Param]:
    return {}


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    """All runs, regardless of the filter."""
    opened = selection.opened
    runs = opened.runs()
    runs = runs[runs["recipe"].notna()]  # an import has no start time and no loss
    latest = runs_with_reference(runs.head(style.MAX_GROUPS), opened.parts())
    found = losses_of(opened, latest["run_id"].tolist())
    labels = dict(zip(latest["run_id"], latest["label"], strict=True))
    table, step = loss_chart.loss_table({labels[run_id]: records for run_id, records in found.items()}, style.MARKS)
    if table.empty:
        return Drawn()
    note = f"Losses of the {len(latest)} newest of {len(runs)} runs." if len(runs) > len(latest) else ""
    height = 380 + style.legend_height(list(dict.fromkeys(table["group"])))
    drawn = thinned_note(step)
    words = f"Data: {len(latest)} runs, from their loss.jsonl. Loss: cross entropy in nats per token. {drawn}".strip()
    events = events_of({labels[run_id]: opened.root / run_id for run_id in found})
    chart = marked(loss_chart.losses(table, run_colors(latest)), events)
    figure = Figure("losses", chart, table, words, note=drawn, height=height)
    return Drawn((figure,), problems=(note,) * bool(note))
