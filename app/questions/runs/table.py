"""What the table of runs shows, as JSON: workloads, their groups of runs, and their columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pandas as pd

from binade.app.questions.cost.compute import titles
from binade.app.questions.runs.groups import Records, RunGroup, compared_runs, groups_of, left_at, whole
from binade.app.questions.shared.runs import every_run
from binade.data.compare.evidence import GAP
from binade.data.compare.loss_gaps import RecipeRuns, by_recipe
from binade.data.compare.outcomes import DEFINITION, Outcome
from binade.data.compare.same_data import NATS, states_all
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import events_of
from binade.data.run.directory import IMPORT
from binade.data.run.events import Event, EventKind
from binade.data.run.experiment import EXPERIMENT
from binade.data.words.text import counted, number_text

SPARKS = 40  # points of a small line in the table
LAST = 10**9  # the place of an event of no iteration among those that have one
STATES = {
    "queued": "◔ queued", "running": "● running", "done": "✓ done",
    "failed": "✕ failed", "cancelled": "◌ cancelled", "crashed": "✕ crashed",
}  # fmt: skip
DAMAGED = "damaged"  # of a run that cannot be read, in place of its state
BAD = ("failed", "crashed", DAMAGED)
ORIGINS = {
    IMPORT: ("upload_file", "Imported"), EXPERIMENT: ("straighten", "What rounding costs: measured effects or parity"),
}  # fmt: skip
INSTRUMENTED = ("integration_instructions", "Instrumented: your own training")


@dataclass(frozen=True)
class RunColumn:
    """title, help: of its head; number: whether its cells are numbers; always: whether it is shown unless users choose
    other columns, though all runs have the same value."""

    title: str
    help: str = ""
    number: bool = False
    always: bool = False


COLUMNS = {
    "state": RunColumn("State", "How the runs ended", always=True),
    "event": RunColumn("First event", f"The first NaN, where it diverged ({DEFINITION}), where it ended early, or "
                         "where the recipe leaves bf16; a link to the first NaN or to Difference"),
    "gap": RunColumn("Gap to bf16", "Mean loss minus that of the bf16 run on the same data, over the iterations that "
                       "both have, in nats per token; of a group the mean over seeds, of the newest run of each, if "
                       "none lost its loss for good", number=True, always=True),
    "interval": RunColumn("95% interval", "Of the mean gap, over seeds (Student’s t)", number=True),
    "loss": RunColumn("Last loss", "The last finite one; of a group the mean over the seeds that trained longest, if "
                        "all are finite. In nats per token unless its unit says otherwise", number=True, always=True),
    "iterations": RunColumn("Iterations", "The last one that was trained", number=True),
    "course": RunColumn("Loss", "Of the run, or of the newest run of the group"),
    "unit": RunColumn("Unit of the loss", "Where it is not nats per token. Such losses are not compared"),
    "branch": RunColumn("Branch of", "The run whose checkpoint it starts from"),
    "started": RunColumn("Started (UTC)", "Of a group, its newest run"),
    "seconds": RunColumn("Time (s)", "", number=True),
    "tensors": RunColumn("Tensors", "", number=True),
    "megabytes": RunColumn("Tensor files (MB)", "", number=True),
    "backend": RunColumn("Quantized by"),
    "device": RunColumn("Device"),
    "note": RunColumn("Note"),
    "run": RunColumn("Directory"),
}  # fmt: skip
USUAL = ("state", "event", "gap", "interval", "loss", "iterations", "course", "unit", "branch", "started", "note")
"""The columns that are shown by default where they carry information."""
Cell = list[Any]  # text, what it is sorted by, look, link
Row = Mapping[str, Any]


def data_of(opened: Catalog, runs: pd.DataFrame) -> dict[str, Any]:
    """The table of these rows of `Catalog.runs`."""
    compared, losses = compared_runs(opened)
    named: dict[str, Row] = _by_run(every_run(opened))
    described: dict[str, Row] = _by_run(runs)
    outcomes = dict(zip(compared.table["run_id"], compared.table["outcome"], strict=True))
    costs = _by_run(compared.costs[["run_id", "gap", "ended"]])
    firsts = compared.gaps.drop_duplicates("run_id")
    runs_with_tensors = opened.runs().query("tensors > 0")["run_id"]
    firsts = firsts[firsts["run_id"].isin(runs_with_tensors) & firsts["reference"].isin(runs_with_tensors)]
    references: dict[str, str] = dict(zip(firsts["run_id"], firsts["reference"], strict=True))  # for Difference
    cells: dict[str, dict[str, Cell]] = {}
    events = events_of(opened, described)
    for run_id, run in described.items():
        cost = costs.get(run_id)
        event = _event(events[run_id], run_id, run, outcomes.get(run_id), cost, references.get(run_id))
        cells[run_id] = _cells(run_id, run, event, cost, losses.get(run_id, ()), named.get(run_id))
    own = compared.costs[compared.costs["run_id"].isin(cells)]
    measurements = titles(opened)
    recipes = {run: recipe for recipe in by_recipe(own, compared.table["run_id"].tolist()) for run in recipe.runs}
    seeds = dict(zip(compared.table["run_id"], compared.table["seed"], strict=True))
    workloads: dict[str, list[dict[str, Any]]] = {}
    for group in _with_damaged(groups_of(opened), described):
        inside = [run_id for run_id in group.runs if run_id in cells]
        if inside:
            rows = _rows(group, inside, described, named, cells)
            row = _of_group(group, inside, rows, cells)
            if measurement := measurements.get(inside[-1]):
                row |= _of_measurement(inside[-1], measurement)
            if len(inside) > 1:
                recipe = next((recipes[run_id] for run_id in inside if run_id in recipes), None)
                row["cells"] |= _gap_of(recipe) | _last_loss(inside, losses, seeds)
            if (left := left_at(compared, inside)) is not None:
                row["cells"]["event"] = _with_left(left, row["cells"].get("event"), inside, references)
            workloads.setdefault(group.workload, []).append(row)
    columns = _informative(cells)
    if any("interval" in row["cells"] for rows in workloads.values() for row in rows):
        columns.add("interval")
    return {
        "workloads": [{"name": name, "groups": groups} for name, groups in workloads.items()],
        "columns": [{"name": name} | vars(COLUMNS[name]) for name in COLUMNS if name in columns],
        "usual": [name for name in USUAL if name in columns],
    }


def _by_run(table: pd.DataFrame) -> dict[str, Row]:
    """The rows of a table by their run_id, without the others' index."""
    return {str(row["run_id"]): {str(name): value for name, value in row.items()} for row in table.to_dict("records")}


