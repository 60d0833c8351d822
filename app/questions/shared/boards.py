"""Where it hurts: any metric by place (layer, module, operation, tensor), depth, iteration or direction.

Everything is aggregated in DuckDB. A table's `value` is the metric, its `tensor_id` the tensor that is worst by it.
"""

from __future__ import annotations

import pandas as pd

from binade.app.questions.shared.labels import UNNAMED
from binade.data.catalog import SHOWN_ERRORS, STATISTICS, Catalog
from binade.data.filter import Filter

PLACE = ("layer_index", "module", "operation", "tensor_name")
METRICS = (*SHOWN_ERRORS, *STATISTICS)


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
