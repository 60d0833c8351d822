"""Runs against the bf16 run that saw the same data: which part costs the most loss.

`rungs` makes of runs with several seeds the table of a ladder: an ablation's recipes in order.

Runs are matched by what they have read, see data.same_data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from binade.app.questions.shared.runs import PARTS
from binade.collector.recipes.ladder import Ladder
from binade.collector.recipes.recipe import BF16
from binade.collector.recipes.seeds import judged
from binade.data import evidence
from binade.data.evidence import GAP, Estimate
from binade.data.same_data import closest, equal_warm_up, losses_on_same_data


def loss_gaps(table: pd.DataFrame, losses: dict[str, list[dict[str, Any]]]) -> pd.DataFrame:
    """Each run's loss against its reference's at the same iteration and on the same data, warm-up left out. Of several
    references, the one counts whose losses can be compared at most iterations.

    Columns run_id, label, iteration, loss, gap (nats per token; positive: worse than bf16), equal (whether weights are
    known to be those of the reference). Iterations that the reference does not have, and runs without a reference, are
    left out.
    """

    rows = []
    for _, run in table.iterrows():
        own = losses.get(run["run_id"], [])
        others = [losses[each] for each in run["references"] if each in losses and each != run["run_id"]]
        reference = closest(own, [(each, each) for each in others]) or losses.get(run["reference"], [])
        same = equal_warm_up(own, reference)
        rows += [
            (run["run_id"], run["label"], iteration, loss, loss - other, iteration == 0 and same)
            for iteration, loss, other in losses_on_same_data(own, reference)
        ]
    return pd.DataFrame(rows, columns=["run_id", "label", "iteration", "loss", "gap", "equal"])


def costs(gaps: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """A row per quantized run, largest gap first.

    Columns run_id, label, name, settings, data, parts (what is rounded, in words), gap (mean over the iterations that
    both have), first (in iteration 0, on equal weights; NaN without one), added (the mean over later iterations, minus
    first), last (at the last), iterations, only (the part, where only one is rounded), spec (its format).
    """
    quantized = table[table["quantized"]].set_index("run_id")
    rows = []
    for run_id, part in gaps[gaps["run_id"].isin(quantized.index)].groupby("run_id", sort=False):
        run = quantized.loc[run_id]
        rounded = {name: run[name] for name in PARTS if run[name] not in (None, "bf16")}
        first, later = part.loc[part["equal"], "gap"].mean(), part.loc[part["iteration"] > 0, "gap"].mean()
        last = part.sort_values("iteration")["gap"].iloc[-1]
        only, spec = next(iter(rounded.items())) if len(rounded) == 1 else (None, None)
        row = {"run_id": run_id} | {name: run[name] for name in ("label", "name", "settings", "data")}
        row |= {"parts": ", ".join(f"{name} {fmt}" for name, fmt in rounded.items()), "gap": part["gap"].mean()}
        row |= {"first": first, "added": later - first}
        rows.append(row | {"last": last, "iterations": len(part), "only": only, "spec": spec})
    columns = ["run_id", "label", "name", "settings", "data", "parts", "gap", "first", "added", "last", "iterations"]
    columns += ["only", "spec"]
    return pd.DataFrame(rows, columns=columns).sort_values("gap", ascending=False, ignore_index=True)


@dataclass(frozen=True)
class Recipe:
    """Runs of one recipe and of the same settings: the gap on each data and start (of the newest run), and the part and
    format, if only one part is rounded. label: of the only run, else the recipe's name. first and added: as in `costs`,
    where they are known."""

    label: str
    gaps: dict[Any, float]
    run_id: str
    only: str | None
    spec: str | None
    first: dict[Any, float]
    added: dict[Any, float]

    @property
    def gap(self) -> Estimate:
        return evidence.mean(GAP, self.gaps.values())


def by_recipe(costs: pd.DataFrame) -> list[Recipe]:
    """`costs` by recipe and settings, the largest mean gap first."""
    found = []
    for (name, _), runs in costs.groupby(["name", "settings"], sort=False):
        runs = runs.sort_values("run_id").drop_duplicates("data", keep="last")
        newest = runs.iloc[-1]
        label = newest["label"] if len(runs) == 1 else str(name)
        gaps = dict(zip(runs["data"], runs["gap"], strict=True))
        first, added = (runs.dropna(subset=[name]).set_index("data")[name].to_dict() for name in ("first", "added"))
        found.append(Recipe(label, gaps, newest["run_id"], newest["only"], newest["spec"], first, added))
    return sorted(found, key=lambda recipe: -recipe.gap.value)


LASTING = 3  # iterations in a row, up to the last, for which a gap must differ from 0


def left_at(gaps: pd.DataFrame, table: pd.DataFrame) -> dict[str, int]:
    """The iteration from which the gap of a run's recipe differs from 0 in every iteration up to the last, at 95% over
    its seeds, by run_id. Runs without such an iteration, or of a recipe with a single seed, are left out."""
    runs = table[table["quantized"] & table["reference"].notna()]
    found: dict[str, int] = {}
    for _, own in runs.groupby(["name", "settings"], sort=False):
        newest = own.drop_duplicates("data", keep="last")["run_id"]
        wide = gaps[gaps["run_id"].isin(newest)].pivot_table(index="iteration", columns="run_id", values="gap").dropna()
        if wide.shape[1] < 2 or wide.empty:
            continue
        each = [evidence.mean(GAP, row) for row in wide.to_numpy()]
        inside = [index for index, gap in enumerate(each) if gap.low <= 0 <= gap.high]
        first = inside[-1] + 1 if inside else 0
        if len(each) - first >= LASTING:
            found |= dict.fromkeys(newest, int(wide.index[first]))
    return found


def with_one_seed(table: pd.DataFrame) -> list[str]:
    """The newest run of each recipe and settings that were compared on one seed only, after their reference runs."""
    compared = table[table["quantized"] & table["reference"].notna()]
    groups = [runs for _, runs in compared.groupby(["rounded", "settings"], sort=False)]
    newest = [runs.iloc[-1] for runs in groups if runs["data"].nunique() == 1]
    return list(dict.fromkeys([*(run["reference"] for run in newest), *(run["run_id"] for run in newest)]))


def ladder_runs(table: pd.DataFrame, gaps: pd.DataFrame, ladder: Ladder) -> tuple[pd.DataFrame, int]:
    """(the runs of a ladder except bf16, with column gap: the mean of `loss_gaps`, NaN without a bf16 run; how many of
    its runs are left out). If several runs have the same recipe and seed, the newest counts; of several settings, those
    with the most rungs and, if equal, the newest."""
    own = table[table["recipe"].isin([rung.recipe for rung in ladder.rungs]) & (table["recipe"] != BF16)]
    if own.empty:
        return own.assign(gap=np.nan), 0
    number = {settings: (part["recipe"].nunique(), part.index.max()) for settings, part in own.groupby("settings")}
    found = own[own["settings"] == max(number, key=lambda settings: number[settings])]
    found = found.drop_duplicates(["recipe", "seed"], keep="last")
    found = found.assign(gap=found["run_id"].map(gaps.groupby("run_id")["gap"].mean()))
    return found, len(own) - len(found)


def rungs(runs: pd.DataFrame, ladder: Ladder) -> pd.DataFrame:
    """The runs of `ladder_runs`, a row per rung that was run, in the ladder's order, bf16 first.

    Columns rung (its title), recipe, seeds (with a gap), gap (mean over seeds), deviation (of the seeds), low, high
    (the 95% interval of the mean), change (from the rung that it is compared with, paired by seed), verdict (of the
    change, "" for none), separated (whether it can be told from 0), judged (the change as a Judged).
    """
    gaps = {
        str(recipe): dict(zip(part["seed"], part["gap"], strict=True))
        for recipe, part in runs.dropna(subset="gap").groupby("recipe")
    }
    most = max(map(len, gaps.values()), default=1)
    titles = {rung.recipe: rung.title for rung in ladder.rungs}
    pairs = [(rung.recipe, rung.against) for rung in ladder.rungs]
    rows = []
    for rung, result in zip(ladder.rungs, judged(gaps, pairs, titles), strict=True):
        row: dict[str, Any] = {"rung": rung.title, "recipe": rung.recipe, "seeds": len(gaps.get(rung.recipe, {}))}
        row |= {"verdict": result.verdict, "separated": result.is_apart}
        if rung.recipe == BF16:
            row |= {"seeds": most, "gap": 0.0}
        if own := result.own:
            row |= {"gap": own.value, "deviation": result.deviation, "low": own.low, "high": own.high}
        if result.change:
            row |= {"change": result.change.value, "judged": result}
        rows.append(row)
    columns = ["rung", "recipe", "seeds", "gap", "deviation", "low", "high", "change", "verdict", "separated", "judged"]
    return pd.DataFrame(rows, columns=columns).replace([np.inf, -np.inf], np.nan)
