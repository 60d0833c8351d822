"""The runs of the page Runs in groups: a recipe over its seeds, of one model and data. No Streamlit here."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from binade.app.questions.shared.runs import every_run, with_plain_runs
from binade.data.compare.comparison import Comparison, compare
from binade.data.compare.same_data import window_of
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import losses_of, references_in
from binade.quant.formats import BF16

Records = Sequence[Mapping[str, Any]]
MOST_LINES = 16  # of a chart for which nothing is chosen


@dataclass(frozen=True)
class RunGroup:
    """Runs of one workload and settings that have one name: a recipe over its seeds.

    key   a short hash of what they have in common, for the address
    runs  their run_ids, oldest first
    look  color and dash of its first run
    is_plain  whether it is bf16
    """

    key: str
    workload: str
    name: str
    runs: tuple[str, ...]
    look: tuple[str, int]
    is_plain: bool


def groups_of(opened: Catalog) -> list[RunGroup]:
    """The groups of all runs, the workload of the newest run first, bf16 first in each."""

    def read() -> list[RunGroup]:
        table = every_run(opened)
        found = []
        for workload in dict.fromkeys(table["workload"][::-1]):
            own = table[table["workload"] == workload]
            parts = [part for _, part in own.groupby(["group", "settings"], sort=False)]
            made = [
                RunGroup(
                    hashlib.sha256(repr((workload, run["group"], run["settings"])).encode()).hexdigest()[:8],
                    workload, str(run["group"]), tuple(part["run_id"]), part["look"].iloc[0],
                    bool(run["recipe"] == BF16 and not run["quantized"]),
                )
                for part in parts
                for run in (part.iloc[-1],)
            ]  # fmt: skip
            found += sorted(made, key=lambda group: (not group.is_plain, group.name in group.runs, group.name))
        return found

    groups: list[RunGroup] = opened.kept(("groups of runs", opened.state()), read)
    return groups


def compared_runs(opened: Catalog) -> tuple[Comparison, Mapping[str, Records]]:
    """(all runs compared with their bf16 runs, their losses by run_id), computed once while no run goes on."""

    def compute() -> tuple[Comparison, Mapping[str, Records]]:
        table = with_plain_runs(opened, every_run(opened))
        losses = losses_of(opened, table["run_id"], lost=True)
        return compare(table, losses), losses

    found: tuple[Comparison, Mapping[str, Records]] = opened.kept(("runs compared", opened.progress), compute)
    return found


@dataclass(frozen=True)
class Line:
    """A line of the chart: a group, or one run. runs: those that it is the mean of; short: runs that ended earlier."""

    name: str
    workload: str
    runs: tuple[str, ...]
    look: tuple[str, int]
    short: tuple[str, ...] = ()


def lines_of(
    opened: Catalog, chosen: Collection[str], hidden: Collection[str], within: Collection[str]
) -> tuple[list[Line], int]:
    """(the lines of what is chosen, with bf16 of the same data; how many groups are left out). chosen: keys of groups
    and run_ids, hidden: those that are not drawn; within: the runs of the filter. If nothing is chosen, the groups of
    the newest run's model and data."""
    compared, losses = compared_runs(opened)
    table = compared.table.set_index("run_id")
    trained = [run_id for run_id in table.index if run_id in within and losses.get(run_id)]
    groups = {group.key: group for group in groups_of(opened)}
    of_run = {run_id: group for group in groups.values() for run_id in group.runs}
    units: list[tuple[RunGroup, tuple[str, ...]]] = []
    if not chosen and trained:
        workload = of_run[trained[-1]].workload
        chosen = [group.key for group in groups.values() if group.workload == workload]
    for key in dict.fromkeys(chosen):
        runs = groups[key].runs if key in groups else (key,)
        if kept := tuple(run for run in runs if run in trained and run not in hidden):
            group = groups.get(key) or of_run[key]
            if group.key not in hidden:
                units.append((group, kept))
    plain = references_in(compared.table[compared.table["run_id"].isin([run for _, runs in units for run in runs])])
    drawn = {group.key for group, _ in units}
    for group in {of_run[run].key: of_run[run] for run in plain if run in of_run}.values():
        if group.key not in drawn and (kept := tuple(run for run in group.runs if losses.get(run))):
            units.append((group, kept))
    left_out = max(0, len(units) - MOST_LINES) if not chosen else 0
    several = len({group.workload for group, _ in units}) > 1
    lines = []
    seeds = dict(zip(compared.table["run_id"], compared.table["seed"], strict=True))
    for group, runs in units:
        longest, short = whole(runs, losses, seeds)
        alone = len(runs) == 1 and len(group.runs) > 1
        name = f"{group.name} · seed {seeds[runs[0]]}" if alone else group.name
        lines.append(
            Line(f"{name} · {group.workload}" if several else name, group.workload, longest, group.look, short)
        )
    return _distinct(lines), left_out


def left_at(compared: Comparison, runs: Collection[str]) -> int | None:
    """The iteration at which the recipe of these runs leaves bf16. None if it does not, if that is unknown, and if
    these are only some of the runs that the recipe is compared by."""
    of_recipe = (recipe.run_id for recipe in compared.recipes if {*recipe.runs} <= {*runs})
    return compared.left.get(next(of_recipe, ""))


def whole(
    runs: Iterable[str], losses: Mapping[str, Records], seeds: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(of each seed the newest run that trained as long as any, runs that ended earlier)."""
    ends = {run: losses[run][-1]["iteration"] for run in runs}
    last = max(ends.values(), default=0)
    newest = {seeds[run]: run for run, end in ends.items() if end == last}
    return tuple(newest.values()), tuple(run for run, end in ends.items() if end < last)


def _distinct(lines: list[Line]) -> list[Line]:
    """The lines, of which those of one name have a number."""
    names, made = [line.name for line in lines], []
    for at, line in enumerate(lines):
        count = names[:at].count(line.name)
        made.append(Line(f"{line.name} ({count + 1})" if count else line.name, *_rest(line)))
    return made


def _rest(line: Line) -> tuple[str, tuple[str, ...], tuple[str, int], tuple[str, ...]]:
    return line.workload, line.runs, line.look, line.short


def over_seeds(records: Sequence[Records]) -> pd.DataFrame:
    """The mean loss of several runs at the iterations at which all have a line of the same window, and the lowest and
    the highest: columns iteration, loss, low, high; NaN from where a loss is not finite. Of one run, its losses."""
    if len(records) == 1:
        rows = [(record["iteration"], record["loss"]) for record in records[0]]
        return pd.DataFrame(rows, columns=["iteration", "loss"]).astype({"loss": float})
    windows = [{record["iteration"]: window_of(record) for record in steps} for steps in records]
    at = sorted(
        iteration for iteration in set.intersection(*map(set, windows)) if len({own[iteration] for own in windows}) == 1
    )
    lines = [{record["iteration"]: record["loss"] for record in steps} for steps in records]
    values = np.array([[line[iteration] for iteration in at] for line in lines], float).reshape(len(lines), len(at))
    found = {"iteration": at, "loss": values.mean(axis=0), "low": values.min(axis=0), "high": values.max(axis=0)}
    return pd.DataFrame(found)
