"""Recipes: which part costs the most loss, how the gradients change, and what an ablation shows, compared with bf16
on the same data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from binade.app import style
from binade.app.control import Control
from binade.app.figure import Column, Drawn, Figure, Table, Text, source
from binade.app.formatting import big, losses_of
from binade.app.params import One, Whole
from binade.app.questions.question import Question
from binade.app.questions.recipes import charts, compute
from binade.app.questions.shared.event_marks import with_events
from binade.app.questions.shared.labels import thinned, thinned_note
from binade.app.questions.shared.runs import (
    OF_MODEL,
    PARTS,
    compared_with,
    every_run,
    references_of,
    run_colors,
    run_titles,
    runs_with_reference,
)
from binade.app.questions.shared.selection import Selection
from binade.app.questions.shared.unscaled import with_scale
from binade.app.report.section import ReportSelection, Section, slug
from binade.app.report.section import Table as ReportTable
from binade.app.style import MEASURES
from binade.collector.recipes.ladder import Ladder, ladders
from binade.collector.recipes.recipe import BF16
from binade.collector.recipes.spread import SEPARATED
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.gradients import GRADIENTS, gradient_errors, gradient_summary
from binade.data.tensor_kinds import label_of
from binade.data.text import fixed, short
from binade.quant.formats import FORMATS

NOTE = (
    "Runs are compared with the bf16 run of the same model, data, seed and warm-up, iteration by iteration. "
    "Only the filter’s run, recipe, model, size and dataset apply."
)
OF_DATA, OF_RUNS = OF_MODEL, ("run_id", "recipe")  # the fields of the filter that apply
VIEWS = {"cost": "Loss", "gradients": "Gradients", "ladder": "Ablation"}
NO_ABLATION = "These runs include no ablation: queue one with binade ablate te_nvfp4 --train-iters 50 --seeds 3."
NO_GAP = "No run of this ablation has an iteration in common with a bf16 run of its seed yet."
NAMED = 4  # parts in the answer
MAX_GRADIENT_VALUES = 1 << 26  # that a report reads to compare gradients with bf16's
Compare = Callable[[str, str, str, int], tuple[pd.DataFrame, int]]
VIEW = Control(name="view", label="View", param=One(tuple(VIEWS)), titles=VIEWS, row="what")
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
PART_TITLES = {"linear": "Linear layers", "QK": "QKᵀ", "PV": "PV", "router": "Router"}
COLUMNS = {
    "label": Column("Run", width=160),
    **{part: Column(PART_TITLES[part], width=110) for part in PARTS},
    "gap": Column(
        "Mean gap (nats)", "%+.5f", help="Mean over iterations of the loss minus that of the run it is compared with"
    ),
    "last": Column("Last gap (nats)", "%+.5f"),
    "iterations": Column("Iterations", width=90),
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
        help="Change from the previous step; for a recipe without one ingredient, from the full recipe",
    ),
    "verdict": Column("Verdict", width=220, help=SEPARATED),
    "cosine": Column("Cosine", "%.4f", 75, help=f"With bf16’s gradient: {MEASURES['cosine'].definition}"),
    "gradient_bias": Column("Gradient bias", "%.3g", 105, help=MEASURES["gradient_bias"].definition),
    "forward_sqnr_db": Column("SQNR forward (dB)", "%.2f", 140, help="From the summed powers of the recorded operands"),
    "backward_sqnr_db": Column(
        "SQNR gradients (dB)", "%.2f", 150, help="From the summed powers of the gradients that enter dgrad"
    ),
    "recipe": Column("Recipe", width=280),
}


def _controls(selection: Selection, values: dict[str, Any]) -> list[Control]:
    runs = every_run(selection.opened)
    against = replace(AGAINST, options=(BASE, *runs["run_id"][::-1]), titles=run_titles(runs) | dict(AGAINST.titles))
    if values["view"] == "cost":
        return [VIEW, against]
    iterations = iterations_of(selection.opened, values["gradient"])
    at = [replace(AT, options=iterations)] if len(iterations) > 1 else []
    if values["view"] == "gradients":
        return [VIEW, GRADIENT, *at]
    names = [ladder.name for ladder in ladders(runs_of(selection.opened, selection.where)["recipe"].dropna())]
    if not names:
        return [VIEW]
    several = [replace(LADDER, options=names)] if len(names) > 1 else []
    return [VIEW, *several, *([GRADIENT, *at] if iterations else [])]


def draw(
    selection: Selection, values: dict[str, Any], done: Callable[[int, int], None] = lambda count, of: None
) -> Drawn:
    opened, where = selection.opened, selection.where
    table = runs_with_reference(runs_of(opened, where), opened.parts())
    if values["view"] == "ladder":
        found = {ladder.name: ladder for ladder in ladders(table["recipe"].dropna())}
        if not found:
            return Drawn(problems=(NO_ABLATION,))
        chosen = found.get(values["ladder"]) or next(iter(found.values()))  # the filter may leave it out
        return ladder(opened, where, table, chosen, values["gradient"], values["at"], partial(compare, opened), done)
    base = BASE
    if values["view"] == "cost" and values["against"] != BASE:
        every = every_run(opened)
        base = every.set_index("run_id")["label"][values["against"]]
        kept = every["run_id"].isin([*table["run_id"], values["against"]])
        table = compared_with(every[kept].reset_index(drop=True), values["against"])
        if not has_reference(table):
            return Drawn(problems=(f"No other run in the filter saw the same data as {base}.",))
    if not has_reference(table):
        return Drawn(problems=(no_reference(table),))
    if values["view"] == "cost":
        return cost(opened, where, table, base)
    name = values["gradient"]
    iterations = iterations_of(opened, name)
    if not iterations:
        return Drawn(problems=(f"No {label_of(name)} was recorded.",))
    at = values["at"] if values["at"] in iterations else iterations[0]
    return gradients(where, table, name, at, iterations, partial(compare, opened), done)


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


def _beyond(opened: Catalog, where: Filter, run_ids: Collection[str]) -> set[str]:
    """All runs of the table, as most fields of the filter do not apply, and the bf16 runs of those chosen."""
    shown = {*run_ids, *runs_of(opened, where)["run_id"]}
    return shown.union(references_of(opened, where, shown))


def has_reference(table: pd.DataFrame) -> bool:
    return bool(table["quantized"].any()) and bool(table.loc[table["quantized"], "reference"].notna().any())


def no_reference(table: pd.DataFrame) -> str:
    if table.empty:
        return "The filter selects no run."
    if not table["quantized"].any():
        return "None of these runs was quantized in training: collect one, for example with `binade quick mxfp4`."
    return "No bf16 run saw the same data as these runs: collect one with the same options, but `--quantization bf16`."


def cost(opened: Catalog, where: Filter, table: pd.DataFrame, base: str = BASE) -> Drawn:
    """Each quantized run's gap to bf16's loss, or each other run's to that of the run `base`."""
    gaps = compute.loss_gaps(table, losses_of(opened, table["run_id"].tolist()))
    costs = compute.costs(gaps, table)
    if costs.empty:
        return Drawn(problems=(f"No run has an iteration in common with {base} yet.",))
    latest = costs.head(style.MAX_GROUPS)
    against = "their bf16 runs" if base == BASE else base
    first = source(where, f"{len(costs)} runs and {against}, from loss.jsonl")
    caption = f"{first}\nGap: the run’s loss minus that of {base} at the same iteration, in nats per token."
    part = f"the {len(latest)} runs with the largest gaps of {len(costs)} · " if len(costs) > len(latest) else ""
    labels = latest["label"].tolist()
    colors = dict(zip(labels, style.colors(labels, own=run_colors(table)), strict=True))
    chart = charts.costs(latest, f"{part}mean over the iterations that both runs have", colors, base)
    height = charts.costs_height(latest)
    bars = Figure("costs", chart, latest, caption, note=_noise(costs), height=height, group="cost")
    shown, step = thinned(gaps[gaps["run_id"].isin(latest["run_id"])], style.MARKS)
    height = max(height, 360) + style.legend_height(list(dict.fromkeys(shown["label"])))
    chart = charts.gaps(shown, f"above the dashed line: worse than {base}", colors, base)
    lines = Figure("gaps", chart, shown, caption, note=thinned_note(step), height=height, group="cost")
    shown = costs.merge(table[["run_id", *PARTS]], on="run_id")
    unused = [part for part in PARTS if (shown[part] == "bf16").all()]
    columns = {name: column for name, column in COLUMNS.items() if name not in unused}
    answer = Drawn((bars, lines, Table("costs", shown, columns)), _answer(costs, base))
    return with_events(answer, opened, Filter(run_id=tuple(latest["run_id"])))


