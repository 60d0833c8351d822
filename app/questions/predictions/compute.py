"""Predicted loss changes of recipes, and the gaps measured in their training."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from binade.app.formatting import losses_of
from binade.app.questions.recipes.compute import loss_gaps
from binade.app.questions.shared.runs import OF_MODEL, runs_with_reference
from binade.collector.advice.advice import ADVISED, placed
from binade.collector.advice.costs import Costs, costs
from binade.collector.recipes.files import draft_of
from binade.collector.recipes.recipe import RecipeError
from binade.collector.recipes.spread import Spread
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.quant.specs import SpecError

REFUSED = (RecipeError, SpecError, KeyError)  # a run of an earlier version, or one that Binade did not train


def costs_of(opened: Catalog, where: Filter, parts: tuple[str, ...] = ()) -> Costs:
    """Like `costs`, but cached as long as `Catalog.state` stays the same."""
    return opened.kept(("costs", where, parts, opened.state()), lambda: costs(opened, where, parts))


@dataclass(frozen=True)
class Correlation:
    """Spearman's ρ with its 95% interval: Fisher's z with the variance 1.06/(n - 3) of Fieller, Hartley and Pearson
    (1957). NaN for fewer than four."""

    rho: float
    low: float
    high: float

    @classmethod
    def of(cls, a: pd.Series, b: pd.Series) -> Correlation:
        both = pd.concat([a, b], axis=1).dropna()
        if len(both) < 4 or both.nunique().min() < 2:
            return cls(math.nan, math.nan, math.nan)
        rho = float(spearmanr(both.iloc[:, 0], both.iloc[:, 1]).statistic)
        margin = 1.96 * math.sqrt(1.06 / (len(both) - 3))
        middle = math.atanh(min(max(rho, -1 + 1e-12), 1 - 1e-12))
        return cls(rho, math.tanh(middle - margin), math.tanh(middle + margin))

    @property
    def text(self) -> str:
        return f"{self.rho:.2f} (95% interval {self.low:.2f} to {self.high:.2f})"


def measured(opened: Catalog, found: Costs) -> tuple[pd.DataFrame, int]:
    """(the recipes that were trained together with a bf16 run on the same data, one row each; how many are left out for
    lack of a prediction).

    Columns name (that users gave it, or what was rounded), recipe, advised (whether the advisor made it), bits,
    predicted, seeds, first (the gap of the first iteration, before any step, mean over seeds), gap (mean over
    iterations and seeds), low, high (its 95% interval, NaN of one seed).
    """
    runs = opened.runs()
    data = runs[list(OF_MODEL)]
    same = (data == data[runs["run_id"] == found.runs[0]].iloc[0]).all(axis=1)
    table = runs_with_reference(runs[same], opened.parts())
    table = table[table["quantized"] | (table["recipe"] != "bf16")].drop_duplicates(
        ["name", "seed", "settings"], keep="last"
    )
    gaps = loss_gaps(table, losses_of(opened, [*table["run_id"], *table["reference"].dropna()]))
    by_run = gaps.sort_values("iteration").groupby("run_id")["gap"].agg(["first", "mean"])
    table = table.merge(by_run, left_on="run_id", right_index=True)
    configs = dict(zip(runs["run_id"], runs["config"], strict=True))
    rows, left = [], 0
    for (name, _), own in table.groupby(["name", "settings"], sort=False):
        recipe = str(own["recipe"].iloc[-1])
        try:
            config = json.loads(configs[own["run_id"].iloc[-1]])
            made = draft_of(config["recipe_toml"], recipe).recipe(recipe)
            at = placed(made, found, config.get("skip_layers") or "")
        except REFUSED:
            at = None
        if at is None:
            left += 1
            continue
        spread = Spread(tuple(own["mean"]))
        row = {"name": name, "recipe": recipe, "advised": made.about.title.startswith(ADVISED)}
        row |= {"bits": at[0], "predicted": at[1], "seeds": spread.seeds, "first": own["first"].mean()}
        rows.append(row | {"gap": spread.mean, "low": spread.low, "high": spread.high})
    columns = ["name", "recipe", "advised", "bits", "predicted", "seeds", "first", "gap", "low", "high"]
    return pd.DataFrame(rows, columns=columns).replace([np.inf, -np.inf], np.nan), left
