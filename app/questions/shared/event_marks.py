"""Events of runs as rules in charts over iterations, such as a trigger that has fired."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import events_of
from binade.data.run.events import EventKind

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


def marked(chart: Chart, events: pd.DataFrame, iterations: pd.Series) -> Chart:
    """A chart over these iterations with a rule at each event within them."""
    shown = events[events["iteration"].between(iterations.min(), iterations.max())]
    if shown.empty:
        return chart
    tips = plot.tips(group="run", kind="event", text="what", iteration="iteration")
    rules = plot.mark("rule", shown, x="iteration", color=style.GREY, strokeWidth=1.4, strokeDash=[2, 2], tips=tips)
    return plot.layers(chart.title, "", rules, chart)
