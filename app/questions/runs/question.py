"""How did the runs train? The losses of the newest runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from binade.app import style
from binade.app.control import Control
from binade.app.figure import Drawn, Figure, Item, Text
from binade.app.params import One
from binade.app.questions.question import Question
from binade.app.questions.shared import loss_chart
from binade.app.questions.shared.event_marks import events_of
from binade.app.questions.shared.labels import thinned_note
from binade.app.questions.shared.runs import matching, run_looks, some_runs, with_plain_runs
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Selection
from binade.data import comparison, evidence
from binade.data.catalog import Catalog
from binade.data.comparison import Comparison, compare
from binade.data.filter import Filter
from binade.data.run_table import losses_of
from binade.data.same_data import NATS, UNKNOWN, window_of
from binade.data.text import counted

SMOOTH = Control(
    name="smooth", label="Mean over", param=One(("1", "5", "25")), row="loss",
    titles={"1": "each iteration", "5": "5 iterations", "25": "25 iterations"},
    help="The mean of as many iterations before each as after it; each iteration stays behind it",
)  # fmt: skip
WARMUP = Control(
    name="warmup", label="Warm-up", param=One(("hide", "show")), titles={"hide": "hidden", "show": "shown"}, row="loss",
    width=2, help="The iterations below 0, before what is quantized",
)  # fmt: skip


def _trained(opened: Catalog) -> pd.DataFrame:
    """The runs that have losses: an import of tensors has none."""
    runs = opened.runs()
    return runs[runs["first_step"].notna()]


def _controls(selection: Selection, values: dict[str, Any]) -> list[Control]:
    firsts = [json.loads(step)["iteration"] for step in _trained(selection.opened)["first_step"].dropna()]
    return [SMOOTH, *[WARMUP] * (min(firsts) < 0)] if firsts else []


def recipe_names(runs: pd.DataFrame) -> dict[str, str]:
    """The group of each run, by its label: runs that differ only in their seed are named by their recipe, of several
    runs of a seed the newest one; all others by their label. runs: of `some_runs`, oldest first."""
    names = dict(zip(runs["label"], runs["label"], strict=True))
    groups = [group for _, group in runs.groupby(["name", "settings"], sort=False) if group["seed"].nunique() > 1]
    recipes = Counter(group["name"].iloc[0] for group in groups)
    for group in groups:
        name, newest = group["name"].iloc[0], group.drop_duplicates("seed", keep="last")["label"]
        if recipes[name] == 1 and name not in set(names) - set(newest):
            names |= dict.fromkeys(newest, name)
    return names


def over_seeds(
    records: Mapping[str, Sequence[Mapping[str, Any]]], names: Mapping[str, str]
) -> tuple[dict[str, list[dict[str, Any]]], pd.DataFrame, pd.DataFrame]:
    """(the records of each group, in nats per token: of several seeds, the means of the iterations at which all have a
    loss of the same window; their 95% intervals of Student's t, with columns group, iteration, low, high; the records
    of these seeds, with columns group, seed, iteration, loss). names: the group of each run, as `recipe_names`."""
    lines = {run: {record["iteration"]: record["loss"] for record in steps} for run, steps in records.items()}
    windows = {run: {(record["iteration"], window_of(record)) for record in steps} for run, steps in records.items()}
    means: dict[str, list[dict[str, Any]]] = {}
    intervals, seeds = [], []
    for group in dict.fromkeys(names[run] for run in records):
        runs = [run for run in records if names[run] == group]
        means[group] = []
        for iteration, _ in sorted(set.intersection(*(windows[run] for run in runs)), key=lambda pair: pair[0]):
            losses = [lines[run][iteration] for run in runs]
            if len(runs) == 1 or None in losses:
                means[group].append({"iteration": iteration, "loss": losses[0] if len(runs) == 1 else None})
                continue
            mean = evidence.mean(evidence.GAP, losses)
            means[group].append({"iteration": iteration, "loss": mean.value})
            intervals.append((group, iteration, mean.low, mean.high))
        if len(runs) > 1:
            seeds += [(group, run, iteration, loss) for run in runs for iteration, loss in lines[run].items()]
    return (
        means,
        pd.DataFrame(intervals, columns=["group", "iteration", "low", "high"]),
        pd.DataFrame(seeds, columns=["group", "seed", "iteration", "loss"]),
    )


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    opened = selection.opened
    runs = matching(opened, selection.where, _trained(opened))
    latest = some_runs(opened, runs.head(style.MAX_GROUPS))
    losses = losses_of(opened, latest["run_id"].tolist(), lost=True)
    labels = dict(zip(latest["run_id"], latest["label"], strict=True))
    after = {run: [record for record in records if record["iteration"] >= 0] for run, records in losses.items()}
    hidden = values["warmup"] == "hide" and after != losses and any(after.values())
    losses = after if hidden else losses
    smooth = int(values["smooth"])
    recipes = recipe_names(latest)
    records, intervals, seeds = over_seeds({labels[run_id]: lines for run_id, lines in losses.items()}, recipes)
    table, step = loss_chart.loss_table(records, style.MARKS, smooth)
    if table.empty:
        return Drawn()
    units = list(dict.fromkeys(latest["unit"]))
    unit = units[0] if len(units) == 1 else f"in units that differ: {', '.join(units)}"
    unit = f"unit {unit}" if unit == UNKNOWN else unit
    if not intervals.empty:
        table = table.merge(intervals, how="left", on=["group", "iteration"])
    note = f"Losses of the {len(latest)} newest of {len(runs)} runs." if len(runs) > len(latest) else ""
    height = 380 + style.legend_height(list(dict.fromkeys(table["group"])))
    half = smooth // 2
    mean = f"Mean: of {smooth} iterations: one, the {half} before and the {half} after it; fewer at both ends."
    band = "Recipes with several seeds: mean, its 95% interval (Student's t) in each iteration, and faint seeds."
    parts = (thinned_note(step), mean * (smooth > 1), band * (not seeds.empty), "Warm-up is hidden." * hidden)
    drawn = " ".join(filter(None, parts))
    data = f"Data: {counted(len(latest), 'run')}, from loss.jsonl"
    words = f"{data}. Loss: {f'cross entropy in {unit}' if unit == NATS else unit}. {drawn}".strip()
    events = events_of({labels[run_id]: opened.root / run_id for run_id in losses})
    events["group"] = events["group"].map(recipes)
    looks = {recipes[label]: look for label, look in run_looks(latest.iloc[::-1]).items()}
    compared = _compared(opened, latest)
    outcomes = compared.table.set_index("run_id")["outcome"]
    diverged = {labels[run_id]: outcomes[run_id].diverged for run_id in labels}
    diverged = {label: at for label, at in diverged.items() if at is not None}
    marks = pd.concat([_marks(compared, table, recipes), _ends(diverged, table, recipes)])
    chart = loss_chart.losses(table, looks, events, smooth, seeds, marks, unit)
    figure = Figure("losses", chart, table, words, note=drawn, height=height)
    scope = Scope(Filter(run_id=tuple(latest["run_id"])), ((table["group"].nunique(), "line"),), len(runs))
    items: tuple[Item, ...] = (figure, *map(Text, compared.missing))
    verdict = evidence.together(_diverged(diverged), *compared.leaving)
    return Drawn(items, verdict, tuple(filter(None, (note, comparison.other_unit(latest)))), scope)


def _compared(opened: Catalog, runs: pd.DataFrame) -> Comparison:
    table = with_plain_runs(opened, runs)
    return compare(table, losses_of(opened, table["run_id"], lost=True))


def _diverged(at: Mapping[str, int]) -> evidence.Sentence:
    """Which runs diverged, the earliest first."""
    texts = [f"{label} at iteration {iteration}" for label, iteration in sorted(at.items(), key=lambda item: item[1])]
    return evidence.say("Diverged: {texts}.", texts=evidence.listed(texts)) if texts else evidence.Sentence()


def _ends(diverged: Mapping[str, int], table: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Where the lines of runs that diverged end, or at least the last finite loss before: columns group, iteration,
    loss, text."""
    rows = []
    lines = table.assign(loss=table["mean"] if "mean" in table else table["loss"]).dropna(subset="loss")
    for label, at in diverged.items():
        group = names[label]
        before = lines[(lines["group"] == group) & (lines["iteration"] <= at)].sort_values("iteration")
        if len(before):
            last = before.iloc[-1]
            rows.append((group, last["iteration"], last["loss"], f"{label} diverged at iteration {at}"))
    return pd.DataFrame(rows, columns=["group", "iteration", "loss", "text"])


