"""Events of runs as rules in charts over iterations, such as a trigger that has fired."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart, Drawn, Figure
from binade.app.questions.shared.runs import every_run
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import events_of
from binade.data.run.events import EventKind
from binade.data.words.filter import Filter

MARKED = (EventKind.TRIGGER, EventKind.WARNING, EventKind.NON_FINITE)
MOST = 50  # rules of a chart


def marked_events(opened: Catalog, groups: Mapping[str, str]) -> pd.DataFrame:
    """Columns group, iteration, kind, text: the last MOST events of each run. groups: the run of each group."""
    events = events_of(opened, groups.values())
    rows = [
        {"group": group, "iteration": event.iteration, "kind": event.kind.value, "text": event.text}
        for group, run_id in groups.items()
        for event in [entry for entry in events[run_id] if entry.kind in MARKED][-MOST:]
    ]
    return pd.DataFrame(rows, columns=["group", "iteration", "kind", "text"])


def events_in(opened: Catalog, where: Filter) -> pd.DataFrame:
    """`marked_events` of the newest runs that the filter selects."""
    chosen = set(opened.distinct(("run_id",), where)["run_id"])
    runs = every_run(opened)
    newest = runs[runs["run_id"].isin(chosen)].tail(style.MAX_GROUPS)
    return marked_events(opened, dict(zip(newest["label"], newest["run_id"], strict=True)))


def with_events(drawn: Drawn, opened: Catalog, where: Filter) -> Drawn:
    """The answer with the events of the filter's runs in each of its charts over iterations."""
    events = events_in(opened, where)
    items = (
        replace(item, chart=marked(item.chart, events)) if isinstance(item, Figure) else item for item in drawn.items
    )
    return replace(drawn, items=tuple(items))


def marked(chart: Chart, events: pd.DataFrame) -> Chart:
    """A chart whose x is the field "iteration" with a rule at each event within its iterations, or at the next of the
    iterations that it draws, if they are ordinal. Any other chart is returned unchanged."""
    x, values = plot.along_x(chart, "iteration")
    shown = events[events["iteration"].between(min(values, default=0), max(values, default=-1))]
    if shown.empty:
        return chart
    if x.endswith(":O"):
        drawn = np.unique(values)
        shown = shown.assign(iteration=drawn[np.searchsorted(drawn, shown["iteration"])])
    tips = plot.tips(group="run", kind="event", text="what", iteration="iteration")
    rules = plot.mark("rule", shown, x=x, color=style.GREY, strokeWidth=1.4, strokeDash=[2, 2], tips=tips)
    return plot.layers(chart.title, "", rules, chart)
