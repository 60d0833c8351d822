"""The Triton implementation of `reference`, with the same bits.

One kernel rounds in every format along either axis: by scales that it finds itself, in one pass over memory, or with
factors that it is given. `runs` computes these from what the same kernel (LARGEST), `run_errors_kernel` and
`run_moments_kernel` return for each run of values.

The kernels are in `triton_tiles`. Triton's interpreter gets large tiles: its cost is per operation, not per value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from binade.quant.backends import triton_scores
from binade.quant.backends.runs import Runs
from binade.quant.backends.triton_arithmetic import ALL, EACH, GIVEN, INTERPRETED, LARGEST, SHARED, triton
from binade.quant.backends.triton_scores import BINS, BLOCKS, NUMBERS, ROUNDED, RUNS, SUMS, ScoreSums
from binade.quant.backends.triton_tiles import (
    How,
    quantize_dequantize_kernel,
    run_errors_kernel,
    run_moments_kernel,
    score_formats_kernel,
)
from binade.quant.block_histograms import COUNTS, counted_blocks
from binade.quant.elements import E4M3, Element, Overflow, RoundingMode, Tier
from binade.quant.memory import is_ordinary
from binade.quant.reference import absmax_over, outer_absmax
from binade.quant.scaling import Amax, kernel_of
from binade.quant.scheme import Factors, Kernel
from binade.quant.specs import TENSOR, Spec

# Values a program takes if blocks lie along the last axis. The interpreter handles at most 2^20 elements in a tile.
TILE = 1 << 17 if INTERPRETED else 1 << 12
# Values, twice as many along other axes: they share the fixed work of a thread per program.
PER_THREAD = 64
PER_THREAD_SCORED = 16  # float64 takes two registers for a value

# Kernel launches in this process so far.
launches = 0

ROUNDINGS = {RoundingMode.NEAREST: 0, RoundingMode.HALF_AWAY: 1, RoundingMode.STOCHASTIC: 2}


@lru_cache
def _taper(tiers: tuple[Tier, ...]) -> int:
    """P if an element has P - max(2, length of |e|) mantissa bits at each exponent e, as HiFloat8 has; else 0."""
    most = max(bits for _, bits in tiers) + 2
    ends = [*(lowest for lowest, _ in tiers[1:]), tiers[-1][0] + 1]
    tapered = [
        bits == most - max(2, abs(exponent).bit_length())
        for (lowest, bits), end in zip(tiers, ends, strict=True)
        for exponent in range(lowest, end)
    ]
    return most if len(tiers) > 1 and all(tapered) else 0


def _tiling(block_size: int, axis: int, inner: int, blocks: int, tile: int = 32 * PER_THREAD) -> tuple[int, bool]:
    """Blocks to a program, and whether tiles are whole: no block is short, no tile is part empty or spans two rows of
    blocks. Whole tiles need no mask and no division per block, which would otherwise cost more than the rounding.
    tile: values of a compiled program, if blocks lie along another axis than the last."""
    block_pow2 = triton.next_power_of_2(block_size)
    tile = TILE if inner == 1 or INTERPRETED else tile
    groups = max(1, min(tile // block_pow2, triton.next_power_of_2(blocks)))
    fit = math.gcd(groups, blocks if inner == 1 else inner)
    # A smaller tile that fits is worth it unless it is tiny, or interpreted, where each program costs milliseconds.
    enough = groups if INTERPRETED else max(1, min(groups, 1024 // block_pow2))
    whole = block_size == block_pow2 and axis % block_size == 0 and fit >= enough and block_size * inner < 2**31
    return (fit, True) if whole else (groups, False)


@dataclass(frozen=True)
class Grid:
    """A tensor as the kernels see it: [outer, axis, inner] in blocks along the axis."""

    axis: int
    inner: int
    block: int
    per_row: int
    blocks: int

    @classmethod
    def of(cls, x: Tensor, dim: int, block: int | None) -> Grid:
        """Without a block: one flat row, cut anywhere."""
        axis = x.shape[dim] if x.dim() and block else x.numel()
        inner = x.shape[dim + 1 :].numel() if x.dim() and block else 1
        block = min(block, max(axis, 64)) if block else min(TILE, 1024)  # HiF4 takes whole blocks of 64 only
        per_row = -(-axis // block)
        return cls(axis, inner, block, per_row, x.numel() // (axis * inner) * per_row * inner)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.blocks, self.axis, self.inner, self.per_row


NO_FACTORS = Factors()


def _how(
    grid: Grid,
    element: Element,
    rule: int,
    rounding: RoundingMode = RoundingMode.NEAREST,
    overflow: Overflow = Overflow.SATURATE,
    factors: Factors = NO_FACTORS,
    scales: bool = False,
    scale_element: Element = E4M3,
    bounded: bool = False,
    shared: tuple[float, float, bool] = (0.0, 0.0, False),
    score: int = 0,
    stored: int = 0,
    limits: Sequence[float | Tensor] = (),
) -> How:
    # Along another axis a program that rounds is one warp, whose lanes find the largest magnitudes without shared
    # memory. One that scores is four: each program has sums to write, and waits for its turn to count itself.
    tile = 32 * _per_thread(grid, score) * (4 if score else 1)
    groups, whole = _tiling(grid.block, grid.axis, grid.inner, grid.blocks, tile)
    return How(
        block=grid.block,
        block_pow2=triton.next_power_of_2(grid.block),
        groups=groups,
        adjacent=grid.inner == 1,
        whole=whole,
        tiers=element.tiers,
        taper=_taper(element.tiers),
        scale_tiers=scale_element.tiers,
        emax=element.emax,
        mantissa=element.mantissa_bits,
        max=element.max,
        limit=element.max if overflow == Overflow.SATURATE else float("inf"),
        inverse=float(np.float32(1.0 / element.max)),
        rule=rule,
        rounding=ROUNDINGS[rounding],
        signed_zero=element.signed_zero,
        scales=scales,
        factors=_kinds(factors),
        bounded=bounded,
        score=score,
        stored=stored,
        limits=_limits(limits),
        shared=shared,
    )


def _per_thread(grid: Grid, score: int) -> int:
    """Values."""
    return PER_THREAD_SCORED if score else 2 * PER_THREAD if grid.inner > 1 else PER_THREAD


def _warps(grid: Grid, how: How) -> int:
    return max(1, min(8 if how.score else 4, how.groups * how.block_pow2 // (32 * _per_thread(grid, how.score))))


def _launch(
    x: Tensor,
    grid: Grid,
    element: Element,
    rule: int,
    *,
    factors: Factors = NO_FACTORS,
    absmax: Tensor | None = None,
    scales: Tensor | None = None,
    seed: int = 0,
    score: ScoreSums | None = None,
    **options: Any,
) -> Tensor:
    """y of x's dtype; x itself for LARGEST and with a score, which is computed instead. If interpreted, x is float32:
    the interpreter's own conversions flush bfloat16's subnormals to zero. options: others of `_how`."""
    global launches
    launches += 1
    limits: Sequence[float | Tensor] = score.limits if score else ()
    scales = score.scales if score else scales
    if score:
        options |= {"score": score.kind, "stored": score.stored, "limits": limits}
    how = _how(grid, element, rule, factors=factors, scales=scales is not None, **options)
    programs = triton.cdiv(grid.blocks, how.groups)
    if score:
        y = x if score.y is None else score.y
        partial = torch.empty(NUMBERS, programs, dtype=torch.float64, device=x.device)
        place = partial, triton_scores.workspace(x.device), score.out, x if score.runs is None else score.runs
    else:
        y, place = x if rule == LARGEST.value else torch.empty_like(x), (x, x, x, x)
    with np.errstate(all="ignore"):  # the interpreter computes in numpy, which would warn of every NaN and Inf
        quantize_dequantize_kernel[(programs,)](
            x,
            y,
            x if scales is None else scales,
            x if absmax is None else absmax,
            *(x if factor is None else factor for factor in factors),
            *(x if isinstance(limit, float) else limit for limit in limits or (0.0, 0.0)),
            *place,
            *grid.sizes,
            seed,
            HOW=how,
            num_warps=_warps(grid, how),
            enable_fp_fusion=False,
        )
    return y


def _kinds(factors: Factors) -> tuple[int, ...]:
    return tuple(0 if factor is None else EACH.value if factor.dim() else ALL.value for factor in factors)


def _limits(limits: Sequence[float | Tensor]) -> tuple[float, ...]:
    """LIMITS of the kernel."""
    if not limits:
        return -1, -1, 0.0, 0.0
    kinds = (0 if isinstance(limit, float) else EACH.value if limit.dim() else ALL.value for limit in limits)
    return *kinds, *(limit if isinstance(limit, float) else 0.0 for limit in limits)


def _runs_to_a_program(grid: Grid) -> int:
    """Blocks per program of the kernels that add up runs: four per thread."""
    return min(TILE if INTERPRETED else 512, int(triton.next_power_of_2(grid.blocks)))


@dataclass(frozen=True)
class TritonRuns(Runs):
    """Runs of more values than SPLIT are cut where possible: a program's tile holds whole blocks, and neighbors of
    those if they do not lie along the last axis."""

    SPLIT = 1024
    SPLIT_INNER = 32

    def largest(self) -> Tensor:
        grid, together = self._pieces()
        out = torch.empty(grid.blocks, dtype=torch.float32, device=self.x.device)
        _launch(self.x, grid, self.spec.format.element, LARGEST.value, scales=out)
        return out if together == 1 else self._whole_runs(out.reshape(-1, grid.per_row, grid.inner)).amax(2).reshape(-1)

    def moments(self) -> tuple[Tensor, Tensor]:
        grid = self._whole
        total, squares = torch.empty(2, grid.blocks, dtype=torch.float64, device=self.x.device)
        groups = _runs_to_a_program(grid)
        with np.errstate(all="ignore"):
            run_moments_kernel[(triton.cdiv(grid.blocks, groups),)](
                self.x, total, squares, *grid.sizes, grid.block, GROUPS=groups, enable_fp_fusion=False
            )
        return total, squares

    def errors(self, tried: Sequence[Factors], square: bool) -> list[Tensor]:
        return [self._errors(factors, square) for factors in tried]

    def _errors(self, factors: Factors, square: bool) -> Tensor:
        grid, element = self._whole, self.spec.format.element
        out = torch.empty(grid.blocks, dtype=torch.float32, device=self.x.device)
        groups = _runs_to_a_program(grid)
        with np.errstate(all="ignore"):
            run_errors_kernel[(triton.cdiv(grid.blocks, groups),)](
                self.x,
                out,
                *(self.x if factor is None else factor for factor in factors),
                *grid.sizes,
                LENGTH=grid.block,
                GROUPS=groups,
                WHOLE=grid.axis % grid.block == 0 and grid.blocks % groups == 0,
                TIERS=element.tiers,
                TAPER=_taper(element.tiers),
                EMAX=element.emax,
                MAX=element.max,
                SIGNED_ZERO=element.signed_zero,
                SQUARE=square,
                FACTORS=_kinds(factors),
                PRECISE=element.mantissa_bits <= 3,
                enable_fp_fusion=False,
            )
        return out

    def stored(self, scale: Tensor, element: Element) -> Tensor:
        scale = scale.contiguous()
        return _launch(scale, Grid.of(scale, 0, None), element, GIVEN.value)

    def rescaled(self, factors: Factors, seed: int, score: ScoreSums | None = None) -> Tensor:
        """The values rounded with these factors; with a score, that is computed instead."""
        factors = Factors(*(factor if factor is None else self._of_pieces(factor) for factor in factors))
        spec = self.spec
        bounded = not (spec.scaling.saturates or spec.history) and spec.rounding != RoundingMode.STOCHASTIC
        overflow = Overflow.SATURATE if bounded else spec.overflow
        how: dict[str, Any] = {"rounding": spec.rounding, "overflow": overflow, "bounded": bounded}
        given = spec.format.element, GIVEN.value
        return _launch(self.x, self._pieces()[0], *given, factors=factors, seed=seed, score=score, **how)

    def limits(self, absmax: Tensor | None, scales: Tensor | None) -> tuple[float | Tensor, ...]:
        """`Scaling.saturation`, a tensor as float64 scalar or [pieces]; () if no value saturates. scales: [runs]."""
        spec, scaling = self.spec, self.spec.scaling
        if not (scaling.saturates or spec.history):
            return ()
        shared = spec.block == TENSOR or scaling.outer or spec.history
        if absmax is None and shared:
            absmax = outer_absmax(self.x, spec, self.dim)
        above = self.x if absmax is None else self._at_runs(absmax)  # without an outer scale, of no use
        limits = scaling.saturation(scales, spec, above)
        return tuple(limit if isinstance(limit, float) else self._of_pieces(limit) for limit in limits)

    def _at_runs(self, of_values: Tensor) -> Tensor:
        """One number for each value (or all), equal in a run -> for each run."""
        if not of_values.dim():
            return of_values
        at = [slice(None)] * self.x.dim()
        at[self.dim] = slice(None, None, self.spec.run(self.x.shape[self.dim]))
        return of_values.expand(self.x.shape)[tuple(at)].reshape(-1).contiguous()

    def counts_of(self, of_pieces: Tensor, scales: Tensor) -> Tensor:
        """`counted_blocks` from the numbers of a score for RUNS, and the scale of each run."""
        grid, _ = self._pieces()
        begin = torch.arange(0, grid.per_row * grid.block, grid.block, device=self.x.device)[:, None]
        length = (
            (grid.axis - begin)
            .clamp(max=grid.block)
            .expand(len(of_pieces[0]) // len(begin) // grid.inner, -1, grid.inner)
        )
        peak, signal, noise, count = (
            self._whole_runs(numbers.reshape(-1, grid.per_row, grid.inner)) for numbers in (*of_pieces, length.double())
        )
        peak = self._grouped(peak.amax(2).reshape(-1)).amax(-1)
        signal, noise, count = (self._grouped(numbers.sum(2).reshape(-1)).sum(-1) for numbers in (signal, noise, count))
        return counted_blocks(peak, signal, noise, count, self._grouped(scales)[:, 0])

    def _whole_runs(self, of_pieces: Tensor) -> Tensor:
        """[outer, pieces, inner] -> [outer, runs, pieces of a run, inner], short runs padded with zeros."""
        together = self._pieces()[1]
        padded = torch.nn.functional.pad(of_pieces, (0, 0, 0, -of_pieces.shape[1] % together))
        return padded.reshape(len(padded), -1, together, padded.shape[-1])

    def _of_pieces(self, of_runs: Tensor) -> Tensor:
        """One number for each run, or one for all -> for each of its pieces."""
        grid, together = self._pieces()
        if not of_runs.dim() or together == 1:
            return of_runs
        runs = of_runs.reshape(-1, -(-grid.per_row // together), grid.inner)
        return runs.repeat_interleave(together, 1)[:, : grid.per_row].reshape(-1)

    @property
    def _whole(self) -> Grid:
        return Grid.of(self.x, self.dim, self.spec.run(self.x.shape[self.dim]))

    def _pieces(self) -> tuple[Grid, int]:
        """The grid, and how many of its blocks make a run."""
        axis = self.x.shape[self.dim]
        run = self.spec.run(axis)
        split = self.SPLIT if self.dim == self.x.dim() - 1 else self.SPLIT_INNER
        if run is not None and run > split and (run >= axis or run % split == 0):
            return Grid.of(self.x, self.dim, split), -(-min(run, axis) // split)
        return Grid.of(self.x, self.dim, run), 1


def check_device(x: Tensor) -> None:
    """Raises ValueError unless the kernels of this process can run on x's device, TypeError unless x has memory."""
    if not is_ordinary(x):
        raise TypeError(
            f"a Triton kernel cannot read a {type(x).__name__} of layout {x.layout}: pass an ordinary tensor"
        )
    if x.is_cuda == INTERPRETED:
        have = "interpreted" if INTERPRETED else "compiled for CUDA"
        raise ValueError(
            f"the Triton kernels are {have} in this process, but the tensor is on {x.device}: "
            "to run on CPU tensors, set TRITON_INTERPRET=1 before the process starts; to run on CUDA tensors, unset it"
        )


