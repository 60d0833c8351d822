"""The Triton pass of `summary`: the sketch's counts and the moments of a tensor, read once.

A program walks over the tensor with a stride of all programs. Each tile is counted in shared memory (tl.histogram) and
added to the program's own counts and sums in registers; the programs' results are added up at the end. The tile is
[rows, width] with a row as wide as one 16-byte load, so that summing along it stays within a thread.

Counts are exact and equal to those of the CPU path. Moments are float64 sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from binade.quant.backends.moments import Pass
from binade.quant.backends.triton_arithmetic import INTERPRETED, tl, triton
from binade.quant.backends.triton_kernels import check_device
from binade.quant.sketch import BINS, INFINITY_BIN, SIGN_BIN

TILE = 1 << 15 if INTERPRETED else 1 << 14
WARPS = 16


@triton.jit
def summarize_kernel(
    x_ptr,
    counts_ptr,  # int32 [programs, BINS]
    sums_ptr,  # float64 [programs, 4]: sums of d, d², d³, d⁴
    extremes_ptr,  # float32 [programs, 3]: low, high, absmin
    special_ptr,  # int64 [programs, 3]: zeros, NaNs, infinities
    shift_ptr,  # float64 scalar: moments are taken about it
    numel,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BINS: tl.constexpr,
):
    program = tl.program_id(0)
    shift = tl.load(shift_ptr)
    counts = tl.zeros([BINS], tl.int32)
    s1 = tl.zeros([ROWS], tl.float64)
    s2 = tl.zeros([ROWS], tl.float64)
    s3 = tl.zeros([ROWS], tl.float64)
    s4 = tl.zeros([ROWS], tl.float64)
    low = tl.full([ROWS], float("inf"), tl.float32)
    high = tl.full([ROWS], float("-inf"), tl.float32)
    absmin = tl.full([ROWS], float("inf"), tl.float32)
    zeros = tl.zeros([ROWS], tl.int32)
    nans = tl.zeros([ROWS], tl.int32)
    infs = tl.zeros([ROWS], tl.int32)
    within = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    start = program.to(tl.int64) * (ROWS * WIDTH)
    while start < numel:
        if start + ROWS * WIDTH <= numel:
            x = tl.load(x_ptr + start + within).to(tl.float32)
            inside = tl.full([ROWS, WIDTH], True, tl.int1)
        else:
            inside = start + within < numel
            x = tl.load(x_ptr + start + within, mask=inside, other=0.0).to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        counts += tl.histogram(tl.reshape((bits >> 20) & 0xFFF, [ROWS * WIDTH]), BINS)
        finite = inside & (magnitude < 0x7F800000)
        nans += tl.sum((magnitude > 0x7F800000).to(tl.int32), 1)
        infs += tl.sum((magnitude == 0x7F800000).to(tl.int32), 1)
        zeros += tl.sum((inside & (magnitude == 0)).to(tl.int32), 1)
        low = tl.minimum(low, tl.min(tl.where(finite, x, float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(finite, x, float("-inf")), 1))
        nonzero = tl.where(finite & (magnitude != 0), tl.abs(x), float("inf"))
        absmin = tl.minimum(absmin, tl.min(nonzero, 1))
        d = tl.where(finite, x.to(tl.float64) - shift, 0.0)
        square = d * d
        s1 += tl.sum(d, 1)
        s2 += tl.sum(square, 1)
        s3 += tl.sum(square * d, 1)
        s4 += tl.sum(square * square, 1)
        start += tl.num_programs(0).to(tl.int64) * (ROWS * WIDTH)
    tl.store(counts_ptr + program * BINS + tl.arange(0, BINS), counts)
    sums = sums_ptr + program * 4
    tl.store(sums, tl.sum(s1, 0))
    tl.store(sums + 1, tl.sum(s2, 0))
    tl.store(sums + 2, tl.sum(s3, 0))
    tl.store(sums + 3, tl.sum(s4, 0))
    extremes = extremes_ptr + program * 3
    tl.store(extremes, tl.min(low, 0))
    tl.store(extremes + 1, tl.max(high, 0))
    tl.store(extremes + 2, tl.min(absmin, 0))
    special = special_ptr + program * 3
    tl.store(special, tl.sum(zeros, 0).to(tl.int64))
    tl.store(special + 1, tl.sum(nans, 0).to(tl.int64))
    tl.store(special + 2, tl.sum(infs, 0).to(tl.int64))


def one_pass(x: Tensor) -> Callable[[], Pass]:
    """Flat, contiguous, not empty x -> a function that returns the Pass; nothing waits for the GPU before its call."""
    check_device(x)
    device, numel = x.device, x.numel()
    programs = 4 if INTERPRETED else 2 * torch.cuda.get_device_properties(device).multi_processor_count
    tiles = triton.cdiv(numel, TILE)
    programs = min(programs, tiles)
    # Moments about a first guess of the mean do not cancel.
    head = x[: 1 << 16].double()
    usable = head.isfinite()
    shift = torch.where(usable, head, 0.0).sum() / usable.sum().clamp(min=1)
    counts = torch.empty(programs, BINS, dtype=torch.int32, device=device)
    sums = torch.empty(programs, 4, dtype=torch.float64, device=device)
    extremes = torch.empty(programs, 3, dtype=torch.float32, device=device)
    special = torch.empty(programs, 3, dtype=torch.int64, device=device)
    if INTERPRETED:  # its own conversions flush bfloat16's subnormals to zero
        x = x.float()
    width = 16 // x.element_size()
    with np.errstate(all="ignore"):
        summarize_kernel[(programs,)](
            x,
            counts,
            sums,
            extremes,
            special,
            shift,
            numel,
            ROWS=TILE // width,
            WIDTH=width,
            BINS=BINS,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    # Reduced on the device, so that little is kept until it is fetched.
    counts = counts.sum(0, dtype=torch.int64)
    sums, special = sums.sum(0), special.sum(0)
    extremes = torch.stack((extremes[:, 0].amin(), extremes[:, 1].amax(), extremes[:, 2].amin()))

    def fetch() -> Pass:
        total = counts.cpu().numpy().copy()
        total[0] -= tiles * TILE - numel  # lanes past the end read 0
        total[INFINITY_BIN:SIGN_BIN] = 0
        total[SIGN_BIN + INFINITY_BIN :] = 0
        low, high, absmin = extremes.tolist()
        zeros, nans, infs = special.tolist()
        return Pass(total, sums.cpu().numpy(), float(shift), low, high, absmin, zeros, nans, infs)

    return fetch
