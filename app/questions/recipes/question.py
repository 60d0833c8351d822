"""Recipes: which part costs the most loss, how the gradients change, and what an ablation shows, compared with bf16
on the same data."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from binade.app import style
from binade.app.control import Control
from binade.app.figure import Column, Drawn, Figure, Item, Table, Text, source
from binade.app.formatting import losses_of
from binade.app.params import One, Whole
from binade.app.questions.question import Question
from binade.app.questions.recipes import bands, charts, compute
from binade.app.questions.shared.event_marks import with_events
from binade.app.questions.shared.labels import thinned, thinned_note
from binade.app.questions.shared.runs import (
    OF_MODEL,
    PARTS,
    compared_with,
    every_run,
    references_of,
    run_looks,
    run_titles,
    some_runs,
)
from binade.app.questions.shared.selection import Selection
from binade.app.questions.shared.unscaled import with_scale
from binade.app.style import MEASURES
from binade.collector.recipes.ladder import Ladder, ladders
from binade.collector.recipes.parse import linear_formats_of
from binade.collector.recipes.recipe import BF16
from binade.collector.recipes.seeds import JUDGED, Judged
from binade.data import evidence, gap_bands
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.gradients import COMPARED, GRADIENTS, gradient_errors, gradient_summary
from binade.data.names import name_of, product_name
from binade.data.notes import rounded_twice
from binade.data.same_data import pairs_on_same_data
from binade.data.tensor_kinds import label_of
from binade.data.text import counted
from binade.quant.formats import FORMATS

NOTE = (
    "Runs are compared with the bf16 run of the same model, data, seed and warm-up, iteration by iteration. "
    "Only the filter’s run, recipe, model, size and dataset apply."
)
OF_DATA, OF_RUNS = OF_MODEL, ("run_id", "recipe")  # the fields of the filter that apply
VIEWS = {"cost": "Loss", "gradients": "Gradients", "ladder": "Ablation"}
NO_ABLATION = "These runs include no ablation: queue one with binade ablate te_nvfp4 --train-iters 50 --seeds 3."
NO_GAP = "No run of this ablation has an iteration in common with a bf16 run of its seed yet."
NAMED = 4  # runs in the answer
ONE_SEED = "The gaps of successive iterations depend on each other, so one seed has no interval."
Done = Callable[[int, int], None]  # of the runs whose gradients are compared: how many, of how many
VIEW = Control(name="of", label="View", param=One(tuple(VIEWS)), titles=VIEWS, row="what")
GRADIENT = Control(
    name="gradient", label="Gradient", param=One(GRADIENTS), titles={name: label_of(name) for name in GRADIENTS},
    row="gradients", width=2,
)  # fmt: skip
AT = Control(name="at", label="Iteration", param=Whole(0, 10**9), widget="slider", row="gradients")
LADDER = Control(
    name="ladder",
    label="Ablation of",
    param=lambda opened: One(tuple(ladder.name for ladder in ladders(opened.runs()["recipe"].dropna()))),
    widget="list",
    row="gradients",
    width=2,
)
BASE = "bf16"
AGAINST = Control(
    name="against", label="Compare with", param=lambda opened: One((BASE, *opened.runs()["run_id"]), "run"),
    widget="list",
    titles={BASE: "bf16 on the same data"}, row="what",
)  # fmt: skip
COLUMNS = {
    "label": Column("Run", width=130),
    **{part: Column(title, width=110) for part, title in PARTS.items()},
    "gap": Column(
        "Mean gap",
        "%+.5f",
        90,
        help="Mean over iterations of the loss minus the other run’s, in nats",
    ),
    "first": Column(
        "Rounding alone", "%+.5f", 115, help="Gap in iteration 0, before any step: weights and data are those of bf16"
    ),
    "added": Column("Added later", "%+.5f", 100, help="Mean gap of the later iterations, minus that of iteration 0"),
    "last": Column("Last gap", "%+.5f", 90, help="In nats"),
    "iterations": Column("Iterations", width=85),
    "run_id": Column("Directory", width=330),
}
RUNGS = {
    "rung": Column("Step", width=130),
    "seeds": Column("Seeds", width=60),
    "gap": Column("Mean gap", "%+.5f", 90, help="Mean of loss − bf16’s loss over iterations and seeds, in nats"),
    "deviation": Column("sd", "%.5f", 75, help="Sample standard deviation of the seeds’ mean gaps"),
    "change": Column(
        "Change",
        "%+.5f",
        85,
        help="Change from the previous step, paired by seed; for a recipe without one ingredient, from the full recipe",
    ),
    "verdict": Column("Verdict", width=220, help=JUDGED),
    "cosine": Column("Cosine", "%.4f", 75, help=f"With bf16’s gradient: {MEASURES['cosine'].definition}"),
    "relative_squared_error": Column(
        "Rel. squared error", "%.3g", 125, help=MEASURES["relative_squared_error"].definition
    ),
    "forward_sqnr_db": Column("SQNR forward (dB)", "%.2f", 140, help="Median over the recorded operands"),
    "backward_sqnr_db": Column("SQNR gradients (dB)", "%.2f", 150, help="Median over the gradients that enter dgrad"),
    "recipe": Column("Recipe", width=280),
}


def _controls(selection: Selection, values: dict[str, Any]) -> list[Control]:
    runs = every_run(selection.opened)
    against = replace(AGAINST, options=(BASE, *runs["run_id"][::-1]), titles=run_titles(runs) | dict(AGAINST.titles))
    if values["of"] == "cost":
        return [VIEW, against]
    iterations = iterations_of(selection.opened, values["gradient"])
    at = [replace(AT, options=iterations)] if len(iterations) > 1 else []
    if values["of"] == "gradients":
        return [VIEW, GRADIENT, *at]
    names = [each.name for each in ladders(runs_of(selection.opened, selection.where)["recipe"].dropna())]
    if not names:
        return [VIEW]
    several = [replace(LADDER, options=names)] if len(names) > 1 else []
    return [VIEW, *several, *([GRADIENT, *at] if iterations else [])]


def draw(selection: Selection, values: dict[str, Any], done: Done = lambda count, of: None) -> Drawn:
    opened, where, view = selection.opened, selection.where, values["of"]
    table = some_runs(opened, runs_of(opened, where))
    if view == "ladder":
        if (chosen := _chosen(table, values["ladder"])) is None:
            return Drawn(problems=(NO_ABLATION,))
        return ladder(opened, where, table, chosen, values["gradient"], values["at"], done)
    table, base = _against(opened, table, values)
    if problem := no_reference(table):
        other = f"No other run in the filter saw the same data as {base}."
        return Drawn(problems=(problem if base == BASE else other,))
    if view == "cost":
        return cost(opened, where, table, base)
    name = values["gradient"]
    iterations = iterations_of(opened, name)
    if not iterations:
        return Drawn(problems=(f"No {label_of(name)} was recorded.",))
    at = values["at"] if values["at"] in iterations else iterations[0]
    return gradients(opened, where, table, name, at, iterations, done)


def runs_of(opened: Catalog, where: Filter) -> pd.DataFrame:
    """The runs that the filter's words about runs allow; those in bf16 stay, to compare with."""
    runs = opened.runs()
    plain = (runs["recipe"] == "bf16") & ~runs["run_id"].isin(opened.parts()["run_id"])
    keep = pd.Series(True, index=runs.index)
    for name in OF_DATA:
        if wanted := getattr(where, name):
            keep &= runs[name].isin(wanted)
    for name in OF_RUNS:
        if wanted := getattr(where, name):
            keep &= runs[name].isin(wanted) | plain
    return runs[keep]


