"""A metric by tensor and layer."""

from __future__ import annotations

import pandas as pd

from binade.app.questions.shared.boards import PLACE, tensor_names, values
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.evidence import Measure, Named
from binade.data.filter import Filter


def depth(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """`values` by PLACE, with row: "fc1 input" and direction; of tensors that belong to a layer."""
    table = values(catalog, where, fmt, metric, PLACE)
    table = table[table["layer_index"].notna()]
    return table.assign(row=tensor_names(table)).reset_index(drop=True)


def trends(table: pd.DataFrame, measure: Measure) -> list[Named]:
    """The slope of the metric over layers, per layer, of each row and operation of a `depth` table."""
    return [
        (str(row), evidence.trend(measure, part["layer_index"].tolist(), part["value"].tolist(), "layers"))
        for (row, _), part in table.groupby(["row", "operation"], sort=False)
    ]
