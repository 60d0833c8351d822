"""Recipes: which part costs the most loss, how the gradients change, and what an ablation shows, compared with bf16
on the same data."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from binade.app.draw import style
from binade.app.draw.control import Control
from binade.app.draw.figure import Column, Drawn, Figure, Item, Table, Text, source
from binade.app.draw.style import MEASURES
from binade.app.questions.question import Question
from binade.app.questions.recipes import charts
from binade.app.questions.shared.event_marks import marked, marked_events
from binade.app.questions.shared.labels import thinned, thinned_note
from binade.app.questions.shared.runs import every_run, references_of, run_looks, run_titles, some_runs
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Selection
from binade.app.view.params import One, Whole
from binade.collector.recipes.ladder import ladders
from binade.data.compare import comparison, evidence, loss_gaps
from binade.data.compare.ablation import JUDGED, RUNG_FIELDS, ablation, iterations_of
from binade.data.compare.comparison import (
    MOST_RUNS,
    NO_INTERVAL,
    RECIPE_FIELDS,
    Done,
    comparable_runs,
    gradient_pairs,
    left_out,
    measured_sentence,
    no_reference,
    with_effects,
)
from binade.data.compare.gap_bands import RULE
from binade.data.compare.gradients import COMPARED, GRADIENTS, gradient_summary
from binade.data.compare.ladder import Ladder
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import OF_MODEL, PARTS, compared_with, has_reference, losses_of, references_in
from binade.data.run.notes import rounded_twice
from binade.data.run.tensor_kinds import label_of
from binade.data.words.fields import Field
from binade.data.words.filter import Filter
from binade.data.words.names import name_of, product_name
from binade.data.words.text import counted
from binade.quant.formats import BF16

NOTE = (
    "Runs are compared with the bf16 run of the same model, data, seed and warm-up, iteration by iteration. "
    "Only the filter’s run, recipe, model, size and dataset apply."
)
OF_DATA, OF_RUNS = OF_MODEL, ("run_id", "recipe")  # the fields of the filter that apply
VIEWS = {"cost": "Loss", "gradients": "Gradients", "ladder": "Ablation"}
NO_ABLATION = "These runs include no ablation: queue one with binade ablate te_nvfp4 --train-iters 50 --seeds 3."
NO_GAP = "No run of this ablation has an iteration in common with a bf16 run of its seed yet."
ONE_SEED = "The gaps of successive iterations depend on each other, so one seed has no interval."
NEWEST = "newest"
WORKLOAD = Control(
    name="workload", label="Model and data", widget="list", row="what",
    param=lambda opened: One((NEWEST, *dict.fromkeys(every_run(opened)["workload"]))),
    help="Gaps are compared among runs of one model and data. By default those of the newest run",
)  # fmt: skip
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
AGAINST = Control(
    name="against", label="Compare with", param=lambda opened: One((BF16, *opened.runs()["run_id"]), "run"),
    widget="list",
    titles={BF16: "bf16 on the same data"}, row="what",
)  # fmt: skip


def _columns(fields: Iterable[Field]) -> dict[str, Column]:
    return {field.name: Column(field=field) for field in fields}


RECIPES_SHOWN, RUNGS = _columns(RECIPE_FIELDS), _columns(RUNG_FIELDS)


def _controls(selection: Selection, values: dict[str, Any]) -> list[Control]:
    workloads = workloads_of(selection.opened, selection.where)
    one = [replace(WORKLOAD, options=workloads)] if len(workloads) > 1 else []
    runs = runs_in(selection, values | {"against": BF16})
    against = replace(AGAINST, options=(BF16, *runs["run_id"][::-1]), titles=run_titles(runs) | dict(AGAINST.titles))
    if values["of"] == "cost":
        return [VIEW, *one, against]
    iterations = iterations_of(selection.opened, values["gradient"])
    at = [replace(AT, options=iterations)] if len(iterations) > 1 else []
    if values["of"] == "gradients":
        return [VIEW, *one, GRADIENT, *at]
    names = [ladder.name for ladder in ladders(runs_of(selection.opened, selection.where)["recipe"].dropna())]
    if not names:
        return [VIEW, *one]
    several = [replace(LADDER, options=names)] if len(names) > 1 else []
    return [VIEW, *one, *several, *([GRADIENT, *at] if iterations else [])]


def workloads_of(opened: Catalog, where: Filter) -> list[str]:
    """The models and data of the runs that were compared, those of the newest run first; of all runs if none was."""
    table = every_run(opened)
    table = table[table["run_id"].isin(runs_of(opened, where)["run_id"])]
    if len(table) and where.run_id:  # bf16 runs stay in `runs_of`, whatever runs are chosen
        chosen = table[table["run_id"].isin(where.run_id)]
        table = chosen if len(chosen) else table
    known = table[table["quantized"] & has_reference(table)]
    return list(dict.fromkeys((known if len(known) else table)["workload"][::-1]))


def draw(selection: Selection, values: dict[str, Any], done: Done = lambda count, of: None) -> Drawn:
    opened, where, view = selection.opened, selection.where, values["of"]
    table = _of_workload(selection, values)
    if view == "ladder":
        if (chosen := _chosen(table, values["ladder"])) is None:
            return Drawn(problems=(NO_ABLATION,))
        return ladder(opened, where, table, chosen, values["gradient"], values["at"], done)
    table, base = _against(opened, table, values)
    if problem := no_reference(table):
        other = f"No other run in the filter saw the same data as {base}."
        return Drawn(problems=(problem if base == BF16 else other,))
    if view == "cost":
        return cost(opened, where, table, base)
    name = values["gradient"]
    iterations = iterations_of(opened, name)
    if not iterations:
        return Drawn(problems=(f"No {label_of(name)} was recorded.",))
    at = values["at"] if values["at"] in iterations else iterations[0]
    return gradients(opened, where, table, name, at, iterations, done)


def _of_workload(selection: Selection, values: Mapping[str, Any]) -> pd.DataFrame:
    """The runs of the filter and of the model and data that are chosen: of `some_runs`."""
    opened, runs = selection.opened, runs_of(selection.opened, selection.where)
    workloads = workloads_of(opened, selection.where)
    if len(workloads) > 1:
        chosen = values["workload"] if values["workload"] in workloads else workloads[0]
        table = every_run(opened)
        runs = runs[runs["run_id"].isin(table.loc[table["workload"] == chosen, "run_id"])]
    return some_runs(opened, runs)


def runs_of(opened: Catalog, where: Filter) -> pd.DataFrame:
    """The runs that the filter's words about runs allow; those in bf16 stay, to compare with."""
    runs = opened.runs()
    plain = (runs["recipe"] == BF16) & ~runs["run_id"].isin(opened.parts()["run_id"])
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
    table = _of_workload(selection, values)
    if values["of"] == "ladder":
        chosen = _chosen(table, values["ladder"])
        return table[table["recipe"].isin([rung.recipe for rung in chosen.rungs] if chosen else [])]
    return _against(selection.opened, table, values)[0]