def rule_of(spec: Spec) -> int | None:
    """How the kernel finds a spec's scales by itself; None if it cannot."""
    scaling = spec.scaling
    if spec.block is None:
        return int(GIVEN.value)  # there are none
    if spec.block == TENSOR:
        alone = isinstance(scaling, Amax) and not (scaling.pow2 or spec.history)
        return int(SHARED.value) if alone else None
    rule = kernel_of(spec)
    return int(rule) if rule and rule <= Kernel.HIF4 and scaling.outer in (None, TENSOR) else None


def _alone(spec: Spec) -> dict[str, Any]:
    """What `_how` needs of a spec with a rule."""
    scaling = spec.scaling
    bounded = (
        spec.block == TENSOR and not scaling.saturates and spec.rounding != RoundingMode.STOCHASTIC
    )  # by its scale
    return {
        "element": spec.format.element,
        "rule": rule_of(spec),
        "rounding": spec.rounding,
        "overflow": Overflow.SATURATE if bounded else spec.overflow,
        "scale_element": scaling.stored or E4M3,
        "bounded": bounded,
        "shared": scaling.shared(spec) if isinstance(scaling, Amax) else (0.0, 0.0, False),
    }


def quantize_dequantize(
    x: Tensor, spec: Spec, dim: int, absmax: Tensor | None, want_scales: bool, seed: int
) -> tuple[Tensor, Tensor | None]:
    """x (any shape, contiguous, not empty) of a spec with a kernel -> (y of x's shape and dtype, scales).

    Scales are float32: [outer · blocks of a row · inner] for a block format if wanted, else None or undefined.
    absmax as in `reference.outer_absmax`, computed here if None.
    """
    check_device(x)
    shape, dtype = x.shape, x.dtype
    x = x.float() if INTERPRETED else x
    x = x if x.dim() else x.reshape(1)
    dim = dim % x.dim()
    if rule_of(spec) is None:
        runs = TritonRuns(x, spec, dim)
        factors, scales = runs.factors(absmax, want_scales)
        return runs.rescaled(factors, seed).to(dtype).reshape(shape), scales
    absmax = _outer(x, spec, dim, absmax)
    grid = Grid.of(x, dim, spec.run(x.shape[dim]))
    want_scales = want_scales and spec.has_blocks
    scales = torch.empty(grid.blocks, dtype=torch.float32, device=x.device) if want_scales else None
    y = _launch(x, grid, **_alone(spec), absmax=absmax, scales=scales, seed=seed)
    return y.to(dtype).reshape(shape), scales