def runs_in(selection: Selection, values: dict[str, Any]) -> pd.DataFrame:
    """The runs that these values of the controls compare: of `some_runs`."""
    opened, where = selection.opened, selection.where
    table = some_runs(opened, runs_of(opened, where))
    if values["of"] == "ladder":
        chosen = _chosen(table, values["ladder"])
        return table[table["recipe"].isin([rung.recipe for rung in chosen.rungs] if chosen else [])]
    return _against(opened, table, values)[0]


def _against(opened: Catalog, table: pd.DataFrame, values: Mapping[str, Any]) -> tuple[pd.DataFrame, str]:
    """(the runs of the table, compared with the chosen run; its label). BASE compares each with its bf16 run."""
    run_id = values["against"]
    if values["of"] != "cost" or run_id == BASE:
        return table, BASE
    every = every_run(opened)
    own = every[every["run_id"].isin([*table["run_id"], run_id])].reset_index(drop=True)
    return compared_with(own, run_id), every.set_index("run_id")["label"][run_id]


def _chosen(table: pd.DataFrame, name: str | None) -> Ladder | None:
    """The ladder of this name, else the first: the filter may leave it out."""
    by_name = {each.name: each for each in ladders(table["recipe"].dropna())}
    return by_name.get(name or "") or next(iter(by_name.values()), None)