def _against(opened: Catalog, table: pd.DataFrame, values: Mapping[str, Any]) -> tuple[pd.DataFrame, str]:
    """(the runs of the table, compared with the chosen run; its label). bf16 compares each with its bf16 run."""
    run_id = values["against"]
    if values["of"] != "cost" or run_id == BF16:
        return table, BF16
    every = every_run(opened)
    runs = every[every["run_id"].isin([*table["run_id"], run_id])].reset_index(drop=True)
    return compared_with(runs, run_id), every.set_index("run_id")["label"][run_id]


def _chosen(table: pd.DataFrame, name: str | None) -> Ladder | None:
    """The ladder of this name, else the first: the filter may leave it out."""
    by_name = {ladder.name: ladder for ladder in ladders(table["recipe"].dropna())}
    return by_name.get(name or "") or next(iter(by_name.values()), None)


def _beyond(opened: Catalog, where: Filter, run_ids: Collection[str]) -> set[str]:
    """All runs of the table, as most fields of the filter do not apply, and the bf16 runs of those chosen."""
    shown = {*run_ids, *runs_of(opened, where)["run_id"]}
    return shown.union(references_of(opened, where, shown))


def _known(table: pd.DataFrame) -> dict[str, Column]:
    """The columns of recipes that say something."""
    known = {name: column for name, column in RECIPES_SHOWN.items() if table[name].notna().any()}
    said_once = ("added_interval",) if table["gap_interval"].eq(NO_INTERVAL).all() else ()
    return {name: column for name, column in known.items() if name not in said_once}


def comparison_of(opened: Catalog, table: pd.DataFrame, base: str = BF16) -> comparison.Comparison:
    """The comparison of these runs, computed once while no run goes on."""
    key = ("comparison of recipes", opened.progress, tuple(table["run_id"]), base)

    def compute() -> comparison.Comparison:
        return comparison.compare(table, losses_of(opened, table["run_id"].tolist(), lost=True), base)

    made: comparison.Comparison = opened.kept(key, compute)
    return made


