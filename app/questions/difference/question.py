"""Where do two implementations differ? Two runs of the same model and data, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import pandas as pd

from binade.app.draw.control import Control
from binade.app.draw.figure import Column, Drawn, Figure, Item, Table, Text, source
from binade.app.questions.difference import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared.runs import every_run, run_titles
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Selection
from binade.app.view.params import One
from binade.data.compare.difference import EXPLAINED, TOLERANCE, Difference, Tolerance, default_tolerance
from binade.data.compare.difference_text import RELATIVE, conclusion
from binade.data.compare.evidence import Sentence, exact, extreme, say, together
from binade.data.index.cache import Done
from binade.data.index.catalog import Catalog
from binade.data.run.directory import DONE, RunError

NOTE = (
    "Matches the tensors of two runs of the same model and data, after joining the shards of all ranks, and compares "
    "them in the order of execution: by their values if both runs kept them, otherwise by their statistics."
)
DEFINITION = (
    "Relative difference: ‖a − b‖₂ / ‖a‖₂, or the largest relative change of rms, mean, absmax, min and max where only "
    "statistics were kept. 0 and Inf are drawn at the ends of the axis."
)
BITWISE = "bitwise"
DEFAULT = "default"  # see data.compare.difference.default_tolerance
TOLERANCES = (DEFAULT, BITWISE, "0.0001", "0.001", str(TOLERANCE), "0.1")
TITLES = {DEFAULT: "2⁻⁵", str(TOLERANCE): "2⁻⁵", BITWISE: "0 (bitwise)"}
COLUMNS = {
    "order": Column("Order", "d"),
    "place": Column("Tensor"),
    "difference": Column("Relative difference", ".3g"),
    "limit": Column("Explained", ".3g"),
    "largest": Column("Largest difference", ".3g"),
    "by": Column("By"),
}
FORMAT_COLUMNS = {"place": Column("Operands"), "a": Column("Run A"), "b": Column("Run B")}


def pair_of(opened: Catalog) -> tuple[str, ...]:
    """The runs that are compared by default: the newest one that ended well and recorded tensors, after the bf16 run on
    the same data, or else the run before it. Imports, and runs that failed, only if there are no others."""
    runs = opened.runs()
    kinds = runs["config"].map(lambda config: json.loads(config).get("kind"))
    sound = runs[(runs["state"] == DONE) & (runs["tensors"] > 0) & kinds.isna()]["run_id"].tolist()
    references = dict(zip(*(every_run(opened)[name] for name in ("run_id", "references")), strict=True))
    for run_id in sound:
        known = [other for other in references.get(run_id, ()) if other in sound and other != run_id]
        if known:
            return known[0], run_id
    newest = list(dict.fromkeys([*sound, *runs["run_id"]]))[:2]
    return tuple(newest[::-1])


def _first(place: int) -> Callable[[Catalog], One]:
    """The runs: the default, then the others, newest first."""

    def runs(opened: Catalog) -> One:
        return One(tuple(dict.fromkeys([*pair_of(opened)[place : place + 1], *opened.runs()["run_id"]])), "run")

    return runs


CONTROLS = (
    Control(name="run_a", label="Run A", param=_first(0), widget="list", row="runs"),
    Control(name="run_b", label="Run B", param=_first(1), widget="list", row="runs"),
    Control(
        name="tolerance", label="Tolerance", param=One(TOLERANCES), titles=TITLES, widget="list", row="runs",
        help="By default 2⁻⁵, four units in the last place of bfloat16: summing in a different order can cause such "
        "differences. If a run is imported, what the dtypes explain: twice the rounding error of the coarser one, and "
        "twice the largest difference before it",
    ),
)  # fmt: skip


def _controls(selection: Selection, values: dict[str, Any]) -> Iterable[Control]:
    table = every_run(selection.opened)
    titles = run_titles(table)
    choices = table["run_id"].tolist()[::-1]
    return [_for_runs(selection.opened, values, control) if control.name == "tolerance"
            else replace(control, titles=titles, options=choices) for control in CONTROLS]  # fmt: skip


def _for_runs(opened: Catalog, values: dict[str, Any], control: Control) -> Control:
    """The tolerances for two runs."""
    runs = opened.runs()
    chosen = runs.loc[runs["run_id"].isin([values["run_a"], values["run_b"]]), "config"]
    if default_tolerance(*map(json.loads, chosen)) == EXPLAINED:
        return replace(control, titles=TITLES | {DEFAULT: "what the dtypes explain"})
    return replace(control, options=[text for text in TOLERANCES if text != str(TOLERANCE)])


def _tolerance(text: str, difference: Difference) -> Tolerance:
    if text == DEFAULT:
        return difference.tolerance
    return None if text == BITWISE else float(text)


def draw(selection: Selection, values: dict[str, Any], done: Done = lambda count, of: None) -> Drawn:
    run_a, run_b = values["run_a"], values["run_b"]
    if run_a is None or run_a == run_b:
        return Drawn(problems=("Choose two runs of the same model and data.",))
    try:
        difference, table = compute.compared(selection.opened, selection.where, run_a, run_b, done)
    except RunError as error:
        return Drawn(problems=(str(error),))
    problems = [*difference.notes, *_missing(difference)]
    if table.empty:
        return Drawn(problems=(*problems, "The two runs have none of the filter's tensors in common."))
    tolerance = _tolerance(values["tolerance"], difference)
    first = difference.first(tolerance)
    limit = tolerance if isinstance(tolerance, float) else None
    figure = Figure(
        "difference",
        charts.differences(
            compute.drawable(table), limit, None if first is None else first + 1, f"A: {run_a} · B: {run_b}"
        ),
        table,
        f"{source(selection.where, f'{len(table):,} tensors of {run_a} and {run_b}')}\n{DEFINITION}",
        note=DEFINITION,
        hint="Click a point to open the tensor of run A.",
        height=380,
        choose="tensor_id",
    )
    start = max(0, (first or 0) - 20)
    around = table.iloc[start : start + 200]
    order = "names" if difference.in_order_of_names else "execution"
    title = f"In the order of {order}" + (f", from tensor {start + 1:,} on" if start else "")
    columns = {name: column for name, column in COLUMNS.items() if name != "limit" or tolerance == EXPLAINED}
    items: list[Item] = [figure, Table("differences", around, columns, title, height=420, choose="tensor_id")]
    if difference.formats:
        formats = pd.DataFrame([asdict(row) for row in difference.formats])
        items.insert(0, Table("formats", formats, FORMAT_COLUMNS, "Operands in different formats, or of one run alone"))
    if len(around) < len(table):
        items.append(Text(f"The table shows {len(around):,} of {len(table):,} tensors; the CSV of the chart has more."))
    where = replace(selection.where, run_id=(run_a, run_b))
    scope = Scope(where, ((len(table), "tensor"),), len(selection.opened.runs()))
    return Drawn(tuple(items), _verdict(difference, table, tolerance), tuple(problems), scope)


def _verdict(difference: Difference, table: pd.DataFrame, tolerance: Tolerance) -> Sentence:
    how = say("{values} were compared by their values.", values=int((table["by"] == "values").sum()))
    sizes = [(row.place, exact(RELATIVE, row.difference)) for row in difference.rows if row.by != "shape"]
    ends = extreme(sizes, "relative difference", lowest=False) if any(row.difference for row in difference.rows) else ""
    return together(conclusion(difference, tolerance), how, ends)


def _missing(difference: Difference) -> Iterable[str]:
    for what, places in (
        ("are only in run A", difference.only_a), ("are only in run B", difference.only_b),
        ("were not compared", difference.incomplete),
    ):  # fmt: skip
        if places:
            yield f"Tensors that {what}: {len(places):,}. First: {places[0]}."


DIFFERENCE = Question(
    text="Where do two implementations differ?",
    title="Difference",
    icon=":material/difference:",
    help="The first tensor in which two runs differ, for example on two machines or with two backends",
    page="runs",
    view="difference",
    choice="Difference",
    draw=draw,
    controls=CONTROLS,
    narrow=_controls,
    slow="Comparing tensors",
    note=NOTE,
)
