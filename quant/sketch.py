"""The binade sketch: counts of values by the top 12 bits of their IEEE binary32 form, and statistics that can be
computed from them.

A bin is a sign, an exponent and 3 mantissa bits: an eighth of a binade. Every power of two lies on an edge, and so
do the range limits of all formats except the largest values of bf16, fp16 and MXINT8. Counts are exact, and sketches
merge by addition. The place of a value within its bin is unknown, so a result has the width of a bin as its error: at
most an eighth of the value's magnitude (2^-129 for float32's subnormals). Each function states its own bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

BINS = 1 << 12
INFINITY_BIN = 0xFF << 3  # the top 12 bits of +Inf; NaN shares the exponent
SIGN_BIN = 1 << 11


def bin_edges(bins: np.ndarray, bits: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """The interval of each bin as float64 (low, high): low <= value < high for positive bins, low < value <= high for
    negative ones; the bin of zero holds 0 and the smallest subnormals. bits: how many of the top bits a bin is."""
    bins = np.asarray(bins, dtype=np.int64)
    sign, infinity = 1 << (bits - 1), 0xFF << (bits - 9)
    magnitude = (bins & (sign - 1)).astype(np.uint32)
    finite = np.minimum(magnitude + 1, infinity - 1).astype(np.uint32)
    with np.errstate(invalid="ignore"):  # NaN
        inner, edge = ((pattern << (32 - bits)).view(np.float32).astype(np.float64) for pattern in (magnitude, finite))
    outer = np.where(magnitude + 1 >= infinity, 2.0**128, edge)
    negative = bins >= sign
    return np.where(negative, -outer, inner), np.where(negative, -inner, outer)


@dataclass(frozen=True)
class Sketch:
    """Nonempty bins in ascending order of value, and their counts (int64). Built from any order of bins."""

    bins: np.ndarray
    counts: np.ndarray

    def __post_init__(self) -> None:
        bins, counts = np.asarray(self.bins, np.int64), np.asarray(self.counts, np.int64)
        if bins.shape != counts.shape or bins.ndim != 1:
            raise ValueError(
                f"bins have shape {bins.shape}, counts {counts.shape}: expected one axis and the same length"
            )
        order = np.argsort(np.where(bins >= SIGN_BIN, SIGN_BIN - 1 - bins, bins))
        kept = order[counts[order] > 0]
        object.__setattr__(self, "bins", bins[kept])
        object.__setattr__(self, "counts", counts[kept])

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Low and high of each bin, float64."""
        return bin_edges(self.bins)


def merge(sketches: Iterable[Sketch]) -> Sketch:
    """The sketch of the combined values."""
    counts = np.zeros(BINS, np.int64)
    for sketch in sketches:
        counts[sketch.bins] += sketch.counts
    used = counts.nonzero()[0]
    return Sketch(used, counts[used])


def quantiles(sketch: Sketch, p: np.ndarray | float) -> np.ndarray:
    """Quantiles at probabilities p in [0, 1], float64, of p's shape; NaN for an empty sketch.

    The p-quantile is the smallest value v of the sample with #(values <= v) >= p·n (numpy's "inverted_cdf"). The
    result lies in v's own bin, values taken as spread evenly over it: |result - v| <= max(|v| / 8, 2^-129).

    Raises ValueError for p outside [0, 1].
    """
    return interval_quantiles(*sketch.edges, sketch.counts, p)


def interval_quantiles(low: np.ndarray, high: np.ndarray, counts: np.ndarray, p: np.ndarray | float) -> np.ndarray:
    """As `quantiles`, for counts of values in any ascending intervals; exact where low equals high.

    Raises ValueError for p outside [0, 1].
    """
    p = np.asarray(p, np.float64)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"probabilities must be from 0 to 1, not {p[~((p >= 0) & (p <= 1))].flat[0]}")
    upto = np.cumsum(counts)
    total = int(upto[-1]) if len(upto) else 0
    if not total:
        return np.full(p.shape, np.nan)
    rank = p * total  # of the value to find; p = 0 is the low end of the first interval, p = 1 the high end of the last
    at = np.searchsorted(upto, np.maximum(np.ceil(rank - 1e-9 * rank), 1.0))
    share = np.clip((rank - (upto[at] - counts[at])) / counts[at], 0.0, 1.0)
    values: np.ndarray = low[at] + share * (high[at] - low[at])
    return values


def _shared(a: Sketch, b: Sketch) -> tuple[Sketch, np.ndarray, np.ndarray]:
    """The bins of both, and the share of each sample in them. -0 equals 0: the two bins at zero are taken as one."""
    rows = np.zeros((2, BINS), np.int64)
    for row, sketch in zip(rows, (a, b), strict=True):
        row[sketch.bins] = sketch.counts
    rows[:, 0] += rows[:, SIGN_BIN]
    rows[:, SIGN_BIN] = 0
    used = np.flatnonzero(rows.any(0))
    both = Sketch(used, rows[:, used].sum(0))
    return both, rows[0, both.bins] / a.total, rows[1, both.bins] / b.total


def ks(a: Sketch, b: Sketch) -> float:
    """Kolmogorov-Smirnov distance sup|F - G| over the bins' edges; NaN if either is empty.

    Never above the samples' own distance, and below it by no more than the largest share that a bin holds of either
    (the two bins at zero taken as one).
    """
    if not (a.total and b.total):
        return np.nan
    _, f, g = _shared(a, b)
    return float(np.abs(np.cumsum(f - g)).max())


def wasserstein(a: Sketch, b: Sketch) -> float:
    """Earth mover's distance ∫|F⁻¹ - G⁻¹| in the values' unit, each value moved to its bin's middle; NaN if either is
    empty. The error is at most (mean|x| + mean|y|) / 16 (2^-129 more where there are float32 subnormals)."""
    if not (a.total and b.total):
        return np.nan
    both, f, g = _shared(a, b)
    low, high = both.edges
    middle = low + (high - low) / 2
    return float((np.abs(np.cumsum(f - g))[:-1] * np.diff(middle)).sum())


def js(a: Sketch, b: Sketch) -> float:
    """Jensen-Shannon divergence on the shared bins, base 2: 0 (equal) to 1 (disjoint); NaN if either is empty."""
    if not (a.total and b.total):
        return np.nan
    _, f, g = _shared(a, b)
    middle = (f + g) / 2
    total = 0.0
    for share in (f, g):
        used = share > 0
        total += float((share[used] * np.log2(share[used] / middle[used])).sum()) / 2
    return min(max(total, 0.0), 1.0)