def cost(opened: Catalog, where: Filter, table: pd.DataFrame, base: str = BF16) -> Drawn:
    """Each quantized run's gap to bf16's loss, or each other run's to that of the run `base`."""
    compared = comparison_of(opened, table, base)
    costs, recipes = compared.costs, compared.recipes
    if costs.empty:
        return Drawn(problems=(f"No run has an iteration in common with {base} yet.",))
    drawn = loss_gaps.worst_first(recipes)[: style.MAX_GROUPS]  # of lines: the bars and the table have all recipes
    against = "their bf16 runs" if base == BF16 else base
    first = source(where, f"{counted(len(costs), 'run')} and {against}, from loss.jsonl")
    caption = f"{first}\nGap: the run’s loss minus that of {base} at the same iteration, in nats per token."
    bars = pd.DataFrame(
        {"label": recipe.label, "run_id": recipe.run_id, "gap": recipe.gap.value, "low": recipe.gap.low,
         "high": recipe.gap.high, "seeds": recipe.gap.n, "outcome": recipe.outcome,
         "text": recipe.outcome if math.isnan(recipe.gap.value) else str(recipe.gap)}
        for recipe in recipes
    ).replace([math.inf, -math.inf], math.nan)  # fmt: skip
    bars = bars.sort_values("gap", ascending=False, na_position="last", ignore_index=True)
    look = dict(zip(table["run_id"], table["look"], strict=True))
    looks = {recipe.label: look[recipe.runs[0]] for recipe in recipes}
    configs = opened.runs().set_index("run_id")["config"]
    chart = charts.costs(bars, "mean over the iterations that both have, and seeds", looks, base)
    height = 130 + 28 * len(bars)
    note = ONE_SEED if any(recipe.gap.n == 1 for recipe in recipes) else ""
    figures = [Figure("costs", chart, bars, caption, note=note, height=height, group="cost")]
    if not compared.gaps.empty:
        figure = _gaps_figure(compared, drawn, looks, base, caption, height)
        events = marked_events(opened, {recipe.label: recipe.run_id for recipe in drawn})
        figures.append(replace(figure, chart=marked(figure.chart, events, figure.table["iteration"])))
    every = with_effects(opened, compared)
    missing = [Text(compared.unknown)] if compared.unknown else []
    items: tuple[Item, ...] = (*figures, Table("recipes", every, _known(every)), *missing)
    caveat = rounded_twice(json.loads(configs[recipe.run_id]) for recipe in recipes)
    measured = measured_sentence(opened, compared) if base == BF16 else ""
    runs = table[table["run_id"].isin([run for recipe in recipes for run in recipe.runs])]
    used = used_by(opened, runs, ((len(recipes), "recipe"),))
    return Drawn(items, evidence.together(compared.verdict, measured, caveat), left_out(table), used)


def _gaps_figure(
    compared: comparison.Comparison,
    drawn: Sequence[loss_gaps.RecipeRuns],
    looks: dict[str, tuple[str, int]],
    base: str,
    caption: str,
    height: int,
) -> Figure:
    """The gaps by iteration of these recipes, with bf16's band. height: of the figure beside it."""
    gaps = compared.mean_gaps[compared.mean_gaps["run_id"].isin([recipe.run_id for recipe in drawn])]
    shown, step = thinned(gaps, style.MARKS)
    part = f"the {len(drawn)} worst of {len(compared.recipes)} recipes · " if len(compared.recipes) > len(drawn) else ""
    band, of = _band(compared, drawn)
    subtitle = f"{part}mean over seeds{f' · shaded: {of}' if of else ''}"
    at = {run_id: iteration for run_id, iteration in compared.left.items() if iteration is not None}
    leaves = gaps[gaps["run_id"].map(at) == gaps["iteration"]]
    diverged = {recipe.run_id: min(recipe.diverged.values()) for recipe in drawn if recipe.diverged}
    ends = gaps[gaps["iteration"] <= gaps["run_id"].map(diverged)].groupby("run_id").tail(1)
    marks = pd.concat(
        [
            leaves.assign(text=leaves["label"] + " leaves bf16 at iteration " + leaves["iteration"].astype(str)),
            ends.assign(
                text=ends["label"] + " diverged at iteration " + ends["run_id"].map(diverged).astype(int).astype(str)
            ),
        ]
    )
    height = max(height, 380) + style.legend_height(list(dict.fromkeys(shown["label"])))
    chart = charts.gaps(shown, subtitle, looks, base, band[band["iteration"].isin(shown["iteration"])], marks)
    note = f"{thinned_note(step)} {f'{RULE}.' if of else ''}".strip()
    return Figure("gaps", chart, shown, caption, note=note, height=height, group="cost")


