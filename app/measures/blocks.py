"""The blocks of an operand: their scales, errors and crest factors, from the histograms that were recorded."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pandas as pd

from binade.app.draw import plot
from binade.app.draw.figure import Chart, Figure, source
from binade.app.measures.cells import deciles, product
from binade.app.measures.map_measure import LAYER, CellQuery, MapMeasure, if_any
from binade.app.questions.shared.operands import OTHER
from binade.app.questions.shared.scope import scope_of
from binade.data.compare.evidence import Measure
from binade.data.index.catalog import USED, Catalog
from binade.data.words.fields import MEASURES
from binade.data.words.filter import Filter
from binade.quant.block_histograms import BLOCK_MEASURES
from binade.quant.specs import Spec

EXTREMES = 0.01  # of the blocks at each end that the spread of scales leaves out
BAD_DB = 10  # a block with a lower SQNR is called bad
MOST = 60  # columns of the distribution
ROW = ["gemm", "product", "tensor"]
PERCENTILES = {"low": 0.01, "median": 0.5, "high": 0.99}


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


def summaries(quantity: str, shown: str, query: CellQuery) -> pd.DataFrame:
    """The blocks of all tensors of a cell together. low and high: their 1st and 99th percentile, to a bin's width;
    value: one of PERCENTILES, or bad, the share of blocks below BAD_DB."""
    table, by = _with_edges(histograms(query, quantity), quantity), [*ROW, query.across]
    rows = []
    for key, part in table.groupby(by, dropna=False):
        known = {name: quantile(part, q) for name, q in PERCENTILES.items()}
        value = known.get(shown, bad(part))
        ends = {"low": known["low"], "high": known["high"]} if shown in known else {"low": math.nan, "high": math.nan}
        worst = part.sort_values("bin", ascending=shown in ("low", "bad"), kind="stable")["tensor_id"].iloc[0]
        rows.append((*key, None, value, *ends.values(), part["tensor_id"].nunique(), worst))
    return pd.DataFrame(rows, columns=[*by, "expert", "value", "low", "high", "tensors", "tensor_id"])


def _with_edges(table: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """A histogram with low and high, the edges of its bins."""
    width = BLOCK_MEASURES[quantity].width
    return table.assign(low=table["bin"] * width, high=(table["bin"] + 1) * width)


def bad(part: pd.DataFrame) -> float:
    """The share of blocks below BAD_DB, of a histogram of SQNR."""
    return float(part.loc[part["high"] <= BAD_DB, "count"].sum() / part["count"].sum())


def quantile(part: pd.DataFrame, q: float) -> float:
    """Quantile of a histogram given as columns low, high and count, with values spread evenly over their bin."""
    merged = part.groupby(["low", "high"], as_index=False)["count"].sum()
    below = np.concatenate(([0], merged["count"].cumsum()))
    at = min(int(np.searchsorted(below[1:], q * below[-1])), len(merged) - 1)
    row = merged.iloc[at]
    return float(row["low"] + (row["high"] - row["low"]) * (q * below[-1] - below[at]) / row["count"])


def distribution(quantity: str, query: CellQuery, cell: pd.Series | None) -> Figure | None:
    """The blocks of the selected row of the map, or of all operands, by layer or iteration: a column for each. The
    figure's table has that column, low and high (the edges of a bin), count, and share (of the column's blocks)."""
    table, by = _with_edges(histograms(query, quantity), quantity), query.across
    if cell is not None:
        table = table[(table[ROW] == cell[ROW]).all(axis=1)]
    if table.empty:
        return None
    shares = table.groupby([by, "low", "high"])["count"].sum().reset_index().astype({by: int})
    shares = shares.assign(share=shares["count"] / shares.groupby(by)["count"].transform("sum"))
    what, blocks = BLOCK_MEASURES[quantity], int(table["count"].sum())
    word, fmt = "layer" if by == LAYER else "iteration", "each GEMM’s format" if query.format == USED else query.format
    subtitle, last = (
        f"{blocks:,} blocks in {fmt} · {scope_of(query.opened, query.where)}",
        (what.bins[1] - 1) * what.width,
    )
    drawn = shares
    if quantity == "sqnr_db" and (lossless := shares.loc[shares["low"] >= last, "count"].sum()):
        subtitle += f"; not drawn: {100 * lossless / blocks:.2g}% without error or above {last:g} dB"
        drawn = shares[shares["low"] < last]
    axis = f"{what.label} ({what.unit})" if what.unit else what.label
    of = "" if cell is None else f" of {cell['product']} {cell['tensor']}, {cell['gemm']}"
    chart = _chart(drawn, by, word, axis, f"{what.label}{of}, by {word}", subtitle)
    caption = f"{source(query.where, f'{blocks:,} blocks in {fmt}')}\n{what.label}: {what.definition}."
    return Figure("block_distribution", chart, shares, caption, height=400)


def _chart(table: pd.DataFrame, by: str, word: str, axis: str, title: str, subtitle: str) -> Chart:
    values = sorted(table[by].unique())
    shown = table[table[by].isin(values[:: -(-len(values) // MOST) or 1])]
    legend = {"title": "share of blocks", "format": ".0%", "gradientLength": 180}
    tips = {
        by: word, "low": f"{axis}, from", "high": "to", "share": ("share of blocks", ".2%"), "count": ("blocks", ","),
    }  # fmt: skip
    cells = plot.cells(
        shown, "low", by, seams=False, tips=tips, x=plot.ordinal(by, word),
        y=plot.y("low", axis, zero=False, nice=False).bin("binned"), y2="high",
        color=plot.ramp("share", legend, type="sqrt"),
    )  # fmt: skip
    return plot.layers(title, subtitle, cells, independent="stroke")


def _nothing(opened: Catalog, where: Filter, fmt: str) -> str:
    words = "as used" if fmt == USED else f"in {fmt}"
    return (
        f"No blocks were measured {words}: choose a format with block scales, and a run recorded with “blocks” under "
        "Also measured (--measures blocks)."
    )


def _of_blocks(quantity: str, shown: str, name: str, label: str, unit: str, what: str) -> MapMeasure:
    definition = f"{what} of the blocks; {BLOCK_MEASURES[quantity].definition}. Blocks with NaN or Inf are left out"
    written = {"format": ".3g"} if shown == "bad" else {"format": ".1f", "resolution": BLOCK_MEASURES[quantity].width}
    measure = Measure(name, label, unit, definition, low_is_bad=shown == "low", **written)
    return MapMeasure(
        measure=measure, cells=partial(summaries, quantity, shown), nothing=_nothing, of_format=True,
        recorded=_RECORDED, several="all of their blocks together", extra=partial(distribution, quantity),
        interval="" if shown == "bad" else "1st to 99th percentile of the blocks",
    )  # fmt: skip


_RECORDED = if_any("block")
SCALE_SPREAD = MapMeasure(
    measure=MEASURES["scale_spread"], cells=spreads, nothing=_nothing, of_format=True, recorded=_RECORDED,
    extra=partial(distribution, "scale_exponent"),
)  # fmt: skip
OF_BLOCKS = (
    _of_blocks("sqnr_db", "low", "block_sqnr_db", "SQNR of the worst blocks", "dB", "1st percentile"),
    _of_blocks(
        "sqnr_db", "bad", "bad_blocks", f"Blocks below {BAD_DB} dB", "%", f"share with an SQNR below {BAD_DB} dB"
    ),
    _of_blocks("scale_exponent", "median", "block_scale_exponent", "Scale exponent of the blocks", "", "median"),
    _of_blocks("crest_db", "median", "block_crest_db", "Crest factor of the blocks", "dB", "median"),
    SCALE_SPREAD,
)
