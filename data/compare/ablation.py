"""Ablations: the mean gap of each step of a ladder over its seeds, and whether the seeds tell it from the step before.

Runs › Recipes draws the table, and `binade compare` prints it. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from binade.data.compare import evidence
from binade.data.compare.comparison import Done, gradient_pairs
from binade.data.compare.evidence import GAP, Estimate, Sentence
from binade.data.compare.gradients import gradient_summary
from binade.data.compare.ladder import Ladder
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import has_reference
from binade.data.run.tensor_kinds import label_of
from binade.data.words.fields import MEASURES, Field
from binade.data.words.filter import Filter
from binade.quant.formats import BF16

JUDGED = (
    "A change counts if Student’s t over the seeds, paired, and corrected for the number of changes (Holm), tells it "
    "from 0 at the 5% level. One seed tells nothing."
)
RUNG_FIELDS = (
    Field("rung", "Step", format=""),
    Field("diverged", "Diverged at", "", "The first iteration at which a seed diverged", "d"),
    Field("seeds", "Seeds", format="d"),
    Field("gap", "Mean gap", "nats", "Mean of loss − bf16’s loss over iterations and seeds", "+.5f"),
    Field("deviation", "sd", "nats", "Sample standard deviation of the seeds’ mean gaps", ".5f"),
    Field("change", "Change", "nats", "Change from the previous step, paired by seed; for a recipe without one "
          "ingredient, from the full recipe", "+.5f"),
    Field("verdict", "Verdict", "", JUDGED, ""),
    Field("cosine", "Cosine", "", f"With bf16’s gradient: {MEASURES['cosine'].definition}", ".4f"),
    Field("relative_squared_error", "Rel. squared error", "", MEASURES["relative_squared_error"].definition, ".3g"),
    Field("forward_sqnr_db", "SQNR forward", "dB", "Median over the recorded operands", ".2f"),
    Field("backward_sqnr_db", "SQNR gradients", "dB", "Median over the gradients that enter dgrad", ".2f"),
    Field("recipe", "Recipe", format=""),
)  # fmt: skip
"""The columns of `Ablation.table` that are shown."""
DIVERGED = "diverged"
Gaps = Mapping[str, Mapping[Any, float]]
"""The mean gap to bf16 by recipe and seed, infinite if the loss has become NaN or infinite for good."""


@dataclass(frozen=True)
class Judged:
    """A recipe compared with another: own gap over its seeds, change over those that both have (None without any),
    and whether the change can be told from 0. than: the other's name."""

    own: Estimate | None
    change: Estimate | None = None
    is_apart: bool = False
    than: str = ""

    @property
    def deviation(self) -> float:
        """The standard deviation of the own gaps; NaN for one seed."""
        return self.own.error * math.sqrt(self.own.n) if self.own else math.nan

    @property
    def verdict(self) -> str:
        """ "higher than bf16", "lower than bf16", "not distinguishable from bf16", "diverged" or "bf16 diverged"; "" if
        there is no change."""
        if self.own and math.isnan(self.own.value):
            return DIVERGED
        if self.change is None:
            return ""
        if math.isnan(self.change.value):
            return f"{self.than} {DIVERGED}"
        if not self.is_apart:
            return f"not distinguishable from {self.than}"
        return f"{'higher' if self.change.value > 0 else 'lower'} than {self.than}"


def judged(gaps: Gaps, pairs: Sequence[tuple[str, str]], titles: Mapping[str, str]) -> list[Judged]:
    """Each pair (recipe, the one it is compared with, "" for none) judged, all together. titles: of the recipes."""
    results: list[Judged] = []
    for recipe, against in pairs:
        recipe_gaps, other = gaps.get(recipe, {}), gaps.get(against, {})
        if against == BF16:
            other = dict.fromkeys(recipe_gaps, 0.0)
        estimate = evidence.mean(GAP, recipe_gaps.values()) if recipe_gaps else None
        change = evidence.paired(GAP, recipe_gaps, other) if recipe_gaps and other and against in titles else None
        change = change if change and change.n else None
        results.append(Judged(estimate, change, than=titles.get(against, "")))
    changes = [result.change for result in results if result.change]
    apart = iter(evidence.holm(changes))
    return [
        Judged(result.own, result.change, next(apart), result.than) if result.change else result for result in results
    ]


