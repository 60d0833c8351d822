"""Runs against the bf16 run that saw the same data: which part costs the most loss.

`rungs` makes of runs with several seeds the table of a ladder: an ablation's recipes in order.

Runs are matched by what they have read, see data.same_data.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from binade.app.questions.shared.runs import PARTS
from binade.collector.recipes.ladder import Ladder
from binade.collector.recipes.recipe import BF16
from binade.collector.recipes.spread import Spread, no_gap, verdict
from binade.data.same_data import same_data


def loss_gaps(table: pd.DataFrame, losses: dict[str, list[dict[str, Any]]]) -> pd.DataFrame:
    """Each run's loss against its reference's at the same iteration and on the same data, warm-up left out.

    Columns run_id, label, iteration, loss, gap (nats per token; positive: worse than bf16). Iterations that the
    reference does not have, and runs without a reference, are left out.
    """
    of = {run_id: {row["iteration"]: row["loss"] for row in rows} for run_id, rows in losses.items()}
    found = []
    for _, run in table.iterrows():
        base = of.get(run["reference"], {})
        same = same_data(losses.get(run["run_id"], []), losses.get(run["reference"], []))
        for iteration, loss in sorted(of.get(run["run_id"], {}).items()):
            if iteration >= 0 and iteration in base and same(iteration):
                gap = {"iteration": iteration, "loss": loss, "gap": loss - base[iteration]}
                found.append({"run_id": run["run_id"], "label": run["label"], **gap})
    return pd.DataFrame(found, columns=["run_id", "label", "iteration", "loss", "gap"])


def costs(gaps: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """A row per quantized run, largest gap first.

    Columns run_id, label, parts (what is rounded, in words), gap (mean over the iterations that both have), last (at
    the last), iterations, only (the part, where only one is rounded).
    """
    quantized = table[table["quantized"]].set_index("run_id")
    rows = []
    for run_id, part in gaps[gaps["run_id"].isin(quantized.index)].groupby("run_id", sort=False):
        run = quantized.loc[run_id]
        rounded = {name: run[name] for name in PARTS if run[name] != "bf16"}
        last = part.sort_values("iteration")["gap"].iloc[-1]
        text = ", ".join(f"{name} {fmt}" for name, fmt in rounded.items())
        rows.append(
            {"run_id": run_id, "label": run["label"], "parts": text, "gap": part["gap"].mean(), "last": last,
             "iterations": len(part), "only": next(iter(rounded)) if len(rounded) == 1 else None}
        )  # fmt: skip
    columns = ["run_id", "label", "parts", "gap", "last", "iterations", "only"]
    return pd.DataFrame(rows, columns=columns).sort_values("gap", ascending=False, ignore_index=True)


def parts_alone(costs: pd.DataFrame) -> pd.DataFrame:
    """The rows of `costs` for runs in which one part alone is rounded, by part and format, largest gap first.

    Columns only (the part), parts (it and the format, in words), gap (mean over the runs), runs.
    """
    alone = costs[costs["only"].notna()].groupby(["only", "parts"], as_index=False)
    return alone.agg(gap=("gap", "mean"), runs=("gap", "size")).sort_values("gap", ascending=False, ignore_index=True)


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
    (the 95% interval of the mean), change (from the rung that it is compared with), verdict (of the change, "" for
    none), separated.
    """
    spreads = {str(recipe): Spread(tuple(part)) for recipe, part in runs.dropna(subset="gap").groupby("recipe")["gap"]}
    spreads[BF16] = no_gap(max((spread.seeds for spread in spreads.values()), default=1))
    titles = {rung.recipe: rung.title for rung in ladder.rungs}
    rows = []
    for rung in ladder.rungs:
        own, other = spreads.get(rung.recipe), spreads.get(rung.against)
        row: dict[str, Any] = {"rung": rung.title, "recipe": rung.recipe, "seeds": own.seeds if own else 0}
        row |= {"verdict": "", "separated": False}
        if own:
            row |= {"gap": own.mean, "deviation": own.deviation, "low": own.low, "high": own.high}
        if own and other:
            row |= {"change": own.mean - other.mean, "separated": own.separated(other)}
            row["verdict"] = verdict(own, other, titles[rung.against])
        rows.append(row)
    columns = ["rung", "recipe", "seeds", "gap", "deviation", "low", "high", "change", "verdict", "separated"]
    return pd.DataFrame(rows, columns=columns).replace([np.inf, -np.inf], np.nan)
