"""Catalog rows and tensors to the small tables that charts are drawn from. No Streamlit here.

Everything is computed from one representation, a Distribution: values in ascending order with their counts. It is
either exact (low == high, a tensor's own values) or made of the binade sketch's bins, an eighth of a binade wide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from data.catalog import Catalog
from data.filter import Filter
from quant.sketch import interval_quantiles
from quant.summary import value_counts

SKETCH_SMALLEST = 2.0**-129  # below lies the sketch's bin of zero
MAX_EXACT_FLOAT32 = 1 << 24  # a larger float32 tensor would have to be sorted: its sketch is drawn instead


@dataclass(frozen=True)
class Distribution:
    """Finite values in ascending order: between low and high lie `count` of them. Arrays are float64, int64."""

    group: str
    low: np.ndarray
    high: np.ndarray
    count: np.ndarray
    mean: float
    std: float
    exact: bool

    @property
    def total(self) -> int:
        return int(self.count.sum())


def distribution_of(group: str, x: Tensor) -> Distribution | None:
    """A tensor's own values, exactly; None for a float32 tensor too large to sort at once."""
    flat = x.reshape(-1)
    if flat.dtype in (torch.bfloat16, torch.float16):
        values, counts = value_counts(flat)
    elif flat.numel() > MAX_EXACT_FLOAT32:
        return None
    else:
        values, counts = np.unique(flat.float().numpy(), return_counts=True)
    values = values.astype(np.float64)
    keep = np.isfinite(values)
    values, counts = values[keep], counts[keep]
    order = np.argsort(values, kind="stable")
    values, counts = values[order], counts[order]
    total = counts.sum()
    mean = float(counts @ values / total) if total else math.nan
    std = math.sqrt(counts @ (values - mean) ** 2 / total) if total else math.nan
    if len(values) == 1:  # not what rounding in the mean leaves
        mean, std = float(values[0]), 0.0
    return Distribution(group, values, values, counts, mean, std, exact=True)


def distributions(
    catalog: Catalog, where: Filter, by: str | None = None, tensor_ids: list[str] | None = None
) -> list[Distribution]:
    """The selection's distributions from the sketch, one a group (the values of column `by`, or "all").

    The outermost bins end at the smallest and the largest value, which are known.
    """
    sketch = catalog.distribution(where, by, tensor_ids)
    moments = catalog.moments(where, by, tensor_ids)
    moments = moments.set_index(moments["group"].map(group_name))
    found = []
    for group, bins in sketch.groupby("group", sort=True, dropna=False):
        row = moments.loc[group_name(group)]
        low, high = (bins[name].to_numpy().clip(row["min"], row["max"]) for name in ("low", "high"))
        mean, std = float(row["mean"]), float(row["std"])
        found.append(Distribution(group_name(group), low, high, bins["count"].to_numpy(), mean, std, exact=False))
    return found


def group_name(group: object) -> str:
    """A group as people read it; a tensor for which the word does not apply or is not known is in "none"."""
    return "none" if pd.isna(group) else str(group)


def magnitudes(d: Distribution) -> Distribution:
    """log2 of the magnitudes of the nonzero values, mean and deviation not computed."""
    outer, inner = np.maximum(np.abs(d.low), np.abs(d.high)), np.minimum(np.abs(d.low), np.abs(d.high))
    nonzero = _nonzero(d, inner)
    low, high, count = np.log2(inner[nonzero]), np.log2(outer[nonzero]), d.count[nonzero]
    order = np.argsort(low, kind="stable")
    return Distribution(d.group, low[order], high[order], count[order], math.nan, math.nan, d.exact)


def _nonzero(d: Distribution, inner: np.ndarray) -> np.ndarray:
    """Which bins hold nonzero values. The sketch's bin of zero holds the smallest subnormals too: not told apart."""
    return inner >= (2.0**-149 if d.exact else SKETCH_SMALLEST)


