"""The cost of each measured spec for each operand of each GEMM, from recorded runs and the effects of `binade measure`.

The effect of a group is divided among its operands in equal shares, so that those of a group add up to what was
measured. Its operands then have one spec, one of those that were measured: no other choice is known. The forward
operands of a group that was not measured stay in bf16. Backward operands have no measured effect: what is known of them
is the noise ‖e‖² / ‖x‖² of each spec that they were scored in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import pandas as pd

from binade.collector.errors import ConfigError
from binade.collector.recipes.recipe import BF16, PARTS
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.effects import CHANGE
from binade.data.experiment import EffectGroup
from binade.data.filter import Filter
from binade.data.notes import rounded_twice
from binade.data.text import counted
from binade.quant.specs import Spec, known_specs

GROUPS = {"site": ("layer_index", "module"), "layer": ("layer_index",), "module": ("module",), "model": ()}
"""The groups that share a choice for each of their GEMMs, with the columns that distinguish them."""
OPERAND = ["part", "layer_index", "module", "gemm", "field", "tensor_name"]
PLACE = ["part", "layer_index", "module"]
FORWARD = "forward"
BF16_BITS = 16.0
Effects = dict[tuple[str, EffectGroup], dict[str, Any]]


class AdviceError(ConfigError):
    """Advice is not possible. The message says what is missing and what to do."""

    exit_status = 1

    @property
    def sentence(self) -> str:
        text = str(self)
        return f"{text[:1].upper()}{text[1:]}."


@dataclass(frozen=True, eq=False)
class Operands:
    """The operands of recorded runs.

    table   a row for each of OPERAND and scored spec: spec, values (per micro-batch), noise (‖e‖²/‖x‖²), tensor_id
    runs    the runs that it is from, all of one recipe
    left    GEMMs without advice, because not both operands were scored: "qk.dquery"
    caveat  what the runs' weights do to effects, "" for nothing
    """

    table: pd.DataFrame
    runs: tuple[str, ...]
    left: tuple[str, ...] = ()
    caveat: str = ""

    @property
    def specs(self) -> list[str]:
        """The specs that all operands were scored in, the narrowest first."""
        return narrowest_first(self.table["spec"])

    def groups(self, by: str) -> tuple[EffectGroup, ...]:
        """The groups of forward operands that share a choice. by: a key of GROUPS."""
        forward = self.table[self.table["gemm"] == FORWARD]
        places = forward[PLACE].drop_duplicates().itertuples(index=False)
        return tuple(dict.fromkeys(group_of(place, by) for place in places))


@dataclass(frozen=True, eq=False)
class Costs:
    """
    table       a row for each of OPERAND and spec, bf16 among them: spec, values (per micro-batch), bits (of all its
                values), change (of the loss, forward operands only), cost (what the choice minimizes), error (of the
                change, its standard error over sequences), by_sequence (the changes of the sequences, in one order),
                noise (‖e‖²/‖x‖², backward operands only), tensor_id
    operands    what it is of
    sequences   the fewest that an effect was measured on
    method      how the effects were measured, a sentence
    unmeasured  the groups that stay in bf16, because they were not measured
    together    a sentence for each spec in which all operands together were measured: that effect and the sum of groups
    """

    table: pd.DataFrame
    operands: Operands
    sequences: int
    method: str
    unmeasured: tuple[EffectGroup, ...] = ()
    together: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[str, ...]:
        return self.operands.runs

    @cached_property
    def forward(self) -> pd.DataFrame:
        """The rows of forward operands."""
        return self.table[self.table["gemm"] == FORWARD]

    @property
    def values(self) -> float:
        """The number of values of all forward operands of a micro-batch."""
        return float(self.forward.drop_duplicates(OPERAND)["values"].sum())

    @property
    def specs(self) -> list[str]:
        """Those in which a group was measured, the narrowest first."""
        return narrowest_first(self.forward["spec"])


@cache
def bits_of(spec: str) -> float:
    """Bits per value."""
    return BF16_BITS if spec == BF16 else Spec.of(spec).bits_per_value


def narrowest_first(specs: Iterable[str]) -> list[str]:
    """All but bf16."""
    return sorted({str(spec) for spec in specs} - {BF16}, key=lambda spec: (bits_of(spec), spec))


def by_sequence(changes: Iterable[Sequence[float]], sequences: int) -> np.ndarray:
    """The sum of operands' changes in each sequence: [sequences]. Operands in bf16 have none. Empty if the operands'
    numbers of sequences differ."""
    given = [np.asarray(change, float) for change in changes if len(change)]
    return np.sum(given, axis=0) if len({len(change) for change in given}) == 1 else np.zeros(0 if given else sequences)


def error_of(changes: Iterable[Sequence[float]]) -> float:
    """The standard error over sequences of the sum of operands' changes, each given by sequence: those of one sequence
    are correlated. NaN for one sequence, or if the operands' numbers of sequences differ."""
    total = by_sequence(changes, 2)
    return float(total.std(ddof=1) / math.sqrt(len(total))) if len(total) > 1 else math.nan


