"""The scales of the blocks of an operand."""

from __future__ import annotations

import pandas as pd

from binade.app.measures.cells import deciles, product
from binade.app.measures.map_measure import CellQuery, MapMeasure, if_any
from binade.app.questions.shared.operands import OTHER
from binade.data.catalog import USED, Catalog
from binade.data.fields import MEASURES
from binade.data.filter import Filter
from binade.quant.block_histograms import BLOCK_MEASURES
from binade.quant.specs import Spec

EXTREMES = 0.01  # of the blocks at each end that the spread of scales leaves out
ROW = ["gemm", "product", "tensor"]


def histograms(query: CellQuery, quantity: str) -> pd.DataFrame:
    """The blocks of each operand: gemm, product, tensor, the query's `across`, tensor_id, bin, count. quantity: one of
    BLOCK_MEASURES."""
    condition, parameters = query.opened.condition(query.where)
    used = query.format == USED
    return query.opened.ask(
        f"""
        SELECT coalesce(tensor.gemm, '{OTHER}') AS gemm, {product()} AS product, tensor.tensor_name AS tensor,
               tensor.{query.across}, tensor.tensor_id, bin, sum(count)::BIGINT AS count
        FROM block JOIN tensor USING (key)
        WHERE {condition} AND block.format = {"tensor.format" if used else "?"} AND measure = ?
              AND layer_index IS NOT NULL
        GROUP BY ALL ORDER BY ALL
        """,
        [*parameters, *([] if used else [str(Spec.of(query.format))]), quantity],
    )


def spreads(query: CellQuery) -> pd.DataFrame:
    """The spread of the block scales of each operand, in binades, without the lowest and highest of EXTREMES."""
    bins, by = histograms(query, "scale_exponent"), [*ROW, query.across]
    columns = [*by, "expert", "value", "low", "high", "tensors", "tensor_id"]
    if bins.empty:
        return pd.DataFrame(columns=columns)
    counts = bins.groupby("tensor_id")["count"]
    total, through = counts.transform("sum"), counts.cumsum()
    inside = bins[(through / total > EXTREMES) & (through / total - bins["count"] / total < 1 - EXTREMES)]
    width = BLOCK_MEASURES["scale_exponent"].width
    each = inside.groupby([*by, "tensor_id"])["bin"].agg(lambda indices: (indices.max() - indices.min()) * width)
    groups = each.reset_index(name="value").sort_values("value", ascending=False).groupby(by, dropna=False)
    table = deciles(groups["value"])
    table["tensors"], table["tensor_id"] = groups.size(), groups["tensor_id"].first()
    return table.reset_index().assign(expert=None)[columns]


def _nothing(opened: Catalog, where: Filter, fmt: str) -> str:
    words = "as used" if fmt == USED else f"in {fmt}"
    return (
        f"No blocks were measured {words}: choose a format with block scales, and a run recorded with “blocks” under "
        "Also measured (--measures blocks)."
    )


SCALE_SPREAD = MapMeasure(
    measure=MEASURES["scale_spread"], cells=spreads, nothing=_nothing, of_format=True, recorded=if_any("block")
)
