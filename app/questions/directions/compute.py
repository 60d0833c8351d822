"""A metric by tensor, the forward pass against the backward pass."""

from __future__ import annotations

import pandas as pd

from binade.app.questions.shared.boards import tensor_names, values
from binade.data.catalog import Catalog
from binade.data.filter import Filter


def directions(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """`values` by operation and tensor over all layers, with row: "fc1 input"; worst first within each operation."""
    table = values(catalog, where, fmt, metric, ("operation", "module", "tensor_name"))
    table = table.assign(row=tensor_names(table))
    table = table.sort_values("value", ascending=metric == "sqnr_db", na_position="last")
    return table.sort_values("operation", ascending=False, kind="stable", ignore_index=True)


def direction_totals(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """`values` by operation alone."""
    return values(catalog, where, fmt, metric, ("operation",))