def quantiles(d: Distribution, p: np.ndarray) -> np.ndarray:
    """The values below which shares p of the distribution lie, spread evenly over a sketch bin. NaN if it is empty."""
    return interval_quantiles(d.low, d.high, d.count, p)


def linear_histogram(found: list[Distribution], bins: int = 100, tails: float = 5e-5) -> pd.DataFrame:
    """Shares of values in equal bins, the same for every group: columns group, low, high, share (0 to 1).

    The axis leaves out a share `tails` at either end of the widest group, so that outliers do not flatten the rest.
    """
    found = [d for d in found if d.total]
    if not found:
        return pd.DataFrame(columns=["group", "low", "high", "share"])
    ends = np.array([quantiles(d, np.array([tails, 1 - tails])) for d in found])
    low, high = ends[:, 0].min(), ends[:, 1].max()
    if low == high:  # a single value: give it a bar of some width
        low, high = low - 0.5 * max(abs(low), 1e-30), high + 0.5 * max(abs(high), 1e-30)
    edges = np.linspace(low, high, bins + 1)
    tables = []
    for d in found:
        share = _shares(d, edges)
        tables.append(pd.DataFrame({"group": d.group, "low": edges[:-1], "high": edges[1:], "share": share}))
    return pd.concat(tables, ignore_index=True)


def _shares(d: Distribution, edges: np.ndarray) -> np.ndarray:
    """The share of values in each interval; a sketch bin that straddles an edge is split by length."""
    if d.exact:
        return np.histogram(d.low, edges, weights=d.count)[0] / d.total
    point = d.high <= d.low
    points = np.histogram(d.low[point], edges, weights=d.count[point])[0]
    starts = np.maximum(d.low[:, None], edges[None, :-1])
    ends = np.minimum(d.high[:, None], edges[None, 1:])
    width = np.maximum(d.high - d.low, np.finfo(np.float64).tiny)
    return (points + (np.clip(ends - starts, 0, None) / width[:, None] * d.count[:, None]).sum(0)) / d.total


def log2_histogram(found: list[Distribution]) -> pd.DataFrame:
    """Shares of values by log2 of their magnitude: columns group, low, high (log2), share (of all values, per binade).

    Bins are eighths of a binade as in the sketch; zeros have no logarithm and are left out. Where that would be too
    many marks, whole binades.
    """
    tables = []
    for d in found:
        inner = np.minimum(np.abs(d.low), np.abs(d.high))
        nonzero = _nonzero(d, inner)
        if not nonzero.any():
            continue
        mantissa, exponent = np.frexp(inner[nonzero])  # 0.5 <= mantissa < 1
        table = pd.DataFrame({"exponent": exponent - 1, "eighth": np.floor((2 * mantissa - 1) * 8)})
        table["count"], table["group"], table["total"] = d.count[nonzero], d.group, d.total
        tables.append(table)
    if not tables:
        return pd.DataFrame(columns=["group", "low", "high", "share"])
    table = pd.concat(tables)
    span = table["exponent"].max() - table["exponent"].min() + 1
    parts = 8 if span * 8 * len(tables) <= 4000 else 1
    table["eighth"] = np.floor(table["eighth"] * parts / 8)
    table["order"] = table["group"].map({d.group: index for index, d in enumerate(found)})
    table = table.groupby(["order", "group", "total", "exponent", "eighth"], as_index=False)["count"].sum()
    low = table["exponent"] + np.log2(1 + table["eighth"] / parts)
    high = table["exponent"] + np.log2(1 + (table["eighth"] + 1) / parts)
    share = table["count"] / table["total"] / (high - low)
    return pd.DataFrame({"group": table["group"], "low": low, "high": high, "share": share})


