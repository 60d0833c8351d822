"""The cost of each scored spec for each operand of each GEMM, from recorded runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import pandas as pd

from binade.collector.errors import ConfigError
from binade.collector.jobs import trained_with
from binade.collector.recipes.recipe import BF16, PARTS
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.loss_bounds import Bounds
from binade.data.names import name_of
from binade.data.notes import rounded_twice
from binade.data.reliability import Reliability, reliability
from binade.data.run_table import losses_of
from binade.quant.specs import Spec

OPERAND = ["part", "layer_index", "module", "gemm", "field", "tensor_name"]
FORWARD = "forward"
BF16_BITS = 16.0


class AdviceError(ConfigError):
    """Advice is not possible. The message says what is missing and what to do."""

    exit_status = 1

    @property
    def sentence(self) -> str:
        text = str(self)
        return f"{text[:1].upper()}{text[1:]}."


@dataclass(frozen=True, eq=False)
class Costs:
    """
    table          a row for each of OPERAND and spec, bf16 among them: spec, values (per micro-batch), bits (of all
                   its values), change (of the loss, forward operands only), error (its standard error over sequences),
                   by_sequence (the changes of the sequences, in one order), noise (‖e‖²/‖x‖²), tensor_id
    runs           the runs that it is from, all of one recipe
    reliability    of the changes of the forward operands in the narrowest spec
    caveat         what the runs' weights do to these costs, "" for nothing
    left           GEMMs without advice, because not both operands were scored: "qk.dquery"
    measured       the groups of forward operands whose effect was measured, so that both operands of a GEMM have one
                   spec; see advice.measured
    predicted      those whose effect is only predicted, if others were measured
    scaled         what predictions are scaled to the measured effects of: "each layer"
    agreement      a sentence for each spec in which all operands together were measured: how the predictions agree
    predictions    the costs without measured effects, if these were looked for
    bounds         of predicted changes; None if the loss or the vocabulary of the runs is not known
    """

    table: pd.DataFrame
    runs: tuple[str, ...]
    reliability: Reliability
    left: tuple[str, ...]
    caveat: str = ""
    measured: tuple[str, ...] = ()
    predicted: tuple[str, ...] = ()
    scaled: tuple[str, ...] = ()
    agreement: tuple[str, ...] = ()
    predictions: Costs | None = None
    bounds: Bounds | None = None

    @cached_property
    def forward(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """(bits, change and by_sequence of each forward operand and spec, by OPERAND and spec; a row for each)."""
        rows = self.table[self.table["gemm"] == FORWARD]
        return rows.set_index([*OPERAND, "spec"])[["bits", "change", "by_sequence"]], rows.drop_duplicates(OPERAND)

    def total(self, rows: pd.DataFrame) -> tuple[float, float]:
        """(the change of the loss by operands together, its standard error over sequences): a row for each, with change
        and by_sequence. A prediction is within the bounds."""
        change = float(rows["change"].sum())
        if self.bounds is None or self.measured:
            return change, error_of(rows["by_sequence"])
        return self.bounds.total(change, by_sequence(rows["by_sequence"], 2))

    @property
    def sequences(self) -> int:
        """The fewest sequences that an operand's change was predicted from."""
        return self.reliability.sequences

    @property
    def values(self) -> float:
        """The number of values of all forward operands of a micro-batch."""
        return float(self.forward[1]["values"].sum())

    @property
    def specs(self) -> list[str]:
        """All but bf16, the narrowest first."""
        specs = {str(spec) for spec in self.table["spec"]} - {BF16}
        return sorted(specs, key=lambda spec: (bits_of(spec), spec))


@cache
def bits_of(spec: str) -> float:
    """Bits per value."""
    return BF16_BITS if spec == BF16 else Spec.of(spec).bits_per_value


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


def costs(catalog: Catalog, where: Filter | None = None, parts: Sequence[str] = ()) -> Costs:
    """The costs from the filter's bf16 runs, or from its only recipe if it has no bf16 run. parts: of recipe.PARTS; all
    that were recorded if empty.

    A forward operand's change is its second-order term plus its first-order one, if its 95% interval leaves out 0;
    its cost leaves out one that lowers the loss. Raises AdviceError.
    """
    runs = _runs(catalog, where)
    operands = catalog.operand_costs(Filter(run_id=runs))
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
    forward = table[table["gemm"] == FORWARD]
    _check_predicted(forward)
    table["change"], table["cost"], table["error"] = forward["change"], forward["cost"], forward["change_error"]
    bf16 = table.drop_duplicates(OPERAND).assign(spec=BF16, noise=0.0, error=0.0)
    bf16["by_sequence"] = [[] for _ in range(len(bf16))]
    bf16[["change", "cost"]] = bf16[["change", "cost"]].where(bf16["gemm"] != FORWARD, 0.0)
    table = pd.concat([table, bf16], ignore_index=True)
    table["bits"] = table["values"] * table["spec"].map({spec: bits_of(spec) for spec in set(table["spec"])})
    narrowest = min(set(table["spec"]), key=lambda spec: (bits_of(spec), spec))
    forward_reliability = reliability(forward.loc[forward["spec"] == narrowest, "by_sequence"])
    columns = [*OPERAND, "spec", "values", "bits", "change", "cost", "error", "by_sequence", "noise", "tensor_id"]
    configs = catalog.runs().set_index("run_id")["config"][list(runs)]
    caveat = rounded_twice(map(json.loads, configs), everywhere=True) if "weight" in set(forward["tensor_name"]) else ""
    return Costs(table[columns], runs, forward_reliability, left, caveat, bounds=_bounds(catalog, runs, configs))


def _bounds(catalog: Catalog, runs: Sequence[str], configs: pd.Series) -> Bounds | None:
    """From the losses of the recorded iterations of these runs, or of all if none says that it was recorded."""
    steps = [step for records in losses_of(catalog, runs).values() for step in records if step["iteration"] >= 0]
    losses = [step["loss"] for step in steps if step.get("recorded")] or [step["loss"] for step in steps]
    with suppress(ConfigError):
        vocabulary = trained_with(runs[-1], json.loads(configs[runs[-1]])).shape.vocab
        return Bounds(float(np.mean(losses)), vocabulary) if losses else None
    return None


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
                f"the runs have several {name}s ({', '.join(several)}), so their predicted losses cannot be added: "
                f"restrict the filter to one {name} or one run"
            )
    return tuple(chosen["run_id"])


def _check_predicted(forward: pd.DataFrame) -> None:
    """Raise AdviceError if a change in the loss cannot be predicted for each forward operand."""
    if forward.empty:
        raise AdviceError(
            "no forward GEMM has both operands recorded and scored: record inputs and weights, as binade run does "
            "without --tensors"
        )
    if forward["first"].isna().all():
        raise AdviceError(
            "no gradient of a forward operand was recorded, so no change in the loss is predicted: record a run with "
            "a backward pass and --measures loss"
        )
    if forward["second"].isna().all():
        raise AdviceError(
            "no second order was measured, so no change in the loss is predicted: record a run with this version, and "
            "in your own loop call recorder.sensitivity(logits) before the backward pass"
        )
    if (bad := forward[forward[["first", "second"]].isna().any(axis=1)]).size:
        row = bad.iloc[0]
        raise AdviceError(
            f"{len(bad)} predicted changes are not finite or were not recorded, such as that of "
            f"{name_of(row['layer_index'], row['module'], row['tensor_name'])} in {row['spec']}: a gradient is not "
            "finite, or was not recorded; record the run again, or filter by another run"
        )


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