def _beyond(opened: Catalog, where: Filter, run_ids: Collection[str]) -> set[str]:
    """All runs of the table, as most fields of the filter do not apply, and the bf16 runs of those chosen."""
    shown = {*run_ids, *runs_of(opened, where)["run_id"]}
    return shown.union(references_of(opened, where, shown))


def no_reference(table: pd.DataFrame) -> str:
    """Why none of the runs can be compared, "" if one can."""
    if table.empty:
        return "The filter selects no run."
    if not table["quantized"].any():
        return "None of these runs was quantized in training: collect one, for example with `binade quick mxfp4`."
    if comparable_runs(table).empty:
        return "No bf16 run saw the same data as these runs: collect one with the same options and --quantization bf16."
    return ""


def cost(opened: Catalog, where: Filter, table: pd.DataFrame, base: str = BASE) -> Drawn:
    """Each quantized run's gap to bf16's loss, or each other run's to that of the run `base`."""
    losses = losses_of(opened, table["run_id"].tolist())
    gaps = compute.loss_gaps(table, losses)
    costs = compute.costs(gaps, table)
    if costs.empty:
        return Drawn(problems=(f"No run has an iteration in common with {base} yet.",))
    recipes = compute.by_recipe(costs)
    latest = recipes[: style.MAX_GROUPS]
    against = "their bf16 runs" if base == BASE else base
    first = source(where, f"{counted(len(costs), 'run')} and {against}, from loss.jsonl")
    caption = f"{first}\nGap: the run’s loss minus that of {base} at the same iteration, in nats per token."
    part = f"the {len(latest)} recipes with the largest gaps of {len(recipes)} · " if len(recipes) > len(latest) else ""
    bars = pd.DataFrame(
        {"label": each.label, "run_id": each.run_id, "gap": each.gap.value, "low": each.gap.low, "high": each.gap.high,
         "seeds": each.gap.n, "text": str(each.gap)}
        for each in latest
    ).replace([math.inf, -math.inf], math.nan)  # fmt: skip
    look = dict(zip(table["run_id"], table["look"], strict=True))
    looks = run_looks(table) | {each.label: look[each.run_id] for each in latest}
    to_bf16 = latest if base == BASE else []
    own = bands.bands_of(to_bf16, table, losses, gaps)
    configs = opened.runs().set_index("run_id")["config"]
    formats = {each.run_id: linear_formats_of(json.loads(configs[each.run_id])) for each in to_bf16}
    subtitle = f"{part}mean over the iterations that both runs have, and over seeds"
    shades = bands.rows(to_bf16, own, formats)
    chart = charts.costs(bars, subtitle, looks, base, shades)
    height = charts.costs_height(bars, shades)
    note = f"{ONE_SEED} {bands.NOTE}" if to_bf16 else ONE_SEED
    figures = [Figure("costs", chart, bars, caption, note=note, height=height, group="cost")]
    newest = gaps[gaps["run_id"].isin([each.run_id for each in latest])]
    shown, step = thinned(newest, style.MARKS)
    subtitle = f"above the dashed line: worse than {base} · the newest run of each recipe"
    shades = bands.by_iteration(own, table)
    shades = shades[shades["iteration"].isin(shown["iteration"])]
    height = max(height, 360) + style.legend_height(list(dict.fromkeys(shown["label"]))) + charts.legend_height(shades)
    chart = charts.gaps(shown, subtitle, looks, base, shades)
    figures.append(Figure("gaps", chart, shown, caption, note=thinned_note(step), height=height, group="cost"))
    listed = costs.merge(table[["run_id", *PARTS]], on="run_id")
    unused = [part for part in PARTS if listed[part].isin(["bf16", None]).all()]
    columns = {name: column for name, column in COLUMNS.items() if name not in unused}
    without = table.loc[table["quantized"] & table["reference"].isna(), "label"].tolist()
    left = (f"Left out, because no bf16 run saw the same data: {evidence.listed(without)}.",) * bool(without)
    missing = gap_bands.missing(band for each in own.values() for band in each)
    published = bands.published([*formats.values()])
    placed = gap_bands.placed((each.label, each.gap, own[each.run_id]) for each in to_bf16)
    items: tuple[Item, ...] = (*figures, Table("costs", listed, columns), *map(Text, missing), *published)
    caveat = rounded_twice(json.loads(configs[each.run_id]) for each in recipes)
    said = evidence.together(_answer(recipes, base), *placed, caveat)
    answer = Drawn(items, said, left)
    return with_events(answer, opened, Filter(run_id=tuple(each.run_id for each in latest)))


