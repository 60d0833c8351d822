"""The comparison of recipes by their loss: the one that Runs › Recipes draws and `binade compare` prints.

    compared = compare(table, losses)      of data.index.run_table
    compared.recipe_table                  a row per recipe
    compared.verdict

Runs are matched by what they have read, see data.compare.same_data. Runs of one recipe with the same settings are one
recipe, over seeds: of several runs on the same data the newest counts. Ablations are in data.compare.ablation. No torch
here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import pandas as pd

from binade.data.compare import evidence
from binade.data.compare.evidence import GAP, Estimate, Sentence
from binade.data.compare.gap_bands import NO_BAND, RULE, Band, bands_of, settings_of_references
from binade.data.compare.gradients import gradient_errors
from binade.data.compare.held_out import (
    HeldOutGap,
    evaluations_of,
    held_out_gap,
    held_out_sentence,
    last_in_common,
    pairs_of,
    repeated,
)
from binade.data.compare.loss_gaps import Losses, RecipeRuns, by_recipe, costs, loss_gaps, with_outcomes, worst_first
from binade.data.compare.outcomes import DEFINITION
from binade.data.compare.same_data import NATS, UNKNOWN, pairs_on_same_data
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import has_reference
from binade.data.run.effects import CHANGE, rounded_by
from binade.data.run.rounding_alone import interval_of
from binade.data.words.fields import MEASURES, Field
from binade.data.words.filter import Filter
from binade.quant.formats import BF16, UnknownFormatError
from binade.quant.specs import Spec, SpecError

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
    Field("alone", "Rounding alone", "nats", "The loss with rounding minus the loss without, of the same sequences on "
          "the same weights, measured in the run before its first step with the recipe; mean over seeds", "+.4f"),
    Field("alone_interval", "Rounding alone, 95% interval", "", "Over seeds; of one seed, over its sequences", ""),
    Field("added", "Training adds", "nats", "Gap at the last iteration minus that in the iteration in which rounding "
          "alone was measured, mean over seeds", "+.4f"),
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
    Field("left", "Leaves bf16", "", RULE, ""),
)  # fmt: skip
"""The columns of `with_effects` that are shown."""
RUN_FIELDS = (
    Field("label", "Run", format=""),
    Field("outcome", "Outcome", "", "Where its training diverged or ended early, or that of its bf16 run diverged", ""),
    Field("gap", "Mean gap", "nats", "Mean over iterations of the loss minus that of the reference", "+.4f"),
    Field("alone", "Rounding alone", "nats", "The loss with rounding minus the loss without, of the same sequences on "
          "the same weights, measured in the run", "+.4f"),
    Field("added", "Training adds", "nats", "Gap at the last iteration minus that in the iteration in which rounding "
          "alone was measured", "+.4f"),
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


@dataclass(frozen=True)
class Comparison:
    """
    table    of `runs_with_references`, `with_outcomes`
    gaps     of `loss_gaps`
    costs    a row per run
    recipes  the largest |mean gap| first, those that diverged last
    bands    of each recipe, by its run_id; empty if runs are compared with another one than bf16
    base     what the gaps are to
    """

    table: pd.DataFrame
    gaps: pd.DataFrame
    costs: pd.DataFrame
    recipes: tuple[RecipeRuns, ...]
    bands: Mapping[str, Band]
    base: str

    @cached_property
    def compared_together(self) -> dict[str, int]:
        """How many recipes have a band of the same settings, by the run_id of each."""
        settings = settings_of_references(self.table)
        known = [settings[recipe.run_id] for recipe in self.recipes if self._has_band(recipe)]
        return {
            recipe.run_id: known.count(settings[recipe.run_id]) for recipe in self.recipes if self._has_band(recipe)
        }

    def _has_band(self, recipe: RecipeRuns) -> bool:
        return recipe.run_id in self.bands and self.bands[recipe.run_id].is_known

    @cached_property
    def mean_gaps(self) -> pd.DataFrame:
        """The gap of each recipe by iteration, mean over the seeds that have it: columns run_id (of the recipe), label,
        iteration, gap, seeds. Only the iterations that all its seeds have."""
        by_run, parts = dict(iter(self.gaps.groupby("run_id"))), []
        for recipe in self.recipes:
            runs = [by_run[run_id] for run_id in recipe.runs if run_id in by_run]
            if runs:
                gaps = pd.concat(runs).groupby("iteration")["gap"].agg(["mean", "size"])
                gaps = gaps[gaps["size"] == len(runs)].reset_index()
                parts.append(gaps.set_axis(["iteration", "gap", "seeds"], axis=1).assign(
                    run_id=recipe.run_id, label=recipe.label
                ))  # fmt: skip
        return pd.concat(parts, ignore_index=True) if parts else self.gaps.assign(seeds=1).iloc[:0]

    @cached_property
    def left(self) -> dict[str, int | None]:
        """The iteration at which each recipe leaves bf16, by its run_id; None for one that does not. One that diverged
        leaves it then at the latest. Recipes without a band are left out. See data.compare.gap_bands."""
        iterations, by_recipe = {}, dict(iter(self.mean_gaps.groupby("run_id")))
        for recipe in self.recipes:
            if self._has_band(recipe):
                gaps = by_recipe.get(recipe.run_id, self.mean_gaps.iloc[:0])
                diverged = min(recipe.diverged.values(), default=None)
                mean = {int(at): float(gap) for at, gap in zip(gaps["iteration"], gaps["gap"], strict=True)}
                seeds = int(gaps["seeds"].max()) if len(gaps) else 1
                before = {at: gap for at, gap in mean.items() if diverged is None or at < diverged}
                left = self.bands[recipe.run_id].left_at(before, seeds, self.compared_together[recipe.run_id])
                iterations[recipe.run_id] = diverged if left is None else left
        return iterations

    @cached_property
    def recipe_table(self) -> pd.DataFrame:
        """A row per recipe: the columns of RECIPE_FIELDS but for measured effects, run_id, and low and high of gap,
        alone and added, NaN where one seed gives no interval. alone and added: only of gaps to bf16."""
        rows = []
        for recipe in self.recipes:
            row: dict[str, Any] = {"run_id": recipe.run_id, "label": recipe.label, "seeds": recipe.gap.n}
            row |= {"outcome": recipe.outcome or None, "diverged": min(recipe.diverged.values(), default=None)}
            parts = {"gap": recipe.gap}
            if self.base == BF16:
                parts |= {"alone": recipe.alone_gap, "added": recipe.added_gap}
            for name, estimate in parts.items():
                row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
                row[f"{name}_interval"] = (interval_of if name == "alone" else _interval)(estimate) or None
            if recipe.run_id in self.left:
                at = self.left[recipe.run_id]
                row["left"] = "no" if at is None else f"at iteration {at}"
            rows.append(row)
        ends = [f"{name}_{end}" for name in ("gap", "alone", "added") for end in ("low", "high")]
        shown = (field.name for field in RECIPE_FIELDS if not field.name.startswith(("effect", "held_out")))
        columns = [*shown, "run_id", "diverged", *ends]
        return pd.DataFrame(rows, columns=columns).replace([np.inf, -np.inf], np.nan)

    @property
    def verdict(self) -> Sentence:
        return evidence.together(*self.sentences)

    @property
    def sentences(self) -> list[Sentence]:
        """Which gaps can be told from 0, and when each recipe leaves bf16."""
        return [sentence for sentence in (*self.outcomes, *self._answers, *self.leaving) if sentence]

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
    def unknown(self) -> str:
        """Why it is unknown which recipes leave bf16; "" if it is known of all."""
        without = [
            recipe.label for recipe in self.recipes if recipe.run_id in self.bands and not self._has_band(recipe)
        ]
        if not without:
            return ""
        of = "" if not self.left else f" of {evidence.listed(without)}"
        return f"Whether {'a recipe leaves' if not of else 'they leave'} bf16{of} is unknown: {NO_BAND}"

    @property
    def leaving(self) -> list[Sentence]:
        """When each recipe leaves bf16."""
        left = [(recipe, self.left[recipe.run_id]) for recipe in self.recipes if recipe.run_id in self.left]
        out = sorted((at, recipe.label, len(recipe.gaps)) for recipe, at in left if at is not None)
        inside = [recipe.label for recipe, at in left if at is None]
        sentences = []
        if out:
            texts = [f"{label} at iteration {at}{' (one seed)' if seeds == 1 else ''}" for at, label, seeds in out]
            sentences.append(Sentence(f"Leaves bf16: {evidence.listed(texts)}."))
        if inside:
            sentences.append(
                Sentence(f"Does not leave what differs from bf16 in bits alone: {evidence.listed(inside)}.")
            )
        return sentences

    @property
    def _answers(self) -> list[Sentence]:
        """Which recipes’ gaps can be told from 0, and, of one part rounded alone, which part costs the most."""
        sentences: list[Sentence] = []
        known = [recipe for recipe in self.recipes if recipe.alone] if self.base == BF16 else []
        if known:
            changes = [(recipe.label, recipe.alone_gap) for recipe in known]
            what = "Change of the loss by rounding alone (the same sequences and weights, with and without)"
            sentences.append(evidence.each_of(changes, what))
        recipes = [recipe for recipe in self.recipes if not math.isnan(recipe.gap.value)]  # the others diverged
        several = [recipe for recipe in recipes if len(recipe.gaps) > 1 or recipe not in known]
        pairs = [(recipe.label, recipe.gap) for recipe in several]
        sentences.append(evidence.effects(pairs, self.base, ("higher loss", "lower loss")))
        if added := [recipe for recipe in known if recipe in recipes and recipe not in several and recipe.added]:
            shown = [(recipe.label, recipe.added_gap) for recipe in added]
            what = "Training adds by the last iteration, which one seed cannot tell from chance"
            sentences.append(evidence.each_of(shown, what))
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
        f"{evidence.listed(runs['label'].tolist())} ({'unit unknown' if unit == UNKNOWN else str(unit)})"
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
    if effects.empty:
        return None
    configs = opened.runs().set_index("run_id")["config"]
    whole = effects[effects[["part", "layer_index", "module"]].isna().all(axis=1)]
    measurements = whole[whole["recipe_sha256"] == rounded_by(json.loads(configs[recipe.run_id]))]
    if measurements.empty:
        return None
    row = measurements.iloc[0]
    trained = json.loads(configs[row["run_id"]]).get("measured_run")
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
    """What rounding did to the operands that the newest run of each recipe recorded last, of the worst recipes
    (`operands_left`): columns of OPERAND_FIELDS, run_id, and numbers by side: linear_forward_sqnr_db, …, medians over
    operands."""
    rows = []
    for recipe in worst_first([*recipes])[:MOST_RUNS]:
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


def operands_left(recipes: Sequence[RecipeRuns]) -> str:
    """A sentence if `operand_table` has not all recipes, else ""."""
    if len(recipes) <= MOST_RUNS:
        return ""
    return f"Operands are shown of the {MOST_RUNS} recipes that diverged or have the largest gaps, of {len(recipes)}."


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