def _outer(x: Tensor, spec: Spec, dim: int, absmax: Tensor | None) -> Tensor | None:
    """absmax, computed if it is needed."""
    needed = absmax is None and (spec.scaling.outer or spec.block == TENSOR)
    return outer_absmax(x, spec, dim) if needed else absmax


def score_formats(
    x: Tensor, specs: Sequence[Spec], dim: int = -1, absmax: Tensor | None = None, seed: int = 0, blocks: bool = False
) -> list[tuple[Tensor, Tensor | None]]:
    """`score` of x rounded by each spec, all of which have a kernel. One launch for those with a rule. blocks: of those
    that have blocks. absmax: of the tensor, computed here if None and needed."""
    check_device(x)
    original, stored = x, triton_scores.DTYPES[x.dtype]
    x = x.contiguous().float() if INTERPRETED else x.contiguous()
    x = x if x.dim() else x.reshape(1)
    dim = dim % x.dim()
    together = [spec for spec in specs if rule_of(spec) is not None]
    whole = [spec for spec in specs if spec.of_tensor and not spec.history]
    if absmax is None and whole:
        absmax = absmax_over(x, dim, TENSOR)
    grids, hows = [], []
    for spec in together:
        kind = (BLOCKS if blocks and spec.has_blocks else SUMS).value
        limits = (1.0, spec.format.max) if spec.scaling.saturates else ()
        grids.append(Grid.of(x, dim, spec.run(x.shape[dim])))
        hows.append(_how(grids[-1], **_alone(spec), score=kind, stored=stored, limits=limits))
    scores: dict[Spec, tuple[Tensor, Tensor | None]] = {}
    if together:
        out = torch.empty(len(together), NUMBERS + BINS, dtype=torch.float64, device=x.device)
        _launch_formats(x, dim, grids, tuple(hows), absmax, seed, out)
        for spec, how, row in zip(together, hows, out, strict=True):
            counts = row[NUMBERS:][: sum(COUNTS)] if how.score == BLOCKS.value else None
            scores[spec] = row[:NUMBERS], counts
    for spec in specs:
        if spec not in scores:
            counted = blocks and spec.has_blocks
            scores[spec] = score(original, None, spec, dim, None, absmax if spec in whole else None, seed, counted)
    return [scores[spec] for spec in specs]