def _with_scale(together: pd.DataFrame, runs: pd.DataFrame) -> str:
    """What the gradients of the hifp8_scaled run show, if there is one."""
    scaled = together[together["group"].isin(runs.loc[runs["recipe"] == "hifp8_scaled", "label"])]
    if scaled.empty:
        return "to see it with one, collect the recipe hifp8_scaled"
    return f"with one, hifp8_scaled has a mean cosine of {fixed(scaled['cosine'].mean(), 3)}"


def _answer(costs: pd.DataFrame, base: str) -> str:
    """Which part costs most, of the runs in which one part alone is rounded; else which run."""
    alone = compute.parts_alone(costs)
    if base != BASE:
        first = costs.iloc[0]
        return f"Largest mean gap to {base}: {first['label']}, {_gap(first['gap'])} nats per token."
    if len(alone):
        several = " of several runs" * bool((alone["runs"] > 1).any())
        named = [f"{row.parts} {_gap(row.gap)}" for row in alone.head(NAMED).itertuples()]
        rest = f" and {len(alone) - NAMED} more" * (len(alone) > NAMED)
        return (
            f"Rounded alone, {alone['only'].iloc[0]} has the largest gap: {', '.join(named)}{rest} "
            f"(nats per token, mean gap to bf16{several})."
        )
    first = costs.iloc[0]
    advice = "To compare the parts, collect FA_… and linear_… recipes."
    return f"{first['label']} has the largest mean gap to bf16: {_gap(first['gap'])} nats per token. {advice}"


