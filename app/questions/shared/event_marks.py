"""Events of runs as rules in charts over iterations, such as a trigger that has fired."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.figure import Chart, Drawn, Figure
from binade.app.questions.shared.runs import every_run
from binade.data.catalog import Catalog
from binade.data.events import EventKind, read_events
from binade.data.filter import Filter

MARKED = (EventKind.TRIGGER, EventKind.WARNING, EventKind.NON_FINITE)
MOST = 50  # rules of a chart
C = TypeVar("C", bound=Chart)


def events_of(runs: Mapping[str, Path]) -> pd.DataFrame:
    """Columns group, iteration, kind, text: the last MOST events of each run's directory, by the run's group."""
    rows = [
        {"group": group, "iteration": event.iteration, "kind": event.kind.value, "text": event.text}
        for group, directory in runs.items()
        for event in [each for each in read_events(directory) if each.kind in MARKED][-MOST:]
    ]
    return pd.DataFrame(rows, columns=["group", "iteration", "kind", "text"])


def events_in(opened: Catalog, where: Filter) -> pd.DataFrame:
    """`events_of` the newest runs that the filter selects."""
    chosen = set(opened.distinct(("run_id",), where)["run_id"])
    runs = every_run(opened)
    newest = runs[runs["run_id"].isin(chosen)].tail(style.MAX_GROUPS)
    return events_of({label: opened.root / run for label, run in zip(newest["label"], newest["run_id"], strict=True)})


def with_events(drawn: Drawn, opened: Catalog, where: Filter) -> Drawn:
    """The answer with the events of the filter's runs in each of its charts over iterations."""
    events = events_in(opened, where)
    items = (
        replace(item, chart=marked(item.chart, events)) if isinstance(item, Figure) else item for item in drawn.items
    )
    return replace(drawn, items=tuple(items))


def marked(chart: C, events: pd.DataFrame, above: bool = False) -> C | alt.LayerChart:
    """A chart whose x is the field "iteration" with a rule at each event within its iterations, or at the next of the
    iterations that it draws, if they are ordinal. Any other chart is returned unchanged. above: whether the
    rules cover the chart."""
    for x, drawn in _iterations(chart):
        found = events[events["iteration"].between(drawn.min(), drawn.max())]
        if x.endswith(":O"):
            found = found.assign(iteration=drawn[np.searchsorted(drawn, found["iteration"])])
        if len(found):
            if isinstance(chart, alt.LayerChart):  # one level: parameters of a nested chart would be set twice
                flat: alt.LayerChart = chart.copy(deep=False)
                first, *others = chart.layer  # Altair names views by their position, which stays
                below = alt.LayerChart(layer=[rules(found, x), first])
                flat.layer = [*chart.layer, rules(found, x)] if above else [below, *others]
                return flat
            own = chart.copy(deep=False)
            own.title = alt.Undefined
            layers = [rules(found, x), own]
            return alt.LayerChart(layer=layers[::-1] if above else layers, title=chart.title)
    return chart


def _iterations(chart: Chart) -> Iterator[tuple[str, np.ndarray]]:
    """The x of the chart's parts that is an iteration, and the iterations in order."""
    for part in getattr(chart, "layer", [chart]):
        data: Any = chart.data if part.data is alt.Undefined else part.data
        if getattr(part, "layer", None):
            yield from _iterations(part)
        elif str(getattr(part.encoding.x, "shorthand", "")).startswith("iteration:"):
            yield part.encoding.x.shorthand, np.unique(data["iteration"])


def rules(events: pd.DataFrame, x: str = "iteration:Q", color: str = style.GREY) -> alt.Chart:
    """A rule at each event, to be layered with a chart of this x."""
    tooltip = [
        alt.Tooltip(f"{name}:N", title=title) for name, title in (("group", "run"), ("kind", "event"), ("text", "what"))
    ]
    result: alt.Chart = (
        alt.Chart(events)
        .mark_rule(strokeWidth=1.4, strokeDash=[2, 2], color=color)
        .encode(x=x, tooltip=[*tooltip, alt.Tooltip("iteration:Q", title="iteration")])
    )
    return result