def _is_known(value: object) -> bool:
    return not pd.isna(value)  # type: ignore[call-overload]


def _with_damaged(groups: Sequence[RunGroup], runs: Mapping[str, Row]) -> list[RunGroup]:
    """The groups, and one for each run that cannot be read."""
    damaged = [run_id for run_id, run in runs.items() if _is_known(run["damage"])]
    known = {run for group in groups for run in group.runs}
    return [
        *groups,
        *(RunGroup(run, "Damaged", run, (run,), ("#888888", 0), False) for run in damaged if run not in known),
    ]


def _informative(cells: Mapping[Any, Mapping[str, Cell]]) -> set[str]:
    """The columns in which runs differ."""
    found = {name for name, column in COLUMNS.items() if column.always}
    for name in COLUMNS:
        values = [repr(own[name][0]) for own in cells.values() if name in own]
        if values and (len({*values}) > 1 or len(values) < len(cells)):
            found.add(name)
    return found


def _cells(
    run_id: str,
    run: Row,
    event: Cell | None,
    cost: Row | None,
    records: Sequence[Mapping[str, Any]],
    known: Row | None,
) -> dict[str, Cell]:
    """The cells of a run that are known, by column."""
    state: str = DAMAGED if _is_known(run["damage"]) else str(run["state"])
    config = json.loads(run["config"] or "{}")
    values = [record["loss"] for record in records]
    cells: dict[str, Cell] = {"state": [STATES.get(state, f"✕ {state}"), state, "bad" if state in BAD else ""]}
    if event:
        cells["event"] = event
    if values:
        step = -(-len(values) // SPARKS)
        cells["course"] = [[None if loss is None else round(loss, 4) for loss in values[::step]], len(values)]
        cells["iterations"] = [f"{records[-1]['iteration'] + 1:,}", records[-1]["iteration"] + 1]
    if _is_known(run["loss_last"]):
        cells["loss"] = [number_text(float(run["loss_last"]), ".4f"), float(run["loss_last"])]
    if cost is not None and _is_known(cost["gap"]):
        cells["gap"] = [GAP.text(float(cost["gap"])), float(cost["gap"])]
    if known is not None and known["unit"] != NATS:
        cells["unit"] = [str(known["unit"])]
    if known is not None and _is_known(known["branch_of"]):
        cells["branch"] = [f"{known['branch_of']} from iteration {known['branched']:.0f}"]
    if _is_known(run["started"]):
        cells["started"] = [f"{run['started']:%Y-%m-%d %H:%M:%S}", run["started"].timestamp()]
    seconds = (run["finished"] - run["started"]).total_seconds() if _is_known(run["finished"]) else math.nan
    numbers: dict[str, tuple[Any, str]] = {
        "seconds": (seconds, ".1f"),
        "tensors": (run["tensors"], "d"),
        "megabytes": (run["bytes"] / 1e6, ".1f"),
    }
    for name, (number, form) in numbers.items():
        if _is_known(number) and (name != "seconds" or config.get("kind") != IMPORT):
            cells[name] = [number_text(float(number), form), float(number)]
    texts = {"backend": run["backend"], "device": config.get("device"), "note": run["note"], "run": run_id}
    return cells | {name: [str(text)] for name, text in texts.items() if _is_known(text) and text}


def _event(
    events: Sequence[Event],
    run_id: str,
    run: Row,
    outcome: Outcome | None,
    cost: Row | None,
    reference: str | None,
) -> Cell | None:
    """The first thing that happened to a run: [text, iteration, look, link]."""
    found = [event for event in events if event.kind == EventKind.NON_FINITE]
    if found:
        at = found[0].iteration
        link = {"view": "provenance", "run": run_id, "help": f"{found[0].text}. Open First NaN"}
        return [f"NaN at {at}", at, "bad", link]
    difference = reference and {"view": "difference", "run_a": reference, "run_b": run_id, "help": "Open Difference"}
    if outcome is not None and outcome.diverged is not None:
        return [f"diverged at {outcome.diverged}", outcome.diverged, "bad", difference]
    if _is_known(run["damage"]) or _is_known(run["reason"]):
        return [str(run["damage"] if _is_known(run["damage"]) else run["reason"]), LAST, "bad"]
    if cost is not None and outcome is not None and cost["ended"]:
        return [f"ended at {outcome.last}", outcome.last, "", difference]
    return None


def _rows(
    group: RunGroup,
    inside: Sequence[str],
    runs: Mapping[str, Row],
    named: Mapping[str, Row],
    cells: Mapping[str, dict[str, Cell]],
) -> list[dict[str, Any]]:
    """The rows of the runs of a group, whose names are what differs among them."""
    found = []
    configs = [json.loads(runs[run_id]["config"] or "{}") for run_id in inside]
    names = names_within(configs, [runs[run_id]["started"] for run_id in inside])
    for run_id, name, config in zip(inside, names, configs, strict=True):
        own = cells[run_id]
        texts = [group.name, name, run_id, group.workload]
        texts += [str(own[key][0]) for key in ("state", "event", "note") if key in own]
        color = named[run_id]["look"][0] if run_id in named else "#888888"
        found.append({
            "id": run_id, "name": name, "title": run_id, "color": color, "cells": own, "origin": _origin(config),
            "find": " ".join(texts).lower(),
        })  # fmt: skip
    return found


def names_within(configs: Sequence[Mapping[str, Any]], started: Sequence[Any]) -> list[str]:
    """Names of the runs of a group, from run.json and the time of their start: the seed, the parallel layout where
    seeds are repeated, and the time where that is the same."""
    names = [f"seed {config['seed']}" if config.get("seed") is not None else "seed unknown" for config in configs]
    for setting in ("tp", "dp", "device"):
        texts = [f"{setting} {config.get(setting) or 1}" for config in configs]
        if len({*names}) < len(names) and len({*texts}) > 1:
            names = [f"{name} · {text}" for name, text in zip(names, texts, strict=True)]
    times = [f"{time:%m-%d %H:%M:%S}" if _is_known(time) else "" for time in started]
    return [f"{name} · {time}" if names.count(name) > 1 else name for name, time in zip(names, times, strict=True)]


def _origin(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """The icon and the tooltip of where a run is from; None for one of `binade run`."""
    if (kind := config.get("kind")) in ORIGINS:
        icon, text = ORIGINS[kind]
        source = config.get("source")
        return icon, f"{text} from {source}" if source else text
    return None if "run_config" in config or states_all(config) else INSTRUMENTED


def _of_group(
    group: RunGroup,
    inside: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    cells: Mapping[str, dict[str, Cell]],
) -> dict[str, Any]:
    """The row of a group: of its only run, or what its runs have in common."""
    own = [cells[run_id] for run_id in inside]
    newest = dict(own[-1])
    if len(inside) > 1:
        newest = {name: newest[name] for name in ("course", "started") if name in newest} | _together(own)
    origins = {row["origin"] for row in rows}
    name = group.name if group.name != inside[-1] or not rows[-1]["origin"] else rows[-1]["origin"][1]
    return {
        "id": group.key, "name": name, "title": f"{group.name}, {counted(len(inside), 'run')}",
        "color": group.look[0], "cells": newest, "origin": origins.pop() if len(origins) == 1 else None,
        "find": f"{group.name} {group.workload}".lower() + (f" {rows[0]['find']}" if len(rows) == 1 else ""),
        "runs": list(rows),
    }  # fmt: skip


def _together(own: Sequence[Mapping[str, Cell]]) -> dict[str, Cell]:
    """The cells of several runs."""
    states: dict[str, int] = {}
    for cells in own:
        states[cells["state"][0]] = states.get(cells["state"][0], 0) + 1
    text = ", ".join(f"{count} {state.split(' ', 1)[-1]}" for state, count in states.items())
    found: dict[str, Cell] = {"state": [text, text]}
    events = sorted((cells["event"] for cells in own if "event" in cells), key=lambda event: event[1])
    if events:
        more = f" and {len(events) - 1} more" if len(events) > 1 else ""
        found["event"] = [f"{events[0][0]}{more}", *events[0][1:]]
    for name, add in (("iterations", max), ("tensors", sum), ("megabytes", sum), ("seconds", sum)):
        if numbers := _numbers(own, name):
            total = float(add(numbers))
            found[name] = [number_text(total, ".1f" if name in ("megabytes", "seconds") else "d"), total]
    for name in ("backend", "device", "unit"):
        texts = {cells[name][0] for cells in own if name in cells}
        if len(texts) == 1:
            found[name] = [texts.pop()]
    return found


def _of_measurement(run_id: str, title: str) -> dict[str, Any]:
    """What the row of a run shows that is a measurement and no training: its title, as What rounding costs has it."""
    link = {"view": "cost", "measured": run_id, "help": f"{title}: open What rounding costs"}
    return {"name": title, "title": title, "find": title.lower(), "link": link}


def _gap_of(recipe: RecipeRuns | None) -> dict[str, Cell]:
    """The gap and the interval of a recipe, as Recipes has them: none if a run of it has lost its loss for good."""
    if recipe is None or math.isnan(recipe.gap.value):
        return {}
    gap = recipe.gap
    found: dict[str, Cell] = {"gap": [GAP.text(gap.value), gap.value]}
    if gap.n > 1:
        found["interval"] = [f"{GAP.text(gap.low)} to {GAP.text(gap.high)}", gap.low]
    return found


def _last_loss(inside: Sequence[str], losses: Mapping[str, Records], seeds: Mapping[str, str]) -> dict[str, Cell]:
    """The mean of the last losses of the runs that the line of the group is of."""
    runs, _ = whole([run_id for run_id in inside if losses.get(run_id)], losses, seeds)
    last = [losses[run_id][-1]["loss"] for run_id in runs]
    return {} if not last or None in last else {"loss": [number_text(fmean(last), ".4f"), fmean(last)]}


def _with_left(left: int, first: Cell | None, inside: Sequence[str], references: Mapping[str, str]) -> Cell:
    """The first event of a group that leaves bf16. A run that diverges leaves it then at the latest. references: the
    bf16 runs of those that Difference can compare with one."""
    if first is not None and first[1] <= left:
        return first
    run_id = next((run_id for run_id in reversed(inside) if run_id in references), None)
    link = run_id and {"view": "difference", "run_a": references[run_id], "run_b": run_id, "help": "Open Difference"}
    return [f"leaves bf16 at {left}{f'; {first[0]}' if first else ''}", left, "", link]


def _numbers(own: Iterable[Mapping[str, Cell]], name: str) -> list[float]:
    return [cells[name][1] for cells in own if name in cells]
