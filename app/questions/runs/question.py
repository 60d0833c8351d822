"""How did the runs train? The losses of the newest runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from binade.app import style
from binade.app.figure import Drawn, Figure
from binade.app.formatting import losses_of
from binade.app.questions.question import Question, not_in_report
from binade.app.questions.shared import loss_chart
from binade.app.questions.shared.event_marks import events_of, marked
from binade.app.questions.shared.labels import thinned_note
from binade.app.questions.shared.runs import run_colors, runs_with_reference
from binade.app.questions.shared.selection import Selection
from binade.data.catalog import Catalog
from binade.data.filter import Filter


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    """All runs, regardless of the filter."""
    opened = selection.opened
    runs = opened.runs()
    runs = runs[runs["recipe"].notna()]  # an import has no start time and no loss
    latest = runs_with_reference(runs.head(style.MAX_GROUPS), opened.parts())
    found = losses_of(opened, latest["run_id"].tolist())
    labels = dict(zip(latest["run_id"], latest["label"], strict=True))
    after = {run: [record for record in records if record["iteration"] >= 0] for run, records in found.items()}
    warm_up = any(len(after[run]) < len(found[run]) for run in found) and any(after.values())
    found = after if warm_up else found
    table, step = loss_chart.loss_table({labels[run_id]: records for run_id, records in found.items()}, style.MARKS)
    if table.empty:
        return Drawn()
    note = f"Losses of the {len(latest)} newest of {len(runs)} runs." if len(runs) > len(latest) else ""
    height = 380 + style.legend_height(list(dict.fromkeys(table["group"])))
    drawn = " ".join(filter(None, (thinned_note(step), "Warm-up is not drawn." * warm_up)))
    words = f"Data: {len(latest)} runs, from their loss.jsonl. Loss: cross entropy in nats per token. {drawn}".strip()
    events = events_of({labels[run_id]: opened.root / run_id for run_id in found})
    chart = marked(loss_chart.losses(table, run_colors(latest)), events)
    figure = Figure("losses", chart, table, words, note=drawn, height=height)
    return Drawn((figure,), problems=(note,) * bool(note))


def _every(opened: Catalog, where: Filter, run_ids: Collection[str]) -> Iterable[str]:
    return opened.runs()["run_id"]


RUNS = Question(
    text="How did the runs train?",
    title="Runs",
    icon=":material/science:",
    help="What was collected, how it ended, and its loss",
    page="runs",
    view="table",
    draw=draw,
    of_runs=True,
    empty=True,
    beyond=_every,
    layout="binade.app.questions.runs.page",
    report=not_in_report,
)
