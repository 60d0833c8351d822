"""The Triton pass of `summary`: the sketch's counts and the moments of a tensor, read once.

A program walks over the tensor with a stride of all programs. In each tile, values within 16 binades of the largest
are counted by tl.histogram, which is slow for all 4,096 bins: Triton 3.6 counts each bin for each value and keeps the
counts in local memory. The few smaller values are added one by one, and zeros are known already. Counts go to one of
REPLICAS histograms, sums stay in registers; the last program to end adds up all, as in `triton_scores`. The tile is
[rows, width] with a row as wide as one 16-byte load, so that summing along it stays within a thread.

Counts are exact and equal to those of the CPU path. Moments are float64 sums in another order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from binade.quant.backends.moments import Pass
from binade.quant.backends.triton_arithmetic import INTERPRETED, tl, triton
from binade.quant.backends.triton_kernels import check_device
from binade.quant.backends.triton_scores import COUNTER, WORK, workspace
from binade.quant.later import Later, LaterPart
from binade.quant.sketch import BINS, SIGN_BIN

TILE = 1 << 15 if INTERPRETED else 1 << 13
WARPS = 16
# The sums of d, d², d³ and d⁴, where d = x - shift; low, high, absmin; zeros, negative zeros, NaNs, infinities; shift.
NUMBERS = 12
MOST = 4 if INTERPRETED else 512  # programs
REPLICAS = 8
WINDOW = 128  # bins of a sign: 16 binades
assert COUNTER + REPLICAS * BINS <= WORK

_COUNTER, _MOST, _NUMBERS = tl.constexpr(COUNTER), tl.constexpr(MOST), tl.constexpr(NUMBERS)
_REPLICAS, _WINDOW, _SIGN = tl.constexpr(REPLICAS), tl.constexpr(WINDOW), tl.constexpr(SIGN_BIN)


@triton.jit
def summarize_kernel(
    x_ptr,
    counts_ptr,  # int64 [BINS]
    numbers_ptr,  # float64 [NUMBERS]
    partial_ptr,  # float64 [NUMBERS - 1, programs]
    work_ptr,  # int64 [COUNTER + REPLICAS * BINS], zero, and zero again at the end
    numel,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BINS: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    within = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    # Moments about a first guess of the mean, that of the first tile, do not cancel.
    x = tl.load(x_ptr + within, mask=within < numel, other=0.0).to(tl.float32)
    finite = (within < numel) & (tl.abs(x) < float("inf"))
    head = tl.sum(tl.sum(tl.where(finite, x, 0.0).to(tl.float64), 1), 0)
    shift = head / tl.maximum(tl.sum(tl.sum(finite.to(tl.int32), 1), 0), 1)
    replica = work_ptr + _COUNTER + (program % _REPLICAS) * BINS
    window = tl.arange(0, 2 * _WINDOW)  # positive, then negative
    of_window = replica + window % _WINDOW + (window // _WINDOW) * _SIGN
    s1 = tl.zeros([ROWS], tl.float64)
    s2 = tl.zeros([ROWS], tl.float64)
    s3 = tl.zeros([ROWS], tl.float64)
    s4 = tl.zeros([ROWS], tl.float64)
    low = tl.full([ROWS], float("inf"), tl.float32)
    high = tl.full([ROWS], float("-inf"), tl.float32)
    absmin = tl.full([ROWS], float("inf"), tl.float32)
    zeros = tl.zeros([ROWS], tl.int32)
    negative_zeros = tl.zeros([ROWS], tl.int32)
    nans = tl.zeros([ROWS], tl.int32)
    infs = tl.zeros([ROWS], tl.int32)
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
        finite = inside & (magnitude < 0x7F800000)
        counted = finite & (magnitude != 0)
        bin = magnitude >> 20
        first = tl.maximum(tl.max(tl.max(tl.where(counted, bin, 0), 1), 0) - (_WINDOW - 1), 0)
        place = tl.where(counted & (bin >= first), bin - first + tl.where(bits < 0, _WINDOW, 0), 2 * _WINDOW)
        flat = tl.reshape(place, [ROWS * WIDTH])
        counts = tl.histogram(flat, 2 * _WINDOW, flat < 2 * _WINDOW)
        tl.atomic_add(of_window + first, counts.to(tl.int64), mask=counts > 0, sem="relaxed")
        smaller = counted & (bin < first)
        tl.atomic_add(
            replica + ((bits >> 20) & 0xFFF), tl.full([ROWS, WIDTH], 1, tl.int64), mask=smaller, sem="relaxed"
        )
        nans += tl.sum((magnitude > 0x7F800000).to(tl.int32), 1)
        infs += tl.sum((magnitude == 0x7F800000).to(tl.int32), 1)
        zeros += tl.sum((inside & (magnitude == 0)).to(tl.int32), 1)
        negative_zeros += tl.sum((inside & (magnitude == 0) & (bits < 0)).to(tl.int32), 1)
        low = tl.minimum(low, tl.min(tl.where(finite, x, float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(finite, x, float("-inf")), 1))
        nonzero = tl.where(counted, tl.abs(x), float("inf"))
        absmin = tl.minimum(absmin, tl.min(nonzero, 1))
        d = tl.where(finite, x.to(tl.float64) - shift, 0.0)
        square = d * d
        s1 += tl.sum(d, 1)
        s2 += tl.sum(square, 1)
        s3 += tl.sum(square * d, 1)
        s4 += tl.sum(square * square, 1)
        start += programs.to(tl.int64) * (ROWS * WIDTH)
    place = partial_ptr + program
    tl.store(place, tl.sum(s1, 0))
    tl.store(place + programs, tl.sum(s2, 0))
    tl.store(place + 2 * programs, tl.sum(s3, 0))
    tl.store(place + 3 * programs, tl.sum(s4, 0))
    tl.store(place + 4 * programs, tl.min(low, 0).to(tl.float64))
    tl.store(place + 5 * programs, tl.max(high, 0).to(tl.float64))
    tl.store(place + 6 * programs, tl.min(absmin, 0).to(tl.float64))
    tl.store(place + 7 * programs, tl.sum(zeros, 0).to(tl.float64))
    tl.store(place + 8 * programs, tl.sum(negative_zeros, 0).to(tl.float64))
    tl.store(place + 9 * programs, tl.sum(nans, 0).to(tl.float64))
    tl.store(place + 10 * programs, tl.sum(infs, 0).to(tl.float64))
    tl.debug_barrier()  # the whole program has written
    if tl.atomic_add(work_ptr, 1, sem="acq_rel") == programs - 1:
        bins = tl.arange(0, BINS)
        counts = tl.zeros([BINS], tl.int64)
        for index in range(_REPLICAS):
            count_ptr = work_ptr + _COUNTER + index * BINS + bins
            counts += tl.load(count_ptr, cache_modifier=".cg")
            tl.store(count_ptr, tl.zeros([BINS], tl.int64))
        tl.store(counts_ptr + bins, counts)
        at = tl.arange(0, _MOST)
        for number in tl.static_range(_NUMBERS - 1):
            beyond = float("inf") if number == 4 or number == 6 else float("-inf") if number == 5 else 0.0
            column = partial_ptr + number * programs + at
            part = tl.load(column, mask=at < programs, other=beyond, cache_modifier=".cg")
            if number == 4 or number == 6:
                tl.store(numbers_ptr + number, tl.min(part, 0))
            elif number == 5:
                tl.store(numbers_ptr + number, tl.max(part, 0))
            else:
                tl.store(numbers_ptr + number, tl.sum(part, 0))
        tl.store(numbers_ptr + _NUMBERS - 1, shift)
        tl.store(work_ptr, 0)


def one_pass(x: Tensor) -> Later[Pass]:
    """Flat, contiguous, not empty x -> the Pass."""
    check_device(x)
    device, numel = x.device, x.numel()
    programs = MOST if INTERPRETED else 2 * torch.cuda.get_device_properties(device).multi_processor_count
    tiles = triton.cdiv(numel, TILE)
    programs = min(programs, tiles, MOST)
    counts = torch.empty(BINS, dtype=torch.int64, device=device)
    numbers = torch.empty(NUMBERS, dtype=torch.float64, device=device)
    partial = torch.empty(NUMBERS - 1, programs, dtype=torch.float64, device=device)
    if INTERPRETED:  # its own conversions flush bfloat16's subnormals to zero
        x = x.float()
    width = 16 // x.element_size()
    with np.errstate(all="ignore"):
        summarize_kernel[(programs,)](
            x,
            counts,
            numbers,
            partial,
            workspace(device),
            numel,
            ROWS=TILE // width,
            WIDTH=width,
            BINS=BINS,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )

    def passed(counts: np.ndarray, numbers: np.ndarray) -> Pass:
        low, high, absmin, zeros, negative_zeros, nans, infs, shift = map(float, numbers[4:])
        total = counts.copy()
        total[0] += int(zeros - negative_zeros)
        total[SIGN_BIN] += int(negative_zeros)
        return Pass(total, numbers[:4], shift, low, high, absmin, int(zeros), int(nans), int(infs))

    return Later(passed, LaterPart(counts), LaterPart(numbers))
