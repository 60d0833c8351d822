"""What `binade parity` has measured, as tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pandas as pd

from binade.data.catalog import Catalog
from binade.data.parity import MEASURES
from binade.data.parity_results import GroupGap, Parity, ParityStep, read_parity, replay
from binade.data.parity_values import PublishedValue, published_values
from binade.data.routing import Routing
from binade.data.runs import RunError
from binade.data.text import number_text

VALUES = ("over_tokens", "over_sequences", "median_of_tokens", "median_of_sequences")


def result_of(opened: Catalog, run_id: str) -> Parity | str:
    """The result of a run, or why there is none."""
    try:
        parity = read_parity(opened.root / run_id)
    except (RunError, OSError) as error:
        return f"{run_id} cannot be shown: {error}."
    return parity or f"{run_id} has no parity.json."


def titles(opened: Catalog) -> dict[str, str]:
    """What a list shows of each result, by its run, newest first."""
    configs = opened.runs().set_index("run_id")["config"]
    return {run_id: f"{json.loads(configs[run_id]).get('compares', '')} · {run_id}" for run_id in opened.parities()}


def quantities(step: ParityStep) -> pd.DataFrame:
    """The quantities of all tokens: name, quantity, formula, VALUES as text, published (limits, as text), value (the
    main one, NaN if there is none)."""
    rows = []
    for quantity in step.values:
        measure = MEASURES[quantity.name]
        texts = {name: text_of(quantity.name, getattr(quantity, name)) for name in VALUES}
        limits = "; ".join(dict.fromkeys(entry.text for entry in published_of(quantity.name) if entry.is_limit))
        row = {"name": quantity.name, "quantity": measure.axis, "formula": measure.definition} | texts
        rows.append(row | {"published": limits, "value": math.nan if quantity.main is None else quantity.main})
    return pd.DataFrame(rows)


def text_of(name: str, value: float | None) -> str:
    """A value of a quantity as text, without the unit; "" if there is none."""
    measure = MEASURES[name]
    return "" if value is None else number_text(value * measure.factor, measure.format)


def published_of(quantity: str) -> list[PublishedValue]:
    return [entry for entry in published_values() if entry.quantity == quantity]


def against_published(table: pd.DataFrame) -> pd.DataFrame:
    """The measured values above 0 of the quantities that have published values, and these: quantity, value, kind
    ("here", "limit" or "measured"), text, case, source. table: of `quantities`."""
    rows = []
    for quantity in table[table["value"] > 0].to_dict("records"):
        entries, measure = published_of(quantity["name"]), MEASURES[quantity["name"]]
        if entries and math.isfinite(quantity["value"]):
            measured = quantity["value"], "here", measure.quantity(quantity["value"]), "over tokens", "this measurement"
            published = ((e.value, e.kind.value, e.text, e.case, e.source) for e in entries)
            rows += [(measure.title, *row) for row in (measured, *published)]
    return pd.DataFrame(rows, columns=["quantity", "value", "kind", "text", "case", "source"])


def groups(gaps: Sequence[GroupGap]) -> pd.DataFrame:
    """The gaps of groups, all products first: group, change, low, high (its 95% interval over sequences, NaN for one
    sequence), divergence and its ends, text, sequences."""
    rows = []
    for gap in gaps:
        change, divergence = gap.change, gap.divergence
        rows.append(
            {"group": gap.name, "change": change.value, "low": change.low, "high": change.high,
             "divergence": divergence.value, "divergence_low": divergence.low, "divergence_high": divergence.high,
             "text": str(change), "sequences": len(gap.changes)}
        )  # fmt: skip
    return pd.DataFrame(rows).replace([math.inf, -math.inf], math.nan)


def routing(routing: Routing) -> pd.DataFrame:
    """The routers: router, layer_index, experts, flips, low, high (its 95% interval over sequences), text, recall,
    reorders (shares), margin, flipped_margin."""
    rows = []
    for layer in routing.layers:
        flips, recall, reorders = layer.estimates()
        rows.append(
            {"router": layer.name, "layer_index": layer.layer_index, "experts": f"{layer.chosen} of {layer.experts}",
             "flips": flips.value, "low": flips.low, "high": flips.high, "text": str(flips), "recall": recall.value,
             "reorders": reorders.value, "margin": layer.margin, "flipped_margin": layer.flipped_margin}
        )  # fmt: skip
    return pd.DataFrame(rows).replace([math.inf, -math.inf], math.nan)


def replays(whole: GroupGap, routing: Routing) -> pd.DataFrame:
    """The gap with own routes and with those of the rollout in training: gap, own, replayed, difference (as text),
    disappears (a share)."""
    return pd.DataFrame(
        {"gap": gap.own.measure.axis, "own": str(gap.own), "replayed": str(gap.replayed),
         "difference": str(gap.difference), "disappears": gap.disappears}
        for gap in replay(whole, routing)
    )  # fmt: skip


def steps(parity: Parity, quantity: str) -> pd.DataFrame:
    """A quantity by step, in the order of the dumps: place (from 1), step, value, text, tokens."""
    rows = []
    for place, step in enumerate(parity.steps[1:], 1):
        value = next((entry.main for entry in step.values if entry.name == quantity), None)
        rows.append((place, step.name, math.nan if value is None else value, text_of(quantity, value), step.tokens))
    table = pd.DataFrame(rows, columns=["place", "step", "value", "text", "tokens"])
    return table.replace([math.inf, -math.inf], math.nan)
