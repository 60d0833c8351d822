"""Which format for which operand? The smallest measured loss change within a budget of bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from binade.app.control import Control
from binade.app.figure import Column, Drawn, Figure, Table, Text, source
from binade.app.params import One
from binade.app.questions.advise import charts
from binade.app.questions.question import Question
from binade.app.questions.shared import layer_chart
from binade.app.questions.shared.runs import labels_of, same_model
from binade.app.questions.shared.scope import Scope, scoped, unrounded
from binade.app.questions.shared.selection import Selection
from binade.collector.advice.advice import Advice, AdviceRequest, advise
from binade.collector.advice.costs import FORWARD, GROUPS, AdviceError, costs, operands_of
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.names import short_names

NOTE = (
    "An integer linear program chooses the formats by the effects on the loss that were measured for the model of one "
    "run: the chosen run or, if none is chosen, the newest bf16 run."
)
BUDGETS = ("4.5", "5", "5.5", "6", "7", "8", "9", "10", "12", "14")
DEFAULT = "5.5"
BY = {"site": "Each linear layer", "layer": "Each layer", "module": "Each module", "model": "The model"}
PARTS = {"linear": "Linear layers", "all": "Linear layers and attention"}
BUDGET = Control(
    name="budget", label="Bits per value", param=One((DEFAULT, *(b for b in BUDGETS if b != DEFAULT))),
    options=BUDGETS, widget="slider", row="advise", width=2,
    help="Average over the values of the operands, separately for forward and backward operands",
)  # fmt: skip
CONTROLS = (
    BUDGET,
    Control(
        name="by", label="Granularity", param=One(tuple(GROUPS)), titles=BY, widget="list", row="advise",
        help="The part of the model that shares one choice of formats. Its GEMMs and operands can still get different "
        "formats",
    ),
    Control(name="parts", label="Choose formats for", param=One(tuple(PARTS)), titles=PARTS, widget="list",
            row="advise"),
)  # fmt: skip
OPERANDS = {
    "place": Column("Operand"),
    "gemm": Column("GEMM"),
    "spec": Column("Format"),
    "width": Column("Bits per value", ".2f"),
    "change": Column("Loss change (nats)", ".2g", help="An equal share of its group’s; forward operands only"),
    "saved": Column(
        "Saved", ".2g",
        help="How much the loss, or the noise ‖e‖² / ‖x‖² of a backward operand, would grow in the narrowest format",
    ),
}  # fmt: skip
CAPTION = (
    "Measured loss change: the loss with a group of forward operands rounded minus the loss without, on the same "
    "weights and sequences, added up over the groups. The formats of backward operands are chosen for the least noise "
    "in gradients, within the same budget."
)


def advice_of(selection: Selection, values: dict[str, Any]) -> Advice:
    """Raises AdviceError."""
    opened, where = selection.opened, selection.where
    parts = ("linear",) if values["parts"] == "linear" else ()
    request = AdviceRequest(float(values["budget"]), by=values["by"])

    def answer() -> Advice:
        return advise(costs(opened, operands_of(opened, where, parts), values["by"]), request)

    return opened.kept(("advice", where, parts, request, opened.state()), answer)


def within(opened: Catalog, where: Filter, values: Mapping[str, Any]) -> Filter:
    """The chosen runs; if none is chosen, one."""
    return where if where.run_id else scoped(opened, unrounded(opened, where), ("iteration",))


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    try:
        advice = advice_of(selection, values)
    except AdviceError as error:
        return Drawn(problems=(error.sentence,))
    advised, where = advice.advised, Filter(run_id=advice.costs.runs)
    words = f"{source(where, f'{len(advised):,} operands')}\n{CAPTION}"
    chosen = (
        advised.drop(columns="by_sequence")
        .assign(
            place=short_names(advised),
            width=advised["bits"] / advised["values"],
            backward=advised["gemm"] != FORWARD,
        )
        .sort_values(["backward", "saved"], ascending=[True, False], ignore_index=True)
    )
    forward = chosen[~chosen["backward"]]
    bits = float(forward["bits"].sum() / forward["values"].sum())
    frontier = charts.frontier(advice.frontier, bits, float(forward["change"].sum()))
    heat = charts.bits(forward, "Bits that forward operands get", "bright: more bits")
    height = max(420, layer_chart.height(forward.assign(row=forward["module"] + forward["tensor_name"])))
    items: list[Any] = [
        Text(f"Operands of {', '.join(labels_of(selection.opened)[run] for run in advice.costs.runs)}."),
        Figure("frontier", frontier, advice.frontier, words, height=height, group="advice"),
        Figure(
            "bits", heat, forward, words, height=height, group="advice", choose="tensor_id",
            hint="Click a cell to open its tensor.",
        ),
        Table("operands", chosen, OPERANDS, title="All operands", choose="tensor_id"),
        *map(Text, advice.doubts),
    ]  # fmt: skip
    return Drawn(tuple(items), advice.sentence, scope=Scope(where, ((len(chosen), "operand"),)))


ADVISE = Question(
    text="Which format for which operand?",
    title="Advise",
    icon=":material/tune:",
    help="The smallest measured loss change within a budget of bits, as a recipe to train",
    page="map",
    view="advise",
    within=within,
    draw=draw,
    of_runs=True,
    beyond=same_model,
    controls=CONTROLS,
    note=NOTE,
    layout="binade.app.questions.advise.page",
)
