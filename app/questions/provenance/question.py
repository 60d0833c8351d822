"""Where does a NaN come from? The operation that produced the first one, what it reached, and the steps before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from binade.app.draw import style
from binade.app.draw.control import Control
from binade.app.draw.figure import Column, Drawn, Figure, Item, Table
from binade.app.draw.style import MEASURES
from binade.app.questions.provenance import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared.runs import labels_of, matching
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Selection
from binade.app.view.params import Whole, known_run
from binade.data.compare.evidence import say
from binade.data.run.events import Event
from binade.data.words.filter import Filter

NOTHING = "No run in the filter has recorded a NaN or Inf. To look for one, record with find_nan=True or --find-nan."
RUN = Control(name="run", label="Run", param=known_run, widget="list", row="event", width=2)
AT = Control(name="at", label="Iteration", param=Whole(0, 10**9), widget="list", row="event")
RANKS = {
    "rank": Column("Rank"),
    "place": Column("Operation"),
    "order": Column("Order", help="Position among the operations of the step"),
    "text": Column("What happened"),
    "reached": Column("Reached", help="Later operations whose result or gradient is not finite"),
}
OPERANDS = {
    "tensor_name": Column("Tensor"),
    "shape": Column("Shape", text=lambda row: " × ".join(map(str, row["shape"]))),
    "absmax": Column(format=".4g"),
    "nans": Column("NaN", "d"),
    "infs": Column("Inf", "d"),
    "rank": Column("Rank"),
}


def _found(selection: Selection) -> dict[str, list[Event]]:
    wanted = set(
        selection.where.run_id or matching(selection.opened, selection.where, selection.opened.runs())["run_id"]
    )
    return {run: events for run, events in compute.runs_with_events(selection.opened).items() if run in wanted}


def _chosen(runs: Mapping[str, list[Event]], values: Mapping[str, Any]) -> tuple[str, list[int], int]:
    """(the run, the iterations of its events, the one that is shown)."""
    run = values["run"] if values["run"] in runs else next(iter(runs))
    iterations = sorted({event.iteration for event in runs[run]})
    return run, iterations, values["at"] if values["at"] in iterations else iterations[0]


def _controls(selection: Selection, values: dict[str, Any]) -> Iterator[Control]:
    if not (runs := _found(selection)):
        return
    _, iterations, _ = _chosen(runs, values)
    yield replace(RUN, options=tuple(runs), titles=labels_of(selection.opened))
    yield replace(AT, options=tuple(iterations))


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    runs = _found(selection)
    if not runs:
        return Drawn(problems=(NOTHING,))
    opened = selection.opened
    run, _, iteration = _chosen(runs, values)
    events = [event for event in runs[run] if event.iteration == iteration]  # the earliest in the step first
    first, ranks, chain = events[0], compute.of_ranks(events), compute.chain(events)
    label = labels_of(selection.opened)[run]
    words = f"Data: events of {run}, iteration {iteration}, in the order in which each rank executed its operations."
    items: list[Item] = [
        Figure(
            "chain", charts.chain(chain, f"Path from {first.place}", f"{label} · iteration {iteration}"), chain, words,
            note="The ringed operation has finite operands and a result that is not finite. The others have a "
            "result or gradient that is not finite; of nested modules, only the innermost is drawn.",
            height=charts.chain_height(chain),
        ),
        Table("ranks", ranks, RANKS, title="By rank, earliest event first"),
    ]  # fmt: skip
    table, of = compute.before(opened, run, first)
    for name in ("absmax", "sqnr_db"):
        measure = MEASURES[name]
        if len(table) and table[name].abs().lt(float("inf")).groupby(table["iteration"]).any().sum() > 1:
            title, subtitle = f"{measure.label} in the preceding steps", f"{of} · up to iteration {iteration}"
            chart = charts.before(table, measure, iteration, title, subtitle)
            caption = f"Data: {run}, tensors of {of}.\n{measure.label}: {measure.definition}."
            height = 320 + style.legend_height(sorted(set(table["tensor_name"])))
            items.append(Figure(f"before_{name}", chart, table, caption, height=height))
    operands = compute.kept(opened, run, first)
    if len(operands):
        title = "The operands and the result of the operation"
        items.append(Table("operands", operands, OPERANDS, title=title, choose="tensor_id"))
    nothing = " No tensor was measured in the preceding steps: watch more steps, or keep the last ones with --ring."
    steps = "" if len(table) else nothing
    rank = f" on rank {first.rank}" if len({event.rank for event in events}) > 1 or first.rank else ""
    verdict = say(
        "Iteration {iteration}{rank}: {text}.{steps}", iteration=iteration, rank=rank, text=first.text, steps=steps
    )
    scope = Scope(Filter(run_id=(run,), iteration=(iteration,)), ((len(ranks), "rank"),), len(runs))
    return Drawn(tuple(items), verdict, scope=scope)


PROVENANCE = Question(
    text="Where does a NaN come from?",
    title="First NaN",
    icon=":material/account_tree:",
    help="The operation that produced the first one, its path to the loss, and the statistics of the preceding steps",
    page="runs",
    view="provenance",
    room="difference",
    controls=(RUN, AT),
    narrow=_controls,
    draw=draw,
    of_runs=True,
    empty=True,  # a run without tensors has events, too
)