@dataclass(frozen=True)
class Ablation:
    """
    table     a row per rung that was run: `rungs`, with forward_sqnr_db and backward_sqnr_db, and with cosine and
              relative_squared_error of the gradients, where they are known
    seeds     the gaps of single seeds: columns rung, seed, gap
    runs      of `ladder_runs`
    verdict   which changes the seeds tell from 0
    notes     on what was compared
    problems  what is missing
    """

    table: pd.DataFrame
    seeds: pd.DataFrame
    runs: pd.DataFrame
    verdict: Sentence
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def ablation(
    opened: Catalog,
    table: pd.DataFrame,
    gaps: pd.DataFrame,
    chosen: Ladder,
    name: str,
    at: int | None,
    done: Done = lambda count, of: None,
) -> Ablation | None:
    """What each rung of a ladder costs; None if none of its runs has a gap. table: of `with_outcomes`; gaps: of
    `loss_gaps`; name, at: of the gradients that are compared, "" for none."""
    runs, left_out = ladder_runs(table, gaps, chosen)
    if not runs["gap"].notna().any():
        return None
    steps = rungs(runs, chosen)
    verdict = _separated(steps, chosen)
    errors, notes = _gradient_errors(opened, runs, name, at, done)
    steps = steps.drop(columns="judged").merge(errors, on="recipe", how="left")
    steps = steps.merge(_sqnr(opened, runs), on="recipe", how="left")
    seeds = (
        runs.replace({"gap": math.inf}, math.nan)
        .dropna(subset="gap")
        .merge(steps[["recipe", "rung"]], on="recipe")[["rung", "seed", "gap"]]
    )
    if left_out:
        runs_are = "run of these recipes is" if left_out == 1 else "runs of these recipes are"
        notes = [*notes, f"{left_out} {runs_are} left out: their settings differ, or a newer run has the same seed."]
    return Ablation(steps, seeds, runs, verdict, tuple(notes), tuple(_missing(runs, steps)))


def ladder_runs(table: pd.DataFrame, gaps: pd.DataFrame, ladder: Ladder) -> tuple[pd.DataFrame, int]:
    """(the runs of a ladder except bf16; how many of its runs are left out). Columns gap: the mean of `loss_gaps`, NaN
    without a bf16 run, infinite for a loss that is no longer finite; diverged: the iteration. If several runs have the
    same recipe and seed, the newest counts; of several settings, those with the most rungs and, if equal, the newest.
    """
    candidates = table[table["recipe"].isin([rung.recipe for rung in ladder.rungs]) & (table["recipe"] != BF16)]
    if candidates.empty:
        return candidates.assign(gap=np.nan, diverged=np.nan), 0
    number = {
        settings: (part["recipe"].nunique(), part.index.max()) for settings, part in candidates.groupby("settings")
    }
    runs = candidates[candidates["settings"] == max(number, key=lambda settings: number[settings])]
    runs = runs.drop_duplicates(["recipe", "seed"], keep="last")
    mean = runs["run_id"].map(gaps.groupby("run_id")["gap"].mean())
    lost = runs["outcome"].map(lambda outcome: outcome.is_lost).astype(bool) & has_reference(runs)
    diverged = runs["outcome"].map(lambda outcome: outcome.diverged).astype(float)
    runs = runs.assign(gap=mean.mask(lost, math.inf), diverged=diverged)
    return runs, len(candidates) - len(runs)


