"""Parts of the queries of measures: the product of a tensor, the tensors of each cell, and medians over a cell."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from binade.app.measures.map_measure import LAYER, CellQuery
from binade.app.questions.shared.operands import OTHER
from binade.data.index.catalog import Catalog, part
from binade.data.run.tensor_kinds import Gemm
from binade.data.words.filter import Filter

PRODUCT = ["part", "layer_index", "module"]  # what a product is known by
RESULTS = {"qk": "attention_scores"}  # the result of a product, where it is not called output
PLACE = ["gemm", "product", "tensor", "expert"]  # the columns of a row of the map
HUGE = 1e300  # stands for infinity, between which and a number pandas finds no quantile


def product() -> str:
    """SQL for the product of a tensor: its module, or QK or PV."""
    return f"CASE WHEN {part()} IN ('QK', 'PV') THEN {part()} ELSE coalesce(tensor.module, 'none') END"


def deciles(groups: Any) -> pd.DataFrame:
    """value, low and high of each group: its median, 10th and 90th percentile. groups: a grouped column, without
    infinite values but ±HUGE."""
    shares = [0.1, 0.5, 0.9]
    table: pd.DataFrame = groups.quantile(np.array(shares)).unstack().reindex(columns=shares)
    table = table.mask(table > HUGE / 1e9, math.inf).mask(table < -HUGE / 1e9, -math.inf)
    return table.set_axis(["low", "value", "high"], axis=1)


def places(query: CellQuery, every_gemm: bool = True) -> pd.DataFrame:
    """The tensors of the selection: PLACE, layer_index, iteration, tensor_id. A tensor that two GEMMs take has a row in
    each, or only in its own."""
    condition, parameters = query.opened.condition(query.where)
    taken = "SELECT DISTINCT key, gemm FROM score" if every_gemm else "SELECT NULL AS key, NULL AS gemm WHERE false"
    return query.opened.ask(
        f"""
        SELECT coalesce(taken.gemm, tensor.gemm, '{OTHER}') AS gemm, {product()} AS product,
               coalesce(tensor_name, 'unnamed') AS tensor, CASE WHEN module = ? THEN expert END AS expert, layer_index,
               iteration, tensor_id
        FROM tensor LEFT JOIN ({taken}) AS taken USING (key)
        WHERE {condition} AND layer_index IS NOT NULL ORDER BY ALL
        """,
        [query.expanded, *parameters],
    )


def by_cell(
    query: CellQuery, values: pd.DataFrame, low_is_bad: bool = False, every_gemm: bool = True, mean: bool = False
) -> pd.DataFrame:
    """The cells of values of single tensors. values: tensor_id, value. value of a cell is the median of its tensors, or
    their mean, low and high the 10th and 90th percentile. NaN if one of its tensors has no value."""
    by = [*PLACE, query.across]
    table = places(query, every_gemm).merge(values, on="tensor_id")
    if table.empty:
        return table.reindex(columns=[*by, "value", "low", "high", "tensors", "tensor_id"])
    table = table.assign(value=table["value"].clip(-HUGE, HUGE))
    table = table.sort_values("value", ascending=low_is_bad, kind="stable")
    groups = table.groupby(by, dropna=False)
    found = deciles(groups["value"])
    found["value"] = groups["value"].mean() if mean else found["value"]
    found = found.where(groups["value"].count() == groups.size())
    return found.assign(tensors=groups.size(), tensor_id=groups["tensor_id"].first()).reset_index()


def products(catalog: Catalog, where: Filter) -> pd.DataFrame:
    """The products of the selection: PRODUCT, product, tensor_id and runs."""
    condition, parameters = catalog.condition(where)
    return catalog.ask(
        f"""
        SELECT lower({part()}) AS part, {product()} AS product, layer_index, tensor.module,
               arg_min(tensor_id, (phase <> 'post', tensor_id)) AS tensor_id, list(DISTINCT run_id) AS runs
        FROM tensor WHERE operation = 'forward' AND layer_index IS NOT NULL AND {condition} GROUP BY ALL
        """,
        parameters,
    )


def of_products(known: pd.DataFrame, values: pd.DataFrame) -> pd.DataFrame:
    """Cells of values of products, each in the row of its result. known: of `products`. values: PRODUCT, value, margin,
    sequences."""
    table = values[[*PRODUCT, "value", "margin", "sequences"]].merge(known, on=PRODUCT)
    margin = table["margin"].astype(float).replace(math.inf, math.nan)  # of one sequence
    return table.assign(
        gemm=Gemm.FORWARD.value, tensor=table["part"].map(RESULTS).fillna("output"), expert=None,
        low=table["value"] - margin, high=table["value"] + margin, tensors=table["sequences"],
    )[[*PLACE, LAYER, "value", "low", "high", "tensors", "tensor_id"]]  # fmt: skip
