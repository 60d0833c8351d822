"""What the Triton kernel does in place of writing the rounded values: it adds up their errors, and counts blocks.

A program adds up its tile. The last one to end adds the programs' sums in a fixed order, so that a score is one launch
and the same in every run. Blocks are counted by atomic additions to one of REPLICAS histograms, which keeps programs
out of each other's way; the last program adds these, too, and leaves the workspace zero for the next launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from binade.quant.backends.score_numbers import ScoreNumber
from binade.quant.backends.triton_arithmetic import FLOAT32_MAX, IN_NUMPY, INTERPRETED, tl, to_bfloat16, triton, widen
from binade.quant.block_histograms import BLOCK_MEASURES, COUNTS

ROUNDED = tl.constexpr(-2)  # a rule of the kernel: y is given
SUMS, BLOCKS, RUNS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)  # what a score consists of
NUMBERS = len(ScoreNumber)
REPLICAS = 2 if INTERPRETED else 32
BINS = 1 << 10  # of a replica
COUNTER = 16  # numbers before the replicas, of which the first counts the programs that have ended
WORK = COUNTER + 32 * BINS  # int64 numbers of a workspace
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MEASURES = tuple((one.bins[0], one.bins[1], one.width) for one in BLOCK_MEASURES.values())
assert sum(COUNTS) <= BINS

# Of the counts of a tile, see add_score. A tile of the interpreter is larger.
COUNT = tl.constexpr(tl.int64 if INTERPRETED else tl.int32)
HALF, LOWER = (tl.constexpr(constant) for constant in ((32, (1 << 32) - 1) if INTERPRETED else (16, (1 << 16) - 1)))

_NUMBERS, _REPLICAS, _BINS, _COUNTER = (tl.constexpr(constant) for constant in (NUMBERS, REPLICAS, BINS, COUNTER))
_SCALE, _SQNR, _CREST = (tl.constexpr(measure) for measure in MEASURES)
_AT_SQNR, _AT_CREST = tl.constexpr(COUNTS[0]), tl.constexpr(COUNTS[0] + COUNTS[1])


@triton.jit
def as_stored(y, STORED: tl.constexpr):
    """float32 y rounded to the dtype of DTYPES that it would be written in, as float32."""
    if STORED == 1:
        if IN_NUMPY:  # whose own conversion flushes subnormals
            return tl.where(tl.abs(y) <= FLOAT32_MAX, to_bfloat16(y), y)
        else:
            return widen(y.to(tl.bfloat16))
    elif STORED == 2:
        return y.to(tl.float16).to(tl.float32)
    else:
        return y


@triton.jit
def bin_of(value, MEASURE: tl.constexpr):
    """The bin of a block measure, counted from its first."""
    index = tl.floor(value / MEASURE[2]).to(tl.int32)
    return tl.minimum(tl.maximum(index, MEASURE[0]), MEASURE[1] - 1) - MEASURE[0]


@triton.jit
def decibels(ratio):
    """10·log10 of float64, rounded to float32, which is exact for powers of ten."""
    return (tl.log(ratio) * 4.342944819032518).to(tl.float32)


@triton.jit
def add_score(
    x,  # float32 tile, y likewise
    y,
    ok,  # which x are finite and inside the tensor
    over,  # which saturate
    scale,  # [groups] of the blocks
    length,  # int32 [groups]: values of each block
    block,
    blocks,
    partial_ptr,  # float64 [NUMBERS, programs]
    work_ptr,  # int64 [WORK], zero, and zero again at the end
    out_ptr,  # float64 [NUMBERS] or [NUMBERS + BINS], see `ScoreSums.out`
    runs_ptr,  # float64 [3, blocks]
    program,
    programs,
    AXIS: tl.constexpr,  # of the tile, along which blocks lie
    SCORE: tl.constexpr,
):
    a = tl.where(ok, x, 0.0).to(tl.float64)
    b = tl.where(ok, y, 0.0).to(tl.float64)
    e = b - a
    signal, noise = tl.sum(a * a, AXIS), tl.sum(e * e, AXIS)
    nonzero, zero, over = ok & (x != 0.0), y == 0.0, ok & over
    # Two counts to a number: a tile has fewer values than either half can count.
    pairs = tl.sum(ok.to(COUNT) + (over.to(COUNT) << HALF), AXIS)
    others = tl.sum(nonzero.to(COUNT) + ((nonzero & zero).to(COUNT) << HALF))
    finite = (pairs & LOWER).to(tl.int32)
    both = tl.sum(pairs, 0)
    largest = tl.max(tl.abs(e).to(tl.int64, bitcast=True))  # bits: NaN is the largest
    sums = partial_ptr + program
    tl.store(sums, tl.sum(signal, 0))
    tl.store(sums + programs, tl.sum(b * b))
    tl.store(sums + 2 * programs, tl.sum(a * b))
    tl.store(sums + 3 * programs, tl.sum(noise, 0))
    tl.store(sums + 4 * programs, largest.to(tl.float64, bitcast=True))
    tl.store(sums + 5 * programs, (both & LOWER).to(tl.float64))
    tl.store(sums + 6 * programs, (others & LOWER).to(tl.float64))
    tl.store(sums + 7 * programs, (others >> HALF).to(tl.float64))
    tl.store(sums + 8 * programs, (both >> HALF).to(tl.float64))
    # Where x is 0, so is its error.
    tl.store(sums + 9 * programs, tl.sum(tl.where(zero, e * e, 0.0)))
    tl.store(sums + 10 * programs, tl.sum(tl.where(over & (y != 0.0), e * e, 0.0)))
    if SCORE != SUMS:
        peak = tl.max(tl.where(ok, tl.abs(x), 0.0), AXIS).to(tl.float64)
        whole = finite == length
        if SCORE == RUNS:
            inside = block < blocks
            tl.store(runs_ptr + block, tl.where(whole, peak, float("nan")), mask=inside)
            tl.store(runs_ptr + blocks + block, signal, mask=inside)
            tl.store(runs_ptr + 2 * blocks + block, noise, mask=inside)
        else:
            used = whole & (signal > 0.0) & (noise < float("inf"))
            signal = tl.where(used, signal, 1.0)
            exponent = ((scale.to(tl.float64).to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1023
            quotient = decibels(signal / tl.where(used & (noise > 0.0), noise, 1.0))
            sqnr = tl.where(noise > 0.0, bin_of(quotient, _SQNR), _AT_CREST - _AT_SQNR - 1)
            crest = bin_of(decibels(tl.where(used, peak * peak * length / signal, 1.0)), _CREST)
            scaled = used & (scale > 0.0) & (scale <= FLOAT32_MAX)
            replica = work_ptr + _COUNTER + (program % _REPLICAS) * _BINS
            tl.atomic_add(replica + bin_of(exponent.to(tl.float32), _SCALE), 1, mask=scaled, sem="relaxed")
            tl.atomic_add(replica + _AT_SQNR + sqnr, 1, mask=used, sem="relaxed")
            tl.atomic_add(replica + _AT_CREST + crest, 1, mask=used, sem="relaxed")
    tl.debug_barrier()  # the whole program has written
    if tl.atomic_add(work_ptr, 1, sem="acq_rel") == programs - 1:
        finish_score(partial_ptr, work_ptr, out_ptr, programs, SCORE)


@triton.jit
def finish_score(partial_ptr, work_ptr, out_ptr, programs, SCORE: tl.constexpr):
    """What the last program does. It reads past the first cache, which other multiprocessors do not write to."""
    at = tl.arange(0, _BINS)
    for number in tl.static_range(_NUMBERS):
        column = partial_ptr + number * programs + at
        if number == 4:
            largest = tl.zeros([_BINS], tl.int64)
            for start in range(0, programs, _BINS):
                part = tl.load(column + start, mask=start + at < programs, other=0.0, cache_modifier=".cg")
                largest = tl.maximum(largest, part.to(tl.int64, bitcast=True))
            tl.store(out_ptr + number, tl.max(largest, 0).to(tl.float64, bitcast=True))
        else:
            total = tl.zeros([_BINS], tl.float64)
            for start in range(0, programs, _BINS):
                total += tl.load(column + start, mask=start + at < programs, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + number, tl.sum(total, 0))
    if SCORE == BLOCKS:
        counts = tl.zeros([_BINS], tl.int64)
        for replica in range(_REPLICAS):
            place = work_ptr + _COUNTER + replica * _BINS + at
            counts += tl.load(place, cache_modifier=".cg")
            tl.store(place, tl.zeros([_BINS], tl.int64))
        tl.store(out_ptr + _NUMBERS + at, counts.to(tl.float64))
    tl.store(work_ptr, 0)


@dataclass(frozen=True)
class ScoreSums:
    """What a launch of the kernel adds up, and where.

    kind    SUMS; BLOCKS, if each of the launch's blocks is one of the format; RUNS, if those are put together later
    stored  the dtype of y, see DTYPES
    y       the rounded values; None to round here
    scales  float32 [blocks], if values can saturate or blocks are counted
    limits  (left, right) of `Scaling.saturation`: a number, or float64 for all blocks or each; () if no value does
    out     float64 [NUMBERS] or, for BLOCKS, [NUMBERS + BINS]
    runs    float64 [3, blocks]: for RUNS the largest magnitude, NaN unless all are finite, Σx² and Σ(y-x)²
    """

    kind: int
    stored: int
    y: Tensor | None
    scales: Tensor | None
    limits: Sequence[float | Tensor]
    out: Tensor
    runs: Tensor | None


_workspaces: dict[tuple[torch.device, int], Tensor] = {}


def workspace(device: torch.device, scores: int = 1) -> Tensor:
    """int64 zeros [scores, WORK] for the kernels of the current stream, which run one after the other and leave them
    zero."""
    stream = 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id
    zeros = _workspaces.get((device, stream))
    if zeros is None or len(zeros) < scores:
        zeros = _workspaces[device, stream] = torch.zeros(max(scores, 8), WORK, dtype=torch.int64, device=device)
    return zeros
