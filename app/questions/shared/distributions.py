"""Distributions of values: histograms and box plots from one representation.

A Distribution is values in ascending order with their counts. It is exact (low == high, a tensor's own values), or made
of bins: the binade sketch's, an eighth of a binade wide, or a large float32 tensor's values by their upper 16 bits,
1/128 of a binade.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from binade.app.questions.shared.labels import group_name
from binade.app.questions.shared.runs import labels_of
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from binade.quant.backends.counts import counted, upper_counts
from binade.quant.sketch import bin_edges, interval_quantiles
from binade.quant.summary import summarize

SKETCH_BIN = 2.0**-3  # a bin's width, as a share of the power of two below it
FINE_BIN = 2.0**-7
MAX_EXACT_FLOAT32 = 1 << 22  # a larger float32 tensor would have to be sorted: it is counted by its upper 16 bits


@dataclass(frozen=True)
class Distribution:
    """Finite values in ascending order: `count` of them are between low and high. Arrays are float64, int64.

    bin_width is the bins' width where the values are not exact.
    """

    group: str
    low: np.ndarray
    high: np.ndarray
    count: np.ndarray
    mean: float
    std: float
    exact: bool
    bin_width: float = SKETCH_BIN

    @property
    def smallest(self) -> float:
        """The smallest magnitude that is distinguished from zero: the sketch's bin of zero also holds the smallest
        subnormals."""
        return 2.0**-149 if self.exact else 2.0**-126 * self.bin_width

    @property
    def inner(self) -> np.ndarray:
        """The smallest magnitude of each bin."""
        result: np.ndarray = np.minimum(np.abs(self.low), np.abs(self.high))
        return result

    @property
    def total(self) -> int:
        return int(self.count.sum())


def distribution_of(group: str, x: Tensor, moments: tuple[float, float] | None = None) -> Distribution:
    """A tensor's own values: exactly, or for a large float32 tensor in bins of 1/128 binade.

    moments are its mean and standard deviation if known; otherwise they are computed.
    """
    flat = x.detach().reshape(-1)
    codes = counted(flat) if flat.dtype in (torch.bfloat16, torch.float16) else None
    if codes:
        values, counts = codes.values, codes.counts
    elif flat.numel() > MAX_EXACT_FLOAT32:
        if moments is None:
            summary = summarize(flat.float())
            moments = summary.mean, summary.std
        return _of_upper(group, *upper_counts(flat.float()), moments)
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
    if len(values) == 1:  # exactly 0, without the rounding error of the mean
        mean, std = float(values[0]), 0.0
    return Distribution(group, values, values, counts, mean, std, exact=True)


@dataclass
class Pool:
    """The values of several tensors together, in bins of 1/128 binade."""

    group: str
    counts: np.ndarray = field(default_factory=lambda: np.zeros(1 << 16))

    def add(self, x: Tensor, times: float = 1.0) -> None:
        """times: how many values each of x stands for."""
        bins, counts = upper_counts(x.float())
        self.counts[bins] += counts * times

    def distribution(self) -> Distribution:
        """The distribution, without mean and standard deviation."""
        bins = np.flatnonzero(self.counts)
        return _of_upper(self.group, bins, np.rint(self.counts[bins]).astype(np.int64), (math.nan, math.nan))


def _of_upper(group: str, bins: np.ndarray, counts: np.ndarray, moments: tuple[float, float]) -> Distribution:
    """A distribution from the upper 16 bits of float32 values, and how often each occurs."""
    low, high = bin_edges(bins, 16)
    keep = np.isfinite(low) & np.isfinite(high)
    low, high, counts = low[keep], high[keep], counts[keep]
    order = np.argsort(low + high, kind="stable")
    return Distribution(group, low[order], high[order], counts[order], *moments, exact=False, bin_width=FINE_BIN)


def distributions(
    catalog: Catalog, where: Filter, by: str | None = None, tensor_ids: list[str] | None = None
) -> list[Distribution]:
    """The selection's distributions from the sketch, one per group (the values of column `by`, or "all").

    The outermost bins end at the smallest and the largest value, which are known.
    """
    sketch = catalog.distribution(where, by, tensor_ids)
    moments = catalog.moments(where, by, tensor_ids)
    name = partial(group_name, names=labels_of(catalog) if by == "run_id" else None)
    moments.index = pd.Index(moments["group"].map(name))
    distributions = []
    for group, bins in sketch.groupby("group", sort=True, dropna=False):
        row: Any = moments.loc[name(group)]
        low, high = (bins[name].to_numpy().clip(row["min"], row["max"]) for name in ("low", "high"))
        mean, std = float(row["mean"]), float(row["std"])
        distributions.append(Distribution(name(group), low, high, bins["count"].to_numpy(), mean, std, exact=False))
    return distributions


def magnitudes(d: Distribution) -> Distribution:
    """log2 of the magnitudes of the nonzero values, mean and deviation not computed."""
    nonzero = d.inner >= d.smallest
    outer = np.maximum(np.abs(d.low), np.abs(d.high))
    low, high, count = np.log2(d.inner[nonzero]), np.log2(outer[nonzero]), d.count[nonzero]
    order = np.argsort(low, kind="stable")
    return Distribution(d.group, low[order], high[order], count[order], math.nan, math.nan, d.exact, d.bin_width)


def merged(low: np.ndarray, high: np.ndarray, count: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(edges, counts) of intervals, which may overlap, merged into bins of 1/steps. One that lies across several
    of these is split evenly."""
    if not len(low):
        return np.zeros(1), np.zeros(0)
    first, last = math.floor(low.min() * steps), math.floor(high.max() * steps) + 1
    edges = np.arange(first, last + 1) / steps
    counts = np.zeros(last - first)
    width = high - low
    point = width <= 0
    np.add.at(counts, np.floor(low[point] * steps).astype(int) - first, count[point])
    low, high, count, width = low[~point], high[~point], count[~point], width[~point]
    at = np.floor(low * steps).astype(int)
    for step in range(math.ceil(width.max() * steps) + 1 if len(width) else 0):
        here = at + step
        shared = np.clip(np.minimum(high, (here + 1) / steps) - np.maximum(low, here / steps), 0, None) / width
        inside = shared > 0
        np.add.at(counts, here[inside] - first, (count * shared)[inside])
    return edges, counts


