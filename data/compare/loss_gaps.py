"""The gaps of losses: of runs to their references by iteration, of each run, and of recipes over their seeds.

Runs that diverged are last, with the iteration: data.outcomes. Sentences and tables are in data.compare.comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from binade.data.compare import evidence
from binade.data.compare.evidence import GAP, Estimate
from binade.data.compare.outcomes import Outcome, before_divergence, outcome_of
from binade.data.compare.same_data import NATS, closest, losses_on_same_data
from binade.data.index.run_table import PARTS, has_reference
from binade.data.run.rounding_alone import RoundingAlone
from binade.quant.formats import BF16

Losses = Mapping[str, list[dict[str, Any]]]


def loss_gaps(table: pd.DataFrame, losses: Losses) -> pd.DataFrame:
    """Each run's loss against its reference's at the same iteration and on the same data, warm-up left out. Of several
    references, the one counts whose losses can be compared at most iterations, and never the run itself if there is
    another.

    Columns run_id, label, iteration, loss, gap (nats per token; positive: worse than bf16), reference (its run_id).
    Iterations that the reference does not have or at which it has diverged, those without a finite loss, and runs
    without a reference, are left out.
    """
    rows = []
    sound = {run_id: before_divergence(steps, outcome_of(steps)) for run_id, steps in losses.items()}
    for _, run in table.iterrows():
        steps = [step for step in losses.get(run["run_id"], []) if step["loss"] is not None]
        known = [run_id for run_id in run["references"] if run_id in losses]
        others = [run_id for run_id in known if run_id != run["run_id"]] or known
        name = closest(steps, [(run_id, sound[run_id]) for run_id in others])
        reference = sound[name] if name else []
        rows += [
            (run["run_id"], run["label"], iteration, loss, loss - other, name)
            for iteration, loss, other in losses_on_same_data(steps, reference)
        ]
    return pd.DataFrame(rows, columns=["run_id", "label", "iteration", "loss", "gap", "reference"])


def with_outcomes(table: pd.DataFrame, losses: Losses) -> pd.DataFrame:
    """The table with the column outcome: how each run trained. losses: with those that are not finite."""
    nats = table["unit"] == NATS
    outcomes = [outcome_of(losses.get(run_id, []), grows) for run_id, grows in zip(table["run_id"], nats, strict=True)]
    return table.assign(outcome=pd.Series(outcomes, table.index, object))


def costs(gaps: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """A row per quantized run that has a gap or has diverged, the largest |gap| first, those that diverged last. table:
    of `with_outcomes`.

    Columns run_id, label, name, group, recipe, settings, start, parts (what is rounded, in words), gap (mean over the
    iterations that both have; NaN if the loss has become NaN or infinite for good), last (at the last), measured (a
    RoundingAlone; None if there is none), alone (its change, else NaN), added (the last gap minus that at the iteration
    in which rounding alone was measured; NaN without one of them), iterations, only (the part, where only one is
    rounded), spec (its format), outcome (in words), diverged (the iteration; NaN if it has not), ended (whether it
    ended before its reference).
    """
    outcomes = dict(zip(table["run_id"], table["outcome"], strict=True))
    labels = dict(zip(table["run_id"], table["label"], strict=True))
    parts = dict(iter(gaps.groupby("run_id")))
    rows = []
    for _, run in table[table["quantized"] & has_reference(table)].iterrows():
        outcome, part = run["outcome"], parts.get(run["run_id"], gaps.iloc[:0]).sort_values("iteration")
        if part.empty and outcome.diverged is None:
            continue
        name = part["reference"].iloc[0] if len(part) else run["references"][0]
        reference = outcomes.get(name, Outcome())
        alone = run["alone"]
        usable = len(part) and not outcome.is_lost
        gap, last, added = _of_gaps(part, alone) if usable else (np.nan, np.nan, np.nan)
        rounded = {name: run[name] for name in PARTS if run[name] not in (None, BF16)}
        only, spec = next(iter(rounded.items())) if len(rounded) == 1 else (None, None)
        row = {name: run[name] for name in ("run_id", "label", "name", "group", "recipe", "settings", "start")}
        row |= {"parts": ", ".join(f"{name} {fmt}" for name, fmt in rounded.items()), "gap": gap}
        row |= {"last": last, "added": added, "iterations": len(part), "only": only, "spec": spec}
        row |= {"measured": alone, "alone": alone.change if alone else np.nan}
        row |= {"outcome": outcome.text(reference, labels.get(name, BF16)) or None, "diverged": outcome.diverged}
        rows.append(row | {"ended": outcome.diverged is None and outcome.ended_before(reference)})
    columns = ["run_id", "label", "name", "group", "recipe", "settings", "start", "parts", "gap", "measured", "alone"]
    columns += ["last", "added", "iterations", "only", "spec", "outcome", "diverged", "ended"]
    frame = pd.DataFrame(rows, columns=columns).astype({"diverged": float, "outcome": object})
    frame["outcome"] = frame["outcome"].where(frame["outcome"].notna(), None)
    frame = frame.assign(size=frame["gap"].abs())
    ordered = frame.sort_values(["diverged", "size"], ascending=False, na_position="first", ignore_index=True)
    return ordered.drop(columns="size")


def _of_gaps(part: pd.DataFrame, alone: RoundingAlone | None) -> tuple[float, float, float]:
    """(mean, last, and last minus that in whose iteration rounding alone was measured) of a run's gaps."""
    last, added = part.iloc[-1], np.nan
    if alone and alone.iteration < last["iteration"]:
        added = float(last["gap"] - part.loc[part["iteration"] == alone.iteration, "gap"].mean())
    return float(part["gap"].mean()), float(last["gap"]), added


