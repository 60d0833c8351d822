"""What rounding a product changes: of the loss, as `binade measure` measured it, and of log-probabilities, if it is
rounded as for a rollout, as `binade parity` measured it."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from binade.app.measures.cells import PRODUCT, of_products, products
from binade.app.measures.map_measure import LAYER, CellQuery, MapMeasure, if_any
from binade.data.compare.student import quantile
from binade.data.index.catalog import Catalog
from binade.data.run.directory import RunError
from binade.data.run.parity_results import Parity, read_parity
from binade.data.words.fields import MEASURES
from binade.data.words.filter import Filter

INTERVAL = "95% interval over sequences"
NOT_ACROSS = "is that of one set of weights"


def effect_cells(query: CellQuery) -> pd.DataFrame:
    """Of the measurements of the same model, the one with the most sequences."""
    known = products(query.opened, query.where)
    effects = query.opened.effects({run for runs in known["runs"] for run in runs})
    effects = effects[effects["format"] == query.format].drop_duplicates(PRODUCT)
    margin = effects["change_error"].astype(float) * np.array([quantile(n - 1) for n in effects["sequences"]], float)
    return of_products(known, effects.assign(value=effects["change"], margin=margin))


def parity_cells(query: CellQuery) -> pd.DataFrame:
    """Of the newest parity of the same model that has single products."""
    known, run_parity = parity_of(query.opened, query.where)
    rows = [
        (*gap.group, gap.change.value, gap.change.value - gap.change.low, len(gap.changes))
        for gap in (run_parity[1].gaps if run_parity else ())
        if gap.group.kind == "site" and gap.key.is_whole
    ]
    values = pd.DataFrame(rows, columns=[*PRODUCT, "value", "margin", "sequences"])
    return of_products(known, values.astype({"layer_index": "Int32"}))


def parity_of(catalog: Catalog, where: Filter) -> tuple[pd.DataFrame, tuple[str, Parity] | None]:
    """(the products of the selection, the newest parity of the same model with single products and its run)."""
    known = products(catalog, where)
    for run_id in catalog.parities({run for runs in known["runs"] for run in runs}):
        with suppress(RunError, OSError):  # the index names damaged files
            parity = read_parity(catalog.root / run_id)
            if parity and any(gap.group.kind == "site" for gap in parity.gaps):
                return known, (run_id, parity)
    return known, None


def _no_effect(opened: Catalog, where: Filter, fmt: str) -> str:
    return f"No effect was measured in {fmt} for a model with these weights: binade measure --by site --formats {fmt}."


def _no_parity(opened: Catalog, where: Filter, fmt: str) -> str:
    return (
        "No parity of single products was measured for a model with these weights: binade parity --rollout mxfp4 "
        "--by site."
    )


EFFECT = MapMeasure(
    measure=MEASURES["effect"], cells=effect_cells, nothing=_no_effect,
    recorded=if_any("effect WHERE iteration IS NULL"), of="result", of_format=True, as_used=False, across=(LAYER,), not_across=NOT_ACROSS, several="", interval=INTERVAL,
)  # fmt: skip
PARITY = MapMeasure(
    measure=MEASURES["parity_change"], cells=parity_cells, nothing=_no_parity,
    recorded=lambda opened: bool(opened.parities()), of="result", across=(LAYER,), not_across=NOT_ACROSS, several="",
    interval=INTERVAL,
)  # fmt: skip
