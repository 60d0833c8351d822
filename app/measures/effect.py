"""What rounding a product changes of the loss, as `binade measure` measured it."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.app.measures.cells import PRODUCT, of_products, products
from binade.app.measures.map_measure import LAYER, CellQuery, MapMeasure, if_any
from binade.data.catalog import Catalog
from binade.data.fields import MEASURES
from binade.data.filter import Filter
from binade.data.student import quantile


def cells(query: CellQuery) -> pd.DataFrame:
    known = products(query.opened, query.where)
    effects = query.opened.effects({run for runs in known["runs"] for run in runs})
    effects = effects[effects["format"] == query.format].drop_duplicates(PRODUCT)  # the longest
    margin = effects["change_error"].astype(float) * np.array([quantile(n - 1) for n in effects["sequences"]], float)
    return of_products(known, effects.assign(value=effects["change"], margin=margin))


def _nothing(opened: Catalog, where: Filter, fmt: str) -> str:
    return f"No effect was measured in {fmt} for a model with these weights: binade measure --by site --formats {fmt}."


EFFECT = MapMeasure(
    measure=MEASURES["effect"], cells=cells, nothing=_nothing, recorded=if_any("effect"), of="result", of_format=True,
    as_used=False, across=(LAYER,), not_across="is that of one set of weights", several="",
    interval="95% interval over sequences",
)  # fmt: skip