def rungs(runs: pd.DataFrame, ladder: Ladder) -> pd.DataFrame:
    """The runs of `ladder_runs`, a row per rung that was run, in the ladder's order, bf16 first.

    Columns rung (its title), recipe, diverged (the first iteration at which a seed did), seeds (with a gap), gap (mean
    over seeds), deviation (of the seeds), low, high (the 95% interval of the mean), change (from the rung that it is
    compared with, paired by seed), verdict (of the change, "" for none), separated (whether it can be told from 0),
    judged (the change as a Judged).
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
        row["diverged"] = runs.loc[runs["recipe"] == rung.recipe, "diverged"].min()
        if estimate := result.own:
            row |= {"gap": estimate.value, "deviation": result.deviation, "low": estimate.low, "high": estimate.high}
        if result.change:
            row |= {"change": result.change.value, "judged": result}
        rows.append(row)
    columns = [
        "rung",
        "recipe",
        "diverged",
        "seeds",
        "gap",
        "deviation",
        "low",
        "high",
        "change",
        "verdict",
        "separated",
        "judged",
    ]
    frame = pd.DataFrame(rows, columns=columns).replace([np.inf, -np.inf], np.nan)
    return frame.astype({"diverged": float})


def _separated(rungs: pd.DataFrame, chosen: Ladder) -> evidence.Sentence:
    """Which changes the seeds tell from 0, and which they do not."""
    diverged = rungs.dropna(subset=["diverged"]).sort_values("diverged")
    texts = [f"{rung} at iteration {at:.0f}" for rung, at in zip(diverged["rung"], diverged["diverged"], strict=True)]
    lost = evidence.say("Diverged: {texts}.", texts=evidence.listed(texts)) if texts else Sentence()
    return evidence.together(lost, _by_seeds(rungs, chosen))


def _by_seeds(rungs: pd.DataFrame, chosen: Ladder) -> evidence.Sentence:
    judged: list[tuple[str, Judged]] = [
        (str(row["rung"]), row["judged"])
        for row in rungs.to_dict("records")
        if row["verdict"] and not row["verdict"].endswith(DIVERGED)
    ]
    most = max((result.change.n for _, result in judged if result.change), default=0)
    if most < 2:
        return evidence.say(
            "One seed tells no recipe from another. To collect more: binade ablate {name} --seeds 3.", name=chosen.name
        )
    apart = [
        (f"{rung} is {result.verdict},", result.change) for rung, result in judged if result.is_apart and result.change
    ]
    alike = [f"{rung} is {result.verdict}" for rung, result in judged if not result.is_apart]
    if not apart:
        return evidence.say("{seeds} seeds tell no step from the one that it is compared with.", seeds=most)
    rest = evidence.say("By {seeds} seeds, {alike}.", seeds=most, alike="; ".join(alike)) if alike else ""
    return evidence.together(evidence.each_of(apart, "Statistically significant"), rest)


def _missing(runs: pd.DataFrame, rungs: pd.DataFrame) -> list[str]:
    """A sentence for everything that the ladder lacks."""
    sentences = []
    if alone := sorted(set(runs.loc[runs["gap"].isna(), "seed"])):
        s, that = ("s", "those seeds") if len(alone) > 1 else ("", "that seed")
        seeds = f"seed{s} {', '.join(alone)}"
        sentences.append(f"There is no bf16 run on the same data for {seeds}, so runs with {that} have no gap.")
    number = rungs.loc[rungs["recipe"] != BF16, "seeds"]
    if fewer := [f"{row.rung} {row.seeds}" for row in rungs[1:].itertuples() if row.seeds < number.max()]:
        sentences.append(f"Not every step has {number.max()} seeds: {', '.join(fewer)}.")
    return sentences


def _sqnr(opened: Catalog, runs: pd.DataFrame) -> pd.DataFrame:
    """The rounding error of each recipe: columns recipe, forward_sqnr_db, backward_sqnr_db, where there are any."""
    medians = opened.moments(Filter(run_id=tuple(runs["run_id"])), by=("recipe", "operation"))
    wide = medians.pivot_table(index="recipe", columns="operation", values="sqnr_db", aggfunc="first")
    return wide.add_suffix("_sqnr_db").reset_index()


def _gradient_errors(
    opened: Catalog, runs: pd.DataFrame, name: str, at: int | None, done: Done
) -> tuple[pd.DataFrame, list[str]]:
    """(columns recipe, cosine and relative_squared_error, over all seeds; what to say of them)."""
    nothing = pd.DataFrame(columns=["recipe"])
    if not name:
        return nothing, ["Gradients are not compared here: too many values would be read. See Recipes in the app."]
    iterations = iterations_of(opened, name)
    if not iterations:
        return nothing, [f"No {label_of(name)} was recorded: there is no gradient error."]
    at = at if at in iterations else iterations[0]
    together, unread = gradient_pairs(opened, runs[has_reference(runs)], "recipe", name, at, done)
    if together.empty:
        return nothing, [f"No {label_of(name)} has a counterpart with values in bf16: there is no gradient error."]
    notes = [f"Gradients: {len(together):,} pairs of {name} tensors of iteration {at}, all seeds together."]
    if unread:
        notes.append(f"{unread} pairs could not be read and are left out.")
    summary = gradient_summary(together, ["group"]).rename(columns={"group": "recipe"})
    return summary.drop(columns="tensors"), notes


def iterations_of(opened: Catalog, name: str) -> list[int]:
    """The iterations in which tensors of this name were recorded."""
    return opened.facets(Filter(tensor_name=(name,))).get("iteration", [])
