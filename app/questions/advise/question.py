"""Which format for which operand? The smallest predicted loss change within a budget of bits or time, and whether
training confirmed it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from binade.app.control import Control
from binade.app.figure import Column, Drawn, Figure, Table, Text, source
from binade.app.params import One
from binade.app.questions.advise import charts
from binade.app.questions.predictions import compute
from binade.app.questions.predictions.question import COLUMNS as MEASURED
from binade.app.questions.question import Question
from binade.app.questions.shared import layer_chart
from binade.app.questions.shared.runs import labels_of, same_model
from binade.app.questions.shared.scope import Scope, scoped, unrounded
from binade.app.questions.shared.selection import Selection
from binade.collector.advice.advice import AS_MANY, Advice, AdviceRequest, advise, roofline_of
from binade.collector.advice.choice import GROUPS
from binade.collector.advice.costs import FORWARD, AdviceError
from binade.collector.advice.measured import measured_costs
from binade.collector.advice.roofline import PUBLISHED, read_devices
from binade.collector.errors import ConfigError
from binade.collector.training.devices import Device
from binade.collector.training.targets import read_config
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.names import short_names

NOTE = (
    "An integer linear program chooses the formats by the costs recorded in one run, over all its iterations: the "
    "chosen run or, if none is chosen, the newest bf16 run."
)
BUDGETS = ("4.5", "5", "5.5", "6", "7", "8", "9", "10", "12", "14")
DEFAULT = "5.5"
BY = {"site": "Each linear layer", "layer": "Each layer", "module": "Each module", "model": "The model"}
PARTS = {"linear": "Linear layers", "all": "Linear layers and attention"}
NO_DEVICE = "none"
HALFWAY = "halfway"
SPEEDUPS = (HALFWAY, "1.1", "1.25", "1.5", "1.75", "2", "2.5", "3")


def devices() -> dict[str, Device]:
    """Those that can be chosen; a binade.toml that cannot be read adds none: Runs › New collection says why."""
    try:
        return read_devices()
    except ConfigError:
        return read_config(PUBLISHED).devices


BUDGET = Control(
    name="budget", label="Bits per value", param=One((DEFAULT, *(b for b in BUDGETS if b != DEFAULT))),
    options=BUDGETS, widget="slider", row="advise", width=2,
    help="Average over the values of the operands, separately for forward and backward operands",
)  # fmt: skip
SPEEDUP = Control(
    name="speedup", label="Speedup over bf16", param=One(SPEEDUPS), titles={HALFWAY: "halfway to the fastest"},
    widget="slider", row="advise", width=2, help="How many times as fast as in bf16 a step is predicted to be",
)  # fmt: skip
DEVICE = Control(
    name="device", label="Time on", param=lambda opened: One((NO_DEVICE, *devices())), widget="list", row="advise",
    help="With a device, the budget is the predicted time of a step, from the device's published peak rates",
)  # fmt: skip
OF_CHOICE = (
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
    "change": Column("Loss change (nats)", ".2g", help="Predicted or measured; forward operands only"),
    "saved": Column(
        "Saved", ".2g",
        help="How much the loss, or the noise ‖e‖² / ‖x‖² of a backward operand, would grow in the narrowest format",
    ),
}  # fmt: skip
BITS = Column("Bits per forward value", ".2f")
CAPTION = (
    "Predicted loss change: the second-order terms of all forward operands, and first-order ones of more than two "
    "standard errors; those that lower the loss do not count in the choice. Effects that were measured replace the "
    "predictions of their group. The formats of backward operands are "
    "chosen for the least noise in gradients, within the same budget."
)


def _controls(selection: Selection, values: dict[str, Any]) -> Iterator[Control]:
    yield BUDGET if values["device"] == NO_DEVICE else SPEEDUP
    yield from OF_CHOICE
    yield replace(DEVICE, options=(NO_DEVICE, *devices()))


def advice_of(selection: Selection, values: dict[str, Any]) -> Advice:
    """Raises AdviceError."""
    opened, where = selection.opened, selection.where
    parts = ("linear",) if values["parts"] == "linear" else ()
    device, speedup = devices().get(values["device"]), values["speedup"]
    request = AdviceRequest(float(values["budget"]), by=values["by"])
    if device:
        request = AdviceRequest(None, share=None if speedup == HALFWAY else 1 / float(speedup), by=values["by"])

    def answer() -> Advice:
        costs = measured_costs(opened, compute.costs_of(opened, where, parts), values["by"])
        return advise(costs, request, roofline_of(opened, costs, device) if device else None)

    return opened.kept(("advice", where, parts, request, repr(device), opened.state()), answer)


def within(opened: Catalog, where: Filter, values: Mapping[str, Any]) -> Filter:
    """The chosen runs; if none is chosen, one."""
    return where if where.run_id else scoped(opened, unrounded(opened, where), ("iteration",))


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    try:
        advice = advice_of(selection, values)
    except AdviceError as error:
        return Drawn(problems=(error.sentence,))
    where = Filter(run_id=advice.costs.runs)
    words = f"{source(where, f'{len(advice.chosen):,} operands')}\n{CAPTION}"
    chosen = (
        advice.chosen.drop(columns="by_sequence")
        .assign(
            place=short_names(advice.chosen),
            width=advice.chosen["bits"] / advice.chosen["values"],
            backward=advice.chosen["gemm"] != FORWARD,
        )
        .sort_values(["backward", "saved"], ascending=[True, False], ignore_index=True)
    )
    forward = chosen[~chosen["backward"]]
    if advice.roofline:
        frontier = charts.frontier(advice.frontier, charts.PER_STEP, 1e3 * advice.seconds, advice.change)
    else:
        frontier = charts.frontier(advice.frontier, charts.PER_VALUE, advice.bits, advice.change)
    heat = charts.bits(forward, "Bits that forward operands get", "bright: more bits")
    height = max(420, layer_chart.height(forward.assign(row=forward["module"] + forward["tensor_name"])))
    items: list[Any] = [
        Text(f"Costs of {', '.join(labels_of(selection.opened)[run] for run in advice.costs.runs)}."),
        Figure("frontier", frontier, advice.frontier, words, height=height, group="advice"),
        Figure(
            "bits", heat, forward, words, height=height, group="advice", choose="tensor_id",
            hint="Click a cell to open its tensor.",
        ),
        Table("operands", chosen, OPERANDS, title="All operands", choose="tensor_id"),
        *map(Text, advice.doubts),
    ]  # fmt: skip
    if advice.unplaced:
        missing = ", ".join(advice.unplaced)
        items.append(Text(f"Not shown, because some of their formats were not scored: {missing}."))
    verdict = advice.sentence
    table, held = confirmed(selection.opened, advice)
    if not table.empty:
        columns = {"name": MEASURED["name"], "bits": BITS} | MEASURED
        shown = table.drop(columns=["gaps", "run_ids"])
        items.append(Table("advised_and_measured", shown, columns, title="Predicted and measured"))
        verdict = evidence.together(verdict, held)
    return Drawn(tuple(items), verdict, scope=Scope(where, ((len(chosen), "operand"),)))


def confirmed(opened: Catalog, advice: Advice) -> tuple[pd.DataFrame, evidence.Sentence]:
    """(predicted and measured figures of the advised and single-format recipes that were trained; whether the advice
    held)."""
    table, _ = compute.measured(opened, advice.costs.predictions or advice.costs)
    advised = table["advised"]
    plain = table["recipe"].str.startswith(("linear_", "FA_linear_"))
    held = [_held(row, table[plain]) for _, row in table[advised].iterrows()]
    return table[advised | plain].sort_values("predicted", ignore_index=True) if held else table[:0], evidence.together(
        *held
    )


def _held(advised: pd.Series, plain: pd.DataFrame) -> evidence.Sentence:
    """Whether an advised recipe did better than the best single format with no more bits."""
    others = plain[plain["bits"] <= advised["bits"] + AS_MANY].sort_values("predicted")
    if others.empty:
        text = "{name} was trained, but no single format with at most as many bits was."
        return evidence.say(text, name=str(advised["name"]))
    other = others.iloc[0]
    name = str(advised["name"])
    change = evidence.paired(evidence.GAP, advised["gaps"], other["gaps"])
    items = [(name, evidence.mean(evidence.GAP, advised["gaps"].values()))]
    items.append((str(other["name"]), evidence.mean(evidence.GAP, other["gaps"].values())))
    measured = evidence.each_of(items, "Mean gap to bf16 in training")
    return evidence.together(
        measured, evidence.effects([(name, change)], str(other["name"]), ("higher loss", "lower loss"))
    )


ADVISE = Question(
    text="Which format for which operand?",
    title="Advise",
    icon=":material/tune:",
    help="The smallest predicted loss change within a budget of bits or time, as a recipe to train",
    page="map",
    view="advise",
    within=within,
    draw=draw,
    of_runs=True,
    beyond=same_model,
    controls=(BUDGET, SPEEDUP, *OF_CHOICE, DEVICE),
    narrow=_controls,
    note=NOTE,
    layout="binade.app.questions.advise.page",
)
