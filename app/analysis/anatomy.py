"""One tensor, taken apart: against a format's codebook, by channel and token, by block and by code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from binade.quant.blocks import DENORMAL, SPECIAL, ZERO, Blocks, code_tiers, look, sample
from binade.quant.formats import FORMATS, Element

MAX_SIDE = 400  # pixels of a heatmap, each way
MAX_CHANNELS = 1000
WORST_BLOCKS = 50


@dataclass(frozen=True)
class Subject:
    """The part of a tensor that is looked at, rounded to a format. every: one line in so many; 1 is all of it."""

    blocks: Blocks
    every: int
    total: int

    @property
    def note(self) -> str:
        """Empty, or what was left out."""
        if self.every == 1:
            return ""
        held = int(self.blocks.valid.sum())
        return f"a sample: {held:,} of {self.total:,} values, one line of blocks in {self.every}"


def subject(x: Tensor, fmt: str, dim: int = -1, limit: int = 1 << 20, **options) -> Subject:
    """x rounded to a format, blocks along dim; of a tensor of more than `limit` values, a sample of whole lines."""
    part, every = sample(x, dim, limit)
    along = dim if every == 1 else -1
    return Subject(look(part, fmt, along, **options), every, x.numel())


# Against the codebook


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
    return np.log2(positive)


# By token and channel


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
    for strip in matrix.split(height):
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
    strips = [strip.abs().amax(0).float() for strip in matrix.split(max(1, (1 << 22) // matrix.shape[1]))]
    absmax = torch.stack(strips).amax(0)
    run = -(-len(absmax) // MAX_CHANNELS)
    padded = torch.nn.functional.pad(absmax, (0, -len(absmax) % run), value=0.0).reshape(-1, run).amax(-1)
    first = np.arange(len(padded)) * run
    last = np.minimum(first + run, len(absmax)) - 1
    return pd.DataFrame({"channel": first, "last": last, "absmax": padded.numpy().astype(np.float64)})


# By block


BLOCK_METRICS = ("sqnr_db", "flush_to_zero", "saturated", "scale_exponents")


def block_table(found: Subject) -> pd.DataFrame:
    """Every block: columns block (its number), absmax, sqnr_db, flush_to_zero, saturated, scale_exponent."""
    blocks = found.blocks
    return pd.DataFrame(
        {
            "block": np.arange(len(blocks.x)),
            "absmax": blocks.x.abs().amax(-1).double().numpy(),
            "sqnr_db": blocks.sqnr_db.numpy(),
            "flush_to_zero": blocks.flush_to_zero.numpy(),
            "saturated": blocks.saturated.numpy(),
            "scale_exponent": blocks.scale_exponents.numpy(),
        }
    )


def worst_blocks(table: pd.DataFrame, metric: str, n: int = WORST_BLOCKS) -> pd.DataFrame:
    """The n worst of a `block_table` by sqnr_db, flush_to_zero or saturated; all-zero blocks have nothing to lose."""
    return table.dropna(subset=[metric]).sort_values(metric, ascending=metric == "sqnr_db", kind="stable").head(n)


def block_grid(values: np.ndarray, per_line: int, worst: str = "min", side: int = MAX_SIDE) -> np.ndarray:
    """A value a block as a picture [lines, blocks along the contracted axis], thinned to `side` by the worst of each
    cell; where the blocks of a line are few, lines stand beside each other. NaN where a cell has no value."""
    grid = values.reshape(-1, per_line)
    take = np.fmin if worst == "min" else np.fmax
    for axis in (0, 1):
        step = -(-grid.shape[axis] // side)
        if step > 1:
            grid = take.reduceat(grid, np.arange(0, grid.shape[axis], step), axis=axis)
    return grid


def scale_histogram(table: pd.DataFrame) -> pd.DataFrame:
    """How often each scale exponent occurs, of a `block_table`: columns exponent, blocks, share."""
    counts = table["scale_exponent"].dropna().astype(int).value_counts().sort_index()
    return pd.DataFrame({"exponent": counts.index, "blocks": counts.to_numpy(), "share": counts / max(counts.sum(), 1)})


def block_values(found: Subject, block: int) -> pd.DataFrame:
    """One block, a row a value: columns index, value, code (its number), bits, code_value, dequantized, error."""
    blocks = found.blocks
    keep = blocks.valid[block]
    x, y = blocks.x[block][keep].double().numpy(), blocks.y[block][keep].double().numpy()
    codes = blocks.codes[block][keep].numpy()
    width = blocks.plan.format.element.bits
    return pd.DataFrame(
        {
            "index": np.arange(len(x)),
            "value": x,
            "code": codes,
            "bits": [f"{code:0{width}b}" for code in codes],
            "code_value": blocks.values[block][keep].double().numpy(),
            "dequantized": y,
            "error": y - x,
        }
    )


# By code


def codes(found: Subject) -> pd.DataFrame:
    """Every code of the format: columns code, value, tier, count, share; in order of value, −0 before 0, Inf and NaN
    last. Blocks that NaN or Inf took have none. Of a 16-bit format only the codes that occur."""
    blocks = found.blocks
    element = blocks.plan.format.element
    used = blocks.valid & blocks.y.isfinite()
    counts = torch.bincount(blocks.codes[used], minlength=1 << element.bits).numpy()
    values = [element.values[code] for code in range(1 << element.bits)]
    table = pd.DataFrame({"code": range(len(values)), "value": values, "tier": code_tiers(element), "count": counts})
    if element.bits > 8:
        table = table[table["count"] > 0]
    table = table.assign(share=table["count"] / max(table["count"].sum(), 1))
    order = np.lexsort((~np.signbit(table["value"]), table["value"]))
    return table.iloc[order].reset_index(drop=True)


def tiers(table: pd.DataFrame) -> pd.DataFrame:
    """A `codes` table by tier, widest mantissa first: columns tier, codes (in the format), used, share (of values)."""
    found = table.groupby("tier", sort=False).agg(
        codes=("code", "size"), used=("count", lambda counts: int((counts > 0).sum())), share=("share", "sum")
    )
    last = {DENORMAL: 97, ZERO: 98, SPECIAL: 99}
    rank = {tier: last.get(tier) or -int(tier.split()[0]) for tier in found.index}
    return found.reset_index().sort_values("tier", key=lambda names: names.map(rank), ignore_index=True)


def entropy_bits(table: pd.DataFrame) -> float:
    """−Σp·log2 p over the codes of a `codes` table."""
    p = table.loc[table["count"] > 0, "share"].to_numpy()
    return max(0.0, float(-(p * np.log2(p)).sum())) if len(p) else math.nan


def blocks_per_line(shape: tuple[int, ...], dim: int, fmt: str, block_size: int | None = None) -> int:
    """How many blocks lie along the contracted axis."""
    axis = shape[dim] if shape else 1
    return max(1, -(-axis // (block_size or FORMATS[fmt].block_size or 32)))