@dataclass(frozen=True)
class RecipeRuns:
    """Runs of one recipe and of the same settings: the gap on each data and start (of the newest run), and the part and
    format, if only one part is rounded. label: the `group` of `runs_with_references`. alone: what the runs measured,
    and added: as in `costs`, where they are known. runs: their run_ids; run_id: the newest. diverged: the iteration, of
    each start that did. outcome: in words; "" if all trained to the end."""

    label: str
    gaps: Mapping[Any, float]
    run_id: str
    only: str | None
    spec: str | None
    alone: Mapping[Any, RoundingAlone]
    added: Mapping[Any, float]
    runs: tuple[str, ...] = ()
    diverged: Mapping[Any, int] = field(default_factory=dict)
    outcome: str = ""

    @property
    def gap(self) -> Estimate:
        return evidence.mean(GAP, self.gaps.values())

    @property
    def alone_gap(self) -> Estimate:
        """What rounding alone does to the loss: of one start over its sequences; of several, over these."""
        measured = list(self.alone.values())
        return measured[0].estimate if len(measured) == 1 else evidence.mean(GAP, (one.change for one in measured))

    @property
    def added_gap(self) -> Estimate:
        return evidence.mean(GAP, self.added.values())


def by_recipe(costs: pd.DataFrame, oldest_first: Sequence[str]) -> list[RecipeRuns]:
    """`costs` by recipe and settings, the largest |mean gap| first, those of which a run diverged last, the earliest at
    the very end. oldest_first: the run_ids."""
    recipes, place = [], {run_id: at for at, run_id in enumerate(oldest_first)}
    for _, runs in costs.groupby(["name", "settings"], sort=False):
        runs = runs.sort_values("run_id", key=lambda ids: ids.map(place)).drop_duplicates("start", keep="last")
        newest = runs.iloc[-1]
        label = str(newest["group"])
        gaps = dict(zip(runs["start"], runs["gap"], strict=True))
        alone, added = (runs.dropna(subset=[name]).set_index("start")[name].to_dict() for name in ("measured", "added"))
        ids, lost = tuple(runs["run_id"]), runs.dropna(subset=["diverged"]).set_index("start")["diverged"].astype(int)
        recipe = RecipeRuns(label, gaps, newest["run_id"], newest["only"], newest["spec"], alone, added, ids)
        recipes.append(replace(recipe, diverged=lost.to_dict(), outcome=_outcome(runs)))
    return sorted(recipes, key=_rank)


def _outcome(runs: pd.DataFrame) -> str:
    """How the runs of a recipe trained, in words: rows of `costs`."""
    if len(runs) == 1:
        return runs["outcome"].iloc[0] or ""
    said = []
    if lost := len(known := runs["diverged"].dropna()):
        said.append(f"{lost} of {len(runs)} seeds diverged, the first at iteration {int(known.min())}")
    others = runs[runs["diverged"].isna() & runs["outcome"].notna()]
    if len(others):
        said.append(f"{len(others)} of {len(runs)} seeds are compared in part: see the runs")
    return "; ".join(said)


def _rank(recipe: RecipeRuns) -> tuple[bool, float]:
    """The place of a recipe in lists: by its gap, or of those that diverged by when."""
    if recipe.diverged:
        return True, -min(recipe.diverged.values())
    return False, -abs(recipe.gap.value)


def worst_first(recipes: Sequence[RecipeRuns]) -> list[RecipeRuns]:
    """Those that diverged first, the earliest at the top, then the largest |mean gap|: for lists that stop."""
    diverged = sorted((recipe for recipe in recipes if recipe.diverged), key=lambda one: min(one.diverged.values()))
    return [*diverged, *sorted((recipe for recipe in recipes if not recipe.diverged), key=_rank)]
