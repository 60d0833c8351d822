"""binade watch: follows the runs of a root in a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from binade.terminal import Command, Option, print_text, resolve_root

if TYPE_CHECKING:  # they import pyarrow: --help does not wait for it
    from binade.data.events import Event
    from binade.data.runs import RunInfo, Status

    Seen = dict[str, tuple[Status, str, set[Event]]]

SECONDS = 1.0  # between two checks


def _lines(root: Path, seen: Seen) -> Iterator[str]:
    """What is new since the last call: a line for each event, and for each run that has made progress. seen: the last
    status and line of each run, and the events already shown."""
    from binade.data.events import read_events
    from binade.data.runs import RUNNING, list_runs

    for run in list_runs(root)[0]:
        status, before, shown = seen.get(run.run_id, (None, "", set()))
        events = read_events(run.directory)
        if run.status == status and shown.issuperset(events):
            continue
        if events or run.status.state == RUNNING or before:
            yield from (f"{run.run_id}: {event}" for event in events if event not in shown)
            line = _progress(run, len(events))
            if line != before:
                yield line
            seen[run.run_id] = run.status, line, set(events)


def _progress(run: RunInfo, events: int) -> str:
    status = run.status
    loss = "" if status.loss_last is None else f", loss {status.loss_last:.4f}"
    ended = f", {status.reason}" if status.reason else ""
    return (
        f"{run.run_id}: {status.state.value}, iteration {status.iteration}{loss}, {status.tensors:,} tensors, "
        f"{events} event{'s' * (events != 1)}{_latest(run)}{ended}"
    )


def _latest(run: RunInfo) -> str:
    """The extremes of the last rows; "" for a run without tensors."""
    from binade.data.segment import read_tables

    try:
        if not (segments := run.segments):
            return ""
        table = read_tables(run.directory / "segments" / segments[-1], names=["tensor"])["tensor"]
    except (OSError, ValueError):  # deleted in the meantime, or damaged: the index says so
        return ""
    text = ""
    for column, title, pick in (("sqnr_db", "lowest SQNR (dB)", min), ("absmax", "largest magnitude", max)):
        rows = table.select([column, "layer_index", "module", "tensor_name", "iteration"]).to_pylist()
        known = [row for row in rows if row[column] is not None and math.isfinite(row[column])]
        if known:
            row = pick(known, key=lambda row: row[column])
            where = f"layer{row['layer_index']}.{row['module']} {row['tensor_name']}, iteration {row['iteration']}"
            text += f"; {title} {row[column]:.4g} ({where})"
    return text


def _watch(root: str | None, once: bool, **_: Any) -> None:
    folder = resolve_root(root)
    seen: Seen = {}
    while True:
        for line in _lines(folder, seen):
            print_text(line)
        if once:
            if not seen:
                print_text(f"{folder}: no run is running, and none has events")
            return
        time.sleep(SECONDS)


watch = Command(
    "watch",
    params=[
        click.Argument(["root"], required=False, metavar="[ROOT]"),
        Option(["--once"], is_flag=True, help="Print the events so far and exit"),
    ],
    callback=_watch,
    help="Follow the runs of a root: iterations, losses and events.",
    cancelled="stopped watching",
)
