"""A tensor against a format's codebook, by column and by row, which are channels and tokens of most tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor

from binade.app.questions.shared.distributions import bars, half_binades
from binade.app.questions.shared.rounded import MAX_SIDE, Subject
from binade.app.view.params import Interval
from binade.quant.elements import Element
from binade.quant.error_causes import CAUSES, ErrorCauses, ScaleCost
from binade.quant.statistics import cell_absmax

MAX_CHANNELS = 1000


def zone_edges(element: Element, rounding: str) -> tuple[float, float]:
    """(log2 of the magnitude below which a value becomes 0, log2 of that above which it is clipped), x over its scale.

    Half the smallest code; a tie goes to zero when ties go to even. Stochastic rounding keeps some from below.
    """
    return math.log2(element.smallest / 2), math.log2(element.max)


def codebook_histogram(subject: Subject, of: Tensor | None = None) -> pd.DataFrame:
    """The magnitudes over their scale by log2: `distributions.bars`, of all values. Zeros have none.

    of: [groups, block] bool, those of the values that are counted; by default all."""
    magnitudes = subject.blocks.magnitudes[subject.blocks.valid if of is None else of]
    log2 = np.log2(magnitudes[magnitudes > 0].numpy().astype(np.float64))
    return bars(*half_binades(log2, log2, np.ones(len(log2))), total=len(magnitudes))


def zones(subject: Subject, of: Tensor | None = None) -> pd.DataFrame:
    """The values by outcome: columns zone, share (of all values; they sum to 1) and of_nonzero (of the nonzero finite
    values). The zones are flushed, kept, saturated, zero and lost (NaN, Inf, or in a block with one). of: as above."""
    blocks = subject.blocks
    counted = blocks.valid if of is None else of
    n = int(counted.sum())
    lost = counted & ~(blocks.x.isfinite() & blocks.y.isfinite())
    zero = counted & (blocks.x == 0) & ~lost
    flushed = counted & (blocks.x != 0) & (blocks.y == 0) & ~lost
    saturated = counted & blocks.clipped & ~flushed & ~lost  # flushed: where even the scaled-back value underflows
    counts = {
        "flushed": int(flushed.sum()),
        "saturated": int(saturated.sum()),
        "zero": int(zero.sum()),
        "lost": int(lost.sum()),
    }
    counts["kept"] = n - sum(counts.values())
    nonzero = int((counted & (blocks.x != 0) & blocks.x.isfinite()).sum())
    shares = {
        name: [count / max(of, 1) for count in counts.values()] for name, of in (("share", n), ("of_nonzero", nonzero))
    }
    return pd.DataFrame({"zone": [*counts], **shares})


def error_by_binade(causes: ErrorCauses, clip: float) -> pd.DataFrame:
    """Shares of the squared error by binade and cause: columns low, high (log2 of |value / scale|), cause, share, and
    from and to, between which an area of this share stands over low to high. clip: log2 of the largest code, from where
    on values are saturated, and up to which others have the error of the grid."""
    rows = []
    for binade, shares in zip(causes.binades.tolist(), causes.by_binade.tolist(), strict=True):
        divided, start = binade < clip < binade + 1, 0.0
        ends = {"saturated": (clip, binade + 1), "grid": (binade, clip)} if divided else {}
        for cause, share in zip(CAUSES, shares, strict=True):
            if share:
                low, high = ends.get(cause, (binade, binade + 1))
                place = {"low": low, "high": high, "cause": cause, "share": share}
                rows.append(place | {"from": start, "to": start + share / (high - low)})
            start = 0.0 if divided else start + share
    return pd.DataFrame(rows, columns=["low", "high", "cause", "share", "from", "to"])


def decomposition(cost: ScaleCost) -> pd.DataFrame:
    """What the rounding of scales costs: columns part, share (of the squared error), percent, meaning."""
    rows = [
        ("scale", cost.scale, "‖Q − Q*‖²"),
        ("dead zone", cost.dead_zone, "‖Q* − x‖² where Q* is 0"),
        ("grid", cost.grid, "‖Q* − x‖² elsewhere"),
        ("scale with dead zone", cost.scale_and_dead_zone, "2 ⟨scale, dead zone⟩"),
        ("scale with grid", cost.scale_and_grid, "2 ⟨scale, grid⟩"),
    ]
    table = pd.DataFrame(rows, columns=["part", "share", "meaning"])
    return table.assign(percent=table["share"] * 100)


def code_magnitudes(element: Element) -> np.ndarray:
    """log2 of the distinct positive finite codes, ascending; of a 16-bit element only its powers of two."""
    positive = np.array([v for v in element.finite_values if v > 0])
    if element.bits > 8:
        positive = positive[np.frexp(positive)[0] == 0.5]
    result: np.ndarray = np.log2(positive)
    return result


def rows_by_channels(x: Tensor) -> Tensor:
    """[rows, columns]: the last axis is that of the columns. `axes.Axes` says what they are."""
    return x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)


def pooled(x: Tensor, rows: int = MAX_SIDE, columns: int = MAX_SIDE) -> np.ndarray:
    """The largest magnitude of each cell of a grid over [rows, columns], float32, at most rows × columns; NaN
    shows."""
    matrix = rows_by_channels(x.detach())
    if not matrix.numel():
        return np.zeros((0, 0), np.float32)
    height, width = cell_of(matrix.shape, (rows, columns))
    return cell_absmax(matrix, height, width).numpy()


def channels(x: Tensor) -> pd.DataFrame:
    """absmax by channel (the last axis): columns channel, last (of the run that a row stands for), absmax.

    If there are more than MAX_CHANNELS channels, runs of neighbors are combined, each by its largest.
    """
    matrix = rows_by_channels(x.detach())
    if not matrix.numel():
        return pd.DataFrame(columns=["channel", "last", "absmax"])
    bars = channel_bars(matrix.shape[1])
    absmax = cell_absmax(matrix, matrix.shape[0], run_of(matrix.shape[1]))[0]
    return bars.assign(absmax=absmax.numpy().astype(np.float64))


def run_of(count: int) -> int:
    """How many of so many channels a bar stands for."""
    return max(1, -(-count // MAX_CHANNELS))


def channel_bars(count: int) -> pd.DataFrame:
    """The bars for so many channels: columns channel, last."""
    first = np.arange(0, count, run_of(count))
    return pd.DataFrame({"channel": first, "last": np.minimum(first + run_of(count), count) - 1})


def cell_of(shape: Sequence[int], most: tuple[int, int] = (MAX_SIDE, MAX_SIDE)) -> tuple[int, int]:
    """Rows and columns of a matrix of this shape that a cell of a grid of at most so many cells stands for."""
    height, width = (max(1, -(-n // m)) for n, m in zip(shape, most, strict=True))
    return height, width


def taken(shape: Sequence[int]) -> str:
    """What a cell of `pooled` shows of a matrix of this shape, in words."""
    height, width = cell_of(shape)
    return f"each cell is the largest of {height} × {width} values" if max(height, width) > 1 else "one cell per value"


@dataclass(frozen=True)
class Held:
    """Where the values of a range are. All counts are of the examined part of the tensor; tensors are [groups, block].

    inside                     whether a value lies in the range
    token, channel             of each value
    values, of_values          how many lie in it, and of how many; zeros and values that are not finite never do
    channels, tokens, blocks   how many of these hold such a value: (count, of how many)
    squares                    their share of the sum of squares; NaN if that is 0
    """

    found: Subject
    inside: Tensor
    token: Tensor
    channel: Tensor

    @property
    def values(self) -> int:
        return int(self.inside.sum())

    @property
    def of_values(self) -> int:
        return int(self.found.blocks.valid.sum())

    @property
    def channels(self) -> tuple[int, int]:
        return self._distinct(self.channel)

    @property
    def tokens(self) -> tuple[int, int]:
        return self._distinct(self.token)

    @property
    def blocks(self) -> tuple[int, int]:
        return int(self.inside.any(-1).sum()), int(self.found.blocks.valid.any(-1).sum())

    def _distinct(self, index: Tensor) -> tuple[int, int]:
        held, of = (len(np.unique(index[mask].numpy())) for mask in (self.inside, self.found.blocks.valid))
        return held, of

    @property
    def squares(self) -> float:
        x = self.found.blocks.x[self.inside].double()
        signal = self.found.blocks.sums.signal
        return float(x @ x) / signal if signal else math.nan

    def by_channel(self, count: int) -> pd.DataFrame:
        """Columns channel, last, values (of the range), of (all that are examined), for each bar with such."""
        bars, run = channel_bars(count), run_of(count)
        values, of = (_counts(self.channel[mask] // run, len(bars)) for mask in (self.inside, self.found.blocks.valid))
        return bars.assign(values=values, of=of)[of > 0].reset_index(drop=True)

    def by_cell(self, shape: tuple[int, int]) -> np.ndarray:
        """The share of each cell's values that lie in the range, in the grid of `pooled`; NaN for a cell without
        examined values."""
        height, width = cell_of(shape)
        rows, columns = -(-shape[0] // height), -(-shape[1] // width)
        cell = self.token // height * columns + self.channel // width
        values, of = (_counts(cell[mask], rows * columns) for mask in (self.inside, self.found.blocks.valid))
        share: np.ndarray = np.where(of > 0, values / np.maximum(of, 1), math.nan).reshape(rows, columns)
        return share


def _counts(index: Tensor, size: int) -> np.ndarray:
    counts: np.ndarray = np.bincount(index.numpy(), minlength=size)
    return counts


def held(subject: Subject, interval: Interval, token: Tensor, channel: Tensor) -> Held:
    """Where the values are whose log2 |value / scale| lies in an interval."""
    log2 = subject.blocks.magnitudes.log2()
    return Held(subject, (log2 >= interval.low) & (log2 < interval.high), token, channel)