def _gap(value: Any) -> str:
    return fixed(value, 4, "+")


def _noise(costs: pd.DataFrame) -> str:
    iterations = int(costs["iterations"].max())
    return (
        f"Over {iterations} iteration{'s' * (iterations != 1)}: gaps of a few thousandths of a nat can be due to "
        "chance. Train more iterations (`--train-iters`)."
    )


def iterations_of(opened: Catalog, name: str) -> list[int]:
    return opened.facets(Filter(tensor_name=(name,))).get("iteration", [])


def compare(opened: Catalog, run_id: str, reference: str, name: str, at: int) -> tuple[pd.DataFrame, int]:
    """A run's gradients of one name and iteration against the reference's: as `gradient_errors`."""
    where = Filter(tensor_name=(name,), iteration=(at,))
    request = "gradients", run_id, reference, where
    return opened.kept(request, lambda: gradient_errors(opened, opened.pairs(run_id, reference, where)))


def gradients(
    where: Filter,
    table: pd.DataFrame,
    name: str,
    at: int,
    iterations: list[int],
    compared: Compare,
    done: Callable[[int, int], None] = lambda count, of: None,
) -> Drawn:
    """How far each run's gradients of this name are from bf16's. compared: `compare`, or a version that caches its
    results; done is called with the number of finished runs and of all."""
    runs = runs_compared(table)
    together, unread = _pairs(runs, "label", name, at, compared, done)
    if together.empty:
        return Drawn(problems=("No gradient of these runs has a counterpart with values in its bf16 run.",))
    together["place"] = [
        f"L{int(layer)} {module}" for layer, module in zip(together["layer_index"], together["module"], strict=True)
    ]
    summary = gradient_summary(together, ["group", "place"])
    worst = gradient_summary(together, ["group"]).sort_values("cosine").iloc[0]
    verdict = (
        f"The gradients of {worst['group']} are furthest from bf16’s: mean cosine {fixed(worst['cosine'], 3)}, "
        f"gradient bias {short(worst['gradient_bias'], 3)}."
    )
    unscaled = [name for name in FORMATS if with_scale(name)]
    if runs.loc[runs["label"] == worst["group"], list(PARTS)].isin(unscaled).any(axis=None):
        verdict += f" This run rounds to HiFloat8 without a scale: {_with_scale(together, runs)}."
    what = f"{len(together):,} pairs of {name} tensors, iteration {at}, exact"
    caption = (
        f"{source(where, what)}\nCosine: {MEASURES['cosine'].definition}, where x is bf16’s gradient of the same "
        f"iteration and data. Gradient bias: {MEASURES['gradient_bias'].definition}."
    )
    subtitle = f"{label_of(name)} · iteration {at} · {len(together):,} pairs"
    height = charts.agreement_height(summary)
    colors = run_colors(table)
    figures = []
    for column in ("cosine", "gradient_bias"):
        chart = charts.agreement(summary, column, subtitle, colors)
        figures.append(Figure(column, chart, summary, caption, height=height, group="gradients"))
    notes = [f"Gradient bias: {MEASURES['gradient_bias'].definition}."]
    if unread:
        notes.append(f"{unread} pairs could not be read and are left out.")
    comparable = len(comparable_runs(table))
    if comparable > style.MAX_GROUPS:
        notes.append(f"The {style.MAX_GROUPS} newest of {comparable} runs are shown; use the filter to choose others.")
    if at > min(iterations):
        notes.append("In later iterations the weights have drifted apart as well.")
    return Drawn((*figures, *map(Text, notes)), verdict)


