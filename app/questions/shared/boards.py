"""Worst tensors: any metric by place (layer, module, operation, tensor), depth, iteration or direction.

Everything is aggregated in DuckDB. A table's `value` is the metric (of several tensors, the median of their own), its
`tensor_id` the tensor that is worst by it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from binade.data import evidence
from binade.data.catalog import MICRO_BATCH, SHOWN_ERRORS, Catalog
from binade.data.evidence import Estimate, Measure, Named
from binade.data.filter import Filter
from binade.data.names import short_names
from binade.quant.normal import VS_NORMAL, normal_sqnr

PLACE = ("layer_index", "module", "operation", "tensor_name")
LOSS_CHANGE = "loss_change"
# Identifies a place in the data, which runs of one seed share.
DATA = [name for name in MICRO_BATCH if name != "run_id"]


def values(catalog: Catalog, where: Filter, fmt: str, metric: str, by: tuple[str, ...]) -> pd.DataFrame:
    """by's columns, tensors, value, tensor_id; for an error metric also low and high, the 10th and 90th percentile of
    the tensors' own values, and the columns of `Catalog.errors`."""
    if metric == LOSS_CHANGE:
        return mean_changes(catalog.loss_changes(fmt, by, where), by)
    if metric == VS_NORMAL:
        table = values(catalog, where, fmt, "sqnr_db", by)
        return table.assign(**{name: table[name] - normal_sqnr(fmt) for name in ("value", "low", "high")})
    if metric in SHOWN_ERRORS:
        table = catalog.errors(fmt, by, where, metric)
        return table.assign(value=table[metric], low=table[f"{metric}_low"], high=table[f"{metric}_high"])
    return catalog.extremes(metric, by, where).rename(columns={metric: "value"})


def mean_changes(table: pd.DataFrame, by: tuple[str, ...]) -> pd.DataFrame:
    """The mean over micro-batches of the rows of `Catalog.loss_changes`: by's columns, tensors, value, tensor_id (of
    the largest), micro_batches, sequences, first and second (order), and spread, the standard error of value over
    sequences (NaN for one). Micro-batches that several runs recorded at the same position of the same data count as
    one: the mean over the runs."""
    table = table.assign(value=table["first"] + table["second"])
    known = table.dropna(subset="value")
    worst = known.loc[known.groupby(list(by), dropna=False)["value"].idxmax()]
    terms = {name: (name, _mean) for name in ("first", "second", "value")}
    micro_batches = table.groupby(list(dict.fromkeys((*by, *DATA))), dropna=False).agg(
        tensors=("tensors", "sum"), by_sequence=("by_sequence", _mean_of_lists), **terms
    )
    groups = micro_batches.reset_index().groupby(list(by), dropna=False)
    means = groups.agg(
        tensors=("tensors", "sum"),
        micro_batches=("value", "size"),
        sequences=("by_sequence", lambda lists: sum(map(len, lists))),
        spread=("by_sequence", lambda lists: pd.Series(np.concatenate([*lists])).sem(skipna=False)),
        **terms,
    ).reset_index()
    return means.merge(worst[[*by, "tensor_id"]], on=list(by), how="left")


def _mean(values: pd.Series) -> float:
    """NaN if any is NaN: the mean of the others would be over different data."""
    return float(values.mean(skipna=False))


def estimates(table: pd.DataFrame, measure: Measure, name: str = "place") -> list[Named]:
    """The rows of `values`, by the column `name`, as estimates."""
    return [(str(row[name]), _estimate(row, measure)) for row in table.to_dict("records")]


def _estimate(row: dict[Any, Any], measure: Measure) -> Estimate:
    if measure.key == LOSS_CHANGE:
        return evidence.with_error(measure, row["value"], row["spread"], row["sequences"], "sequences")
    return evidence.spread(measure, row) if "low" in row else evidence.exact(measure, row["value"])


def _mean_of_lists(lists: pd.Series) -> np.ndarray:
    """The mean of lists of equal length; of others, the mean of each list's mean, as one number."""
    if len({len(changes) for changes in lists}) == 1:
        return np.asarray(np.mean([*lists], axis=0))
    return np.array([np.mean([np.mean(changes) for changes in lists])])


def ranking(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """Every place of the selection, worst first: `values` by PLACE, with place (its name) and rank from 1.

    Places without a value (all zero: nothing to lose) come last.
    """
    table = values(catalog, where, fmt, metric, PLACE)
    table = table.assign(place=short_names(table))
    table = table.sort_values(
        ["value", "place"], ascending=[metric in ("sqnr_db", VS_NORMAL), True], na_position="last"
    )
    return table.reset_index(drop=True).assign(rank=range(1, len(table) + 1))
