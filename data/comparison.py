"""The comparison of recipes by their loss: the one that Runs › Recipes draws and `binade compare` prints.

    compared = compare(table, losses)      of data.run_table
    compared.recipe_table                  a row per recipe
    compared.verdict

Runs are matched by what they have read, see data.same_data. Runs of one recipe with the same settings are one recipe,
over seeds: of several runs on the same data the newest counts. Ablations are in data.ablation. No torch here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd

from binade.data import evidence, gap_bands
from binade.data.catalog import Catalog
from binade.data.effects import CHANGE, rounded_by
from binade.data.evidence import GAP, Estimate, Sentence
from binade.data.fields import MEASURES, Field
from binade.data.filter import Filter
from binade.data.gap_bands import Band, PlainRun, own_bands
from binade.data.gradients import gradient_errors
from binade.data.held_out import (
    HeldOutGap,
    evaluations_of,
    held_out_gap,
    held_out_sentence,
    last_in_common,
    pairs_of,
    repeated,
)
from binade.data.outcomes import DEFINITION, Outcome, before_divergence, outcome_of
from binade.data.run_table import PARTS, has_reference
from binade.data.same_data import NATS, UNKNOWN, closest, equal_warm_up, losses_on_same_data, pairs_on_same_data
from binade.quant.formats import BF16, UnknownFormatError
from binade.quant.specs import Spec, SpecError

Losses = Mapping[str, list[dict[str, Any]]]
Done = Callable[[int, int], None]  # of the runs whose gradients are compared: how many, of how many
MOST_RUNS = 10  # whose gradients are compared
NO_INTERVAL = "one seed"

RECIPE_FIELDS = (
    Field("label", "Recipe", format=""),
    Field("outcome", "Outcome", "", f"Where its training diverged ({DEFINITION}) or ended early. A recipe that "
          "diverged is listed last, without a gap if its loss is not finite; one that ended early is compared on the "
          "iterations that both have", ""),
    Field("seeds", "Seeds", "", "Seeds with a bf16 run on the same data", "d"),
    Field("gap", "Mean gap", "nats", "Mean over iterations and seeds of the loss minus that of bf16", "+.4f"),
    Field("gap_interval", "95% interval", "", "Of the mean gap, over seeds (Student’s t)", ""),
    Field("first", "Rounding alone", "nats", "Gap in the first iteration (0, or that of a branch), before any step: "
          "weights and data are those of bf16; mean over seeds", "+.4f"),
    Field("first_interval", "Rounding alone, 95% interval", "", "Of the gap in the first iteration, over seeds", ""),
    Field("added", "Training adds", "nats", "Gap at the last iteration minus that in the first, mean over seeds",
          "+.4f"),
    Field("added_interval", "Training adds, 95% interval", "", "Of what training adds, over seeds", ""),
    Field("effect", "Measured rounding", "nats", "What `binade measure` found for all that the recipe rounds: the loss "
          "with rounding minus the loss without, on the same weights and sequences, mean over sequences", "+.4f"),
    Field("effect_interval", "Measured rounding, 95% interval", "", "Of the measured change (Student’s t)", ""),
    Field("effect_on", "Measured on", "", "Weights before training, or of a run’s last checkpoint", ""),
    Field("held_out", "Held-out gap", "nats", "Loss of held-out sequences minus that of bf16 after as many iterations, "
          "mean over sequences and seeds (`--evaluate-every`)", "+.4f"),
    Field("held_out_interval", "Held-out gap, 95% interval", "", "Of the differences of the same sequences (Student’s "
          "t), which holds for this seed; of several seeds, over seeds", ""),
    Field("held_out_slope", "Held-out gap per doubling", "nats", "Change of the held-out gap when the tokens double: "
          "least squares over all evaluations", "+.4f"),
    Field("held_out_slope_interval", "Held-out gap per doubling, 95% interval", "", "Over seeds", ""),
    Field("held_out_at", "Held out after", "", "Iterations with the recipe, tokens trained until then and tokens per "
          "parameter. Nothing is known of longer training", ""),
    Field("left", "Leaves bf16’s band", "", "First iteration from which the gap, its mean over seeds, is beyond the "
          "band of reordering up to the last iteration", ""),
)  # fmt: skip
"""The columns of `with_effects` that are shown."""
RUN_FIELDS = (
    Field("label", "Run", format=""),
    Field("outcome", "Outcome", "", "Where its training diverged or ended early, or that of its bf16 run diverged", ""),
    Field("gap", "Mean gap", "nats", "Mean over iterations of the loss minus that of the reference", "+.4f"),
    Field("first", "Rounding alone", "nats", "Gap in the first iteration (0, or that of a branch), before any step: "
          "weights and data are those of bf16", "+.4f"),
    Field("added", "Training adds", "nats", "Gap at the last iteration minus that in the first", "+.4f"),
    Field("last", "Last gap", "nats", "Gap at the last iteration that both have finished", "+.4f"),
    Field("iterations", "Iterations", "", "Iterations that are compared", "d"),
    Field("run_id", "Directory", format=""),
)  # fmt: skip
"""The columns of `costs` that are shown."""
SIDES = {
    "linear_forward": ("linear", "forward"),
    "linear_gradients": ("linear", "backward"),
    "fa_forward": ("FA", "forward"),
    "fa_gradients": ("FA", "backward"),
}
ERRORS = ("sqnr_db", "flush_to_zero", "saturated")
OPERAND_FIELDS = (
    Field("label", "Recipe", format=""),
    Field("bits", "Bits per value", "", "Of the recorded operands, with their block scales; bf16 has 16", ".2f"),
    *(
        Field(side, side.replace("_", " ").replace("fa", "FA"), "", "SQNR in dB / flushed to zero in % / saturated in "
              "%: medians over the operands of the last recorded iteration; gradients are those that enter dgrad", "")
        for side in SIDES
    ),
)  # fmt: skip
"""The columns of `operand_table` that are shown."""


def loss_gaps(table: pd.DataFrame, losses: Losses) -> pd.DataFrame:
    """Each run's loss against its reference's at the same iteration and on the same data, warm-up left out. Of several
    references, the one counts whose losses can be compared at most iterations, and never the run itself if there is
    another.

    Columns run_id, label, iteration, loss, gap (nats per token; positive: worse than bf16), equal (whether all that
    enters the model is known to be that of the reference), reference (its run_id). Iterations that the reference does
    not have or at which it has diverged, those without a finite loss, and runs without a reference, are left out.
    """
    rows = []
    branched = dict(zip(table["run_id"], table["branched"], strict=True))
    trained = dict(zip(table["run_id"], table["trained"], strict=True))
    sound = {run_id: before_divergence(steps, outcome_of(steps)) for run_id, steps in losses.items()}
    for _, run in table.iterrows():
        steps = [step for step in losses.get(run["run_id"], []) if step["loss"] is not None]
        known = [run_id for run_id in run["references"] if run_id in losses]
        others = [run_id for run_id in known if run_id != run["run_id"]] or known
        name = closest(steps, [(run_id, sound[run_id]) for run_id in others])
        reference = sound[name] if name else []
        since = max(run["branched"], branched.get(name, -math.inf))
        same = run["trained"] is not None and run["trained"] == trained.get(name)
        same = same and equal_warm_up(steps, reference, since)
        rows += [
            (run["run_id"], run["label"], iteration, loss, loss - other, iteration == max(since, 0) and same, name)
            for iteration, loss, other in losses_on_same_data(steps, reference)
        ]
    return pd.DataFrame(rows, columns=["run_id", "label", "iteration", "loss", "gap", "equal", "reference"])


def with_outcomes(table: pd.DataFrame, losses: Losses) -> pd.DataFrame:
    """The table with the column outcome: how each run trained. losses: with those that are not finite."""
    nats = table["unit"] == NATS
    outcomes = [outcome_of(losses.get(run_id, []), grows) for run_id, grows in zip(table["run_id"], nats, strict=True)]
    return table.assign(outcome=pd.Series(outcomes, table.index, object))


def costs(gaps: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """A row per quantized run that has a gap or has diverged, the largest |gap| first, those that diverged last. table:
    of `with_outcomes`.

    Columns run_id, label, name, recipe, settings, start, parts (what is rounded, in words), gap (mean over the
    iterations that both have; NaN if the loss has become NaN or infinite for good), first (in the first one, if all
    that enters the model is known to be equal; else NaN), last (at the last), added (last minus first; NaN without a
    later iteration), iterations, only (the part, where only one is rounded), spec (its format), outcome (in words),
    diverged (the iteration; NaN if it has not), ended (whether it ended before its reference).
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
        gap, first, last, added = (
            _of_gaps(part) if len(part) and not outcome.is_lost else (np.nan, _first(part), np.nan, np.nan)
        )
        rounded = {name: run[name] for name in PARTS if run[name] not in (None, BF16)}
        only, spec = next(iter(rounded.items())) if len(rounded) == 1 else (None, None)
        row = {name: run[name] for name in ("run_id", "label", "name", "recipe", "settings", "start")}
        row |= {"parts": ", ".join(f"{name} {fmt}" for name, fmt in rounded.items()), "gap": gap}
        row |= {"first": first, "last": last, "added": added, "iterations": len(part), "only": only, "spec": spec}
        row |= {"outcome": outcome.text(reference, labels.get(name, BF16)) or None, "diverged": outcome.diverged}
        rows.append(row | {"ended": outcome.diverged is None and outcome.ended_before(reference)})
    columns = ["run_id", "label", "name", "recipe", "settings", "start", "parts", "gap", "first", "last", "added"]
    frame = pd.DataFrame(rows, columns=[*columns, "iterations", "only", "spec", "outcome", "diverged", "ended"])
    frame = frame.astype({"diverged": float, "outcome": object})
    frame["outcome"] = frame["outcome"].where(frame["outcome"].notna(), None)
    frame = frame.assign(size=frame["gap"].abs())
    ordered = frame.sort_values(["diverged", "size"], ascending=False, na_position="first", ignore_index=True)
    return ordered.drop(columns="size")