def _launch_formats(
    x: Tensor, dim: int, grids: Sequence[Grid], hows: tuple[How, ...], absmax: Tensor | None, seed: int, out: Tensor
) -> None:
    global launches
    launches += 1
    most = max(triton.cdiv(grid.blocks, how.groups) for grid, how in zip(grids, hows, strict=True))
    partial = torch.empty(len(hows), NUMBERS, most, dtype=torch.float64, device=x.device)
    with np.errstate(all="ignore"):
        score_formats_kernel[(most,)](
            x,
            x if absmax is None else absmax,
            partial,
            triton_scores.workspace(x.device, len(hows)),
            out,
            x.numel(),
            x.shape[dim],
            x.shape[dim + 1 :].numel(),
            most,
            seed,
            HOWS=hows,
            FLAT=tuple(grid.axis == x.numel() and grid.inner == 1 for grid in grids),
            num_warps=max(map(_warps, grids, hows)),
            enable_fp_fusion=False,
        )


def score(
    x: Tensor,
    y: Tensor | None,
    spec: Spec | None = None,
    dim: int = -1,
    scales: Tensor | None = None,
    absmax: Tensor | None = None,
    seed: int = 0,
    blocks: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(float64 [NUMBERS], see `triton_scores`; for `blocks` how many lie in each bin of BLOCK_MEASURES, else None).

    Of x (any shape, not empty) and y, its rounded values, with scales as `quantize_dequantize` returns them; or of x
    rounded here, by a spec with a kernel. Without a spec nothing saturates. absmax as in `reference.outer_absmax`,
    computed here if None and needed.
    """
    if spec is not None and spec.scaling.per_element:  # y does not tell its factors
        y = None
    if spec is not None and y is None and rule_of(spec) is not None:
        return score_formats(x, [spec], dim, absmax, seed, blocks)[0]
    check_device(x)
    stored = triton_scores.DTYPES[x.dtype if y is None else y.dtype]
    x, y = x.contiguous(), None if y is None else y.contiguous()
    if INTERPRETED:
        x, y = x.float(), None if y is None else y.float()
    x = x if x.dim() else x.reshape(1)

    def prepared(
        grid: Grid, kind: Any, scales: Tensor | None = None, limits: Sequence[float | Tensor] = ()
    ) -> ScoreSums:
        out = torch.empty(NUMBERS + (BINS if kind == BLOCKS else 0), dtype=torch.float64, device=x.device)
        of_runs = torch.empty(3, grid.blocks, dtype=torch.float64, device=x.device) if kind == RUNS else None
        return ScoreSums(kind.value, stored, y, scales, limits, out, of_runs)

    if spec is None:
        grid = Grid.of(x, 0, None)
        request = prepared(grid, SUMS)
        _launch(x, grid, E4M3, ROUNDED.value, score=request)
        return request.out, None
    runs, factors = TritonRuns(x, spec, dim % x.dim()), NO_FACTORS
    if y is None:
        factors, scales = runs.factors(absmax, True)
    per_run = None if scales is None else scales.reshape(-1)
    of_pieces = None if per_run is None else runs._of_pieces(per_run)
    grid, together = runs._pieces()
    kind = SUMS if not blocks else BLOCKS if together == 1 and runs._rows == 1 else RUNS
    request = prepared(grid, kind, of_pieces, runs.limits(absmax, per_run))
    if y is None:
        runs.rescaled(factors, seed, request)
    else:
        _launch(x, grid, E4M3, ROUNDED.value, score=request)
    if request.runs is not None:
        assert per_run is not None, "the scales of a block format are missing"
        return request.out, runs.counts_of(request.runs, per_run)
    return request.out[:NUMBERS], request.out[NUMBERS:][: sum(COUNTS)] if blocks else None