def quantiles(d: Distribution, p: np.ndarray) -> np.ndarray:
    """The values below which shares p of the distribution lie, spread evenly over a sketch bin. NaN if it is empty."""
    return interval_quantiles(d.low, d.high, d.count, p)


def linear_histogram(distributions: list[Distribution], bins: int = 100, tails: float = 5e-5) -> pd.DataFrame:
    """Shares of values in equal bins, the same for every group: columns group, low, high, share (0 to 1), count.

    The axis leaves out a share `tails` at either end of the widest group, so that outliers do not flatten the rest.
    """
    distributions = [d for d in distributions if d.total]
    if not distributions:
        return pd.DataFrame(columns=["group", "low", "high", "share", "count"])
    ends = np.array([quantiles(d, np.array([tails, 1 - tails])) for d in distributions])
    low, high = ends[:, 0].min(), ends[:, 1].max()
    if low == high:  # for a single value, give the bar a width
        low, high = low - 0.5 * max(abs(low), 1e-30), high + 0.5 * max(abs(high), 1e-30)
    edges = np.linspace(low, high, bins + 1)
    tables = []
    for d in distributions:
        share = _shares(d, edges)
        table = pd.DataFrame({"group": d.group, "low": edges[:-1], "high": edges[1:], "share": share})
        tables.append(table.assign(count=share * d.total))
    return pd.concat(tables, ignore_index=True)


def _shares(d: Distribution, edges: np.ndarray) -> np.ndarray:
    """The share of values in each interval; a sketch bin that straddles an edge is split by length."""
    if d.exact:
        return np.histogram(d.low, edges, weights=d.count)[0] / d.total
    point = d.high <= d.low
    points = np.histogram(d.low[point], edges, weights=d.count[point])[0]
    low, high, count = d.low[~point], d.high[~point], d.count[~point]
    upto = np.cumsum(count)
    ends, below = np.stack([low, high], 1).reshape(-1), np.stack([upto - count, upto], 1).reshape(-1)
    spread = np.diff(np.interp(edges, ends, below)) if len(low) else 0.0
    return (points + spread) / d.total


# Where a binade is divided: a bin of a sketch ends there, so that counts of raw values are exact.
STEPS = 0.0, math.log2(1.5)
HALF = STEPS[1]
HALVES = 40  # binades of which the panel of the Map shows halves; of more, whole ones
MOST_BINS = 4000  # of all groups of a histogram in halves of binades; else it has whole ones