def _first(part: pd.DataFrame) -> float:
    return float(part.loc[part["equal"].astype(bool), "gap"].mean())


def _of_gaps(part: pd.DataFrame) -> tuple[float, float, float, float]:
    """(mean, first, last and last minus first) of a run's gaps, by iteration."""
    first, last = _first(part), float(part["gap"].iloc[-1])
    return float(part["gap"].mean()), first, last, np.nan if part["equal"].iloc[-1] else last - first


@dataclass(frozen=True)
class RecipeRuns:
    """Runs of one recipe and of the same settings: the gap on each data and start (of the newest run), and the part and
    format, if only one part is rounded. label: of the only run, else the recipe's name. first and added: as in `costs`,
    where they are known. runs: their run_ids; run_id: the newest. diverged: the iteration, of each start that did.
    outcome: in words; "" if all trained to the end."""

    label: str
    gaps: Mapping[Any, float]
    run_id: str
    only: str | None
    spec: str | None
    first: Mapping[Any, float]
    added: Mapping[Any, float]
    runs: tuple[str, ...] = ()
    diverged: Mapping[Any, int] = field(default_factory=dict)
    outcome: str = ""

    @property
    def gap(self) -> Estimate:
        return evidence.mean(GAP, self.gaps.values())

    @property
    def first_gap(self) -> Estimate:
        """The gap of the first iteration: exact for one start; over several, their mean."""
        values = list(self.first.values())
        if len(values) == 1:
            return evidence.exact(GAP, values[0], of="micro-batches")
        return evidence.mean(GAP, values)

    @property
    def added_gap(self) -> Estimate:
        return evidence.mean(GAP, self.added.values())


