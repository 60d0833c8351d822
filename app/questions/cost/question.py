"""What does rounding cost? The measured change of the loss, or of log-probabilities, by group of products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from binade.app.draw.control import Control
from binade.app.draw.figure import Column, Drawn, Figure, Item, Table, Text
from binade.app.questions.cost import charts, compute
from binade.app.questions.cost.compute import KINDS, MeasuredCosts
from binade.app.questions.question import Question
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Selection
from binade.app.view.params import One
from binade.data.compare import evidence
from binade.data.compare.parity import MEASURES
from binade.data.compare.routing import FLIPS, LEGEND
from binade.data.run.block_errors import ERROR, BlockErrors, block_sentence
from binade.data.run.parity_results import Parity, routing_findings
from binade.data.words.filter import Filter
from binade.data.words.text import counted

NOTHING = (
    "Nothing was measured in this root. For the loss of runs that were trained here: choose Measure below; for "
    "log-probabilities of two recipes: binade parity RUN --rollout mxfp4; for dumps of log-probabilities: binade "
    "parity FILE --save."
)
NOTHING_OF_FILTER = "Nothing was measured of the runs of the filter: choose Measure below, or binade parity RUN."
NOTE = (
    "Each group of products is rounded alone, on the same weights and sequences as without rounding. Changes of groups "
    "do not add up."
)
NOTE_OF_PARITY = (
    "In each row, one group of products is rounded as for the rollout and everything else as for training. Changes of "
    "groups do not add up."
)
NOTE_OF_BLOCKS = (
    "A block whose own error is small passes on the error of the blocks before. Where the dashed line is high, an "
    "error begins."
)
AVERAGES = (
    "d = log π_T − log π_R of each token, ρ = e^d; R: rollout, T: training. Tokens: the mean over all tokens; "
    "sequences: the mean within each sequence, then over sequences."
)
OF_TEXT = (
    "The tokens are those of a text, not sampled from a policy: k1, k2, k3, Jensen–Shannon and χ² do not estimate "
    "divergences here. The divergence of the groups is exact at each token."
)
OF_DUMPS = "KL, Jensen–Shannon and χ² are estimates for tokens that were sampled from the rollout policy."
INTERVAL = "The 95% interval over sequences (Student’s t)"
COLUMNS = {
    "group": Column("Group"),
    "treatment": Column("Rounded to"),
    "change": Column("Change (nats)", ".3g"),
    "low": Column("from", ".3g", help=INTERVAL),
    "high": Column("to", ".3g", help=INTERVAL),
    "divergence": Column("KL divergence (nats)", ".3g", help="Of the next token, over the whole vocabulary"),
    "sequences": Column("Sequences"),
}
QUANTITIES = {
    "quantity": Column("Quantity"),
    "formula": Column("Formula"),
    "over_tokens": Column("Tokens", align="right"),
    "over_sequences": Column("Sequences", align="right"),
    "median_of_tokens": Column("Median token", align="right"),
    "median_of_sequences": Column("Median sequence", align="right"),
}


def _percent(name: str) -> Callable[[pd.Series], str]:
    return lambda row: "" if math.isnan(row[name]) else FLIPS.text(row[name])


ROUTING = {
    "router": Column("Router"),
    "experts": Column("Experts"),
    "flips": Column("Flips (%)", text=_percent("flips"), align="right"),
    "low": Column("from", text=_percent("low"), align="right", help=INTERVAL),
    "high": Column("to", text=_percent("high"), align="right", help=INTERVAL),
    "recall": Column("Recall (%)", text=_percent("recall"), align="right"),
    "reorders": Column("Reordered (%)", text=_percent("reorders"), align="right"),
    "margin": Column("Margin", ".3g"),
    "flipped_margin": Column("Margin at flips", ".3g"),
}
MEASURED = Control(
    name="measured", label="Measurement", param=lambda opened: One(tuple(compute.titles(opened)), "run"),
    widget="list", row="cost", width=2,
)  # fmt: skip
GROUPS = Control(
    name="groups", label="Groups", param=One(KINDS), row="cost",
    titles={"site": "Products", "layer": "Layers", "module": "Modules", "part": "Parts"},
)  # fmt: skip
QUANTITY = Control(
    name="quantity", label="By step", param=One(("k3", *(name for name in MEASURES if name != "k3"))), widget="list",
    titles={name: measure.title for name, measure in MEASURES.items()}, row="cost",
)  # fmt: skip


def _controls(selection: Selection, values: dict[str, Any]) -> Iterable[Control]:
    titles = compute.titles(selection.opened, selection.where.run_id)
    if not titles:
        return []
    shown = [replace(MEASURED, options=list(titles), titles=titles)]
    measured = compute.measurement_of(selection.opened.root, _chosen(titles, values))
    if isinstance(measured, MeasuredCosts):
        if len(measured.kinds) > 1:
            shown.append(replace(GROUPS, options=measured.kinds))
        if measured.parity and len(measured.parity.steps) > 1:
            shown.append(QUANTITY)
    return shown


def _chosen(titles: Mapping[str, str], values: dict[str, Any]) -> str:
    """The run of the measurement that is chosen, else the newest of the titles."""
    return values["measured"] if values["measured"] in titles else next(iter(titles))


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    titles = compute.titles(selection.opened, selection.where.run_id)
    if not titles:
        return Drawn(problems=(NOTHING_OF_FILTER if values["measured"] else NOTHING,))
    run_id = _chosen(titles, values)
    measured = compute.measurement_of(selection.opened.root, run_id)
    if isinstance(measured, str):
        return Drawn(problems=(measured,))
    kind = values["groups"] if values["groups"] in measured.kinds else next(iter(measured.kinds), "")
    said, items = [compute.verdict(measured, kind)], _groups(measured, kind)
    sequences = max(len(cost.changes) for cost in measured.costs)
    counts: tuple[tuple[int, str], ...] = ((sequences, "sequence"),)
    if parity := measured.parity:
        items += _parity(parity, values["quantity"], run_id)
        counts = (parity.steps[0].sequences, "sequence"), (parity.steps[0].tokens, "token")
        if parity.gaps[0].divergences:
            said.append(evidence.say("KL(R‖T) is {divergence}.", divergence=parity.gaps[0].divergence))
        said += routing_findings(parity.gaps[0], parity.routing) if parity.routing else []
    if measured.blocks:
        items.append(_blocks(measured.blocks, run_id))
        said += [block_sentence(name, own) for name, own in list(measured.blocks.items())[: compute.MOST_NAMED]]
    scope = Scope(Filter(run_id=(run_id,)), counts, len(titles))
    return Drawn(tuple(items), evidence.together(*said), scope=scope)


def _groups(measured: MeasuredCosts, kind: str) -> list[Item]:
    """The chart and the table of the groups of a granularity, below all that is rounded."""
    whole = [cost for cost in measured.whole if cost.group.kind != kind]
    groups = sorted(measured.of_kind(kind), key=lambda cost: -abs(cost.change.value))
    if not groups:
        return []
    table = compute.table(measured, [*whole, *groups])
    names = table["group"].unique()
    drawn = table[table["group"].isin(names[: charts.GROUPS])]
    shown = (
        f"the {charts.GROUPS} largest of {len(names)} groups" if len(names) > charts.GROUPS else f"{len(names)} groups"
    )
    measure = measured.measure
    source = f"Data: {', '.join(measured.treatments)}, {measured.run_id}."
    caption = f"{source}\n{measure.title}: {measure.definition}. {INTERVAL}."
    chart = charts.ranking(drawn, measure, f"{shown} · bars: 95% interval over sequences")
    height = 130 + max(22, 10 * drawn["treatment"].nunique() + 4) * drawn["group"].nunique()
    listed = table.drop(columns="text")
    return [
        Figure("cost", chart, drawn, caption, note=NOTE_OF_PARITY if measured.parity else NOTE, height=height),
        Table("cost", listed, COLUMNS, height=min(38 + 35 * len(table), 420)),
    ]


def _blocks(blocks: Mapping[str, Sequence[BlockErrors]], run_id: str) -> Item:
    """Own and inherited errors over depth."""
    shown = compute.block_table(blocks)
    chart = charts.blocks(shown, list(blocks), compute.OWN, "dashed: with the inputs of the pass without rounding")
    caption = f"Data: {', '.join(blocks)}, {run_id}.\n{ERROR.title}: {ERROR.definition}. {INTERVAL}."
    return Figure("cost_blocks", chart, shown, caption, note=NOTE_OF_BLOCKS, height=340)


def _parity(parity: Parity, quantity: str, run_id: str) -> list[Item]:
    """What is known of tokens: the quantities that RL tools print, routers, and of dumps a quantity by step."""
    items: list[Item] = []
    if len(parity.steps) > 1:
        measure, by_step = MEASURES[quantity], compute.steps(parity, quantity)
        chart = charts.steps(by_step, measure, f"{parity.title} · {len(by_step):,} steps · dashed: their median")
        caption = f"Data: {parity.title}, {run_id}.\n{measure.title}: {measure.definition}, over tokens."
        items.append(Figure("cost_steps", chart, by_step, caption, height=340))
    table = compute.quantities(parity.steps[0])
    left = parity.steps[0].left_out
    note = f"{AVERAGES} {counted(left, 'token')} without a finite log-probability are left out." if left else AVERAGES
    items.append(Table("quantities", table, QUANTITIES, "Quantities", note, 38 + 35 * len(table)))
    if parity.routing:
        routers = compute.routing(parity.routing)
        items.append(Table("routers", routers, ROUTING, "Routers", LEGEND, min(38 + 35 * len(routers), 420)))
        items += [
            Text(f"{name} does not choose experts by torch.topk: not measured.") for name in parity.routing.left_out
        ]
    return [*items, Text(OF_DUMPS if parity.tool else OF_TEXT)]


COST = Question(
    text="What does rounding cost?",
    title="Cost",
    icon=":material/payments:",
    help="The measured change of the loss, or of log-probabilities, by group of products; formats advised from it",
    page="runs",
    view="cost",
    draw=draw,
    controls=(MEASURED, GROUPS, QUANTITY),
    narrow=_controls,
    of_runs=True,
    of_fields=("run_id",),
    empty=True,
    layout="binade.app.questions.cost.page",
)
