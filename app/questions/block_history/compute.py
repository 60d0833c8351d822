"""How the blocks of a selection differ, by iteration and layer, from the histograms that were recorded."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.evidence import Measure, Named
from binade.data.filter import Filter
from binade.quant.block_histograms import BLOCK_MEASURES

BAD_DB = 10  # a block with a lower SQNR is called bad
ITERATION, LAYER = "iteration", "layer_index"


def histogram(catalog: Catalog, where: Filter, fmt: str, measure: str) -> pd.DataFrame:
    """Columns iteration, layer_index, bin, count, and low and high, the bin's edges."""
    table = catalog.blocks(fmt, measure, (ITERATION, LAYER), where).dropna(subset=[ITERATION, LAYER])
    width = BLOCK_MEASURES[measure].width
    return table.assign(low=table["bin"] * width, high=(table["bin"] + 1) * width)


def shares(table: pd.DataFrame, by: str) -> pd.DataFrame:
    """A `histogram` by one of its columns: that column, low, high, count and share, of the blocks of its group."""
    merged = table.groupby([by, "low", "high"])[["count"]].sum().reset_index()
    return merged.assign(share=merged["count"] / merged.groupby(by)["count"].transform("sum"))


def summary(table: pd.DataFrame, by: tuple[str, ...]) -> pd.DataFrame:
    """Summarize each group of a `histogram`: by's columns, blocks, low, median and high (the 1st, 50th and 99th
    percentile, to a bin's width) and bad, the share of blocks below BAD_DB (of SQNR)."""
    rows = [
        {
            **dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True)),
            "blocks": int(part["count"].sum()),
            **{name: quantile(part, q) for name, q in (("low", 0.01), ("median", 0.5), ("high", 0.99))},
            "bad": float(part.loc[part["high"] <= BAD_DB, "count"].sum() / part["count"].sum()),
        }
        for key, part in table.groupby(list(by))
    ]
    return pd.DataFrame(rows, columns=[*by, "blocks", "low", "median", "high", "bad"])


def quantity(name: str) -> Measure:
    """One of BLOCK_MEASURES. A percentile is known to a bin's width."""
    one = BLOCK_MEASURES[name]
    bad = name == "sqnr_db"
    return Measure(name, one.label, one.unit, one.definition, low_is_bad=bad, format=".1f", resolution=one.width)


def levels(summary: pd.DataFrame, column: str, measure: Measure) -> list[Named]:
    """A column of a `summary` by iteration and layer: of each layer, in the last iteration."""
    last = summary[summary[ITERATION] == summary[ITERATION].max()].astype({LAYER: int})
    return [
        (f"layer {layer}", evidence.exact(measure, value, of="blocks"))
        for layer, value in zip(last[LAYER], last[column], strict=True)
    ]


def trends(summary: pd.DataFrame, column: str, measure: Measure) -> list[Named]:
    """The slope over iterations, per iteration, of the same."""
    return [
        (f"layer {layer}", evidence.trend(measure, part[ITERATION], part[column], "iterations"))
        for layer, part in summary.astype({LAYER: int}).groupby(LAYER)
    ]


def quantile(part: pd.DataFrame, q: float) -> float:
    """Quantile of a histogram given as columns low, high and count, with values spread evenly over their bin. NaN if it
    is empty."""
    merged = part.groupby(["low", "high"], as_index=False)["count"].sum()
    if merged.empty:
        return math.nan
    below = np.concatenate(([0], merged["count"].cumsum()))
    at = min(int(np.searchsorted(below[1:], q * below[-1])), len(merged) - 1)
    row = merged.iloc[at]
    return float(row["low"] + (row["high"] - row["low"]) * (q * below[-1] - below[at]) / row["count"])