def by_recipe(costs: pd.DataFrame, oldest_first: Sequence[str]) -> list[RecipeRuns]:
    """`costs` by recipe and settings, the largest |mean gap| first, those of which a run diverged last, the earliest at
    the very end. oldest_first: the run_ids."""
    recipes, place = [], {run_id: at for at, run_id in enumerate(oldest_first)}
    for (name, _), runs in costs.groupby(["name", "settings"], sort=False):
        runs = runs.sort_values("run_id", key=lambda ids: ids.map(place)).drop_duplicates("start", keep="last")
        newest = runs.iloc[-1]
        label = newest["label"] if len(runs) == 1 else str(name)
        gaps = dict(zip(runs["start"], runs["gap"], strict=True))
        first, added = (runs.dropna(subset=[name]).set_index("start")[name].to_dict() for name in ("first", "added"))
        ids, lost = tuple(runs["run_id"]), runs.dropna(subset=["diverged"]).set_index("start")["diverged"].astype(int)
        recipe = RecipeRuns(label, gaps, newest["run_id"], newest["only"], newest["spec"], first, added, ids)
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


def bands_of(
    recipes: list[RecipeRuns], table: pd.DataFrame, losses: Losses, gaps: pd.DataFrame
) -> dict[str, tuple[Band, Band]]:
    """The bands of each recipe by its run_id: of the bf16 runs with the settings of its reference, over the iterations
    of its gap. table: of `runs_with_references`; gaps: of `loss_gaps`."""
    runs = table.set_index("run_id")
    plain = (table["recipe"] == BF16) & ~table["quantized"] & table["stated"]
    known: dict[Any, tuple[Band, Band]] = {}
    bands = {}
    for recipe in recipes:
        settings = runs["settings"][runs["references"][recipe.run_id][0]]
        iterations = frozenset(gaps.loc[gaps["run_id"] == recipe.run_id, "iteration"])
        if not iterations:
            continue
        if (settings, iterations) not in known:
            alike = table[plain & table["settings"].map(settings.__eq__)]
            of_runs = zip(alike["seed"], alike["data"], alike["run_id"].map(losses), strict=True)
            plain_runs = [
                PlainRun(seed, data, [step for step in steps if step["loss"] is not None])
                for seed, data, steps in of_runs
            ]
            known[settings, iterations] = own_bands(plain_runs, iterations)
        bands[recipe.run_id] = known[settings, iterations]
    return bands