def _band(compared: comparison.Comparison, drawn: Sequence[loss_gaps.RecipeRuns]) -> tuple[pd.DataFrame, str]:
    """(the band of bf16 by iteration, with columns iteration, low and high; what it is), of the recipe with most
    iterations. Empty if there is none."""
    known = [recipe for recipe in drawn if recipe.run_id in compared.left and compared.bands[recipe.run_id].is_known]
    if not known:
        return pd.DataFrame(columns=["iteration", "low", "high"]), ""
    longest = max(known, key=lambda recipe: len(compared.bands[recipe.run_id].deviations))
    band, seeds = compared.bands[longest.run_id], len(longest.gaps)
    halves = band.halves(seeds, compared.compared_together[longest.run_id])
    rows = pd.DataFrame([(at, -half, half) for at, half in halves.items()], columns=["iteration", "low", "high"])
    return rows, f"what differs in bits alone ({band.runs} bf16 runs), for {counted(seeds, 'seed')}"


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
    together, unread = gradient_pairs(opened, runs, "label", name, at, done)
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
        evidence.each_of([item for item in squared if item[0] in lowest], "Relative squared error"),
    )
    what = f"{len(together):,} pairs of {name} tensors, iteration {at}, exact"
    caption = (
        f"{source(where, what)}\nCosine: {MEASURES['cosine'].definition}, where x is bf16’s gradient of the same "
        f"iteration and data. Relative squared error: {MEASURES['relative_squared_error'].definition}. Of several "
        "tensors: the median."
    )
    subtitle = f"{label_of(name)} · iteration {at} · {len(together):,} pairs"
    height = 130 + 24 * summary["place"].nunique() + style.legend_height(style.groups_of(summary))
    looks = run_looks(table)
    figures = []
    for column in COMPARED:
        chart = charts.agreement(summary, column, subtitle, looks)
        figures.append(Figure(column, chart, summary, caption, height=height, group="gradients"))
    notes = [f"Relative squared error: {MEASURES['relative_squared_error'].definition}."]
    if unread:
        notes.append(f"{unread} pairs could not be read and are left out.")
    comparable = len(comparable_runs(table))
    if comparable > MOST_RUNS:
        notes.append(f"The {MOST_RUNS} newest of {comparable} runs are shown; use the filter to choose others.")
    if at > min(iterations):
        notes.append("In later iterations the weights have drifted apart as well.")
    if rounds_to_e5m2(runs):
        notes.append("Plain mxfp8 rounds gradients to mxfp8_e5m2.")
    return Drawn((*figures, *map(Text, notes)), verdict, scope=used_by(opened, runs, ((len(together), "pair"),)))


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
    losses = losses_of(opened, table["run_id"].tolist(), lost=True)
    table = loss_gaps.with_outcomes(table, losses)
    gaps = loss_gaps.loss_gaps(table, losses)
    answer = ablation(opened, table, gaps, chosen, name, at, done)
    if answer is None:
        return Drawn(problems=(no_reference(table) or NO_GAP,))
    rungs, runs = answer.table, answer.runs
    columns = {key: column for key, column in RUNGS.items() if key in rungs and rungs[key].notna().any()}
    what = (
        f"{counted(len(runs), 'run')} of {counted(runs['seed'].nunique(), 'seed')} and their bf16 runs, from loss.jsonl"
    )
    caption = (
        f"{source(where, what)}\nGap: the run’s loss minus the loss of the bf16 run of the same seed at the same "
        f"iteration, mean over the iterations, in nats per token.\n{JUDGED}"
    )
    chart = charts.ladder(rungs, answer.seeds, chosen.name)
    figure = Figure("ladder", chart, rungs, caption, note=JUDGED, height=180 + 34 * len(rungs))
    shown = Table("ladder", rungs, columns)
    used = used_by(opened, runs, ((len(rungs), "rung"),))
    return Drawn((figure, shown, *map(Text, answer.notes)), answer.verdict, answer.problems, used)


def used_by(opened: Catalog, runs: pd.DataFrame, counts: tuple[tuple[int, str], ...]) -> Scope:
    """These runs of a table and what they are compared with."""
    used = dict.fromkeys([*runs["run_id"], *references_in(runs)])
    return Scope(Filter(run_id=tuple(used)), counts, len(opened.runs()))


def _of_runs(by_run: pd.DataFrame, name: str) -> list[evidence.Named]:
    """One of COMPARED by run: median and spread over its tensors."""
    ends = {name: "value", f"{name}_low": "low", f"{name}_high": "high"}
    rows = by_run[["group", "tensors", *ends]].rename(columns=ends).dropna(subset=["value"]).to_dict("records")
    return [(str(row["group"]), evidence.spread(MEASURES[name], row)) for row in rows]


def rounds_to_e5m2(runs: pd.DataFrame) -> bool:
    return bool((runs[list(PARTS)] == "mxfp8").any(axis=None))


def runs_compared(table: pd.DataFrame) -> pd.DataFrame:
    return comparable_runs(table).tail(MOST_RUNS)


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
    controls=(VIEW, WORKLOAD, AGAINST, LADDER, GRADIENT, AT),
    narrow=_controls,
    slow="Comparing gradients",
    note=NOTE,
    layout="binade.app.questions.recipes.page",
)