def group_of(place: Any, by: str) -> EffectGroup:
    """The group that a place (part, layer_index, module) is measured in. by: a key of GROUPS."""
    part = str(place.part)
    if part not in ("linear", "router"):  # a recipe has one choice for the attention of all layers
        return EffectGroup(part)
    layer = int(place.layer_index) if "layer_index" in GROUPS[by] else None
    return EffectGroup(part, layer, str(place.module) if "module" in GROUPS[by] else None)


def operands_of(catalog: Catalog, where: Filter | None = None, parts: Sequence[str] = ()) -> Operands:
    """The operands of the filter's bf16 runs, or of its only recipe if it has no bf16 run. parts: of recipe.PARTS; all
    that were recorded if empty. Raises AdviceError."""
    runs = _runs(catalog, where)
    operands = catalog.scored_operands(Filter(run_id=runs))
    operands = operands.assign(part=operands["part"].str.lower())
    operands = operands[operands["part"].isin(parts or PARTS)]
    if operands.empty:
        raise AdviceError(
            f"no operand of {', '.join(parts or PARTS)} was scored: record a run with scores, for example with "
            "binade run --quantization bf16"
        )
    if missing := [part for part in parts if part not in set(operands["part"])]:
        raise AdviceError(
            f"no operand of {', '.join(missing)} was recorded: record it, or choose other parts (--parts)"
        )
    operands = operands.assign(field=_fields(operands)).dropna(subset="field")
    table, left = _complete(operands)
    if table[table["gemm"] == FORWARD].empty:
        raise AdviceError(
            "no forward GEMM has both operands recorded and scored: record inputs and weights, as binade run does "
            "without --tensors"
        )
    configs = catalog.runs().set_index("run_id")["config"][list(runs)]
    caveat = rounded_twice(map(json.loads, configs), everywhere=True) if "weight" in set(table["tensor_name"]) else ""
    return Operands(table[[*OPERAND, "spec", "values", "noise", "tensor_id"]], runs, left, caveat)


def costs(catalog: Catalog, operands: Operands, by: str) -> Costs:
    """The costs from the effects that were measured in the root for the model of the operands' runs. by: a key of
    GROUPS. Raises AdviceError if none was."""
    known = with_effects(operands, catalog.effects(operands.runs), by)
    if known is None:
        raise AdviceError(
            f"no effect on the loss was measured for {operands.runs[-1]} by {by}: {_measure(catalog, operands, by)}"
        )
    return known


def _measure(catalog: Catalog, operands: Operands, by: str) -> str:
    """How to measure what is missing."""
    run = operands.runs[-1]
    if "run_config" not in json.loads(catalog.runs().set_index("run_id")["config"][run]):
        return f"measure your model with binade.measure(model, loss, batches, formats, root={str(catalog.root)!r})"
    parts = list(dict.fromkeys(operands.table["part"]))
    options = f" --parts {','.join(parts)}" if parts != ["linear"] else ""
    said = "part" if by == "model" else f"part,{by}"
    return f"run binade measure {run} --by {said}{options} --tensor-save-dir {catalog.root}, or binade advise --measure"