@dataclass(frozen=True)
class Comparison:
    """
    table    of `runs_with_references`, `with_outcomes`
    gaps     of `loss_gaps`
    costs    a row per run
    recipes  the largest |mean gap| first, those that diverged last
    bands    (seeds, reordering) of each recipe, by its run_id; empty if runs are compared with another one than bf16
    base     what the gaps are to
    """

    table: pd.DataFrame
    gaps: pd.DataFrame
    costs: pd.DataFrame
    recipes: tuple[RecipeRuns, ...]
    bands: Mapping[str, tuple[Band, Band]]
    base: str

    @cached_property
    def left(self) -> dict[str, int | None]:
        """The iteration at which each recipe leaves bf16's band of reordering, by its run_id; None for one that does
        not. One that diverged leaves it then at the latest. Recipes without such a band are left out."""
        iterations = {}
        for recipe in self.recipes:
            band = self.bands.get(recipe.run_id, (None, None))[1]
            if band and not band.missing:
                gaps = self.gaps[self.gaps["run_id"].isin(recipe.runs)]
                wide = gaps.pivot_table(index="iteration", columns="run_id", values="gap").dropna()
                mean = {int(at): float(gap) for at, gap in zip(wide.index, wide.mean(axis=1), strict=True)}
                diverged = min(recipe.diverged.values(), default=None)
                left = band.left_at({at: gap for at, gap in mean.items() if diverged is None or at < diverged})
                iterations[recipe.run_id] = diverged if left is None else left
        return iterations

    @cached_property
    def recipe_table(self) -> pd.DataFrame:
        """A row per recipe: the columns of RECIPE_FIELDS but for measured effects, run_id, and low and high of gap,
        first and added, NaN where one seed gives no interval."""
        rows = []
        for recipe in self.recipes:
            row: dict[str, Any] = {"run_id": recipe.run_id, "label": recipe.label, "seeds": recipe.gap.n}
            row |= {"outcome": recipe.outcome or None, "diverged": min(recipe.diverged.values(), default=None)}
            parts = {"gap": recipe.gap, "first": evidence.mean(GAP, recipe.first.values()), "added": recipe.added_gap}
            for name, estimate in parts.items():
                row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
                row[f"{name}_interval"] = _interval(estimate)
            if recipe.run_id in self.left:
                at = self.left[recipe.run_id]
                row["left"] = "stays inside" if at is None else f"at iteration {at}"
            rows.append(row)
        ends = [f"{name}_{end}" for name in ("gap", "first", "added") for end in ("low", "high")]
        shown = (field.name for field in RECIPE_FIELDS if not field.name.startswith(("effect", "held_out")))
        columns = [*shown, "run_id", "diverged", *ends]
        return pd.DataFrame(rows, columns=columns).replace([np.inf, -np.inf], np.nan)

    @property
    def verdict(self) -> Sentence:
        return evidence.together(*self.sentences)

    @property
    def sentences(self) -> list[Sentence]:
        """Which gaps can be told from 0, where each lies in the bands, and when it leaves that of reordering."""
        placed = gap_bands.placed((recipe.label, recipe.gap, self.bands[recipe.run_id]) for recipe in self._banded)
        return [sentence for sentence in (*self.outcomes, *self._answers, *placed, *self.leaving) if sentence]

    @property
    def outcomes(self) -> list[Sentence]:
        """Which recipes diverged, and which are compared on a part of their reference's iterations."""
        sentences = []
        if lost := [recipe for recipe in worst_first(self.recipes) if recipe.diverged]:
            texts = [
                f"{recipe.label} at iteration {min(recipe.diverged.values())}{_of_seeds(len(recipe.diverged), recipe)}"
                for recipe in lost
            ]
            sentences.append(Sentence(f"Diverged: {evidence.listed(texts)}."))
        runs = self.costs[self.costs["diverged"].isna()]
        for title, part in (
            ("Ended early, and compared on the iterations that both have", runs[runs["ended"]]),
            ("Compared in part", runs[~runs["ended"].astype(bool) & runs["outcome"].notna()]),
        ):
            if len(part):
                texts = [f"{label} ({text})" for label, text in zip(part["label"], part["outcome"], strict=True)]
                sentences.append(Sentence(f"{title}: {evidence.listed(texts)}."))
        return sentences

    @property
    def _banded(self) -> list[RecipeRuns]:
        return [recipe for recipe in self.recipes if recipe.run_id in self.bands]

    @property
    def missing(self) -> list[str]:
        """Why bands are unknown."""
        return gap_bands.missing(band for bands in self.bands.values() for band in bands)

    @property
    def leaving(self) -> list[Sentence]:
        """When each recipe leaves bf16's band."""
        left = [(recipe.label, self.left[recipe.run_id]) for recipe in self.recipes if recipe.run_id in self.left]
        out = sorted(((at, label) for label, at in left if at is not None))
        inside = [label for label, at in left if at is None]
        sentences = []
        if out:
            texts = [f"{label} at iteration {at}" for at, label in out]
            sentences.append(Sentence(f"Leaves bf16’s band of reordering: {evidence.listed(texts)}."))
        if inside:
            sentences.append(Sentence(f"Does not leave bf16’s band of reordering: {evidence.listed(inside)}."))
        return sentences

    @property
    def _answers(self) -> list[Sentence]:
        """Which recipes’ gaps can be told from 0, and, of one part rounded alone, which part costs the most."""
        sentences: list[Sentence] = []
        known = [recipe for recipe in self.recipes if recipe.first] if self.base == BF16 else []
        if known:
            firsts = [(recipe.label, recipe.first_gap) for recipe in known]
            what = "Change of the loss by rounding alone (first iteration, on the weights and data of bf16)"
            sentences.append(evidence.each_of(firsts, what))
        recipes = [recipe for recipe in self.recipes if not math.isnan(recipe.gap.value)]  # the others diverged
        several = [recipe for recipe in recipes if len(recipe.gaps) > 1 or recipe not in known]
        pairs = [(recipe.label, recipe.gap) for recipe in several]
        sentences.append(evidence.effects(pairs, self.base, ("higher loss", "lower loss")))
        if added := [recipe for recipe in known if recipe in recipes and recipe not in several and recipe.added]:
            shown = [(recipe.label, recipe.added_gap) for recipe in added]
            sentences.append(evidence.each_of(shown, "Training adds, which one seed cannot tell from chance"))
        for spec in dict.fromkeys(recipe.spec for recipe in recipes if recipe.only and recipe.spec):
            alone = {str(recipe.only): recipe.gaps for recipe in recipes if recipe.only and recipe.spec == spec}
            if len(alone) > 1 and max(map(len, alone.values())) > 1:
                sentences.append(evidence.largest(alone, GAP, f"Rounded alone to {spec}, the largest gap"))
        if recipes and all(len(recipe.gaps) == 1 for recipe in recipes):
            sentences.append(evidence.say("Repeat them with other seeds to tell the gaps from chance."))
        return sentences


