"""The Triton pass of `summary`: the sketch's counts and the moments of a tensor, read once.

A program walks over the tensor with a stride of all programs and keeps its partial sums in registers. Counts go by
atomic additions into one of a few copies of the histogram, so that programs seldom meet at one address; the copies are
added up at the end. Counts are exact and equal to those of the CPU path. Moments are float64 sums in another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quant.kernels import INTERPRETED, check_device, tl, triton
from quant.sketch import BINS

TILE = 1 << 15 if INTERPRETED else 1 << 11
COPIES = 1 if INTERPRETED else 256
STATS = 7  # sums of d, d², d³, d⁴; low, high, absmin


@triton.jit
def summarize_kernel(
    x_ptr,
    counts_ptr,  # int32 [copies, BINS]
    stats_ptr,  # float64 [programs, 7]
    special_ptr,  # int64 [programs, 3]: zeros, NaNs, infinities
    shift_ptr,  # float64 scalar: moments are taken about it
    numel,
    COPIES: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    shift = tl.load(shift_ptr)
    copy_ptr = counts_ptr + (program % COPIES) * BINS
    s1 = tl.zeros([TILE], tl.float64)
    s2 = tl.zeros([TILE], tl.float64)
    s3 = tl.zeros([TILE], tl.float64)
    s4 = tl.zeros([TILE], tl.float64)
    low = tl.full([TILE], float("inf"), tl.float32)
    high = tl.full([TILE], float("-inf"), tl.float32)
    absmin = tl.full([TILE], float("inf"), tl.float32)
    zeros = tl.zeros([TILE], tl.int32)
    nans = tl.zeros([TILE], tl.int32)
    infs = tl.zeros([TILE], tl.int32)
    lane = tl.arange(0, TILE)
    step = tl.num_programs(0).to(tl.int64) * TILE
    start = program.to(tl.int64) * TILE
    while start < numel:
        inside = start + lane < numel
        x = tl.load(x_ptr + start + lane, mask=inside, other=0.0).to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        finite = inside & (magnitude < 0x7F800000)
        tl.atomic_add(copy_ptr + ((bits >> 20) & 0xFFF), 1, mask=finite, sem="relaxed")
        nans += (inside & (magnitude > 0x7F800000)).to(tl.int32)
        infs += (inside & (magnitude == 0x7F800000)).to(tl.int32)
        zeros += (inside & (magnitude == 0)).to(tl.int32)
        low = tl.minimum(low, tl.where(finite, x, float("inf")))
        high = tl.maximum(high, tl.where(finite, x, float("-inf")))
        absmin = tl.minimum(absmin, tl.where(finite & (magnitude != 0), tl.abs(x), float("inf")))
        d = tl.where(finite, x.to(tl.float64) - shift, 0.0)
        square = d * d
        s1 += d
        s2 += square
        s3 += square * d
        s4 += square * square
        start += step
    out = stats_ptr + program * 7
    tl.store(out, tl.sum(s1, 0))
    tl.store(out + 1, tl.sum(s2, 0))
    tl.store(out + 2, tl.sum(s3, 0))
    tl.store(out + 3, tl.sum(s4, 0))
    tl.store(out + 4, tl.min(low, 0).to(tl.float64))
    tl.store(out + 5, tl.max(high, 0).to(tl.float64))
    tl.store(out + 6, tl.min(absmin, 0).to(tl.float64))
    special = special_ptr + program * 3
    tl.store(special, tl.sum(zeros.to(tl.int64), 0))
    tl.store(special + 1, tl.sum(nans.to(tl.int64), 0))
    tl.store(special + 2, tl.sum(infs.to(tl.int64), 0))


@dataclass(frozen=True)
class Pass:
    """What one pass finds: counts [BINS] of the finite values; sums of (x - shift)^k, k = 1 to 4; the rest."""

    counts: np.ndarray
    sums: np.ndarray
    shift: float
    low: float
    high: float
    absmin: float
    zeros: int
    nans: int
    infs: int


def one_pass(x: Tensor) -> Pass:
    """Flat, contiguous, not empty x -> Pass."""
    check_device(x)
    device = x.device
    programs = min(triton.cdiv(x.numel(), TILE), 8 if INTERPRETED else 16 * _processors(device))
    # Moments about a first guess of the mean do not cancel.
    head = x[: 1 << 16].double()
    finite = head.isfinite()
    shift = torch.where(finite, head, 0.0).sum() / finite.sum().clamp(min=1)
    counts = torch.zeros(COPIES, BINS, dtype=torch.int32, device=device)
    stats = torch.empty(programs, STATS, dtype=torch.float64, device=device)
    special = torch.empty(programs, 3, dtype=torch.int64, device=device)
    if INTERPRETED:  # its own conversions flush bfloat16's subnormals to zero
        x = x.float()
    with np.errstate(all="ignore"):
        summarize_kernel[(programs,)](x, counts, stats, special, shift, x.numel(), COPIES=COPIES, BINS=BINS, TILE=TILE)
    found = stats.cpu().numpy()
    zeros, nans, infs = (int(v) for v in special.sum(0).cpu())
    return Pass(
        counts=counts.sum(0, dtype=torch.int64).cpu().numpy(),
        sums=found[:, :4].sum(0),
        shift=float(shift),
        low=float(found[:, 4].min()),
        high=float(found[:, 5].max()),
        absmin=float(found[:, 6].min()),
        zeros=zeros,
        nans=nans,
        infs=infs,
    )


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
