"""Measured effects as costs: they replace the predictions of the groups that were measured (see data.effects).

The effect of a group is divided among its operands in equal shares, so that those of a group add up to what was
measured. Its operands then have the same spec, one of those that were measured: no other choice is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from binade.collector.advice.choice import GROUPS, grouped
from binade.collector.advice.costs import FORWARD, Costs, bits_of
from binade.collector.recipes.recipe import BF16
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.effects import CHANGE, EffectGroup
from binade.data.evidence import Estimate
from binade.data.reliability import Reliability, reliability

WITHIN = 1.5  # a prediction within this factor of what was measured agrees with it


@dataclass(frozen=True)
class Agreement:
    """What all operands together were predicted to change in a spec, and what was measured. added: the sum of the
    effects of single groups; NaN if not all of them were measured."""

    spec: str
    predicted: float
    measured: Estimate
    added: float

    @property
    def agrees(self) -> bool:
        """Whether the prediction is within a factor of WITHIN of what was measured."""
        small, large = sorted((self.predicted, self.measured.value))
        return small > 0 and large <= WITHIN * small

    @property
    def sentence(self) -> str:
        verdict = "" if self.agrees else f", so predictions in {self.spec} are not reliable here"
        added = "" if math.isnan(self.added) else f", the sum of its groups {CHANGE.quantity(self.added)}"
        return (
            f"All operands in {self.spec}: predicted {CHANGE.quantity(self.predicted)}, measured {self.measured}{added}"
            f"{verdict}."
        )


def measured_costs(catalog: Catalog, costs: Costs, by: str) -> Costs:
    """The costs with the effects that were measured in the root for the model of their runs, if there are any."""
    effects = catalog.effects(costs.runs)
    used = with_effects(costs, effects, by)
    return replace(
        used, predictions=costs, agreement=tuple(agreement.sentence for agreement in agreements(costs, effects, used))
    )


def with_effects(costs: Costs, effects: pd.DataFrame, by: str) -> Costs:
    """The costs with measured effects in place of predictions, of the groups that share a choice. effects: of
    `Catalog.effects`. by: a key of choice.GROUPS."""
    known = _by_group(_of_one_run(effects, costs, by))
    costs = _scaled(costs, known)
    table = grouped(costs.table.reset_index(drop=True), by)
    forward = table["gemm"] == FORWARD
    groups = [_group(row, by) for row in table[["part", "layer_index", "module"]].itertuples(index=False)]
    measured = {group for _, group in known}
    of_measured = pd.Series([group in measured for group in groups], index=table.index) & forward
    if not of_measured.any():
        return costs
    keys = pd.Series([*zip(table["spec"], groups, strict=True)], index=table.index)
    replaced = pd.Series([key in known for key in keys], index=table.index) & of_measured
    kept = ~of_measured | replaced | (table["spec"] == BF16)
    sizes = table[of_measured].groupby(["group", "spec"])["spec"].transform("size")
    table["change"], table["cost"] = table["change"].astype(float), table["cost"].astype(float)
    by_sequence: list[Any] = table["by_sequence"].tolist()
    for index in table.index[replaced]:
        row, share = known[keys[index]], 1 / int(sizes[index])
        table.loc[index, ["change", "cost", "error"]] = [
            row["change"] * share,
            _cost(row) * share,
            row["error"] * share,
        ]
        by_sequence[int(index)] = [value * share for value in row["change_by_sequence"]]
    table["by_sequence"] = by_sequence
    names = table.loc[of_measured, "group"]
    left = table.loc[forward & ~of_measured, "group"]
    rows = [known[key] for key in dict.fromkeys(keys[replaced])]
    used = costs
    if left.empty:
        used = replace(costs, reliability=_reliability(rows))
    columns = list(costs.table)
    return replace(
        used,
        table=table.loc[kept, columns].reset_index(drop=True),
        measured=tuple(dict.fromkeys(names)),
        predicted=tuple(dict.fromkeys(left)),
    )


def _scaled(costs: Costs, known: dict[tuple[str, EffectGroup], dict[str, Any]]) -> Costs:
    """The costs with the predictions of each layer scaled to what was measured for the layer, where all layers were
    measured in a spec, else with those of a part scaled to what was measured for it as a whole. So a prediction only
    divides a measured effect among operands."""
    table = costs.table.reset_index(drop=True)
    table[["change", "cost", "error"]] = table[["change", "cost", "error"]].astype(float)
    by_sequence: list[Any] = table["by_sequence"].tolist()
    levels: dict[str, None] = {}
    forward = table[(table["gemm"] == FORWARD) & (table["spec"] != BF16)]
    for (part, spec), rows in forward.groupby(["part", "spec"]):
        layers = {EffectGroup(str(part), int(str(layer))): operands for layer, operands in rows.groupby("layer_index")}
        whole = {EffectGroup(str(part)): rows}
        groups = layers if all((spec, group) in known for group in layers) else whole
        for group, operands in groups.items():
            row, positive = known.get((str(spec), group)), operands["cost"].clip(lower=0)
            if row is None or not positive.sum() > 0:
                continue
            levels["each layer" if group.layer_index is not None else "all layers together"] = None
            shares = positive / positive.sum()
            table.loc[operands.index, "cost"], table.loc[operands.index, "change"] = (
                shares * _cost(row),
                shares * row["change"],
            )
            table.loc[operands.index, "error"] = shares * row["error"]
            for index, share in shares.items():
                by_sequence[int(str(index))] = [value * share for value in row["change_by_sequence"]]
    return replace(costs, table=table.assign(by_sequence=by_sequence), scaled=tuple(levels))


def by_prediction(costs: Costs, by: str) -> tuple[EffectGroup, ...]:
    """The groups that share a choice, the largest predicted change of the loss in the narrowest spec first: the order
    in which measuring them tells most."""
    narrowest = costs.specs[0]
    table = costs.table[(costs.table["gemm"] == FORWARD) & (costs.table["spec"] == narrowest)]
    sums: dict[EffectGroup, float] = {}
    for row, cost in zip(table.itertuples(index=False), table["cost"].astype(float), strict=True):
        group = _group(row, by)
        sums[group] = sums.get(group, 0.0) + cost
    return tuple(sorted(sums, key=lambda group: -sums[group]))


def agreements(costs: Costs, effects: pd.DataFrame, used: Costs) -> tuple[Agreement, ...]:
    """How the predictions for uniform specs agree with what was measured for whole parts. costs: the predictions; used:
    what `with_effects` made of them."""
    parts = sorted(set(costs.table["part"]))
    known = _by_group(effects)
    agreements = []
    for spec in costs.specs:
        whole = [known.get((spec, EffectGroup(part))) for part in parts]
        rows = costs.table[(costs.table["gemm"] == FORWARD) & (costs.table["spec"] == spec)]
        if any(row is None for row in whole) or rows.empty:
            continue
        sums = np.sum([row["change_by_sequence"] for row in whole if row is not None], axis=0)
        used_rows = used.table[(used.table["gemm"] == FORWARD) & (used.table["spec"] == spec)]
        added = float(used_rows["change"].sum()) if used.measured and not used.predicted else math.nan
        measured = evidence.mean(CHANGE, sums.tolist(), "sequences")
        agreements.append(
            Agreement(spec, costs.total(rows)[0], measured, added if len(used_rows) == len(rows) else math.nan)
        )
    return tuple(agreements)


def _of_one_run(effects: pd.DataFrame, costs: Costs, by: str) -> pd.DataFrame:
    """The effects, those of the run first that has measured the most groups: effects of one run are of the same
    sequences, so that the error of their sum is known."""
    places = costs.table[["part", "layer_index", "module"]].drop_duplicates().itertuples(index=False)
    wanted = {_group(place, by) for place in places}
    counts = {
        run: sum(group in wanted for _, group in _by_group(rows)) for run, rows in effects.groupby("run_id", sort=False)
    }
    return effects.sort_values("run_id", key=lambda runs: -runs.map(counts), kind="stable")


def _by_group(effects: pd.DataFrame) -> dict[tuple[str, EffectGroup], dict[str, Any]]:
    rows: dict[tuple[str, EffectGroup], dict[str, Any]] = {}
    for row in effects.astype(object).where(effects.notna(), None).to_dict("records"):
        layer = row["layer_index"]
        group = EffectGroup(row["part"] or "", None if layer is None else int(layer), row["module"])
        error = row["change_error"]
        rows.setdefault(
            (str(row["format"]), group),
            {str(k): v for k, v in row.items()}
            | {
                "error": math.nan if error is None else float(error),
                "change_by_sequence": list(row["change_by_sequence"]),
            },
        )
    return rows


def _group(row: Any, by: str) -> EffectGroup:
    """The group of an operand of the costs, as it is measured."""
    part = str(row.part)
    if part not in ("linear", "router"):  # a recipe has one choice for the attention of all layers
        return EffectGroup(part)
    fields = GROUPS[by]
    layer = int(row.layer_index) if "layer_index" in fields else None
    return EffectGroup(part, layer, str(row.module) if "module" in fields else None)


def _cost(row: dict[str, Any]) -> float:
    """What the choice minimizes: the divergence, else the change of the loss if that is above 0. The divergence has the
    same expectation if the model predicts its data as well as it believes, and varies far less between sequences."""
    divergence = row["divergence"]
    return max(float(row["change"] if divergence is None else divergence), 0.0)


def _reliability(rows: list[dict[str, Any]]) -> Reliability:
    """Of the groups' costs in the narrowest spec."""
    narrowest = min((str(row["format"]) for row in rows), key=lambda spec: (bits_of(spec), spec))
    effects = [row for row in rows if row["format"] == narrowest]
    return reliability(
        row["change_by_sequence"] if row["divergence_by_sequence"] is None else row["divergence_by_sequence"]
        for row in effects
    )
