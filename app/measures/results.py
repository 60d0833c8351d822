"""The errors of GEMM results."""

from __future__ import annotations

import pandas as pd

from binade.app.measures.cells import product
from binade.app.measures.map_measure import CellQuery, MapMeasure, if_any
from binade.data.catalog import Catalog, quantiles
from binade.data.fields import MEASURES
from binade.data.filter import Filter


def cells(query: CellQuery) -> pd.DataFrame:
    """Of the result of each GEMM, which has a row of its own."""
    condition, parameters = query.opened.condition(query.where)
    return query.opened.ask(
        f"""
        SELECT gemm, {product()} AS product, tensor_name AS tensor, NULL AS expert, {query.across},
               {quantiles("result_sqnr_db")}, count(*) AS tensors,
               count(*) FILTER (isnan(result_sqnr_db) AND nans + infs > 0) AS broken,
               arg_min(tensor_id, result_sqnr_db) AS tensor_id
        FROM tensor WHERE result_sqnr_db IS NOT NULL AND layer_index IS NOT NULL AND {condition} GROUP BY ALL
        ORDER BY ALL
        """,
        parameters,
    ).rename(columns={"result_sqnr_db": "value", "result_sqnr_db_low": "low", "result_sqnr_db_high": "high"})


def _nothing(opened: Catalog, where: Filter, fmt: str) -> str:
    return (
        "No result of a quantized GEMM was measured: choose a quantized run recorded with “result” under Also "
        "measured (--measures result)."
    )


RESULT = MapMeasure(
    measure=MEASURES["result_sqnr_db"], cells=cells, nothing=_nothing, of="result", ends=(0.0, 40.0),
    recorded=if_any("tensor WHERE result_sqnr_db IS NOT NULL"),
)  # fmt: skip
