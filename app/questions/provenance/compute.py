"""Where the first NaN or Inf of a step appeared, where it spread, and the statistics of the steps before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from binade.data.index.catalog import Catalog
from binade.data.index.run_table import events_of
from binade.data.run.events import Event, EventKind
from binade.data.words.filter import Filter

STEPS = 200  # before the event, that are shown
KEPT = "non_finite_"  # begins the names of the operands and results that were kept


def runs_with_events(opened: Catalog) -> dict[str, list[Event]]:
    """The runs in which one was found, newest first, with these events."""
    runs = {
        run: [event for event in events if event.kind == EventKind.NON_FINITE]
        for run, events in events_of(opened, opened.runs()["run_id"]).items()
    }
    return {run: events for run, events in runs.items() if events}


def of_ranks(events: Sequence[Event]) -> pd.DataFrame:
    """A row per event, the earliest in the order of execution first: rank, order, place, text, reached."""
    rows = [(e.rank, e.order, e.place, e.text.removeprefix(f"{e.place}, "), len(e.chain)) for e in events]
    return pd.DataFrame(rows, columns=["rank", "order", "place", "text", "reached"])


def chain(events: Sequence[Event]) -> pd.DataFrame:
    """For each event, its origin and what it reached, in order: rank, order, place, operation, what."""
    rows = []
    for event in events:
        operation = "backward" if "backward:" in event.text or event.place == "loss" else "forward"
        rows.append((event.rank, event.order, event.place, operation, "produced here"))
        rows += [(event.rank, reached.order, reached.place, reached.operation, "reached") for reached in event.chain]
    return pd.DataFrame(rows, columns=["rank", "order", "place", "operation", "what"])


def before(opened: Catalog, run: str, event: Event) -> tuple[pd.DataFrame, str]:
    """(statistics of the STEPS iterations up to the event by iteration and tensor: those of `Catalog.moments`; a
    description of the tensors: those of the module, else of its layer, else all). Empty if none was measured."""
    where = Filter(run_id=(run,))
    places = [(where, "all layers")]
    if event.layer is not None:
        where = replace(where, layer_index=(event.layer,))
        places.append((where, f"layer {event.layer}"))
        if event.module:
            places.append((replace(where, module=(event.module,)), f"layer {event.layer} {event.module}"))
    for where, name in reversed(places):
        table = opened.moments(where, ("iteration", "tensor_name"))
        table = table[table["iteration"].between(event.iteration - STEPS, event.iteration)]
        table = table[~table["tensor_name"].fillna(KEPT).str.startswith(KEPT)]
        if table["iteration"].nunique() > 1:
            return table.reset_index(drop=True), name
    return pd.DataFrame(), ""


def kept(opened: Catalog, run: str, event: Event) -> pd.DataFrame:
    """The operands and results of the operation that were kept: rows of `Catalog.tensors`."""
    rows = opened.tensors(Filter(run_id=(run,), iteration=(event.iteration,)))
    return rows[rows["tensor_name"].fillna("").str.startswith(KEPT)].reset_index(drop=True)
