"""Data for following a tensor over iterations: its hot channels, and a few of its values before and after rounding.
Both are small and depend on a single iteration, so that recording keeps no state between iterations.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from binade.quant.elements import Element
from binade.quant.later import Later, LaterPart
from binade.quant.quantizer import apply, outer_absmax
from binade.quant.specs import Spec
from binade.quant.statistics import channel_absmax
from binade.quant.transform import untransformed

SAMPLE = 512  # values that are kept of a tensor
EDGE_SAMPLE = 8192  # values that the share at the edge of a bin is counted of
CHANCE_SAMPLE, CHANCE_COLUMNS = 1 << 16, 1 << 10  # values that the share by chance is counted of, and their longest row
EDGE = 0.495  # of a bin's width, from its code
HOT_LEAST, HOT_MOST = 8, 64  # hot channels


def hot_count(channels: int) -> int:
    """The number of hot channels: one channel in 100, but at least 8, at most 64 and never more than a quarter of
    them."""
    return min(max(HOT_LEAST, channels // 100), HOT_MOST, channels // 4)


def hot_channels_later(x: Tensor) -> Later[tuple[np.ndarray, float]]:
    """The `hot_count` channels (indices of the last axis) of x [..., channels] with the largest absmax, the hottest
    first, and of equal ones the one with the lower index first; and the largest absmax divided by the median channel's.

    Channels that hold NaN or Inf or nothing but zeros are not among them. The ratio is NaN where the median is 0.
    """
    absmax = channel_absmax(x) if x.dim() > 1 and x.numel() else torch.zeros(0, dtype=torch.float32, device="cpu")
    absmax = torch.where(absmax.isfinite(), absmax, 0.0)
    values, order = absmax.sort(descending=True, stable=True)

    def hottest(values: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, float]:
        largest = values.astype(np.float64)
        channels = order[largest[: len(order)] > 0]
        median = float(np.median(largest)) if len(largest) else 0.0
        return channels.astype(np.int32), float(largest[0]) / median if median else math.nan

    return Later(hottest, LaterPart(values), LaterPart(order[: hot_count(len(order))]))


def positions(numel: int, count: int) -> np.ndarray:
    """At most `count` places in a flattened tensor of `numel` values, ascending, the same at every call: all of them,
    or those of a Weyl sequence (multiples of the golden ratio), which spreads over rows and columns alike."""
    if numel <= count:
        return np.arange(numel)
    turns = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B9) % np.uint64(1 << 32)
    return np.unique(turns * np.uint64(numel) >> np.uint64(32)).astype(np.int64)


@lru_cache(maxsize=64)
def _places(numel: int, count: int, device: torch.device) -> Tensor:
    """`positions` on a device: copied once, as a copy may wait for a GPU."""
    return torch.from_numpy(positions(numel, count)).to(device)


@dataclass(frozen=True)
class Sample:
    """
    values, rounded   float32, at `positions(numel, SAMPLE)`: before and after rounding; in rotated space
                      for a spec with a rotation
    at_bin_edge       of `positions(numel, EDGE_SAMPLE)`, the share of values v·scale, rounded to c·scale, with |v - c|
                      > 0.495 · width, where c's bin of that width reaches halfway to either neighbor (of the outermost
                      codes: as far out as in). TetraJet-v2, `oscillation_reset.py`. A value beyond the outermost codes
                      is clipped, not at an edge. NaN where rounding is stochastic, or the values of a block have
                      different scales
    """

    values: np.ndarray
    rounded: np.ndarray
    at_bin_edge: float


def sample_later(
    x: Tensor, q: Tensor, spec: Spec, scales: Tensor | None, dim: int, absmax: Tensor | None = None
) -> Later[Sample] | None:
    """A sample of x, which was rounded to q along `dim`; both are coded if the spec transforms values. scales, absmax:
    as `quantizer.apply` returns and takes them. None for a rotation by signs that differ with each call, as the values
    then do, too."""
    if spec.signs == "random" or not x.numel():
        return None
    few, many = (_places(x.numel(), count, x.device) for count in (SAMPLE, EDGE_SAMPLE))
    kept = [t.detach().take(few).float() for t in (x, q)]
    scale = None if spec.random else _scale(many, x.detach(), untransformed(spec), scales, dim, absmax)
    edge = None if scale is None else _at_edge(x.detach().take(many), q.detach().take(many), scale, spec.format.element)

    parts = (*kept, *(() if edge is None else (edge,)))
    return Later(
        lambda *arrays: Sample(arrays[0], arrays[1], float(arrays[2]) if arrays[2:] else math.nan),
        *map(LaterPart, parts),
    )


def edge_by_chance(spec: Spec, deviation: float, absmax: float, dtype: torch.dtype, columns: int) -> float:
    """The share at the edge of a bin (see `Sample`) that normally distributed values have, in rows of `columns` values
    along which they are rounded, with a tensor's standard deviation and, where a scale is for all of it, its absmax.

    Seeded: equal arguments give the same share. The standard deviation is rounded to 1/16 binade, so that results are
    reused; where a tensor's scale meets values of 16 bits, to 1/64, and every digit of absmax matters.
    """
    if spec.random or not (0 < deviation < math.inf and math.isfinite(absmax)):
        return math.nan
    exact = spec.of_tensor and dtype.itemsize <= 2
    steps = 64 if exact else 16
    deviation = 2 ** (round(steps * math.log2(deviation)) / steps)
    absmax = absmax if exact else 0.0
    return _edge_by_chance(untransformed(spec), deviation, absmax, dtype, min(columns, CHANCE_COLUMNS))


@lru_cache(maxsize=1 << 14)
def _edge_by_chance(spec: Spec, deviation: float, absmax: float, dtype: torch.dtype, columns: int) -> float:
    """absmax: 0 for that of the values that are drawn."""
    spec = Spec.of(spec, history=0) if spec.history else spec
    rows = max(-(-CHANCE_SAMPLE // columns), spec.block.rows or 1 if spec.block else 1)
    seed = zlib.crc32(repr((deviation, absmax)).encode())  # so that the errors of several tensors do not agree
    drawn = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")
    x = (drawn * deviation).to(dtype)
    shared = torch.tensor(absmax, dtype=torch.float32, device="cpu") if absmax else None
    q, scales = apply(x, spec, want_scales=True, absmax=shared)
    at = _places(x.numel(), CHANCE_SAMPLE, x.device)
    scale = _scale(at, x, spec, scales, -1, shared)
    return math.nan if scale is None else float(_at_edge(x.take(at), q.take(at), scale, spec.format.element))


def _scale(at: Tensor, x: Tensor, spec: Spec, scales: Tensor | None, dim: int, absmax: Tensor | None) -> Tensor | None:
    """The factor of a code at these places of x, float64 [n] or [1]; None if it differs within a block."""
    scaling = spec.scaling
    if scaling.per_element:
        return None
    outer = outer_absmax(x, spec, dim) if absmax is None else absmax
    outer = outer.take(at).reshape(-1, 1) if outer.dim() else outer
    if scales is None:  # one scale for the tensor, computed from absmax, or none
        block_scales = scaling.block_scale(x.new_ones(1, 1).float(), spec, outer)
    else:
        size, inner = x.shape[dim], x.shape[dim % x.dim() + 1 :].numel()
        columns = spec.block.columns if spec.block and spec.block.columns else size
        block_scales = scales[at // (size * inner), at // inner % size // columns, at % inner].reshape(-1, 1)
    return scaling.multiplier(block_scales, spec, outer).reshape(-1)


@lru_cache(maxsize=64)
def _bin_widths(element: Element, device: torch.device) -> tuple[Tensor, Tensor]:
    """An element's distinct finite values, ascending, and the width of each one's bin: on a device, copied once."""
    values = torch.tensor(element.finite_values, dtype=torch.float64, device=device)
    steps = values.diff()
    return values, (torch.cat((steps[:1], steps)) + torch.cat((steps, steps[-1:]))) / 2


def _at_edge(values: Tensor, rounded: Tensor, scale: Tensor, element: Element) -> Tensor:
    """The share of the finite values at the edge of their bin; clipped ones are not."""
    grid, widths = _bin_widths(element, values.device)
    v, c = values.double() / scale, rounded.double() / scale
    ok = v.isfinite() & c.isfinite() & (scale > 0)
    index = torch.searchsorted((grid[1:] + grid[:-1]) / 2, torch.where(ok, c, 0.0).contiguous())
    # May differ from c: a dequantized value that the tensor's dtype cannot hold was rounded again.
    inside = ok & (v >= grid[0]) & (v <= grid[-1])
    return (inside & ((v - grid[index]).abs() > EDGE * widths[index])).sum().double() / ok.sum()