def qq_normal(found: list[Distribution], points: int = 201) -> pd.DataFrame:
    """Quantiles against a normal of the same mean and deviation: columns group, theoretical, sample.

    Both axes are in standard deviations from the mean. Plotting positions run evenly along the normal axis, to the
    outermost value: (rank - 1/2) / n.
    """
    tables = []
    for d in found:
        if not d.total or not d.std > 0:
            continue
        end = stats.norm.isf(min(0.5 / d.total, 0.4))
        theoretical = np.linspace(-end, end, points)
        sample = (quantiles(d, stats.norm.cdf(theoretical)) - d.mean) / d.std
        tables.append(pd.DataFrame({"group": d.group, "theoretical": theoretical, "sample": sample}))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=["group", "theoretical", "sample"])


BOX_SHARES = np.array([0.0, 0.001, 0.25, 0.5, 0.75, 0.999, 1.0])


def boxes(found: list[Distribution]) -> pd.DataFrame:
    """Columns group, min, p0_1, q1, median, q3, p99_9, max: quartiles, and the 0.1 % and 99.9 % quantiles."""
    names = ["min", "p0_1", "q1", "median", "q3", "p99_9", "max"]
    rows = [{"group": d.group, **dict(zip(names, quantiles(d, BOX_SHARES), strict=True))} for d in found if d.total]
    return pd.DataFrame(rows, columns=["group", *names])


def format_comparison(scores: pd.DataFrame) -> pd.DataFrame:
    """What each format does to a selection of operands: columns format, tensors, sqnr_db, flush_to_zero, saturated.

    SQNR is of the summed powers (infinite where nothing is lost, NaN where there is nothing to lose), flush_to_zero of
    all nonzero elements, saturated of all elements.
    """
    rows = []
    for name, part in scores.groupby("format"):
        part = part[part["mse"].notna() & part["rms"].notna()]
        signal, noise = (part["rms"] ** 2 * part["finite"]).sum(), (part["mse"] * part["finite"]).sum()
        nonzero = (part["finite"] - part["zeros"]).where(part["flush_to_zero"].notna(), 0)
        rows.append(
            {
                "format": name,
                "tensors": len(part),
                "sqnr_db": _decibel(signal, noise),
                "flush_to_zero": (part["flush_to_zero"].fillna(0) * nonzero).sum() / max(nonzero.sum(), 1),
                "saturated": (part["saturated"] * part["numel"]).sum() / max(part["numel"].sum(), 1),
            }
        )
    return pd.DataFrame(rows, columns=["format", "tensors", "sqnr_db", "flush_to_zero", "saturated"])


def _decibel(signal: float, noise: float) -> float:
    if not signal > 0:
        return math.nan
    return 10 * math.log10(signal / noise) if 0 < noise < math.inf else math.inf if noise == 0 else -math.inf


def tensor_label(row: pd.Series) -> str:
    """A tensor's short name: "L1 qkv input (forward, mxfp8)"."""
    layer = "" if pd.isna(row["layer_index"]) else f"L{int(row['layer_index'])} "
    module = "" if pd.isna(row["module"]) else f"{row['module']} "
    return f"{layer}{module}{row['tensor_name']} ({row['operation']}, {row['quant_type']})"


def unique_labels(rows: pd.DataFrame) -> dict[str, str]:
    """tensor_id to label; tensors that would share one are told apart by the first words in which they differ."""
    labels = {row["tensor_id"]: tensor_label(row) for _, row in rows.iterrows()}
    by_id = rows.set_index("tensor_id", drop=False)
    for column, title in DISTINCTIONS.items():
        for _, same in pd.Series(labels).groupby(pd.Series(labels)):
            values = by_id.loc[same.index, column].map(group_name)
            if values.nunique() > 1:
                for tensor_id, value in values.items():
                    labels[tensor_id] += f", {title} {value}"
    return labels


DISTINCTIONS = {
    "phase": "phase",
    "iteration": "iteration",
    "micro_batch": "micro-batch",
    "rank": "rank",
    "expert": "expert",
    "recipe": "recipe",
    "run_id": "run",
    "tensor_id": "tensor",
}