def _of_seeds(count: int, recipe: RecipeRuns) -> str:
    return f" ({count} of {len(recipe.gaps)} seeds)" if len(recipe.gaps) > 1 else ""


def compare(table: pd.DataFrame, losses: Losses, base: str = BF16) -> Comparison:
    """Compare the quantized runs of a table of `runs_with_references` with their references. losses: of all its runs
    and references, with those that are not finite (`losses_of` with lost). base: what the references are; other than
    bf16 it has no bands."""
    table = with_outcomes(table, losses)
    gaps = loss_gaps(table, losses)
    runs = costs(gaps, table)
    recipes = by_recipe(runs, table["run_id"].tolist())
    bands = bands_of(recipes, table, losses, gaps) if base == BF16 else {}
    return Comparison(table, gaps, runs, tuple(recipes), bands, base)


def _interval(estimate: Estimate, single: str = NO_INTERVAL, measure: Field = GAP) -> str:
    if estimate.n < 2 or math.isnan(estimate.value):
        return single if estimate.n == 1 else ""
    return f"{measure.text(estimate.low)} to {measure.text(estimate.high)}"


def with_one_seed(table: pd.DataFrame) -> list[str]:
    """The newest run of each recipe and settings that were compared on one seed only, after their reference runs.
    Branches are left out."""
    runs = comparable_runs(table)
    whole = runs[runs["branched"] == -math.inf]
    groups = [runs for _, runs in whole.groupby(["rounded", "settings"], sort=False)]
    newest = [runs.iloc[-1] for runs in groups if runs["data"].nunique() == 1]
    return list(dict.fromkeys([*(run["references"][0] for run in newest), *(run["run_id"] for run in newest)]))