def _answer(recipes: list[compute.Recipe], base: str) -> evidence.Sentence:
    """Which recipes’ gaps can be told from 0, and, of one part rounded alone, which part costs the most."""
    found: list[str] = []
    known = [each for each in recipes if each.first] if base == BASE else []
    if known:
        firsts = [(each.label, _first(each)) for each in known]
        what = "Change of the loss by rounding alone (iteration 0, on the weights and data of bf16)"
        found.append(evidence.each_of(firsts[:NAMED], what))
    several = [each for each in recipes if len(each.gaps) > 1 or each not in known]
    found.append(evidence.effects([(each.label, each.gap) for each in several], base, ("higher loss", "lower loss")))
    if added := [each for each in known if each not in several and each.added]:
        shown = [(each.label, evidence.mean(evidence.GAP, each.added.values())) for each in added]
        found.append(evidence.each_of(shown[:NAMED], "Training adds, which one seed cannot tell from chance"))
    for spec in dict.fromkeys(each.spec for each in recipes if each.only and each.spec):
        alone = {str(each.only): each.gaps for each in recipes if each.only and each.spec == spec}
        if len(alone) > 1 and max(map(len, alone.values())) > 1:
            found.append(evidence.largest(alone, evidence.GAP, f"Rounded alone to {spec}, the largest gap"))
    if all(len(each.gaps) == 1 for each in recipes):
        found.append(evidence.say("Repeat them with other seeds to tell the gaps from chance."))
    return evidence.together(*found)


def _first(recipe: compute.Recipe) -> evidence.Estimate:
    """The gap of iteration 0: exact for one start; over several, their mean."""
    values = list(recipe.first.values())
    if len(values) == 1:
        return evidence.exact(evidence.GAP, values[0], of="micro-batches")
    return evidence.mean(evidence.GAP, values)


def iterations_of(opened: Catalog, name: str) -> list[int]:
    return opened.facets(Filter(tensor_name=(name,))).get("iteration", [])


def gradients(
    opened: Catalog,
    where: Filter,
    table: pd.DataFrame,
    name: str,
    at: int,
    iterations: list[int],
    done: Done = lambda count, of: None,
) -> Drawn:
    """How far each run's gradients of this name are from bf16's."""
    runs = runs_compared(table)
    together, unread = _pairs(opened, runs, "label", name, at, done)
    if together.empty:
        return Drawn(problems=("No gradient of these runs has a counterpart with values in its bf16 run.",))
    together["place"] = [
        name_of(layer, product_name(module, name))
        for layer, module in zip(together["layer_index"], together["module"], strict=True)
    ]
    summary = gradient_summary(together, ["group", "place"])
    by_run = gradient_summary(together, ["group"])
    cosine, squared = (_of_runs(by_run, name) for name in COMPARED)
    label = f"cosine with bf16’s {label_of(name)}, iteration {at}"
    lowest = [run for run, _ in evidence.leaders(cosine, lowest=True)]
    verdict = evidence.together(
        evidence.extreme(cosine, label, lowest=True),
        evidence.each_of([item for item in squared if item[0] in lowest[:NAMED]], "Relative squared error"),
    )
    worst = by_run.sort_values("cosine").iloc[0]
    unscaled = [name for name in FORMATS if with_scale(name)]
    if runs.loc[runs["label"] == worst["group"], list(PARTS)].isin(unscaled).any(axis=None):
        verdict = evidence.together(verdict, _with_scale(str(worst["group"]), cosine, runs))
    what = f"{len(together):,} pairs of {name} tensors, iteration {at}, exact"
    caption = (
        f"{source(where, what)}\nCosine: {MEASURES['cosine'].definition}, where x is bf16’s gradient of the same "
        f"iteration and data. Relative squared error: {MEASURES['relative_squared_error'].definition}. Of several "
        "tensors: the median."
    )
    subtitle = f"{label_of(name)} · iteration {at} · {len(together):,} pairs"
    height = charts.agreement_height(summary)
    looks = run_looks(table)
    figures = []
    for column in COMPARED:
        chart = charts.agreement(summary, column, subtitle, looks)
        figures.append(Figure(column, chart, summary, caption, height=height, group="gradients"))
    notes = [f"Relative squared error: {MEASURES['relative_squared_error'].definition}."]
    if unread:
        notes.append(f"{unread} pairs could not be read and are left out.")
    comparable = len(comparable_runs(table))
    if comparable > style.MAX_GROUPS:
        notes.append(f"The {style.MAX_GROUPS} newest of {comparable} runs are shown; use the filter to choose others.")
    if at > min(iterations):
        notes.append("In later iterations the weights have drifted apart as well.")
    if rounds_to_e5m2(runs):
        notes.append("Plain mxfp8 rounds gradients to mxfp8_e5m2.")
    return Drawn((*figures, *map(Text, notes)), verdict)