def edge(index: np.ndarray) -> np.ndarray:
    """log₂ of the magnitude at which the bin of this number begins: two bins per binade, 1 to 1.5 and 1.5 to 2."""
    whole, half = np.divmod(index, 2)
    return np.asarray(whole + np.array(STEPS)[np.asarray(half, int)])


def half_binades(low: np.ndarray, high: np.ndarray, count: np.ndarray) -> tuple[int, np.ndarray]:
    """(the number of the first bin of `edge`, the counts of the bins) of values between low and high, log₂ of their
    magnitudes. Values between the same two may be in several bins: they are spread evenly."""
    if not len(low):
        return 0, np.empty(0)
    edges, counts = merged(_index(low), _index(high), count.astype(float), 1)
    if not counts[-1]:  # the largest value ends a bin
        counts = counts[:-1]
    return int(edges[0]), counts


def _index(log2: np.ndarray) -> np.ndarray:
    """The number of the bin of a log₂, with a fraction."""
    whole = np.floor(log2)
    part = log2 - whole
    within = np.where(part < HALF, part / HALF, 1 + (part - HALF) / (1 - HALF))
    return np.asarray((2 * whole + within).round(9))


def magnitude_bins(d: Distribution) -> tuple[int, np.ndarray]:
    """(the number of the first bin of `edge`, the share of all values in each bin, per binade)."""
    nonzero = magnitudes(d)
    first, counts = half_binades(nonzero.low, nonzero.high, nonzero.count)
    widths = np.diff(edge(np.arange(first, first + len(counts) + 1)))
    return first, counts / max(d.total, 1) / widths


def log2_histogram(distributions: list[Distribution]) -> pd.DataFrame:
    """Shares of values by log₂ of their magnitude: columns group, low (log₂), share (of all values, per binade), high,
    count, with a last row of each group, at which its line ends. Bins are halves of binades, if these are not too many.
    Zeros have no logarithm and are left out."""
    found = [(d, first, shares) for d in distributions for first, shares in [magnitude_bins(d)] if len(shares)]
    whole = sum(len(shares) for _, _, shares in found) > MOST_BINS
    tables = []
    for d, first, shares in found:
        low = edge(np.arange(first, first + len(shares) + 1))
        if whole:
            padded = np.concatenate([[0.0] * (first % 2), shares, [0.0] * ((first + len(shares)) % 2)])
            shares = padded.reshape(-1, 2) @ np.array([HALF, 1 - HALF])
            low = first // 2 + np.arange(len(shares) + 1.0)
        width = np.diff(low, append=low[-1])
        table = pd.DataFrame({"group": d.group, "low": low, "share": np.append(shares, 0.0), "high": low + width})
        tables.append(table.assign(count=table["share"] * width * d.total))
    columns = ["group", "low", "share", "high", "count"]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame(columns=columns)


def bars(first: int, counts: np.ndarray, total: int) -> pd.DataFrame:
    """The bins of `half_binades` that have values: columns low, high (log₂), share (of `total` values, per binade),
    count."""
    kept = first + np.flatnonzero(counts)
    low, high = edge(kept), edge(kept + 1)
    held = counts[kept - first]
    return pd.DataFrame({"low": low, "high": high, "share": held / max(total, 1) / (high - low), "count": held})


def whole_binades(table: pd.DataFrame) -> pd.DataFrame:
    """`bars` in whole binades."""
    area = table["share"] * (table["high"] - table["low"])
    summed = table.assign(share=area).groupby(np.floor(table["low"]), sort=True)[["share", "count"]].sum()
    return summed.reset_index().assign(high=lambda whole: whole["low"] + 1)[["low", "high", "share", "count"]]


BOX_SHARES = np.array([0.0, 0.001, 0.25, 0.5, 0.75, 0.999, 1.0])


def boxes(distributions: list[Distribution]) -> pd.DataFrame:
    """Columns group, min, p0_1, q1, median, q3, p99_9, max: quartiles, and the 0.1% and 99.9% quantiles."""
    names = ["min", "p0_1", "q1", "median", "q3", "p99_9", "max"]
    rows = [
        {"group": d.group, **dict(zip(names, quantiles(d, BOX_SHARES), strict=True))} for d in distributions if d.total
    ]
    return pd.DataFrame(rows, columns=["group", *names])