def with_effects(operands: Operands, effects: pd.DataFrame, by: str) -> Costs | None:
    """The costs of operands from effects, the rows of `Catalog.effects`; None if none is of a group. by: a key of
    GROUPS."""
    groups = operands.groups(by)
    known = _by_group(_of_one_run(effects, groups))
    used = {key: row for key, row in known.items() if key[1] in groups}
    if not used:
        return None
    forward = operands.table["gemm"] == FORWARD
    backward = operands.table[~forward].assign(error=0.0)
    backward["by_sequence"] = [[] for _ in range(len(backward))]
    each = operands.table[forward].drop_duplicates(OPERAND).assign(noise=math.nan)
    of = pd.Series([group_of(place, by) for place in each[PLACE].itertuples(index=False)], index=each.index)
    rows = [_share(each[of == group], spec, row) for (spec, group), row in used.items()]
    bf16 = pd.concat([backward.drop_duplicates(OPERAND).assign(noise=0.0), each]).assign(spec=BF16, error=0.0)
    bf16["by_sequence"] = [[] for _ in range(len(bf16))]
    bf16["change"] = bf16["cost"] = np.where(bf16["gemm"] == FORWARD, 0.0, math.nan)
    table = pd.concat([*rows, backward, bf16], ignore_index=True)
    table["bits"] = table["values"] * table["spec"].map({spec: bits_of(spec) for spec in set(table["spec"])})
    columns = [*OPERAND, "spec", "values", "bits", "change", "cost", "error", "by_sequence", "noise", "tensor_id"]
    unmeasured = tuple(group for group in groups if group not in {group for _, group in used})
    sequences = min(len(row["change_by_sequence"]) for row in used.values())
    method = _method(used, sequences)
    return Costs(table[columns], operands, sequences, method, unmeasured, _together(known, groups))


def _share(each: pd.DataFrame, spec: str, row: dict[str, Any]) -> pd.DataFrame:
    """The operands of a group in a spec, each with an equal share of what was measured."""
    share = 1 / len(each)
    rows = each.assign(spec=spec, change=row["change"] * share, cost=_cost(row) * share, error=row["error"] * share)
    rows["by_sequence"] = [[value * share for value in row["change_by_sequence"]] for _ in range(len(each))]
    return rows


def _method(used: Effects, sequences: int) -> str:
    """How these effects were measured."""
    groups, specs = {group for _, group in used}, narrowest_first(spec for spec, _ in used)
    runs = list(dict.fromkeys(str(row["run_id"]) for row in used.values()))
    least = "divergences" if all(row["divergence"] is not None for row in used.values()) else "changes of the loss"
    return (
        f"Measured in {', '.join(runs)}: {counted(len(groups), 'group')} of forward operands in {', '.join(specs)}, "
        f"one at a time, on {counted(sequences, 'sequence')}; the choice minimizes the sum of their {least}."
    )


def _together(known: Effects, groups: Sequence[EffectGroup]) -> tuple[str, ...]:
    """For each spec in which whole parts were measured besides all of their groups, both effects."""
    parts = [EffectGroup(part) for part in dict.fromkeys(group.part for group in groups)]
    said = []
    for spec in narrowest_first(spec for spec, _ in known):
        whole = [known[spec, part] for part in parts if (spec, part) in known]
        single = [known[spec, group] for group in groups if (spec, group) in known]
        if len(whole) < len(parts) or len(single) < len(groups) or set(parts) == set(groups):
            continue
        sums = by_sequence((row["change_by_sequence"] for row in whole), 0)
        measured = evidence.mean(CHANGE, sums.tolist(), "sequences")
        added = CHANGE.quantity(sum(row["change"] for row in single))
        said.append(f"All operands in {spec}: measured together {measured}, the sum of their groups {added}.")
    return tuple(said)


