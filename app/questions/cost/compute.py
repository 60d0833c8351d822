"""What was measured of the cost of rounding, as tables: the effects of `binade measure` on the loss, or the changes of
log-probabilities of `binade parity`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from binade.app.questions.shared.runs import labels_of
from binade.data.compare import evidence
from binade.data.compare.evidence import Measure, Sentence
from binade.data.compare.parity import MEASURES
from binade.data.compare.routing import Routing
from binade.data.index.catalog import Catalog
from binade.data.run import effects
from binade.data.run.block_errors import BlockErrors, block_errors
from binade.data.run.directory import RunError
from binade.data.run.effects import Measured, largest_of, measured_effects
from binade.data.run.experiment import EXPERIMENT, read_blocks, read_results
from binade.data.run.parity_results import CHANGE, Parity, ParityStep, read_parity
from binade.data.words.text import number_text

VALUES = ("over_tokens", "over_sequences", "median_of_tokens", "median_of_sequences")
KINDS = ("site", "layer", "module", "part")  # of groups, the finest first
WHOLE = "all"
OWN = ", own"  # of a line: with the inputs that blocks have without rounding
MOST_NAMED = 3  # treatments whose leader a sentence names


@dataclass(frozen=True)
class MeasuredCosts:
    """A measurement of one model. measure: what a change is; parity: the result of `binade parity`, else None; blocks:
    the errors of the blocks' outputs, if they were measured."""

    run_id: str
    measure: Measure
    costs: tuple[Measured, ...]
    parity: Parity | None = None
    blocks: Mapping[str, Sequence[BlockErrors]] = field(default_factory=dict)

    def treatment_of(self, cost: Measured) -> str:
        """What its group is rounded to, or the two policies that are compared."""
        return self.parity.title if self.parity else cost.format

    @property
    def treatments(self) -> list[str]:
        return list(dict.fromkeys(map(self.treatment_of, self.costs)))

    @property
    def kinds(self) -> list[str]:
        """The granularities that it has, the finest first."""
        present = {cost.group.kind for cost in self.costs}
        return [kind for kind in KINDS if kind in present]

    def of_kind(self, kind: str) -> list[Measured]:
        return [cost for cost in self.costs if cost.group.kind == kind]

    @property
    def whole(self) -> list[Measured]:
        """All that a treatment rounds, of each treatment that was measured so; else each part."""
        return self.of_kind(WHOLE) or self.of_kind("part")


def titles(opened: Catalog, run_ids: Sequence[str] = ()) -> dict[str, str]:
    """What a list shows of each measurement, by its run, newest first: what was measured, of which model or run. Only
    those of the models of some runs, if any are given."""
    shown, labels = {}, labels_of(opened)
    runs = opened.runs()
    runs = runs[runs["run_id"].isin(opened.of_same_models(run_ids))] if run_ids else runs
    for run_id, text in runs[["run_id", "config"]].itertuples(index=False):
        config = json.loads(text)
        if config.get("kind") == EXPERIMENT:
            what, measured = str(config.get("compares") or "Loss"), str(config.get("measured_run") or "")
            of = f"of {labels.get(measured, measured)}" if measured else config.get("model")
            shown[str(run_id)] = " · ".join(filter(None, (what, of, str(run_id))))
    return shown


def measurement_of(root: Path, run_id: str) -> MeasuredCosts | str:
    """The measurement of a run, or why there is none."""
    directory = root / run_id
    try:
        if parity := read_parity(directory):
            return MeasuredCosts(run_id, CHANGE, parity.gaps, parity)
        results = read_results(directory)
        measured, blocks = measured_effects(results), block_errors(results, read_blocks(directory))
    except (RunError, OSError) as error:
        return f"{run_id} cannot be shown: {error}."
    if not measured:
        return f"{run_id} has measured nothing yet."
    return MeasuredCosts(run_id, effects.CHANGE, tuple(measured), blocks=blocks)


def table(measured: MeasuredCosts, costs: Sequence[Measured]) -> pd.DataFrame:
    """A row per cost: treatment, group, change, low, high (its 95% interval over sequences, NaN for one sequence),
    divergence, text, sequences."""
    rows = [
        {"treatment": measured.treatment_of(cost), "group": cost.name, "change": cost.change.value,
         "low": cost.change.low, "high": cost.change.high, "divergence": cost.divergence.value,
         "text": str(cost.change), "sequences": len(cost.changes)}
        for cost in costs
    ]  # fmt: skip
    return pd.DataFrame(rows).replace([math.inf, -math.inf], math.nan)


