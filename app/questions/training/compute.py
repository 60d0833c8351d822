"""A metric by iteration and layer."""

from __future__ import annotations

import pandas as pd

from binade.app.questions.shared.boards import values
from binade.data.catalog import Catalog
from binade.data.filter import Filter


def training(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """`values` by iteration and layer."""
    table = values(catalog, where, fmt, metric, ("iteration", "layer_index"))
    return table.dropna(subset=["iteration", "layer_index"]).reset_index(drop=True)
