"""How far are rollout and training apart? What `binade parity` has measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import pandas as pd

from binade.app.control import Control
from binade.app.figure import Column, Drawn, Figure, Item, Table, Text
from binade.app.params import One
from binade.app.questions.parity import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Selection
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.evidence import Sentence
from binade.data.filter import Filter
from binade.data.parity import MEASURES
from binade.data.parity_results import CHANGE, Parity, findings, routing_findings
from binade.data.routing import FLIPS, LEGEND
from binade.data.text import counted

NOTHING = (
    "No parity was measured in this root. For two recipes on a model: binade parity --rollout mxfp4; for dumps of "
    "log-probabilities: binade parity FILE --save."
)
AVERAGES = (
    "d = log π_T − log π_R of each token, ρ = e^d; R: rollout, T: training. Tokens: the mean over all tokens; "
    "sequences: the mean within each sequence, then over sequences."
)
OF_TEXT = (
    "The tokens are those of a text, not sampled from a policy: k1, k2, k3, Jensen–Shannon and χ² do not estimate "
    "divergences here. KL(R‖T) of the groups is exact at each token."
)
OF_DUMPS = "KL, Jensen–Shannon and χ² are estimates for tokens that were sampled from the rollout policy."
PUBLISHED = (
    "Limits that tools act on, and values that others measured, with other engines, models and data: context, not a "
    "verdict. Bands reach from the lowest to the highest limit."
)
INTERVAL = "The 95% interval over sequences (Student’s t)"
GROUPS = (
    "In each row, one group of products is rounded as for the rollout and everything else as for training. Changes of "
    "groups do not add up."
)
COLUMNS = {
    "quantity": Column("Quantity"),
    "formula": Column("Formula"),
    "over_tokens": Column("Tokens", align="right"),
    "over_sequences": Column("Sequences", align="right"),
    "median_of_tokens": Column("Median token", align="right"),
    "median_of_sequences": Column("Median sequence", align="right"),
    "published": Column("Published limits"),
}
GROUP_COLUMNS = {
    "group": Column("Group"),
    "change": Column("|Δ log-probability| (nats)", ".3g"),
    "low": Column("from", ".3g", help=INTERVAL),
    "high": Column("to", ".3g", help=INTERVAL),
    "divergence": Column("KL(R‖T) (nats)", ".3g"),
    "divergence_low": Column("from", ".3g", help=INTERVAL),
    "divergence_high": Column("to", ".3g", help=INTERVAL),
}


def _percent(name: str) -> Callable[[pd.Series], str]:
    return lambda row: "" if math.isnan(row[name]) else FLIPS.text(row[name])


ROUTING_COLUMNS = {
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
REPLAY_COLUMNS = {
    "gap": Column("Gap"),
    "own": Column("Own routes"),
    "replayed": Column("Routes of the rollout"),
    "difference": Column("Difference, paired"),
    "disappears": Column("Disappears (%)", text=_percent("disappears"), align="right"),
}


def _measured(opened: Catalog) -> One:
    return One(tuple(opened.parities()), "run")


MEASURED = Control(name="parity", label="Measurement", param=_measured, widget="list", row="parity")
QUANTITY = Control(
    name="quantity", label="By step", param=One(("k3", *(name for name in MEASURES if name != "k3"))), widget="list",
    titles={name: measure.title for name, measure in MEASURES.items()}, row="parity",
)  # fmt: skip


def _controls(selection: Selection, values: dict[str, Any]) -> Iterable[Control]:
    opened = selection.opened
    if not values["parity"]:
        return []
    titles = compute.titles(opened)
    shown = compute.result_of(opened, values["parity"])
    several = not isinstance(shown, str) and len(shown.steps) > 1
    return [replace(MEASURED, options=list(titles), titles=titles), *[QUANTITY] * several]


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    run_id = values["parity"]
    if not run_id:
        return Drawn(problems=(NOTHING,))
    result = compute.result_of(selection.opened, run_id)
    if isinstance(result, str):
        return Drawn(problems=(result,))
    parts = _groups(result, run_id), _routing(result, run_id), _quantities(result, run_id)
    items = chain(*parts, _steps(result, run_id, values["quantity"]))
    counts = (result.steps[0].sequences, "sequence"), (result.steps[0].tokens, "token")
    scope = Scope(Filter(run_id=(run_id,)), counts, len(compute.titles(selection.opened)))
    return Drawn((*items, Text(OF_DUMPS if result.tool else OF_TEXT)), _verdict(result), scope=scope)


def _source(parity: Parity, run_id: str) -> str:
    whole = parity.steps[0]
    size = f"{counted(whole.sequences, 'sequence')}, {counted(whole.tokens, 'token')}"
    left = f"; {counted(whole.left_out, 'token')} left out: no finite log-probability" if whole.left_out else ""
    return f"Data: {parity.title}, {size}{left}, {run_id}."


def _groups(parity: Parity, run_id: str) -> list[Item]:
    if len(parity.gaps) == 1:
        return []
    table = compute.groups(parity.gaps)
    more = len(table) - 1 - charts.GROUPS
    shown = f"the {charts.GROUPS} largest of {len(table) - 1:,} groups" if more > 0 else f"{len(table) - 1:,} groups"
    subtitle = f"{parity.title} · {shown} · dashed: between the two recipes"
    figure = Figure(
        "parity_groups", charts.ranking(table, CHANGE, subtitle), table,
        f"{_source(parity, run_id)}\n{CHANGE.title}: {CHANGE.definition}. "
        "Intervals: 95%, over sequences (Student’s t).",
        note=GROUPS, height=charts.ranking_height(table),
    )  # fmt: skip
    height = min(38 + 35 * len(table), 420)
    return [figure, Table("parity_groups", table.drop(columns="text"), GROUP_COLUMNS, height=height)]


def _routing(parity: Parity, run_id: str) -> list[Item]:
    if parity.routing is None:
        return []
    table, several = compute.routing(parity.routing), parity.routing.any
    subtitle = f"{parity.title} · {counted(len(table), 'router')} · dashed: in any layer"
    caption = f"{_source(parity, run_id)}\n{LEGEND} Intervals: 95%, over sequences (Student’s t)."
    chart = charts.routing(table, several.value, subtitle)
    replays = compute.replays(parity.gaps[0], parity.routing)
    missing = [f"{name} does not choose experts by torch.topk: not measured." for name in parity.routing.left_out]
    height = min(38 + 35 * len(table), 420)
    return [
        Figure("parity_routing", chart, table, caption, note=LEGEND, height=340),
        Table("parity_routing", table.drop(columns="text"), ROUTING_COLUMNS, height=height),
        Table("parity_replay", replays, REPLAY_COLUMNS, "Training with the routes of the rollout"),
        *map(Text, missing),
    ]


def _quantities(parity: Parity, run_id: str) -> list[Item]:
    table = compute.quantities(parity.steps[0])
    items: list[Item] = [Table("parity_quantities", table, COLUMNS, "Quantities", AVERAGES, 38 + 35 * len(table))]
    if len(against := compute.against_published(table)):
        chart = charts.published(against, f"{parity.title} · over tokens")
        caption = f"{_source(parity, run_id)}\n{PUBLISHED}"
        height = charts.published_height(against)
        items.insert(0, Figure("parity_published", chart, against, caption, note=PUBLISHED, height=height))
    return items


def _steps(parity: Parity, run_id: str, quantity: str) -> list[Item]:
    if len(parity.steps) == 1:
        return []
    measure, table = MEASURES[quantity], compute.steps(parity, quantity)
    subtitle = f"{parity.title} · {len(table):,} steps · dashed: their median"
    caption = f"{_source(parity, run_id)}\n{measure.title}: {measure.definition}, over tokens."
    return [Figure("parity_steps", charts.steps(table, measure, subtitle), table, caption, height=340)]


def _verdict(parity: Parity) -> Sentence:
    whole = parity.gaps[0]
    text = "Between rollout and training, the log-probability of a token changes by {change}."
    parts = [evidence.say(text, change=whole.change)]
    if whole.divergences:
        parts.append(evidence.say("KL(R‖T) is {divergence}.", divergence=whole.divergence))
    routed = routing_findings(whole, parity.routing) if parity.routing else []
    return evidence.together(*parts, *findings(parity.gaps), *routed)


PARITY = Question(
    text="How far are rollout and training apart?",
    title="Parity",
    icon=":material/compare_arrows:",
    help="Log-probabilities of a rollout and a training policy, and which products cause the difference",
    page="runs",
    view="parity",
    draw=draw,
    controls=(MEASURED, QUANTITY),
    narrow=_controls,
    of_runs=True,
    of_fields=("run_id",),
    empty=True,
)
