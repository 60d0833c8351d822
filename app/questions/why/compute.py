"""A tensor against a format's codebook, by channel and by token."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from binade.app.questions.shared.rounded import MAX_SIDE, Subject
from binade.quant.elements import Element

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
    """What becomes of the values: rows flushed, kept, saturated, zero, lost (NaN, Inf, or in a block that they took):
    columns zone, share of all values. The shares sum to 1."""
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
    return pd.DataFrame({"zone": [*counts], "share": [count / max(n, 1) for count in counts.values()]})


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
    """The largest magnitude of each cell of a grid over [tokens, channels], float32, at most rows × columns; NaN shows.

    Reads the tensor a strip at a time.
    """
    matrix = rows_by_channels(x.detach())
    if not matrix.numel():
        return np.zeros((0, 0), np.float32)
    height, width = (max(1, -(-n // most)) for n, most in zip(matrix.shape, (rows, columns), strict=True))
    strips = []
    for strip in torch.split(matrix, height):
        top = strip.abs().amax(0).float()
        short = -len(top) % width
        top = torch.nn.functional.pad(top, (0, short), value=0.0).reshape(-1, width).amax(-1)
        strips.append(top)
    return torch.stack(strips).numpy()


def channels(x: Tensor) -> pd.DataFrame:
    """absmax by channel (the last axis): columns channel, last (of the run that a row stands for), absmax.

    More than MAX_CHANNELS channels are taken together in runs, each by its largest.
    """
    matrix = rows_by_channels(x.detach())
    if not matrix.numel():
        return pd.DataFrame(columns=["channel", "last", "absmax"])
    strips = [strip.abs().amax(0).float() for strip in torch.split(matrix, max(1, (1 << 22) // matrix.shape[1]))]
    absmax = torch.stack(strips).amax(0)
    run = -(-len(absmax) // MAX_CHANNELS)
    padded = torch.nn.functional.pad(absmax, (0, -len(absmax) % run), value=0.0).reshape(-1, run).amax(-1)
    first = np.arange(len(padded)) * run
    last = np.minimum(first + run, len(absmax)) - 1
    return pd.DataFrame({"channel": first, "last": last, "absmax": padded.numpy().astype(np.float64)})
