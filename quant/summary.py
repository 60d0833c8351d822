"""One pass over a tensor: its moments, counts and binade sketch.

The *binade sketch* counts values by the top 12 bits of their IEEE binary32 form: sign, 8 exponent bits, 3 mantissa
bits. So a bin is an eighth of a binade, every power of two and every format's range limit lies on an edge, counts are
exact, and two sketches merge by addition. For bfloat16 the pass is a histogram of its 65,536 codes, from which all else
follows exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BINS = 1 << 12
INFINITY_BIN = 0xFF << 3  # the top 12 bits of +Inf; NaN shares the exponent
SIGN_BIN = 1 << 11
CHUNK = 1 << 20


@dataclass(frozen=True)
class Summary:
    """What is known of a tensor without keeping it.

    Moments are over the finite elements, summed in float64; std is the population's. absmin is the smallest nonzero
    magnitude. kurtosis is E(x-mean)^4 / std^4 (3 for a normal), not the excess. Where there is nothing to compute from
    (no finite element, no spread) the value is NaN. `bins` and `counts` are the sketch's nonempty bins, finite
    elements only.
    """

    numel: int
    min: float
    max: float
    mean: float
    std: float
    rms: float
    absmax: float
    absmin: float
    skewness: float
    kurtosis: float
    zeros: int
    nans: int
    infs: int
    bins: np.ndarray
    counts: np.ndarray

    @property
    def crest_factor(self) -> float:
        """absmax / rms."""
        return self.absmax / self.rms if self.rms else math.nan

    @property
    def dynamic_range(self) -> float:
        """log2(absmax / absmin), in binades."""
        return math.log2(self.absmax / self.absmin) if self.absmax > 0 else math.nan


def summarize(x: Tensor) -> Summary:
    """Moments, counts and the binade sketch of a float32, bfloat16 or float16 tensor of any shape and device.

    Raises TypeError for another dtype.
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"dtype {str(x.dtype).removeprefix('torch.')} cannot be summarized: float32, bfloat16, float16")
    x = x.detach().reshape(-1)
    if x.dtype == torch.bfloat16:
        return _from_codes(x)
    return _from_values(x)


def _histogram(codes: Tensor, size: int) -> np.ndarray:
    """Counts of int32 codes in [0, size), int64."""
    return torch.bincount(codes, minlength=size).cpu().numpy()


