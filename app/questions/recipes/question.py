"""Recipes: which part costs the most loss, and what becomes of the gradients, against bf16 on the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pandas as pd

from binade.app import style
from binade.app.control import Control
from binade.app.figure import Column, Drawn, Figure, Table, Text, source
from binade.app.formatting import big, losses_of
from binade.app.params import One, Whole
from binade.app.questions.question import Question
from binade.app.questions.recipes import charts, compute
from binade.app.questions.shared.labels import thinned, thinned_note
from binade.app.questions.shared.runs import PARTS, runs_with_reference
from binade.app.questions.shared.selection import Selection
from binade.app.questions.shared.unscaled import with_scale
from binade.app.report.section import ReportSelection, Section
from binade.app.report.section import Table as ReportTable
from binade.app.style import MEASURES
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.tensor_kinds import label_of
from binade.quant.formats import FORMATS

NOTE = "Runs are compared with the bf16 run of the same model, data, seed and warm-up, iteration by iteration."
VIEWS = {"cost": "Loss", "gradients": "Gradients"}
NAMED = 4  # parts in the answer
NAMES = ("grad_weight", "grad_input", "grad_output")
MAX_GRADIENT_VALUES = 1 << 26  # that a report reads to compare gradients with bf16's
Compare = Callable[[str, str, str, int], tuple[pd.DataFrame, int]]
VIEW = Control(name="view", label="View", param=One(tuple(VIEWS)), titles=VIEWS)
GRADIENT = Control(
    name="gradient", label="Gradient", param=One(NAMES), titles={name: label_of(name) for name in NAMES},
    row="gradients", width=2,
)  # fmt: skip
AT = Control(name="at", label="Iteration", param=Whole(0, 10**9), widget="slider", row="gradients")
PART_TITLES = {"linear": "Linear layers", "QK": "QKᵀ", "PV": "PV", "router": "Router"}
COLUMNS = {
    "label": Column("Run", width=160),
    **{part: Column(PART_TITLES[part], width=110) for part in PARTS},
    "gap": Column("Mean gap (nats)", "%+.5f", help="Mean over the iterations of loss − bf16’s loss"),
    "last": Column("Last gap (nats)", "%+.5f"),
    "iterations": Column("Iterations", width=90),
    "run_id": Column("Directory", width=330),
}


def _controls(selection: Selection, values: dict[str, Any]) -> list[Control]:
    if values["view"] != "gradients":
        return [VIEW]
    iterations = iterations_of(selection.opened, values["gradient"])
    return [VIEW, GRADIENT, *([replace(AT, options=iterations)] if len(iterations) > 1 else [])]


def draw(
    selection: Selection, values: dict[str, Any], done: Callable[[int, int], None] = lambda count, of: None
) -> Drawn:
    opened, where = selection.opened, selection.where
    table = runs_with_reference(runs_of(opened, where), opened.parts())
    if not has_reference(table):
        return Drawn(problems=(no_reference(table),))
    if values["view"] == "cost":
        return cost(opened, where, table)
    name = values["gradient"]
    iterations = iterations_of(opened, name)
    if not iterations:
        return Drawn(problems=(f"No {label_of(name)} was recorded.",))
    at = values["at"] if values["at"] in iterations else iterations[0]
    return gradients(where, table, name, at, iterations, partial(compare, opened), done)


def runs_of(opened: Catalog, where: Filter) -> pd.DataFrame:
    """The runs that the filter's words about runs allow; bf16's stay, to compare with."""
    runs = opened.runs()
    keep = pd.Series(True, index=runs.index)
    for name in ("model", "size", "dataset"):
        if wanted := getattr(where, name):
            keep &= runs[name].isin(wanted)
    for name in ("run_id", "recipe"):
        if wanted := getattr(where, name):
            keep &= runs[name].isin(wanted) | (runs["recipe"] == "bf16")
    return runs[keep]


def has_reference(table: pd.DataFrame) -> bool:
    return bool(table["quantized"].any()) and bool(table.loc[table["quantized"], "reference"].notna().any())


def no_reference(table: pd.DataFrame) -> str:
    if table.empty:
        return "The filter selects no run."
    if not table["quantized"].any():
        return "No run here was quantized as it trained: collect one to compare, `binade quick mxfp4`."
    return "No bf16 run saw the same data as these runs: collect one with the same options, `--quantization bf16`."


def cost(opened: Catalog, where: Filter, table: pd.DataFrame) -> Drawn:
    """Each quantized run's gap to bf16's loss."""
    gaps = compute.loss_gaps(table, losses_of(opened, table["run_id"].tolist()))
    costs = compute.costs(gaps, table)
    if costs.empty:
        return Drawn(problems=("No run has an iteration in common with its bf16 run yet.",))
    latest = costs.head(style.MAX_GROUPS)
    first = source(where, f"{len(costs)} runs and their bf16 runs, from loss.jsonl")
    caption = f"{first}\nGap: the run’s loss minus the bf16 run’s at the same iteration, in nats per token."
    part = f"the {len(latest)} dearest of {len(costs)} runs · " if len(costs) > len(latest) else ""
    chart = charts.costs(latest, f"{part}mean over the recorded iterations")
    height = charts.costs_height(latest)
    bars = Figure("costs", chart, latest, caption, note=_noise(costs), height=height, group="cost")
    shown, step = thinned(gaps[gaps["run_id"].isin(latest["run_id"])], style.MARKS)
    height = max(height, 360) + style.legend_height(list(dict.fromkeys(shown["label"])))
    chart = charts.gaps(shown, "above the dashed line: worse than bf16")
    lines = Figure("gaps", chart, shown, caption, note=thinned_note(step), height=height, group="cost")
    shown = costs.merge(table[["run_id", *PARTS]], on="run_id")
    unused = [part for part in PARTS if (shown[part] == "bf16").all()]
    columns = {name: column for name, column in COLUMNS.items() if name not in unused}
    return Drawn((bars, lines, Table("costs", shown, columns)), _answer(costs))


def _with_scale(together: pd.DataFrame, runs: pd.DataFrame) -> str:
    """What the gradients of the run of hifp8_scaled are like, if there is one."""
    scaled = together[together["group"].isin(runs.loc[runs["recipe"] == "hifp8_scaled", "label"])]
    if scaled.empty:
        return "collect recipe hifp8_scaled to see it with one"
    return f"with one, hifp8_scaled has a mean cosine of {scaled['cosine'].mean():.3f}"


def _answer(costs: pd.DataFrame) -> str:
    """Which part costs most, of the runs in which one part alone is rounded; else which run."""
    alone = compute.parts_alone(costs)
    if len(alone):
        several = " of several runs" * bool((alone["runs"] > 1).any())
        named = [f"{row.parts} {row.gap:+.4f}" for row in alone.head(NAMED).itertuples()]
        rest = f" and {len(alone) - NAMED} more" * (len(alone) > NAMED)
        return (
            f"Rounded alone, {alone['only'].iloc[0]} costs the most loss: {', '.join(named)}{rest} "
            f"(nats per token, mean gap to bf16{several})."
        )
    first = costs.iloc[0]
    advice = "To tell the parts apart, collect FA_… and linear_… recipes."
    return f"{first['label']} costs the most loss: {first['gap']:+.4f} nats per token. {advice}"


def _noise(costs: pd.DataFrame) -> str:
    iterations = int(costs["iterations"].max())
    return (
        f"Over {iterations} iteration{'s' * (iterations != 1)}: gaps of a few thousandths of a nat come and go with "
        "the rounding of a single run. More iterations tell more (`--control-iter`)."
    )


def iterations_of(opened: Catalog, name: str) -> list[int]:
    return opened.facets(Filter(tensor_name=(name,))).get("iteration", [])


@lru_cache(64)
def compare(opened: Catalog, run_id: str, reference: str, name: str, at: int) -> tuple[pd.DataFrame, int]:
    """A run's gradients of one name and iteration against the reference's: as `compute.gradients`."""
    where = Filter(tensor_name=(name,), iteration=(at,))
    return compute.gradients(opened, opened.pairs(run_id, reference, where))


def gradients(
    where: Filter,
    table: pd.DataFrame,
    name: str,
    at: int,
    iterations: list[int],
    compared: Compare,
    done: Callable[[int, int], None] = lambda count, of: None,
) -> Drawn:
    """How far each run's gradients of this name are from bf16's. compared: `compare`, or what remembers its answers;
    done is called with how many runs are through, of how many."""
    parts, unread = [], 0
    runs = runs_compared(table)
    for count, (_, run) in enumerate(runs.iterrows()):
        found, missing = compared(run["run_id"], run["reference"], name, at)
        parts.append(found.assign(group=run["label"]))
        unread += missing
        done(count + 1, len(runs))
    together = pd.concat(parts, ignore_index=True)
    if together.empty:
        return Drawn(problems=("No gradient of these runs has a twin with values in its bf16 run.",))
    together["place"] = [
        f"L{int(layer)} {module}" for layer, module in zip(together["layer_index"], together["module"], strict=True)
    ]
    summary = compute.gradient_summary(together, ["group", "place"])
    worst = compute.gradient_summary(together, ["group"]).sort_values("cosine").iloc[0]
    verdict = (
        f"Furthest from bf16’s: {worst['group']}, mean cosine {worst['cosine']:.3f}, "
        f"gradient bias {worst['gradient_bias']:.3g}."
    )
    unscaled = [name for name in FORMATS if with_scale(name)]
    if runs.loc[runs["label"] == worst["group"], list(PARTS)].isin(unscaled).any(axis=None):
        verdict += f" It rounds to HiFloat8 without a scale: {_with_scale(together, runs)}."
    what = f"{len(together):,} pairs of {name} tensors, iteration {at}, exact"
    caption = (
        f"{source(where, what)}\nCosine: {MEASURES['cosine'].definition}, x being bf16’s gradient of the same "
        f"iteration and data. Gradient bias: {MEASURES['gradient_bias'].definition}."
    )
    subtitle = f"{label_of(name)} · iteration {at} · {len(together):,} pairs"
    height = charts.agreement_height(summary)
    figures = [
        Figure(column, charts.agreement(summary, column, subtitle), summary, caption, height=height, group="gradients")
        for column in ("cosine", "gradient_bias")
    ]
    notes = [f"Gradient bias: {MEASURES['gradient_bias'].definition}."]
    if unread:
        notes.append(f"{unread} pairs could not be read and are left out.")
    comparable = len(comparable_runs(table))
    if comparable > style.MAX_GROUPS:
        notes.append(f"The {style.MAX_GROUPS} newest of {comparable} runs; the filter takes others.")
    if at > min(iterations):
        notes.append("Later iterations hold the drift of the weights as well.")
    return Drawn((*figures, *map(Text, notes)), verdict)


def comparable_runs(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["quantized"] & table["reference"].notna()]


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
        ReportTable(name, "Loss against bf16’s", frame.drop(columns=[*PARTS])) for name, frame in found.tables.items()
    ]
    yield Section("comparisons", "", found.figures, tables, verdict=found.verdict, problems=found.problems)
    of_weights = _weight_gradients(opened, where, runs)
    figures = [replace(figure, name=f"gradients_{figure.name}") for figure in of_weights.figures]
    yield Section("comparisons", figures=figures, problems=of_weights.sentences)


def _weight_gradients(opened: Catalog, where: Filter, runs: pd.DataFrame) -> Drawn:
    """Those of the first iteration, unless that would read too many values."""
    name = NAMES[0]
    iterations = iterations_of(opened, name)
    if not iterations:
        return Drawn(problems=(f"No {label_of(name)} was recorded.",))
    first = Filter(tensor_name=(name,), iteration=(iterations[0],))
    pairs = (opened.pairs(run["run_id"], run["reference"], first) for _, run in runs_compared(runs).iterrows())
    values = sum(int(each["numel"].sum()) for each in pairs)
    if values > MAX_GRADIENT_VALUES:
        problem = f"Gradients are not compared here: {big(values)} values would be read. The app does (Recipes)."
        return Drawn(problems=(problem,))
    return gradients(where, runs, name, iterations[0], iterations, partial(compare, opened))


RECIPES = Question(
    text="Which part costs the most loss?",
    title="Recipes",
    icon=":material/balance:",
    help="QK, PV or the linears: each recipe’s loss and gradients against bf16’s",
    page="recipes",
    draw=draw,
    controls=(VIEW, GRADIENT, AT),
    narrow=_controls,
    slow="Comparing gradients",
    note=NOTE,
    report=report,
)