def comparable_runs(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["quantized"] & has_reference(table)]


def left_out(table: pd.DataFrame) -> tuple[str, ...]:
    """Sentences on the runs of a table that cannot be compared."""
    sentences = [other_unit(table)]
    without = table[table["quantized"] & ~has_reference(table) & (table["unit"] == NATS)]
    if len(without):
        labels = evidence.listed(without["label"].tolist())
        sentences.append(f"Left out, because no bf16 run saw the same data: {labels}.{_unknown(without)}")
    return tuple(filter(None, sentences))


def no_reference(table: pd.DataFrame) -> str:
    """Why none of the runs can be compared, "" if one can."""
    if table.empty:
        return "The filter selects no run."
    if not table["quantized"].any():
        return "None of these runs was quantized in training: collect one, for example with `binade quick mxfp4`."
    if not comparable_runs(table).empty:
        return ""
    without = table[table["quantized"] & (table["unit"] == NATS)]
    if without.empty:
        return other_unit(table)
    collect = "collect one with the same options and --quantization bf16."
    return f"No bf16 run saw the same data as these runs: {collect}{_unknown(without)}"


def other_unit(table: pd.DataFrame) -> str:
    """A sentence on the runs whose losses are in another unit than NATS; "" without one."""
    other = table[table["unit"] != NATS]
    units = [
        f"{evidence.listed(runs['label'].tolist())} ({'unit unknown' if unit == UNKNOWN else unit})"
        for unit, runs in other.groupby("unit", sort=False)
    ]
    return f"Losses that are not known to be in {NATS} are not compared: {'; '.join(units)}." if units else ""


