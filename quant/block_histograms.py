"""Histograms over the blocks of a tensor: of their scales, errors and crest factors.

Histograms can be added over tensors, iterations and layers, so that the question "which blocks fail" needs no values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from binade.quant.later import Later, LaterPart
from binade.quant.reference import to_blocks
from binade.quant.rounding import floor_log2, pow2
from binade.quant.specs import TENSOR, Spec

CHUNK, DEVICE_CHUNK = 1 << 18, 1 << 24  # values measured at once: on a CPU, what fits its cache


@dataclass(frozen=True)
class BlockMeasure:
    """A quantity of each block. Bin b holds the values in [b·width, (b+1)·width); values outside the range are counted
    in the first or last bin.

    bins   the first bin, and the one after the last
    """

    label: str
    definition: str
    unit: str
    width: float
    bins: tuple[int, int]


BLOCK_MEASURES = {
    "scale_exponent": BlockMeasure(
        "Scale exponent", "floor(log₂ scale) of the block; all-zero blocks are left out", "", 1, (-160, 160)
    ),
    "sqnr_db": BlockMeasure(
        "SQNR by block",
        "10·log₁₀(Σx² / Σ(q−x)²) of the block; blocks without error are in the last bin",
        "dB",
        2,
        (-20, 64),
    ),
    "crest_db": BlockMeasure("Crest factor by block", "20·log₁₀(max |x| / rms) of the block", "dB", 0.25, (0, 240)),
}
COUNTS = [one.bins[1] - one.bins[0] for one in BLOCK_MEASURES.values()]  # the bins of each
Histogram = tuple[np.ndarray, np.ndarray]  # bins that are not empty, ascending, and how many blocks lie in each


def block_histograms_later(x: Tensor, q: Tensor, spec: Spec, scales: Tensor, dim: int) -> Later[dict[str, Histogram]]:
    """The histogram of each of BLOCK_MEASURES over the blocks of x, which was rounded to q along `dim`.

    x, q: of one shape, float32, bfloat16 or float16; of a spec with a rotation both rotated. scales: as
    `quantizer.apply` returns them. Blocks that hold NaN or Inf, or zeros only, are left out. Sums in
    float32, of values that are divided by a power of two near their block's largest.
    Raises ValueError for a spec without blocks.
    """
    block = spec.block
    if block is None or block == TENSOR:
        raise ValueError(f"{spec} has no blocks: expected a format with block scales")
    total = torch.zeros(sum(COUNTS), dtype=torch.int64, device=x.device)
    lines = scales.transpose(1, 2).reshape(-1, scales.shape[1])  # one of each row of tiles is enough
    stored = lines[:: block.rows or 1].reshape(-1)
    xs, qs = to_blocks(x.detach(), dim, block), to_blocks(q.detach(), dim, block)
    valid = xs.shape[-1] * len(xs) == x.numel()
    counts = None if valid else to_blocks(torch.ones_like(x, dtype=torch.bool), dim, block).sum(-1)
    step = max(1, (CHUNK if x.device.type == "cpu" else DEVICE_CHUNK) // xs.shape[-1])
    for start, end in pairwise((*range(0, len(xs), step), len(xs))):
        some, rounded = xs[start:end].float(), qs[start:end].to(torch.float32, copy=True)
        error, peak = rounded.sub_(some), some.abs().amax(-1)
        # A power of two that brings the largest magnitude near 1, so that no sum of squares underflows or overflows.
        factor = pow2((-floor_log2(torch.where(peak.isfinite() & (peak > 0), peak, 1.0))).clamp(-126, 127))
        some, error, peak = some * factor[:, None], error.mul_(factor[:, None]), peak * factor
        signal, noise = torch.linalg.vecdot(some, some), torch.linalg.vecdot(error, error)
        total += counted_blocks(
            peak, signal, noise, xs.shape[-1] if counts is None else counts[start:end], stored[start:end]
        )
    return Later(histograms, LaterPart(total))


def counted_blocks(peak: Tensor, signal: Tensor, noise: Tensor, count: Tensor | int, scale: Tensor) -> Tensor:
    """int64: how many blocks lie in each bin, one measure's bins after the other's. Of each block, floating [blocks]:
    max |x|, Σx² and Σ(q-x)², all to one scale; how many values it has; its stored scale, float32."""
    widths, low, high = _bins(peak.device)
    first = torch.cumsum(high - low, 0) - high  # where a measure's bin 0 is counted
    crest = peak.square() * count / signal
    used = peak.isfinite() & signal.isfinite() & noise.isfinite() & (signal > 0)
    scaled = scale.isfinite() & (scale > 0)
    exponent = floor_log2(torch.where(scaled, scale, 1.0)).float()
    values = torch.stack((exponent, 10 * torch.log10(signal / noise).float(), 10 * torch.log10(crest).float()))
    bins = (values / widths).nan_to_num(0.0).floor().clamp(low, high - 1).long() + first
    left_out = sum(COUNTS)
    bins = torch.where(torch.stack((used & scaled, used, used)), bins, left_out).reshape(-1)
    total = torch.zeros(left_out + 1, dtype=torch.int64, device=peak.device)
    return total.index_add_(0, bins, torch.ones_like(bins))[:-1]


@lru_cache(maxsize=8)
def _bins(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each measure, [measures, 1] on a device: the width of its bins, the first, and the one after the last."""
    rows = [(one.width, *one.bins) for one in BLOCK_MEASURES.values()]
    widths, low, high = torch.tensor(rows, dtype=torch.float64, device=device).T.unsqueeze(-1)
    return widths.float(), low.long(), high.long()


def histograms(counts: np.ndarray) -> dict[str, Histogram]:
    """The histogram of each of BLOCK_MEASURES, from the counts of all its bins, one measure's after the other's."""
    result = {}
    for (name, one), bin_counts in zip(BLOCK_MEASURES.items(), np.split(counts, np.cumsum(COUNTS)[:-1]), strict=True):
        used = np.flatnonzero(bin_counts)
        result[name] = (used + one.bins[0]).astype(np.int16), bin_counts[used].astype(np.int64)
    return result
