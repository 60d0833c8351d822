"""The predicted cost in loss of rounding each forward operand, compared with its SQNR, and how reliable it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from binade.app.questions.shared.boards import DATA, LOSS_CHANGE, PLACE, mean_changes
from binade.app.style import MEASURES
from binade.collector.recipes.recipe import PARTS
from binade.collector.training.config import layers_of
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.evidence import Estimate, Sentence, listed
from binade.data.filter import Filter
from binade.data.names import short_names
from binade.data.notes import rounded_twice
from binade.data.reliability import Reliability, reliability
from binade.data.student import quantile
from binade.data.tensor_kinds import label_of


@dataclass(frozen=True)
class PredictedChanges:
    """
    table        of every place, the largest predicted change first: `boards.mean_changes` by PLACE, with place (its
                 name), sqnr_db and flush_to_zero in the format, margin (half of
                 value's 95% interval over sequences), rank and sqnr_rank, from 1
    total        of all places together, from the sums of the sequences
    agreement    Spearman's ρ between the predicted changes and SQNR, low SQNR first
    missing      what `total` leaves out of the forward operands of the runs' models, in words
    caveat       what the runs' weights do to these changes, empty for nothing
    reliability  of the predicted changes, over the places that all sequences have
    """

    table: pd.DataFrame
    total: Estimate
    agreement: Estimate
    missing: tuple[str, ...]
    caveat: Sentence
    reliability: Reliability


def costs(catalog: Catalog, where: Filter, fmt: str) -> PredictedChanges:
    """The costs of the filter's forward operands in a format. The table is empty if none has a gradient."""
    changes = catalog.loss_changes(fmt, PLACE, where)
    means = mean_changes(changes, PLACE)
    errors = catalog.errors(fmt, PLACE, where)[[*PLACE, "sqnr_db", "flush_to_zero"]]
    table = means.merge(errors, on=list(PLACE), how="left")
    table = table.assign(place=short_names(table), sqnr_rank=table["sqnr_db"].rank(method="min"))
    table = table.sort_values(["value", "place"], ascending=[False, True], na_position="last", ignore_index=True)
    table["rank"] = range(1, len(table) + 1)
    table["margin"] = table["spread"] * (table["sequences"] - 1).map(quantile)
    sums = catalog.loss_changes(fmt, (), where)["by_sequence"]
    total = evidence.mean(MEASURES[LOSS_CHANGE], np.concatenate([*sums]) if len(sums) else (), "sequences")
    agreement = evidence.correlation(-table["value"].astype(float), table["sqnr_db"].astype(float), "operands")
    known = table.dropna(subset="value")
    configs = _configs(catalog, known)
    caveat = rounded_twice(configs, everywhere=True) if "weight" in set(known["tensor_name"]) else Sentence()
    return PredictedChanges(table, total, agreement, _missing(known, configs), caveat, _reliability(changes))


def _configs(catalog: Catalog, known: pd.DataFrame) -> list[dict[str, Any]]:
    """run.json of the runs of these places."""
    runs = catalog.rows_of(known["tensor_id"].tolist())["run_id"].unique()
    return [json.loads(text) for text in catalog.runs().set_index("run_id")["config"][runs]]


def _missing(known: pd.DataFrame, configs: list[dict[str, Any]]) -> tuple[str, ...]:
    """What a sum over these places leaves out of the forward operands of their runs' models."""
    layers = max((layers_of(config) or 0 for config in configs), default=0)
    recorded = known["layer_index"].nunique()
    left = [f"{layers - recorded} of {layers} layers"] if recorded < layers else []
    if modules := sorted({module for config in configs for module in config.get("modules") or ()}):
        left.append(f"modules other than {listed(modules)}")
    shown = set(known["tensor_name"])
    for part, where in (("linear", "linear layers"), ("qk", "QKᵀ"), ("pv", "PV")):
        names = [operand.name for operand in PARTS[part] if operand.gemm == "forward" and operand.name not in shown]
        left += [f"{listed([label_of(name) for name in names])} of {where}"] if names else []
    return tuple(left)


def _reliability(changes: pd.DataFrame) -> Reliability:
    places = changes.sort_values(DATA).groupby(list(PLACE), dropna=False)["by_sequence"]
    by_place = [np.concatenate([*lists]) for _, lists in places]
    return reliability(by_sequence.tolist() for by_sequence in by_place if np.isfinite(by_sequence).all())