def ladder(
    opened: Catalog,
    where: Filter,
    table: pd.DataFrame,
    chosen: Ladder,
    name: str,
    at: int | None,
    compared: Compare,
    done: Callable[[int, int], None] = lambda count, of: None,
) -> Drawn:
    """An ablation: what each rung of the ladder costs, and whether the seeds separate it. name, at: of the gradients
    that are compared, "" for none; compared and done are as in `gradients`."""
    gaps = compute.loss_gaps(table, losses_of(opened, table["run_id"].tolist()))
    runs, left_out = compute.ladder_runs(table, gaps, chosen)
    rungs = compute.rungs(runs, chosen)
    if not runs["gap"].notna().any():
        return Drawn(problems=(no_reference(table) if not has_reference(table) else NO_GAP,))
    errors, notes = _gradient_errors(opened, runs, name, at, compared, done)
    rungs = rungs.merge(errors, on="recipe", how="left").merge(_sqnr(opened, runs), on="recipe", how="left")
    columns = {key: column for key, column in RUNGS.items() if key in rungs and rungs[key].notna().any()}
    seeds = runs.dropna(subset="gap").merge(rungs[["recipe", "rung"]], on="recipe")[["rung", "seed", "gap"]]
    what = f"{len(runs)} runs of {runs['seed'].nunique()} seeds and their bf16 runs, from loss.jsonl"
    caption = (
        f"{source(where, what)}\nGap: the run’s loss minus the loss of the bf16 run of the same seed at the same "
        f"iteration, mean over the iterations, in nats per token.\n{SEPARATED}"
    )
    chart = charts.ladder(rungs, seeds, chosen.name)
    figure = Figure("ladder", chart, rungs, caption, note=SEPARATED, height=charts.ladder_height(rungs))
    problems = _missing(runs, rungs)
    if left_out:
        runs_are = "run of these recipes is" if left_out == 1 else "runs of these recipes are"
        notes = [*notes, f"{left_out} {runs_are} left out: their settings differ, or a newer run has the same seed."]
    shown = Table("ladder", rungs, columns)
    return Drawn((figure, shown, *map(Text, notes)), _separated(rungs, chosen), tuple(problems))


def _separated(rungs: pd.DataFrame, chosen: Ladder) -> str:
    """What the spread over seeds separates, and what it does not."""
    judged = rungs[rungs["verdict"] != ""]
    if judged["seeds"].max() == 1:
        return f"One seed cannot separate recipes. To collect more: binade ablate {chosen.name} --seeds 3."
    apart = [f"{row.rung} is {row.verdict} ({_gap(row.change)})" for row in judged[judged["separated"]].itertuples()]
    alike = [f"{row.rung} is {row.verdict}" for row in judged[~judged["separated"]].itertuples()]
    if not apart:
        return f"The spread over {judged['seeds'].max()} seeds separates no step from the one it is compared with."
    together = f" By the spread over {judged['seeds'].max()} seeds, {'; '.join(alike)}." * bool(alike)
    return f"Separated: {'; '.join(apart)} (nats per token).{together}"


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
    pooled = opened.moments(Filter(run_id=tuple(runs["run_id"])), by=("recipe", "operation"))
    wide = pooled.pivot_table(index="recipe", columns="operation", values="sqnr_db", aggfunc="first")
    return wide.add_suffix("_sqnr_db").reset_index()


def _gradient_errors(
    opened: Catalog,
    runs: pd.DataFrame,
    name: str,
    at: int | None,
    compared: Compare,
    done: Callable[[int, int], None],
) -> tuple[pd.DataFrame, list[str]]:
    """(columns recipe, cosine and gradient_bias, over all seeds; what to say of them)."""
    nothing = pd.DataFrame(columns=["recipe"])
    if not name:
        return nothing, ["Gradients are not compared here: too many values would be read. See Recipes in the app."]
    iterations = iterations_of(opened, name)
    if not iterations:
        return nothing, [f"No {label_of(name)} was recorded: there is no gradient error."]
    at = at if at in iterations else iterations[0]
    together, unread = _pairs(runs[runs["reference"].notna()], "recipe", name, at, compared, done)
    if together.empty:
        return nothing, [f"No {label_of(name)} has a counterpart with values in bf16: there is no gradient error."]
    notes = [f"Gradients: {len(together):,} pairs of {name} tensors of iteration {at}, all seeds together."]
    if unread:
        notes.append(f"{unread} pairs could not be read and are left out.")
    summary = gradient_summary(together, ["group"]).rename(columns={"group": "recipe"})
    return summary.drop(columns="tensors"), notes


