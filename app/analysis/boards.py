"""Where it hurts: any metric by place (layer, module, operation, tensor), depth, iteration or direction.

Everything is aggregated in DuckDB. A table's `value` is the metric, its `tensor_id` the tensor that is worst by it.
"""

from __future__ import annotations

import pandas as pd

from binade.app.analysis.labels import UNNAMED
from binade.data.catalog import SHOWN_ERRORS, STATISTICS, Catalog
from binade.data.filter import Filter

PLACE = ("layer_index", "module", "operation", "tensor_name")
METRICS = (*SHOWN_ERRORS, *STATISTICS)
GRADIENTS = "grad_"


def is_error(metric: str) -> bool:
    """Whether the metric says what a format does, and not how the values themselves lie."""
    return metric in SHOWN_ERRORS


def values(catalog: Catalog, where: Filter, fmt: str, metric: str, by: tuple[str, ...]) -> pd.DataFrame:
    """by's columns, tensors, value, tensor_id; for an error metric also all three of SHOWN_ERRORS."""
    if is_error(metric):
        table = catalog.errors(fmt, by, where, metric)
        return table.assign(value=table[metric])
    return catalog.extremes(metric, by, where).rename(columns={metric: "value"})


def place_names(table: pd.DataFrame) -> pd.Series:
    """ "L1 fc1 input", the gradients by their own name."""
    layer = table["layer_index"].map(lambda v: "" if pd.isna(v) else f"L{int(v)} ")
    return layer + tensor_names(table)


def tensor_names(table: pd.DataFrame) -> pd.Series:
    """ "fc1 input"."""
    return table["module"].fillna("") + " " + table["tensor_name"].fillna(UNNAMED)


def ranking(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """Every place of the selection, worst first: `values` by PLACE, with place (its name) and rank from 1.

    Places without a value (all zero: nothing to lose) come last.
    """
    table = values(catalog, where, fmt, metric, PLACE)
    table = table.assign(place=place_names(table))
    table = table.sort_values(["value", "place"], ascending=[metric == "sqnr_db", True], na_position="last")
    return table.reset_index(drop=True).assign(rank=range(1, len(table) + 1))


def depth(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """`values` by PLACE, with row: "fc1 input" and direction; of tensors that belong to a layer."""
    table = values(catalog, where, fmt, metric, PLACE)
    table = table[table["layer_index"].notna()]
    return table.assign(row=tensor_names(table)).reset_index(drop=True)


def slope(table: pd.DataFrame) -> pd.DataFrame:
    """How the metric goes with depth, of a `depth` table: columns row, operation, first, last (values in the first and
    last layer), change; the rows that occur in both, by change."""
    ends = table["layer_index"].min(), table["layer_index"].max()
    first, last = (table[table["layer_index"] == end].set_index(["row", "operation"])["value"] for end in ends)
    found = pd.DataFrame({"first": first, "last": last}).dropna().reset_index()
    return found.assign(change=found["last"] - found["first"]).sort_values("change", ignore_index=True)


def training(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """`values` by iteration and layer."""
    table = values(catalog, where, fmt, metric, ("iteration", "layer_index"))
    return table.dropna(subset=["iteration", "layer_index"]).reset_index(drop=True)


def directions(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """`values` by operation and tensor over all layers, with row: "fc1 input"; worst first within each operation."""
    table = values(catalog, where, fmt, metric, ("operation", "module", "tensor_name"))
    table = table.assign(row=tensor_names(table))
    table = table.sort_values("value", ascending=metric == "sqnr_db", na_position="last")
    return table.sort_values("operation", ascending=False, kind="stable", ignore_index=True)


def direction_totals(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """`values` by operation alone."""
    return values(catalog, where, fmt, metric, ("operation",))
