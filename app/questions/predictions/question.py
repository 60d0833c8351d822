"""Do the predictions hold? Predicted loss changes of recipes, and the measured gaps."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from binade.app.figure import Column, Drawn, Figure, Table, source
from binade.app.questions.loss.question import LOSS
from binade.app.questions.predictions import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.shared.runs import same_model
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Selection
from binade.collector.advice.costs import AdviceError, Costs
from binade.data import evidence
from binade.data.filter import Filter
from binade.data.reliability import PREDICTION, Reliability
from binade.data.text import counted

NOTHING = (
    "There is nothing to compare: this needs runs of recipes whose formats were all scored, and a bf16 run on the "
    "same data. Collect FA_… and linear_… recipes of the formats that were scored, with the same options and seeds."
)
CAPTION = (
    f"Predicted: the sum of the recorded terms over the forward operands, as in {LOSS.title}. Gap: the run’s loss "
    "minus the loss of the bf16 run of the same seed at the same iteration, in nats per token. The gap in the first "
    "iteration is measured before any step: it shows the effect of rounding on the forward pass alone. Each "
    "sequence counts within what a cross-entropy can change by: from −L, the loss, to ln V − L, V being the size of "
    "the vocabulary."
)
COLUMNS = {
    "name": Column("Recipe"),
    "predicted": Column("Predicted (nats)", "+.5f"),
    "unbounded": Column("Second order alone (nats)", "+.5f", help="Not bounded by what a cross-entropy can change by"),
    "first": Column("First gap (nats)", "+.5f"),
    "gap": Column("Mean gap (nats)", "+.5f"),
    "low": Column("from", "+.5f", help="The 95% interval of the mean over seeds"),
    "high": Column("to", "+.5f", help="The 95% interval of the mean over seeds"),
    "seeds": Column("Seeds"),
}


def draw(selection: Selection, values: dict[str, Any]) -> Drawn:
    opened, where = selection.opened, selection.where
    try:
        costs = compute.costs_of(opened, where)
    except AdviceError as error:
        return Drawn(problems=(error.sentence,))
    table, left = compute.measured(opened, costs)
    if table.empty:
        return Drawn(problems=(NOTHING,))
    what = f"{counted(len(table), 'recipe')}, predicted from {counted(len(costs.runs), 'run')}"
    runs = dict.fromkeys((*costs.runs, *chain(*table["run_ids"])))
    scope = Scope(Filter(run_id=tuple(runs)), ((len(table), "recipe"),), len(opened.runs()))
    words = f"{source(Filter(run_id=costs.runs), what)}\n{CAPTION}"
    figures = [
        Figure(f"predictions_{name}", charts.against(table, name, title), table, words, height=400, group="predictions")
        for name, title in charts.GAPS.items()
    ]
    table = table.drop(columns=["gaps", "run_ids"])
    beyond = ~np.isclose(table["predicted"], table["unbounded"], rtol=1e-6)
    columns = {name: column for name, column in COLUMNS.items() if name != "unbounded" or beyond.any()}
    listed = Table("predictions", table.sort_values("predicted", ignore_index=True), columns)
    left_out = (
        f"Recipes left out: {left}. They round operands that were not recorded, or use formats that were not scored."
    )
    verdict = evidence.together(
        _bounded(table.loc[beyond, "name"].tolist(), costs), _verdict(table, costs.reliability), PREDICTION
    )
    return Drawn((*figures, listed), verdict, (left_out,) * bool(left), scope)


def _bounded(names: list[str], costs: Costs) -> evidence.Sentence:
    """Which predictions go beyond what a cross-entropy can change by, and are bounded."""
    if not names or costs.bounds is None:
        return evidence.Sentence()
    low, high = (evidence.exact(evidence.GAP, bound, of="runs") for bound in (costs.bounds.low, costs.bounds.high))
    text = (
        "In some sequences of {names} the second order predicts more than a loss can change by, from {low} (a loss of "
        "0) to {high} (a model that knows nothing): they count as the bound. Measure these recipes."
    )
    return evidence.say(text, names=evidence.listed(names), low=low, high=high)


def _verdict(table: pd.DataFrame, reliability: Reliability) -> evidence.Sentence:
    doubt = reliability.doubt or reliability.doubt_of_sum
    first, mean = (
        evidence.correlation(table["predicted"], table[name].astype(float), "recipes") for name in ("first", "gap")
    )
    if math.isnan(mean.value):
        text = "Only {n} recipes can be compared: at least four are needed to check the ranking."
        return evidence.together(doubt, evidence.say(text, n=len(table)))
    sentence = evidence.say(
        "Spearman’s ρ between the prediction and the measured gap is {first} in the first iteration and {mean} for the "
        "mean over training.",
        first=first,
        mean=mean,
    )
    if mean.low <= 0:
        unproven = "For training, these runs do not show that the prediction holds: do not rely on it."
        return evidence.together(doubt, sentence, evidence.say(unproven))
    one = evidence.say("Each recipe has only one seed; repeat with more seeds.") if table["seeds"].max() == 1 else ""
    return evidence.together(doubt, sentence, one)


PREDICTIONS = Question(
    text="Do the predictions hold?",
    title="Predictions",
    icon=":material/fact_check:",
    help="Predicted loss changes of recipes and the gaps measured in training",
    page="runs",
    view="predictions",
    room="recipes",
    draw=draw,
    of_runs=True,
    beyond=same_model,
)