def ladder(
    opened: Catalog,
    where: Filter,
    table: pd.DataFrame,
    chosen: Ladder,
    name: str,
    at: int | None,
    done: Done = lambda count, of: None,
) -> Drawn:
    """An ablation: what each rung of the ladder costs, and whether the seeds separate it. name, at: of the gradients
    that are compared, "" for none."""
    gaps = compute.loss_gaps(table, losses_of(opened, table["run_id"].tolist()))
    runs, left_out = compute.ladder_runs(table, gaps, chosen)
    rungs = compute.rungs(runs, chosen)
    answer = _separated(rungs, chosen)
    rungs = rungs.drop(columns="judged")
    if not runs["gap"].notna().any():
        return Drawn(problems=(no_reference(table) or NO_GAP,))
    errors, notes = _gradient_errors(opened, runs, name, at, done)
    rungs = rungs.merge(errors, on="recipe", how="left").merge(_sqnr(opened, runs), on="recipe", how="left")
    columns = {key: column for key, column in RUNGS.items() if key in rungs and rungs[key].notna().any()}
    seeds = runs.dropna(subset="gap").merge(rungs[["recipe", "rung"]], on="recipe")[["rung", "seed", "gap"]]
    what = (
        f"{counted(len(runs), 'run')} of {counted(runs['seed'].nunique(), 'seed')} and their bf16 runs, from loss.jsonl"
    )
    caption = (
        f"{source(where, what)}\nGap: the run’s loss minus the loss of the bf16 run of the same seed at the same "
        f"iteration, mean over the iterations, in nats per token.\n{JUDGED}"
    )
    chart = charts.ladder(rungs, seeds, chosen.name)
    figure = Figure("ladder", chart, rungs, caption, note=JUDGED, height=charts.ladder_height(rungs))
    problems = _missing(runs, rungs)
    if left_out:
        runs_are = "run of these recipes is" if left_out == 1 else "runs of these recipes are"
        notes = [*notes, f"{left_out} {runs_are} left out: their settings differ, or a newer run has the same seed."]
    shown = Table("ladder", rungs, columns)
    return Drawn((figure, shown, *map(Text, notes)), answer, tuple(problems))


def _separated(rungs: pd.DataFrame, chosen: Ladder) -> evidence.Sentence:
    """Which changes the seeds tell from 0, and which they do not."""
    judged: list[tuple[str, Judged]] = [
        (str(row["rung"]), row["judged"]) for row in rungs.to_dict("records") if row["verdict"]
    ]
    most = max((each.change.n for _, each in judged if each.change), default=0)
    if most < 2:
        return evidence.say(
            "One seed tells no recipe from another. To collect more: binade ablate {name} --seeds 3.", name=chosen.name
        )
    apart = [(f"{rung} is {each.verdict},", each.change) for rung, each in judged if each.is_apart and each.change]
    alike = [f"{rung} is {each.verdict}" for rung, each in judged if not each.is_apart]
    if not apart:
        return evidence.say("{seeds} seeds tell no step from the one that it is compared with.", seeds=most)
    rest = evidence.say("By {seeds} seeds, {alike}.", seeds=most, alike="; ".join(alike)) if alike else ""
    return evidence.together(evidence.each_of(apart, "Statistically significant"), rest)


