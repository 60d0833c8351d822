"""A tensor against a format's codebook, by channel and by token."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from torch import Tensor

from binade.app.questions.shared.rounded import MAX_SIDE, Subject
from binade.quant.elements import Element
from binade.quant.metrics import cell_absmax

MAX_CHANNELS = 1000


def zone_edges(element: Element, rounding: str) -> tuple[float, float]:
    """(log2 of the magnitude below which a value becomes 0, log2 of that above which it is clipped), x over its scale.

    Half the smallest code; a tie goes to zero when ties go to even. Stochastic rounding keeps some from below.
    """
    return math.log2(element.smallest / 2), math.log2(element.max)


def codebook_histogram(found: Subject) -> pd.DataFrame:
    """The magnitudes over their scale by log2: columns low, high, share (of all values, per binade). Zeros left out.

    Eighths of a binade; whole binades where that would be more than 1,000 bars.
    """
    magnitudes = found.blocks.magnitudes.reshape(-1)
    values = magnitudes[magnitudes > 0].numpy()
    total = int(found.blocks.valid.sum())
    if not len(values):
        return pd.DataFrame(columns=["low", "high", "share"])
    mantissa, exponent = np.frexp(values)
    parts = 8 if exponent.max() - exponent.min() < 125 else 1
    place = (exponent.astype(np.int64) - 1) * parts + np.floor((2 * mantissa - 1) * parts).astype(np.int64)
    bins, counts = np.unique(place, return_counts=True)
    low = bins // parts + np.log2(1 + bins % parts / parts)
    high = bins // parts + np.log2(1 + (bins % parts + 1) / parts)
    return pd.DataFrame({"low": low, "high": high, "share": counts / total / (high - low)})


def zones(found: Subject) -> pd.DataFrame:
    """The values by outcome: columns zone, share (of all values; they sum to 1) and of_nonzero (of the nonzero finite
    values). The zones are flushed, kept, saturated, zero and lost (NaN, Inf, or in a block with one)."""
    blocks = found.blocks
    n = int(blocks.valid.sum())
    lost = blocks.valid & ~(blocks.x.isfinite() & blocks.y.isfinite())
    zero = blocks.valid & (blocks.x == 0) & ~lost
    flushed = blocks.valid & (blocks.x != 0) & (blocks.y == 0) & ~lost
    saturated = blocks.clipped & ~flushed & ~lost  # where even the scaled-back value underflows, it is flushed
    counts = {
        "flushed": int(flushed.sum()),
        "saturated": int(saturated.sum()),
        "zero": int(zero.sum()),
        "lost": int(lost.sum()),
    }
    counts["kept"] = n - sum(counts.values())
    nonzero = int((blocks.valid & (blocks.x != 0) & blocks.x.isfinite()).sum())
    shares = {
        name: [count / max(of, 1) for count in counts.values()] for name, of in (("share", n), ("of_nonzero", nonzero))
    }
    return pd.DataFrame({"zone": [*counts], **shares})


def code_magnitudes(element: Element) -> np.ndarray:
    """log2 of the distinct positive finite codes, ascending; of a 16-bit element only its powers of two."""
    positive = np.array([v for v in element.finite_values if v > 0])
    if element.bits > 8:
        positive = positive[np.frexp(positive)[0] == 0.5]
    result: np.ndarray = np.log2(positive)
    return result


def rows_by_channels(x: Tensor) -> Tensor:
    """[tokens, channels]: the last axis is the channel."""
    return x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)


def pooled(x: Tensor, rows: int = MAX_SIDE, columns: int = MAX_SIDE) -> np.ndarray:
    """The largest magnitude of each cell of a grid over [tokens, channels], float32, at most rows × columns; NaN
    shows."""
    matrix = rows_by_channels(x.detach())
    if not matrix.numel():
        return np.zeros((0, 0), np.float32)
    height, width = (max(1, -(-n // most)) for n, most in zip(matrix.shape, (rows, columns), strict=True))
    return cell_absmax(matrix, height, width).numpy()


def channels(x: Tensor) -> pd.DataFrame:
    """absmax by channel (the last axis): columns channel, last (of the run that a row stands for), absmax.

    If there are more than MAX_CHANNELS channels, runs of neighbors are combined, each by its largest.
    """
    matrix = rows_by_channels(x.detach())
    if not matrix.numel():
        return pd.DataFrame(columns=["channel", "last", "absmax"])
    rows, count = matrix.shape
    run = -(-count // MAX_CHANNELS)
    absmax = cell_absmax(matrix, rows, run)[0]
    first = np.arange(len(absmax)) * run
    last = np.minimum(first + run, count) - 1
    return pd.DataFrame({"channel": first, "last": last, "absmax": absmax.numpy().astype(np.float64)})