def _unknown(without: pd.DataFrame) -> str:
    """What is not known of the runs without a reference, as sentences after a space."""
    groups = without[without["unknown"] != ""].groupby("unknown", sort=False)["label"]
    return "".join(f" {evidence.listed(labels.tolist())}: {what}." for what, labels in groups)


def measured_of(opened: Catalog, recipe: RecipeRuns) -> tuple[Estimate, str] | None:
    """(the measured change of the loss by all that a recipe rounds forward, with the interval over sequences; on which
    weights), of the measurement with the most sequences; None if it was not measured. A measurement is that of a recipe
    if it rounded the same, whatever their files are called."""
    effects = opened.effects(recipe.runs)
    configs = opened.runs().set_index("run_id")["config"].map(json.loads)
    whole = effects[effects[["part", "layer_index", "module"]].isna().all(axis=1)]
    measurements = whole[whole["recipe_sha256"] == rounded_by(configs[recipe.run_id])]
    if measurements.empty:
        return None
    row = measurements.iloc[0]
    trained = configs[row["run_id"]].get("measured_run")
    weights = "last checkpoint" if trained else "weights before training"
    return evidence.mean(CHANGE, row["change_by_sequence"], "sequences"), weights


def held_out_gaps(opened: Catalog, compared: Comparison) -> dict[str, HeldOutGap]:
    """The held-out gaps of the recipes that have one, by the run_id of the recipe."""
    evaluations, same = evaluations_of(opened.root, compared.table["run_id"]), last_in_common(compared.gaps)
    configs, gaps = opened.runs().set_index("run_id")["config"], {}
    for recipe in compared.recipes:
        if gap := held_out_gap(pairs_of(compared.table, recipe.runs, evaluations, same)):
            gaps[recipe.run_id] = replace(gap, parameters=json.loads(configs[recipe.run_id]).get("parameters"))
    return gaps


def with_effects(opened: Catalog, compared: Comparison) -> pd.DataFrame:
    """`Comparison.recipe_table` with the measured effects: effect, effect_low, effect_high, effect_interval, effect_on,
    effect_sequences; and with the held-out gaps: held_out, held_out_low and so on, held_out_slope, held_out_at."""
    rows = []
    held_out = held_out_gaps(opened, compared)
    for recipe in compared.recipes:
        row: dict[str, Any] = {"run_id": recipe.run_id}
        if compared.base == BF16 and (measurement := measured_of(opened, recipe)):
            change, weights = measurement
            row |= {"effect_low": change.low, "effect_high": change.high, "effect_sequences": change.n}
            interval = _interval(change, "one sequence", change.measure)
            row |= {"effect": change.value, "effect_interval": interval, "effect_on": weights}
        if found_gap := held_out.get(recipe.run_id):
            for name, estimate in (("held_out", found_gap.gap), ("held_out_slope", found_gap.slope)):
                row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
                row[f"{name}_interval"] = _interval(estimate, f"one {estimate.of.removesuffix('s')}")
            row["held_out_at"] = found_gap.trained
        rows.append(row)
    columns = ["run_id", "effect", "effect_low", "effect_high", "effect_interval", "effect_on", "effect_sequences"]
    ends = ("", "_low", "_high", "_interval")
    columns += [f"{name}{end}" for name in ("held_out", "held_out_slope") for end in ends]
    effects = pd.DataFrame(rows, columns=[*columns, "held_out_at"]).replace([np.inf, -np.inf], np.nan)
    table = compared.recipe_table
    return table.merge(effects.astype({"run_id": table["run_id"].dtype}), on="run_id", how="left")