def verdict(measured: MeasuredCosts, kind: str) -> Sentence:
    """What all costs together, the range over groups, and the largest, if sequences can tell it from the others."""
    whole, what = measured.whole, measured.measure.inline
    known = [
        (name if one.group.kind == WHOLE else f"{one.name} in {name}", one.change)
        for one, name in zip(whole, map(measured.treatment_of, whole), strict=True)
    ]
    parts = [evidence.each_of(known, f"The {what} of all that is rounded")]
    for treatment in measured.treatments[:MOST_NAMED]:
        groups = [cost for cost in measured.of_kind(kind) if measured.treatment_of(cost) == treatment]
        if len(groups) < 2:
            continue
        ordered = sorted((cost.change for cost in groups), key=lambda change: change.value)
        ends = Sentence(f"{ordered[0].text} to {ordered[-1].text}", (ordered[0], ordered[-1]))
        text = "{n} groups in {treatment}, one at a time: {ends}."
        parts.append(evidence.say(text, n=len(groups), treatment=treatment, ends=ends))
        parts.append(largest_of(groups, f"The largest {what} in {treatment}"))
    if (more := len(measured.treatments) - MOST_NAMED) > 0:
        parts.append(evidence.say("{n} more formats are in the table.", n=more))
    return evidence.together(*parts)


def block_table(blocks: Mapping[str, Sequence[BlockErrors]]) -> pd.DataFrame:
    """Two rows per block, with the inputs that it receives and with those that it has without rounding: group, layer,
    value, low, high (its 95% interval over sequences, NaN for one sequence), in percent, and text."""
    rows = [
        {"group": group, "layer": row.layer_index, "value": 100 * error.value, "low": 100 * error.low,
         "high": 100 * error.high, "text": str(error)}
        for name, own in blocks.items() for row in own
        for group, error in ((name, row.error), (f"{name}{OWN}", row.own))
    ]  # fmt: skip
    return pd.DataFrame(rows).replace([math.inf, -math.inf], math.nan)


def quantities(step: ParityStep) -> pd.DataFrame:
    """The quantities of all tokens: name, quantity, formula, and VALUES as text."""
    rows = []
    for quantity in step.values:
        measure = quantity.measure
        texts = {name: text_of(measure.name, getattr(quantity, name)) for name in VALUES}
        rows.append({"name": measure.name, "quantity": measure.axis, "formula": measure.definition} | texts)
    return pd.DataFrame(rows)


def text_of(name: str, value: float | None) -> str:
    """A value of a quantity as text, without the unit; "" if there is none."""
    measure = MEASURES[name]
    return "" if value is None else number_text(value * measure.factor, measure.format)


def routing(routing: Routing) -> pd.DataFrame:
    """The routers: router, experts, flips, low, high (its 95% interval over sequences), recall, reorders (shares),
    margin, flipped_margin."""
    rows = []
    for layer in routing.layers:
        flips, recall, reorders = layer.estimates()
        rows.append(
            {"router": layer.name, "experts": f"{layer.chosen} of {layer.experts}", "flips": flips.value,
             "low": flips.low, "high": flips.high, "recall": recall.value, "reorders": reorders.value,
             "margin": layer.margin, "flipped_margin": layer.flipped_margin}
        )  # fmt: skip
    return pd.DataFrame(rows).replace([math.inf, -math.inf], math.nan)


def steps(parity: Parity, quantity: str) -> pd.DataFrame:
    """A quantity by step, in the order of the dumps: place (from 1), step, value, text, tokens."""
    rows = []
    for place, step in enumerate(parity.steps[1:], 1):
        value = next((entry.main for entry in step.values if entry.measure.name == quantity), None)
        rows.append((place, step.name, math.nan if value is None else value, text_of(quantity, value), step.tokens))
    found = pd.DataFrame(rows, columns=["place", "step", "value", "text", "tokens"])
    return found.replace([math.inf, -math.inf], math.nan)