def comparable_runs(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["quantized"] & table["reference"].notna()]


def _pairs(
    runs: pd.DataFrame, by: str, name: str, at: int, compared: Compare, done: Callable[[int, int], None]
) -> tuple[pd.DataFrame, int]:
    """(the pairs of all runs' gradients with those of their references, group being the run's `by`; how many could not
    be read)."""
    parts, unread = [], 0
    for count, (_, run) in enumerate(runs.iterrows()):
        found, missing = compared(run["run_id"], run["reference"], name, at)
        parts.append(found.assign(group=run[by]))
        unread += missing
        done(count + 1, len(runs))
    return pd.concat(parts, ignore_index=True), unread


def runs_compared(table: pd.DataFrame) -> pd.DataFrame:
    return comparable_runs(table).tail(style.MAX_GROUPS)


def report(selection: ReportSelection) -> Iterator[Section]:
    opened, where = selection.opened, selection.where
    runs = runs_with_reference(runs_of(opened, where), opened.parts())
    if not has_reference(runs):
        yield Section("comparisons", problems=[no_reference(runs).replace("`", "")])
        return
    found = cost(opened, where, runs)
    tables = [
        ReportTable(name, "Loss compared with bf16", frame.drop(columns=[*PARTS]))
        for name, frame in found.tables.items()
    ]
    yield Section("comparisons", "", found.figures, tables, verdict=found.verdict, problems=found.problems)
    for each in ladders(runs["recipe"].dropna()):
        yield _ladder_section(selection, runs, each)
    of_weights = _weight_gradients(opened, where, runs)
    figures = [replace(figure, name=f"gradients_{figure.name}") for figure in of_weights.figures]
    yield Section("comparisons", figures=figures, problems=of_weights.sentences)


def _weight_gradients(opened: Catalog, where: Filter, runs: pd.DataFrame) -> Drawn:
    """Those of the first iteration, unless that would read too many values."""
    name = GRADIENTS[0]
    iterations = iterations_of(opened, name)
    if not iterations:
        return Drawn(problems=(f"No {label_of(name)} was recorded.",))
    values = _values_read(opened, runs_compared(runs), name, iterations[0])
    if values > MAX_GRADIENT_VALUES:
        problem = f"Gradients are not compared here: {big(values)} values would be read. See Recipes in the app."
        return Drawn(problems=(problem,))
    return gradients(where, runs, name, iterations[0], iterations, partial(compare, opened))


def _values_read(opened: Catalog, runs: pd.DataFrame, name: str, iteration: int) -> int:
    """The number of values that are read to compare these runs' gradients with bf16's."""
    where = Filter(tensor_name=(name,), iteration=(iteration,))
    pairs = (opened.pairs(run["run_id"], run["reference"], where) for _, run in runs.iterrows())
    return sum(int(each["numel"].sum()) for each in pairs)


def _ladder_section(selection: ReportSelection, runs: pd.DataFrame, chosen: Ladder) -> Section:
    """An ablation, with gradients of the first iteration unless that would read too many values."""
    opened, name = selection.opened, GRADIENTS[0]
    own = comparable_runs(runs[runs["recipe"].isin([rung.recipe for rung in chosen.rungs])])
    iterations = iterations_of(opened, name)
    too_many = bool(iterations) and _values_read(opened, own, name, iterations[0]) > MAX_GRADIENT_VALUES
    drawn = ladder(opened, selection.where, runs, chosen, "" if too_many else name, None, partial(compare, opened))
    key = f"ladder_{slug(chosen.name)}"
    figures = [replace(each, name=key, note=f"{drawn.verdict} {each.note}") for each in drawn.figures]
    tables = [ReportTable(key, f"Ablation of {chosen.name}", frame) for frame in drawn.tables.values()]
    return Section("comparisons", figures=figures, tables=tables, problems=drawn.problems)


RECIPES = Question(
    text="Which part raises the loss the most?",
    title="Recipes",
    icon=":material/balance:",
    help="QK, PV or linear layers: the loss and gradients of each recipe compared with bf16, and its ablation",
    page="recipes",
    draw=draw,
    of_runs=True,
    of_fields=OF_DATA + OF_RUNS,
    beyond=_beyond,
    controls=(VIEW, AGAINST, LADDER, GRADIENT, AT),
    narrow=_controls,
    slow="Comparing gradients",
    note=NOTE,
    report=report,
)
