"""How did the runs train? The losses of what is chosen in the table of runs."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pandas as pd

from binade.app.draw.control import Control
from binade.app.draw.figure import Drawn, Figure, Text
from binade.app.draw.style import MARKS
from binade.app.questions.question import Question
from binade.app.questions.runs import charts
from binade.app.questions.runs.groups import MOST_LINES, Line, compared_runs, groups_of, left_at, lines_of, over_seeds
from binade.app.questions.shared.labels import thinned, thinned_note
from binade.app.questions.shared.runs import matching
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Selection
from binade.app.view.params import AnyText, Known, One
from binade.data.compare import comparison, evidence
from binade.data.compare.comparison import Comparison
from binade.data.compare.same_data import NATS, UNKNOWN
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from binade.data.words.text import counted

SMOOTH = Control(
    name="smooth", label="Mean over", param=One(("1", "5", "25")), row="loss",
    titles={"1": "each iteration", "5": "5 iterations", "25": "25 iterations"},
    help="The mean of as many iterations before each as after it",
)  # fmt: skip
SCALE = Control(
    name="scale", label="Loss", param=One(("linear", "log")), row="loss",
    titles={"linear": "linear", "log": "logarithmic"},
)  # fmt: skip
WARMUP = Control(
    name="warmup", label="Warm-up", param=One(("hide", "show")), titles={"hide": "hidden", "show": "shown"}, row="loss",
    help="The iterations below 0, before what is quantized",
)  # fmt: skip
NO_LOSSES = "The chosen rows have no losses."
BAND = "A line of several seeds is their mean, shaded from the lowest to the highest seed."


def rows_of(opened: Catalog) -> Known:
    """Groups of runs, by their key, and runs, by their id."""
    return Known(
        lambda name: any(name == group.key or name in group.runs for group in groups_of(opened)), "run", several=True
    )


def _trained(opened: Catalog) -> pd.DataFrame:
    """The runs that have losses: an import of tensors has none."""
    runs = opened.runs()
    return runs[runs["first_step"].notna()]


def _controls(selection: Selection, values: dict[str, Any]) -> list[Control]:
    firsts = [json.loads(step)["iteration"] for step in _trained(selection.opened)["first_step"].dropna()]
    return [SMOOTH, SCALE, *[WARMUP] * (min(firsts) < 0)] if firsts else []


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    opened = selection.opened
    lines, left_out = drawn_lines(opened, values, selection.where)
    compared, losses = compared_runs(opened)
    smooth, logarithmic = int(values["smooth"]), values["scale"] == "log"
    tables, hides = [], values["warmup"] == "hide"
    for line in lines:
        records = [losses[run] for run in line.runs]
        after = [[record for record in steps if record["iteration"] >= 0] for steps in records]
        table = over_seeds(after if hides and all(after) else records)
        tables.append(_smoothed(table, smooth).assign(group=line.name))
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["group", "iteration", "loss"])
    if table["loss"].notna().sum() == 0:
        return Drawn((Text(NO_LOSSES),)) if values["chosen"] else Drawn()
    table, step = thinned(table.reindex(columns=["group", "iteration", "loss", "low", "high"]), MARKS)
    used = [run for line in lines for run in line.runs]
    own = compared.table[compared.table["run_id"].isin(used)]
    short = sum(len(line.short) for line in lines)
    notes = (
        thinned_note(step),
        f"Centered means of {smooth} iterations, of fewer at both ends." if smooth > 1 else "",
        BAND if table["low"].notna().any() else "",
        f"{counted(short, 'run')} that ended earlier than others of the group {'is' if short == 1 else 'are'} not in "
        "its line." if short else "",
        f"{left_out} more groups are not drawn: choose rows of the table." if left_out else "",
    )  # fmt: skip
    unit = _unit(own)
    marks = _marks(compared, lines, table)
    chart = charts.losses(table, {line.name: line.look for line in lines}, marks, unit, logarithmic)
    note = " ".join(filter(None, notes))
    what = f"cross entropy in {unit}" if unit == NATS else unit
    caption = f"Data: {counted(len(used), 'run')}, from loss.jsonl. Loss: {what}. {note}".strip()
    figure = Figure("losses", chart, table, caption, note=note, height=charts.height(table))
    count = len(matching(opened, selection.where, _trained(opened)))
    scope = Scope(Filter(run_id=tuple(used)), ((len(lines), "line"),), count)
    problems = tuple(filter(None, [comparison.other_unit(own)]))
    return Drawn((figure,), _verdict(compared, lines), problems, scope)


def drawn_lines(opened: Catalog, values: Mapping[str, Any], where: Filter) -> tuple[list[Line], int]:
    """(the lines that these values draw, of the runs of the filter; how many groups are left out)."""
    within = set(matching(opened, where, _trained(opened))["run_id"])
    lines, left_out = lines_of(opened, values["chosen"], values["hidden"], within)
    return _most_apart(compared_runs(opened)[0], lines) if left_out else lines, left_out


def _most_apart(compared: Comparison, lines: list[Line]) -> list[Line]:
    """bf16, and MOST_LINES of the others with the largest gaps."""
    gaps = compared.costs.set_index("run_id")["gap"].abs()
    plain = set(compared.table.loc[~compared.table["quantized"], "run_id"])

    def size(line: Line) -> float:
        return -float(gaps.reindex(line.runs).fillna(0.0).mean())

    others = sorted((line for line in lines if plain.isdisjoint(line.runs)), key=size)[:MOST_LINES]
    return [line for line in lines if line in others or not plain.isdisjoint(line.runs)]


def _smoothed(table: pd.DataFrame, smooth: int) -> pd.DataFrame:
    """Centered means of so many iterations. Means of training do not include warm-up, nor the other way round."""
    if smooth < 2:
        return table
    columns = [name for name in ("loss", "low", "high") if name in table]
    parts = table.groupby(table["iteration"] < 0, sort=False)[columns]
    means = parts.transform(lambda loss: loss.rolling(smooth, min_periods=1, center=True).mean())
    return table.assign(**{name: means[name].where(table[name].notna()) for name in columns})


def _unit(runs: pd.DataFrame) -> str:
    units = list(dict.fromkeys(runs["unit"]))
    unit = units[0] if len(units) == 1 else f"in units that differ: {', '.join(units)}"
    return f"unit {unit}" if unit == UNKNOWN else unit


def _diverged(compared: Comparison, lines: Iterable[Line]) -> dict[str, tuple[int, int]]:
    """By line: (the iteration at which the first of its runs diverged, how many did)."""
    outcomes = compared.table.set_index("run_id")["outcome"]
    found = {line.name: [outcomes[run].diverged for run in line.runs] for line in lines}
    known = {name: [at for at in iterations if at is not None] for name, iterations in found.items()}
    return {name: (min(iterations), len(iterations)) for name, iterations in known.items() if iterations}


def _left(compared: Comparison, lines: Iterable[Line]) -> dict[str, int]:
    """By line that is a whole recipe: the iteration at which it leaves bf16."""
    found = {line.name: left_at(compared, (*line.runs, *line.short)) for line in lines}
    return {name: at for name, at in found.items() if at is not None}


def _marks(compared: Comparison, lines: list[Line], table: pd.DataFrame) -> pd.DataFrame:
    """Where lines leave bf16, and where they end because runs diverged: columns group, iteration, loss, text."""
    rows = []
    known = table.dropna(subset="loss").sort_values("iteration")
    for name, at in _left(compared, lines).items():
        points = known[(known["group"] == name) & (known["iteration"] >= at)]
        if len(points):
            rows.append((name, points["iteration"].iloc[0], points["loss"].iloc[0], f"{name} leaves bf16 at {at}"))
    for name, (at, _) in _diverged(compared, lines).items():
        points = known[(known["group"] == name) & (known["iteration"] <= at)]
        if len(points):
            text = f"{name} diverged at iteration {at}"
            rows.append((name, points["iteration"].iloc[-1], points["loss"].iloc[-1], text))
    return pd.DataFrame(rows, columns=["group", "iteration", "loss", "text"])


def _verdict(compared: Comparison, lines: list[Line]) -> evidence.Sentence:
    """Which lines diverged and which leave bf16, the earliest first."""
    count = {line.name: len(line.runs) for line in lines}
    lost = sorted(_diverged(compared, lines).items(), key=lambda item: item[1])
    texts = [
        f"{name} at iteration {at}{f' ({runs} of {count[name]} seeds)' if count[name] > 1 else ''}"
        for name, (at, runs) in lost
    ]
    left = [
        f"{name} at iteration {at}" for name, at in sorted(_left(compared, lines).items(), key=lambda item: item[1])
    ]
    return evidence.together(
        evidence.say("Diverged: {texts}.", texts=evidence.listed(texts)) if texts else "",
        evidence.say("Leaves bf16: {left}.", left=evidence.listed(left)) if left else "",
    )


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
    controls=(SMOOTH, SCALE, WARMUP),
    narrow=_controls,
    takes={"chosen": rows_of, "hidden": rows_of},
    selects={"columns": lambda opened: AnyText(), "sort": lambda opened: AnyText()},
    at_once=("chosen", "hidden", "smooth", "scale", "warmup"),
    of_runs=True,
    empty=True,
    beyond=_every,
    says_scope=True,
    layout="binade.app.questions.runs.page",
)