def _from_codes(x: Tensor) -> Summary:
    counts = np.zeros(1 << 16, np.int64)
    for chunk in x.split(CHUNK):
        counts += _histogram(chunk.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF, 1 << 16)
    used = counts.nonzero()[0]
    values = (used.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return _from_counts(values, counts[used], sketch=(used >> 4, counts[used]))


def _from_counts(values: np.ndarray, counts: np.ndarray, sketch: tuple[np.ndarray, np.ndarray]) -> Summary:
    """Everything, from distinct values (float64) and how often each occurs."""
    finite = np.isfinite(values)
    sketch = (sketch[0][finite], sketch[1][finite])
    nans = int(counts[np.isnan(values)].sum())
    infs = int(counts[np.isinf(values)].sum())
    total = int(counts.sum())
    values, counts = values[finite], counts[finite]
    n = int(counts.sum())
    zeros = int(counts[values == 0].sum())
    nonzero = np.abs(values[values != 0])
    if n:
        mean = float(counts @ values / n)
        powers = _central(counts, values - mean, n)
        rms = math.sqrt(counts @ values**2 / n)
    else:
        mean, powers, rms = math.nan, (math.nan,) * 3, math.nan
    return _summary(
        numel=total,
        low=float(values.min()) if n else math.nan,
        high=float(values.max()) if n else math.nan,
        absmin=float(nonzero.min()) if nonzero.size else math.nan,
        mean=mean,
        rms=rms,
        central=powers,
        zeros=zeros,
        nans=nans,
        infs=infs,
        sketch=sketch,
    )


def _central(counts: np.ndarray, d: np.ndarray, n: int) -> tuple[float, float, float]:
    square = d * d
    return counts @ square / n, counts @ (square * d) / n, counts @ (square * square) / n


def _summary(*, numel, low, high, absmin, mean, rms, central, zeros, nans, infs, sketch) -> Summary:
    second, third, fourth = central
    bins, inverse = np.unique(sketch[0], return_inverse=True)
    merged = np.zeros(len(bins), np.int64)
    np.add.at(merged, inverse, sketch[1])
    spread = second > 0
    return Summary(
        numel=numel,
        min=low,
        max=high,
        mean=mean,
        std=math.sqrt(second) if second == second else math.nan,
        rms=rms,
        absmax=max(abs(low), abs(high)) if low == low else math.nan,
        absmin=absmin,
        skewness=float(third / second**1.5) if spread else math.nan,
        kurtosis=float(fourth / second**2) if spread else math.nan,
        zeros=zeros,
        nans=nans,
        infs=infs,
        bins=bins.astype(np.int16),
        counts=merged,
    )


def _from_values(x: Tensor) -> Summary:
    counts = np.zeros(BINS, np.int64)
    sums = np.zeros(4)
    nans = infs = zeros = 0
    low, high, absmin = math.inf, -math.inf, math.inf
    shift = 0.0  # moments are taken about a first guess of the mean, so that they do not cancel
    for index, chunk in enumerate(x.split(CHUNK)):
        chunk = chunk.contiguous().float()
        bins = (chunk.view(torch.int32) >> 20) & (BINS - 1)
        part = _histogram(bins, BINS)
        if part[INFINITY_BIN:SIGN_BIN].any() or part[SIGN_BIN + INFINITY_BIN :].any():
            nans += int(chunk.isnan().sum())
            infs += int(chunk.isinf().sum())
            chunk = chunk[chunk.isfinite()]
            part[INFINITY_BIN:SIGN_BIN] = 0
            part[SIGN_BIN + INFINITY_BIN :] = 0
        counts += part
        if not chunk.numel():
            continue
        smallest, largest = (float(v) for v in torch.aminmax(chunk))
        low, high = min(low, smallest), max(high, largest)
        magnitude = chunk.abs()
        if part[0] or part[SIGN_BIN]:  # zeros and tiny subnormals share the first bin
            zeros += int((chunk == 0).sum())
            magnitude = torch.where(magnitude == 0, torch.inf, magnitude)
        absmin = min(absmin, float(magnitude.amin()))
        wide = chunk.double()
        if index == 0:
            shift = float(wide.mean())
        wide = wide - shift
        square = wide * wide
        sums += [float(wide.sum()), float(square.sum()), float(square @ wide), float(square @ square)]
    n = int(counts.sum())
    used = counts.nonzero()[0]
    if n:
        s1, s2, s3, s4 = sums / n
        mean = shift + s1
        central = (s2 - s1**2, s3 - 3 * s1 * s2 + 2 * s1**3, s4 - 4 * s1 * s3 + 6 * s1**2 * s2 - 3 * s1**4)
        rms = math.sqrt(max(s2 + 2 * shift * s1 + shift**2, 0.0))
    else:
        mean, central, rms = math.nan, (math.nan,) * 3, math.nan
    return _summary(
        numel=x.numel(),
        low=low if n else math.nan,
        high=high if n else math.nan,
        absmin=absmin if absmin < math.inf else math.nan,
        mean=mean,
        rms=rms,
        central=(max(central[0], 0.0), *central[1:]) if n else central,
        zeros=zeros,
        nans=nans,
        infs=infs,
        sketch=(used, counts[used]),
    )


def bin_edges(bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The interval of each bin as float64 (low, high): low <= value < high for positive bins, low < value <= high for
    negative ones; the bin of zero holds ±0 and the smallest subnormals."""
    bins = np.asarray(bins, dtype=np.int64)
    magnitude = (bins & (SIGN_BIN - 1)).astype(np.uint32)
    inner = (magnitude << 20).view(np.float32).astype(np.float64)
    next_up = magnitude + 1
    edge = (np.minimum(next_up, INFINITY_BIN - 1).astype(np.uint32) << 20).view(np.float32).astype(np.float64)
    outer = np.where(next_up >= INFINITY_BIN, 2.0**128, edge)
    negative = bins >= SIGN_BIN
    return np.where(negative, -outer, inner), np.where(negative, -inner, outer)