def measured_sentence(opened: Catalog, compared: Comparison) -> Sentence:
    """What was measured of the recipes besides the losses of training."""
    known = [
        (recipe.label, measurement[0]) for recipe in compared.recipes if (measurement := measured_of(opened, recipe))
    ]
    alone = evidence.each_of(known, "Measured change of the loss by rounding alone (`binade measure`)")
    gaps = held_out_gaps(opened, compared)
    recipes = [recipe for recipe in compared.recipes if recipe.run_id in gaps]
    evaluations = evaluations_of(opened.root, compared.table["run_id"])
    bits = {
        recipe.label: repeated(compared.table, recipe.runs, evaluations, gaps[recipe.run_id].iteration)
        for recipe in recipes
    }
    held_out = [(recipe.label, gaps[recipe.run_id]) for recipe in recipes]
    return evidence.together(alone, held_out_sentence(held_out, compared.base, bits))


def operand_table(opened: Catalog, recipes: Iterable[RecipeRuns]) -> pd.DataFrame:
    """What rounding did to the operands that the newest run of each recipe recorded last: columns of OPERAND_FIELDS,
    run_id, and numbers by side: linear_forward_sqnr_db, linear_forward_flush_to_zero, …, medians over operands."""
    rows = []
    for recipe in list(recipes)[:MOST_RUNS]:
        where = Filter(run_id=(recipe.run_id,))
        last = Filter(run_id=where.run_id, iteration=tuple(opened.facets(where).get("iteration", [])[-1:]))
        operands = opened.operands(last).dropna(subset="numel")
        if operands["format"].isna().all():
            continue
        row: dict[str, Any] = {"run_id": recipe.run_id, "label": recipe.label}
        with suppress(UnknownFormatError, SpecError):  # of a later version
            row["bits"] = sum(map(_bits, operands.to_dict("records"))) / operands["numel"].sum()
        errors = opened.moments(last, by=("component", "operation")).set_index(["component", "operation"])
        medians = errors[list(ERRORS)].astype(float).to_dict("index")
        for side, place in SIDES.items():
            if place in medians and not math.isnan(medians[place]["sqnr_db"]):
                known = medians[place]
                row |= {f"{side}_{name}": value for name, value in known.items()}
                row[side] = " / ".join(MEASURES[name].text(known[name]) for name in ERRORS)
        rows.append(row)
    return pd.DataFrame(rows, columns=None if rows else ["run_id", "label"])


def _bits(operands: Mapping[Any, Any]) -> float:
    """How many bits operands of one format take, with their block scales; those in bf16 keep their dtype."""
    if not isinstance(operands["format"], str):
        return float(operands["nbytes"]) * 8
    return float(Spec.of(operands["format"]).bits_per_value * operands["numel"])


def gradient_pairs(
    opened: Catalog, runs: pd.DataFrame, by: str, name: str, at: int, done: Done = lambda count, of: None
) -> tuple[pd.DataFrame, int]:
    """(the `gradient_errors` of all runs, each to the reference that has most of these gradients, in an iteration,
    group being the run's `by`; how many pairs could not be read)."""
    parts, unread = [pd.DataFrame()], 0
    where = Filter(tensor_name=(name,), iteration=(at,))

    def read(run_id: str, references: Sequence[str]) -> tuple[pd.DataFrame, int]:
        return gradient_errors(
            opened, max((pairs_on_same_data(opened, run_id, reference, where) for reference in references), key=len)
        )

    for count, run in enumerate(runs.to_dict("records"), 1):
        of = run["run_id"], run["references"]
        errors, missing = opened.kept(("gradients", *of, where), partial(read, *of))
        parts.append(errors.assign(group=run[by]))
        unread += missing
        done(count, len(runs))
    return pd.concat(parts, ignore_index=True), unread