def _marks(compared: Comparison, table: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Where the lines of the chart leave bf16's band: columns group, iteration, loss, text."""
    labels = compared.table.set_index("run_id")["label"]
    lines = table.assign(loss=table["mean"] if "mean" in table else table["loss"])
    rows = []
    for recipe in compared.recipes:
        group, at = names.get(labels[recipe.run_id]), compared.left.get(recipe.run_id)
        points = lines[(lines["group"] == group) & (lines["iteration"] >= (0 if at is None else at))].dropna(
            subset="loss"
        )
        if at is not None and not points.empty:
            first = points.sort_values("iteration").iloc[0]
            rows.append((group, first["iteration"], first["loss"], f"{group} leaves bf16’s band at iteration {at}"))
    return pd.DataFrame(rows, columns=["group", "iteration", "loss", "text"])


def _every(opened: Catalog, where: Filter, run_ids: Collection[str]) -> Iterable[str]:
    return opened.runs()["run_id"]


RUNS = Question(
    text="How did the runs train?",
    title="Runs",
    icon=":material/science:",
    help="What was collected, how it ended, and its loss",
    page="runs",
    view="table",
    draw=draw,
    controls=(SMOOTH, WARMUP),
    narrow=_controls,
    of_runs=True,
    empty=True,
    beyond=_every,
    layout="binade.app.questions.runs.page",
)
