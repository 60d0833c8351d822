"""One pass over a tensor: its moments, counts and binade sketch.

For bfloat16 and float16 on a CPU the pass is a histogram of the 65,536 codes, from which all else follows exactly. For
float32 the sketch (see `sketch`) and the sums are taken chunk by chunk. `backends.moments` takes the sums without the
sketch. `backends.triton_summary` reads CUDA tensors.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from binade.quant.backends import Backend, moments, resolve_backend
from binade.quant.backends.counts import Counted, counted
from binade.quant.backends.moments import Pass
from binade.quant.later import Later
from binade.quant.measurements import Summary
from binade.quant.memory import ordinary
from binade.quant.sketch import BINS, INFINITY_BIN, SIGN_BIN

CHUNK = 1 << 18


def summarize(x: Tensor, backend: str = "auto") -> Summary:
    """Moments, counts and the binade sketch of a float32, bfloat16 or float16 tensor of any shape and device.

    backend as in fake_quantize: auto is Triton for CUDA tensors. Counts are the same from each.
    Raises TypeError for another dtype, ValueError for an unknown backend.
    """
    return summarize_later(x, backend)()


def summarize_later(
    x: Tensor, backend: str = "auto", codes: Counted | None = None, sketch: bool = True
) -> Later[Summary]:
    """As `summarize`, without waiting for a GPU. x may be overwritten before the result is fetched. codes: the result
    of `counted(x)`, if it is known. Without the sketch, which takes the most time on a CPU, the summary has no bins."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a torch.Tensor, not {type(x).__name__}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"dtype {str(x.dtype).removeprefix('torch.')} cannot be summarized: expected float32, bfloat16 or float16"
        )
    x = ordinary(x)
    chosen = resolve_backend(backend, x)
    if chosen == Backend.TORCH and not sketch and (sums := moments.measured_later(x)):
        numel = x.numel()
        return Later(lambda: _from_pass(numel, sums()))
    x = x.reshape(-1)
    if chosen == Backend.TRITON and x.numel():
        from binade.quant.backends import triton_summary  # imported at its first use, as only this needs triton

        numel = x.numel()
        return triton_summary.one_pass(x).map(lambda tally: _with(sketch, _from_pass(numel, tally)))
    codes = codes or counted(x)
    if codes is None:
        return Later.known(_with(sketch, _from_pass(x.numel(), _one_pass(x))))
    return Later(lambda: _with(sketch, _from_codes(codes)))


def _with(sketch: bool, summary: Summary) -> Summary:
    return summary if sketch else replace(summary, bins=summary.bins[:0], counts=summary.counts[:0])


def _from_codes(codes: Counted) -> Summary:
    values, counts = codes.values, codes.counts
    finite = np.isfinite(values)
    total, nans = int(counts.sum()), int(counts[np.isnan(values)].sum())
    values, counts = values[finite], counts[finite]
    n = int(counts.sum())
    bins = values.view(np.uint32) >> 20
    first = np.flatnonzero(np.diff(bins, prepend=-1))  # values come in the order of their bins
    wide, weights = values.astype(np.float64), counts / max(n, 1)
    mean = float(weights @ wide)
    d = wide - mean
    square = d * d
    magnitude = np.abs(values)
    extremes = (
        values.min(initial=math.inf),
        values.max(initial=-math.inf),
        magnitude[magnitude > 0].min(initial=math.inf),
    )
    central = weights @ square, weights @ (square * d), weights @ (square * square)
    special = int(counts[magnitude == 0].sum()), nans, total - nans - n
    moments = mean, math.sqrt(weights @ (wide * wide)), *map(float, central)
    return _summary(total, bins[first], np.add.reduceat(counts, first), tuple(map(float, extremes)), moments, special)


def _summary(
    numel: int,
    bins: np.ndarray,
    counts: np.ndarray,
    extremes: tuple[float, ...],
    moments: tuple[float, ...],
    special: tuple[int, int, int],
) -> Summary:
    """extremes: low, high, and the smallest nonzero magnitude, which is infinite if all values are zero. moments: mean,
    rms, and the central ones of orders 2 to 4. Both are meaningless without finite values. special: how many values are
    zero, NaN and infinite."""
    low, high, absmin = extremes
    zeros, nans, infs = special
    mean, rms, second, third, fourth = moments
    if numel == nans + infs:
        low = high = mean = rms = second = third = fourth = math.nan
    spread = second > 0
    return Summary(
        numel=numel,
        min=low,
        max=high,
        mean=mean,
        std=math.sqrt(second),
        rms=rms,
        absmax=max(abs(low), abs(high)),
        absmin=absmin if absmin < math.inf else math.nan,
        skewness=third / second**1.5 if spread else math.nan,
        kurtosis=fourth / second**2 if spread else math.nan,
        zeros=zeros,
        nans=nans,
        infs=infs,
        bins=bins.astype(np.int16),
        counts=counts,
    )


def _one_pass(x: Tensor) -> Pass:
    counts = np.zeros(BINS, np.int64)
    sums = np.zeros(4)
    nans = infs = zeros = 0
    low, high, absmin = math.inf, -math.inf, math.inf
    shift = None  # moments are taken about a first guess of the mean, so that they do not cancel
    for chunk in torch.split(x, CHUNK):
        chunk = chunk.contiguous().float()
        bins = (chunk.view(torch.int32) >> 20) & (BINS - 1)
        part = torch.bincount(bins, minlength=BINS).cpu().numpy()
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
        if shift is None:
            shift = float(wide.mean())
        wide = wide - shift
        square = wide * wide
        sums += [float(wide.sum()), float(square.sum()), float(square @ wide), float(square @ square)]
    return Pass(counts, sums, shift or 0.0, low, high, absmin, zeros, nans, infs)


def _from_pass(numel: int, tally: Pass) -> Summary:
    used = tally.counts.nonzero()[0]
    shift = tally.shift
    s1, s2, s3, s4 = (tally.sums / max(numel - tally.nans - tally.infs, 1)).tolist()
    mean = shift + s1
    rms = math.sqrt(max(s2 + 2 * shift * s1 + shift**2, 0.0))
    second, third = max(s2 - s1**2, 0.0), s3 - 3 * s1 * s2 + 2 * s1**3
    central = second, third, s4 - 4 * s1 * s3 + 6 * s1**2 * s2 - 3 * s1**4
    if tally.low == tally.high:  # no spread, even if the rounded sums show some
        mean, rms, central = tally.low, abs(tally.low), (0.0, 0.0, 0.0)
    extremes, special = (tally.low, tally.high, tally.absmin), (tally.zeros, tally.nans, tally.infs)
    return _summary(numel, used, tally.counts[used], extremes, (mean, rms, *central), special)
