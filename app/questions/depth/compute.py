"""A metric by tensor and layer."""

from __future__ import annotations

import pandas as pd

from binade.app.questions.shared.boards import PLACE, tensor_names, values
from binade.data.catalog import Catalog
from binade.data.filter import Filter


def depth(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """`values` by PLACE, with row: "fc1 input" and direction; of tensors that belong to a layer."""
    table = values(catalog, where, fmt, metric, PLACE)
    table = table[table["layer_index"].notna()]
    return table.assign(row=tensor_names(table)).reset_index(drop=True)


def slope(table: pd.DataFrame) -> pd.DataFrame:
    """How the metric changes with depth, from a `depth` table: columns row, operation, first, last (values in the first
    and last layer), change; the rows that occur in both, by change."""
    ends = table["layer_index"].min(), table["layer_index"].max()
    first, last = (table[table["layer_index"] == end].set_index(["row", "operation"])["value"] for end in ends)
    found = pd.DataFrame({"first": first, "last": last}).dropna().reset_index()
    return found.assign(change=found["last"] - found["first"]).sort_values("change", ignore_index=True)
