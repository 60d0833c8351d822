"""Every place (layer, module, operation, tensor) by a metric, worst first."""

from __future__ import annotations

import pandas as pd

from binade.app.questions.shared.boards import PLACE, place_names, values
from binade.data.catalog import Catalog
from binade.data.filter import Filter


def ranking(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """Every place of the selection, worst first: `values` by PLACE, with place (its name) and rank from 1.

    Places without a value (all zero: nothing to lose) come last.
    """
    table = values(catalog, where, fmt, metric, PLACE)
    table = table.assign(place=place_names(table))
    table = table.sort_values(["value", "place"], ascending=[metric == "sqnr_db", True], na_position="last")
    return table.reset_index(drop=True).assign(rank=range(1, len(table) + 1))
