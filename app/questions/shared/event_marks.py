"""Events of runs as rules in a chart over iterations: what is quantized has changed, a trigger has fired."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import altair as alt
import pandas as pd

from binade.app import style
from binade.data.events import EventKind, read_events

MARKED = (EventKind.SCHEDULE, EventKind.TRIGGER, EventKind.NON_FINITE)
MOST = 50  # rules of a chart


def events_of(runs: Mapping[str, Path]) -> pd.DataFrame:
    """Columns group, iteration, kind, text: the last MOST events of each run's directory, by the run's group."""
    rows = [
        {"group": group, "iteration": event.iteration, "kind": event.kind.value, "text": event.text}
        for group, directory in runs.items()
        for event in [each for each in read_events(directory) if each.kind in MARKED][-MOST:]
    ]
    return pd.DataFrame(rows, columns=["group", "iteration", "kind", "text"])


def rules(events: pd.DataFrame) -> alt.Chart:
    """A rule at each event, to be layered with a chart whose x is the quantitative field "iteration"."""
    tooltip = [
        alt.Tooltip(f"{name}:N", title=title) for name, title in (("group", "run"), ("kind", "event"), ("text", "what"))
    ]
    drawn: alt.Chart = (
        alt.Chart(events)
        .mark_rule(strokeWidth=1.4, strokeDash=[2, 2], color=style.GREY)
        .encode(x="iteration:Q", tooltip=[*tooltip, alt.Tooltip("iteration:Q", title="iteration")])
    )
    return drawn