def _missing(runs: pd.DataFrame, rungs: pd.DataFrame) -> list[str]:
    """A sentence for everything that the ladder lacks."""
    found = []
    if alone := sorted(set(runs.loc[runs["gap"].isna(), "seed"])):
        s, that = ("s", "those seeds") if len(alone) > 1 else ("", "that seed")
        seeds = f"seed{s} {', '.join(alone)}"
        found.append(f"There is no bf16 run on the same data for {seeds}, so runs with {that} have no gap.")
    number = rungs.loc[rungs["recipe"] != BF16, "seeds"]
    if fewer := [f"{row.rung} {row.seeds}" for row in rungs[1:].itertuples() if row.seeds < number.max()]:
        found.append(f"Not every step has {number.max()} seeds: {', '.join(fewer)}.")
    return found


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
    together, unread = _pairs(opened, runs[runs["reference"].notna()], "recipe", name, at, done)
    if together.empty:
        return nothing, [f"No {label_of(name)} has a counterpart with values in bf16: there is no gradient error."]
    notes = [f"Gradients: {len(together):,} pairs of {name} tensors of iteration {at}, all seeds together."]
    if unread:
        notes.append(f"{unread} pairs could not be read and are left out.")
    summary = gradient_summary(together, ["group"]).rename(columns={"group": "recipe"})
    return summary.drop(columns="tensors"), notes


def _of_runs(by_run: pd.DataFrame, name: str) -> list[evidence.Named]:
    """One of COMPARED by run: median and spread over its tensors."""
    ends = {name: "value", f"{name}_low": "low", f"{name}_high": "high"}
    rows = by_run[["group", "tensors", *ends]].rename(columns=ends).dropna(subset=["value"]).to_dict("records")
    return [(str(row["group"]), evidence.spread(MEASURES[name], row)) for row in rows]


def _with_scale(worst: str, cosine: list[evidence.Named], runs: pd.DataFrame) -> evidence.Sentence:
    """What the gradients of the hifp8_scaled run show, if there is one."""
    scaled = set(runs.loc[runs["recipe"] == "hifp8_scaled", "label"])
    found = next((each for each in cosine if each[0] in scaled), None)
    if found is None:
        text = "{worst} rounds to HiFloat8 without a scale: to see it with one, collect the recipe hifp8_scaled."
        return evidence.say(text, worst=worst)
    text = "{worst} rounds to HiFloat8 without a scale; with one, {scaled} has a cosine of {cosine}."
    return evidence.say(text, worst=worst, scaled=found[0], cosine=found[1])


def rounds_to_e5m2(runs: pd.DataFrame) -> bool:
    return bool((runs[list(PARTS)] == "mxfp8").any(axis=None))


def comparable_runs(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["quantized"] & table["reference"].notna()]


def _pairs(opened: Catalog, runs: pd.DataFrame, by: str, name: str, at: int, done: Done) -> tuple[pd.DataFrame, int]:
    """(the `gradient_errors` of all runs to their references, group being the run's `by`; how many pairs could not be
    read)."""
    parts, unread = [], 0
    for count, run in enumerate(runs.to_dict("records"), 1):
        pairs = run["run_id"], run["reference"], Filter(tensor_name=(name,), iteration=(at,))
        read = partial(lambda pairs: gradient_errors(opened, pairs_on_same_data(opened, *pairs)), pairs)
        errors, missing = opened.kept(("gradients", *pairs), read)
        parts.append(errors.assign(group=run[by]))
        unread += missing
        done(count, len(runs))
    return pd.concat(parts, ignore_index=True), unread


def runs_compared(table: pd.DataFrame) -> pd.DataFrame:
    return comparable_runs(table).tail(style.MAX_GROUPS)


RECIPES = Question(
    text="Which part raises the loss the most?",
    title="Recipes",
    icon=":material/balance:",
    help="QK, PV or linear layers: the loss and gradients of each recipe compared with bf16, and its ablation",
    page="runs",
    view="recipes",
    draw=draw,
    of_runs=True,
    of_fields=OF_DATA + OF_RUNS,
    empty=True,  # imported losses have no tensors
    beyond=_beyond,
    controls=(VIEW, AGAINST, LADDER, GRADIENT, AT),
    narrow=_controls,
    slow="Comparing gradients",
    note=NOTE,
    layout="binade.app.questions.recipes.page",
)
