"""The Triton pass of `summary`: the sketch's counts and the moments of a tensor, read once.

A program walks over the tensor with a stride of all programs. Each tile is counted in shared memory (tl.histogram) and
added to the program's own counts and sums in registers; the last program to end adds up all, as in `triton_scores`. The
tile is [rows, width] with a row as wide as one 16-byte load, so that summing along it stays within a thread.

Counts are exact and equal to those of the CPU path. Moments are float64 sums in another order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from binade.quant.backends.moments import Pass
from binade.quant.backends.triton_arithmetic import INTERPRETED, tl, triton
from binade.quant.backends.triton_kernels import check_device
from binade.quant.backends.triton_scores import COUNTER, workspace
from binade.quant.later import Later, Part
from binade.quant.sketch import BINS, INFINITY_BIN, SIGN_BIN

TILE = 1 << 15 if INTERPRETED else 1 << 14
WARPS = 16
NUMBERS = 11  # the sums of d, d², d³ and d⁴, where d = x - shift; low, high, absmin; zeros, NaNs, infinities; shift
MOST = 4 if INTERPRETED else 512  # programs

_COUNTER, _MOST = tl.constexpr(COUNTER), tl.constexpr(MOST)


@triton.jit
def summarize_kernel(
    x_ptr,
    counts_ptr,  # int64 [BINS]
    numbers_ptr,  # float64 [NUMBERS]
    partial_ptr,  # float64 [NUMBERS - 1, programs]
    work_ptr,  # int64 [COUNTER + BINS], zero, and zero again at the end
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
        start += programs.to(tl.int64) * (ROWS * WIDTH)
    bins = tl.arange(0, BINS)
    tl.atomic_add(work_ptr + _COUNTER + bins, counts.to(tl.int64), mask=counts > 0, sem="relaxed")
    place = partial_ptr + program
    tl.store(place, tl.sum(s1, 0))
    tl.store(place + programs, tl.sum(s2, 0))
    tl.store(place + 2 * programs, tl.sum(s3, 0))
    tl.store(place + 3 * programs, tl.sum(s4, 0))
    tl.store(place + 4 * programs, tl.min(low, 0).to(tl.float64))
    tl.store(place + 5 * programs, tl.max(high, 0).to(tl.float64))
    tl.store(place + 6 * programs, tl.min(absmin, 0).to(tl.float64))
    tl.store(place + 7 * programs, tl.sum(zeros, 0).to(tl.float64))
    tl.store(place + 8 * programs, tl.sum(nans, 0).to(tl.float64))
    tl.store(place + 9 * programs, tl.sum(infs, 0).to(tl.float64))
    tl.debug_barrier()  # the whole program has written
    if tl.atomic_add(work_ptr, 1, sem="acq_rel") == programs - 1:
        tl.store(counts_ptr + bins, tl.load(work_ptr + _COUNTER + bins, cache_modifier=".cg"))
        tl.store(work_ptr + _COUNTER + bins, tl.zeros([BINS], tl.int64))
        at = tl.arange(0, _MOST)
        for number in tl.static_range(10):
            beyond = float("inf") if number == 4 or number == 6 else float("-inf") if number == 5 else 0.0
            column = partial_ptr + number * programs + at
            part = tl.load(column, mask=at < programs, other=beyond, cache_modifier=".cg")
            if number == 4 or number == 6:
                tl.store(numbers_ptr + number, tl.min(part, 0))
            elif number == 5:
                tl.store(numbers_ptr + number, tl.max(part, 0))
            else:
                tl.store(numbers_ptr + number, tl.sum(part, 0))
        tl.store(numbers_ptr + 10, shift)
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
        total = counts.copy()
        total[0] -= tiles * TILE - numel  # lanes past the end read 0
        total[INFINITY_BIN:SIGN_BIN] = 0
        total[SIGN_BIN + INFINITY_BIN :] = 0
        low, high, absmin, zeros, nans, infs, shift = map(float, numbers[4:])
        return Pass(total, numbers[:4], shift, low, high, absmin, int(zeros), int(nans), int(infs))

    return Later(passed, Part(counts), Part(numbers))