def _of_one_run(effects: pd.DataFrame, groups: Sequence[EffectGroup]) -> pd.DataFrame:
    """The effects, those of the run first that has measured the most groups: effects of one run are of the same
    sequences, so that the error of their sum is known."""
    counts = {
        run: sum(group in groups for _, group in _by_group(rows)) for run, rows in effects.groupby("run_id", sort=False)
    }
    return effects.sort_values("run_id", key=lambda runs: -runs.map(counts), kind="stable")


def _by_group(effects: pd.DataFrame) -> Effects:
    """The first effect of each spec and group; those of recipes are left out."""
    specs = {*known_specs(effects["format"])}
    rows: Effects = {}
    for row in effects.astype(object).where(effects.notna(), None).to_dict("records"):
        layer, error = row["layer_index"], row["change_error"]
        group = EffectGroup(row["part"] or "", None if layer is None else int(layer), row["module"])
        if str(row["format"]) in specs:
            changes: dict[str, Any] = {"error": math.nan if error is None else float(error)}
            changes["change_by_sequence"] = list(row["change_by_sequence"])
            key = str(Spec.of(row["format"])), group
            rows.setdefault(key, {str(name): value for name, value in row.items()} | changes)
    return rows


def _cost(row: dict[str, Any]) -> float:
    """What the choice minimizes: the divergence, else the change of the loss if that is above 0. The divergence has the
    same expectation if the model predicts its data as well as it believes, and varies far less between sequences."""
    divergence = row["divergence"]
    return max(float(row["change"] if divergence is None else divergence), 0.0)


def _runs(catalog: Catalog, where: Filter | None) -> tuple[str, ...]:
    """The bf16 runs of the filter, or those of its one recipe, that saw the same model and data."""
    runs = catalog.runs()
    chosen = runs[runs["run_id"].isin(catalog.distinct(("run_id",), where)["run_id"])]
    if chosen.empty:
        raise AdviceError(
            "there is no run with recorded tensors: collect one, for example with binade run --quantization bf16"
        )
    rounds_nothing = [catalog.operands(Filter(run_id=(run,)))["format"].isna().all() for run in chosen["run_id"]]
    if any(rounds_nothing):
        chosen = chosen[rounds_nothing]
    for name in ("recipe", "model", "size", "dataset"):
        if len(several := sorted(map(str, chosen[name].fillna("unknown").unique()))) > 1:
            raise AdviceError(
                f"the runs have several {name}s ({', '.join(several)}), so their operands cannot be put together: "
                f"restrict the filter to one {name} or one run"
            )
    return tuple(chosen["run_id"])


def _fields(table: pd.DataFrame) -> pd.Series:
    """The field of GemmFormats of each operand; missing for tensors that are not operands."""
    fields = {
        (part, operand.field.partition("_")[0], operand.name): operand.field
        for part, operands in PARTS.items()
        for operand in operands
    }
    keys = zip(table["part"], table["gemm"], table["tensor_name"], strict=True)
    return pd.Series([fields.get(key) for key in keys], index=table.index)


def _complete(operands: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """(the GEMMs both of whose operands were recorded, in the specs that all of these were scored in; the others)."""
    operands = operands.rename(columns={"format": "spec"})
    gemm = ["part", "layer_index", "module", "gemm"]
    both = operands.groupby(gemm)["field"].transform("nunique") == 2
    left = operands.loc[~both, ["part", "gemm"]].drop_duplicates()
    operands = operands[both & operands["noise"].notna()]
    wanted = operands.drop_duplicates(OPERAND).shape[0]
    counts = operands["spec"].value_counts()
    operands = operands[operands["spec"].isin(counts[counts == wanted].index)]
    if operands.empty:
        raise AdviceError("no spec was scored on every operand: record a run with the same --scores for all of them")
    return operands, tuple(left["part"] + "." + left["gemm"])
