"""Predicted loss changes of recipes, and the gaps measured in their training."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd

from binade.collector.advice.advice import ADVISED, placed
from binade.collector.advice.costs import Costs, costs
from binade.collector.recipes.files import from_toml
from binade.collector.recipes.recipe import RecipeError
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.loss_gaps import loss_gaps
from binade.data.run_table import OF_MODEL, losses_of, references_in, runs_with_references
from binade.quant.specs import SpecError

REFUSED = (RecipeError, SpecError, KeyError)  # a run of an earlier version, or one that Binade did not train


def costs_of(opened: Catalog, where: Filter, parts: tuple[str, ...] = ()) -> Costs:
    """Like `costs`, but cached as long as `Catalog.state` stays the same."""
    return opened.kept(("costs", where, parts, opened.state()), lambda: costs(opened, where, parts))


def measured(opened: Catalog, costs: Costs) -> tuple[pd.DataFrame, int]:
    """(the recipes that were trained together with a bf16 run on the same data, one row each; how many are left out for
    lack of a prediction).

    Columns name (that users gave it, or what was rounded), recipe, advised (whether the advisor made it), bits,
    predicted, predicted_error (its standard error over sequences), unbounded (what the second order alone predicts),
    seeds, first (the gap of the first iteration, before
    any step, mean over seeds), gap (mean over iterations and seeds), low, high (its 95% interval, NaN for one seed),
    gaps (by seed), run_ids (those that were trained and their bf16 runs).
    """
    runs = opened.runs()
    data = runs[list(OF_MODEL)]
    same = (data == data[runs["run_id"] == costs.runs[0]].iloc[0]).all(axis=1)
    table = runs_with_references(runs[same], opened.parts())
    table = table[table["quantized"] | (table["recipe"] != "bf16")].drop_duplicates(
        ["name", "seed", "settings"], keep="last"
    )
    by_iteration = loss_gaps(table, losses_of(opened, [*table["run_id"], *references_in(table)]))
    by_run = by_iteration.sort_values("iteration").groupby("run_id")["gap"].agg(["first", "mean"])
    table = table.merge(by_run, left_on="run_id", right_index=True)
    configs = dict(zip(runs["run_id"], runs["config"], strict=True))
    rows, left = [], 0
    free = replace(costs, bounds=None)
    for (name, _), group in table.groupby(["name", "settings"], sort=False):
        recipe = str(group["recipe"].iloc[-1])
        try:
            config = json.loads(configs[group["run_id"].iloc[-1]])
            made = from_toml(config["recipe_toml"], recipe)
            at = placed(made, costs, config.get("skip_layers") or "")
            unbounded = placed(made, free, config.get("skip_layers") or "")
        except REFUSED:
            at = unbounded = None
        if at is None or unbounded is None:
            left += 1
            continue
        gaps = dict(zip(group["seed"], group["mean"], strict=True))
        spread = evidence.mean(evidence.GAP, gaps.values())
        row = {"name": name, "recipe": recipe, "advised": made.about.title.startswith(ADVISED)}
        row |= {"bits": at[0], "predicted": at[1], "predicted_error": at[2], "seeds": spread.n}
        row["unbounded"] = unbounded[1]
        row |= {"first": group["first"].mean(), "gap": spread.value, "low": spread.low, "high": spread.high}
        rows.append(row | {"gaps": gaps, "run_ids": [*group["run_id"], *references_in(group)]})
    columns = [
        "name",
        "recipe",
        "advised",
        "bits",
        "predicted",
        "predicted_error",
        "unbounded",
        "seeds",
        "first",
        "gap",
        "low",
    ]
    columns += ["high", "gaps", "run_ids"]
    return pd.DataFrame(rows, columns=columns).replace([np.inf, -np.inf], np.nan), left
