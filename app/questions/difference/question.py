"""Where do two implementations differ? Two runs of the same model and data, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import pandas as pd

from binade.app.control import Control
from binade.app.figure import Column, Drawn, Figure, Item, Table, Text, source
from binade.app.params import One
from binade.app.questions.difference import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared.runs import every_run, run_titles
from binade.app.questions.shared.selection import Selection
from binade.data.cache import Done
from binade.data.catalog import Catalog
from binade.data.difference import TOLERANCE, Difference
from binade.data.evidence import Measure, Sentence, exact, extreme, say, together
from binade.data.runs import RunError

NOTE = (
    "Matches the tensors of two runs of the same model and data, after joining the shards of all ranks, and compares "
    "them in the order of execution: by their values if both runs kept them, otherwise by their statistics."
)
DEFINITION = (
    "Relative difference: ‖a − b‖₂ / ‖a‖₂, or the largest relative change of rms, mean, absmax, min and max where only "
    "statistics were kept. 0 and Inf are drawn at the ends of the axis."
)
BITWISE = "bitwise"
TOLERANCES = (str(TOLERANCE), BITWISE, "0.0001", "0.001", "0.1")
COLUMNS = {
    "order": Column("Order", "%d", 60),
    "place": Column("Tensor", width=450),
    "difference": Column("Relative difference", "%.3g", 145),
    "largest": Column("Largest difference", "%.3g", 140),
    "by": Column("By", width=65),
}
FORMAT_COLUMNS = {"place": Column("Operands", width=450), "a": Column("Run A"), "b": Column("Run B")}


def _newest(first: int) -> Callable[[Catalog], One]:
    """The runs: the default, then the others, newest first."""

    def runs(opened: Catalog) -> One:
        names = opened.runs()["run_id"].tolist()
        return One(tuple(dict.fromkeys([*names[first : first + 1], *names])), "run")

    return runs


CONTROLS = (
    Control(name="run_a", label="Run A", param=_newest(1), widget="list", row="runs"),
    Control(name="run_b", label="Run B", param=_newest(0), widget="list", row="runs"),
    Control(
        name="tolerance", label="Tolerance", param=One(TOLERANCES),
        titles={str(TOLERANCE): "2⁻⁵", BITWISE: "0 (bitwise)"},
        options=(BITWISE, "0.0001", "0.001", str(TOLERANCE), "0.1"), widget="list", row="runs",
        help="2⁻⁵: four units in the last place of bfloat16. Summing in a different order can cause such differences",
    ),
)  # fmt: skip


def _controls(selection: Selection, values: dict[str, Any]) -> Iterable[Control]:
    table = every_run(selection.opened)
    titles = run_titles(table)
    choices = table["run_id"].tolist()[::-1]
    return [
        replace(each, titles=titles, options=choices) if each.row and each.name != "tolerance" else each
        for each in CONTROLS
    ]


def draw(selection: Selection, values: dict[str, Any], done: Done = lambda count, of: None) -> Drawn:
    run_a, run_b = values["run_a"], values["run_b"]
    if run_a is None or run_a == run_b:
        return Drawn(problems=("Choose two runs of the same model and data.",))
    try:
        found, table = compute.compared(selection.opened, selection.where, run_a, run_b, done)
    except RunError as error:
        return Drawn(problems=(str(error),))
    problems = [*found.notes, *_missing(found)]
    if table.empty:
        return Drawn(problems=(*problems, "The two runs have none of the filter's tensors in common."))
    limit = None if values["tolerance"] == BITWISE else float(values["tolerance"])
    first = found.first(limit)
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
    order = "names" if found.in_order_of_names else "execution"
    title = f"In the order of {order}" + (f", from tensor {start + 1:,} on" if start else "")
    items: list[Item] = [figure, Table("differences", around, COLUMNS, title, height=420, choose="tensor_id")]
    if found.formats:
        formats = pd.DataFrame([asdict(each) for each in found.formats])
        items.insert(0, Table("formats", formats, FORMAT_COLUMNS, "Operands in different formats, or of one run alone"))
    if len(around) < len(table):
        items.append(Text(f"The table shows {len(around):,} of {len(table):,} tensors; the CSV of the chart has more."))
    return Drawn(tuple(items), _verdict(found, table, limit, first), tuple(problems))


RELATIVE = Measure("relative", "Relative difference")


def _verdict(found: Difference, table: pd.DataFrame, limit: float | None, first: int | None) -> Sentence:
    total = len(found.rows)
    how = say("{values} were compared by their values.", values=int((table["by"] == "values").sum()))
    if all(row.equal for row in found.rows):
        alike = say("The two runs are not distinguishable: all {total} tensors are equal to the bit.", total=total)
        return together(alike, how)
    tolerance = exact(RELATIVE, limit or 0.0)
    if first is None:
        most = say("All {total} tensors differ by at most {limit}.", total=total, limit=tolerance)
    else:
        order = " in the order of names" * found.in_order_of_names
        row, counts = found.rows[first], {"count": sum(each.differs(limit) for each in found.rows), "total": total}
        if limit is None:
            start = say(
                "The first tensor{order} that differs in at least one bit: {place}", order=order, place=row.place
            )
            most = say("{count} of {total} tensors differ in at least one bit.", **counts)
        else:
            start = say(
                "The first tensor{order} that differs by more than {limit}: {place}",
                order=order,
                limit=tolerance,
                place=row.place,
            )
            most = say("{count} of {total} tensors differ by more than {limit}.", limit=tolerance, **counts)
        size = exact(RELATIVE, row.difference)
        what = say("({size}).", size=size)
        if row.by == "shape":
            what = say("(shapes {a} and {b}).", a=str(row.shape), b=str(row.shape_b))
        most = together(start, what, most)
    sizes = [(row.place, exact(RELATIVE, row.difference)) for row in found.rows if row.by != "shape"]
    return together(most, how, extreme(sizes, "relative difference", lowest=False))


def _missing(found: Difference) -> Iterable[str]:
    for what, places in (
        ("are only in run A", found.only_a), ("are only in run B", found.only_b),
        ("were not compared", found.incomplete),
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
