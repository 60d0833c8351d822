"""Quantize-dequantize on a CPU: a compiled kernel if that is worthwhile, else `reference` piece by piece; both give the
same bits.

The kernel finds the scales of a few schemes itself. For the others, `runs` computes them from the kernel's statistics
of each run of values, and the kernel rounds with the resulting factors.

cpu.cpp is built (see `native`) once for each kind of kernel: input dtype, number of tiers, rounding, float32-wide
exponents. A new format of a known family needs no new source. torch.compile of the reference was rejected: its first
call takes far longer than a build here, and it gives no control over the loops along the first axis.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from binade.quant import reference
from binade.quant.backends import native
from binade.quant.backends.runs import Runs
from binade.quant.backends.score_numbers import ScoreNumber
from binade.quant.block_histograms import BLOCK_MEASURES, COUNTS
from binade.quant.elements import Element, Overflow, RoundingMode
from binade.quant.memory import address
from binade.quant.reference import outer_absmax
from binade.quant.rounding import round_to_element
from binade.quant.scaling import has_kernel, kernel_of
from binade.quant.scheme import Factors
from binade.quant.specs import TENSOR, Block, Spec

MAX_TIERS = 8
STRIP = 256  # as in cpu.cpp
ROUNDINGS = {RoundingMode.NEAREST: 0, RoundingMode.HALF_AWAY: 1, RoundingMode.STOCHASTIC: 2}
GIVEN = 0
VALUES = {torch.float32: "float", torch.bfloat16: "uint16_t"}
ANY = Spec.of("mxfp8")  # the build for functions that need no particular one: the most common build
# For how many groups torch computes the factors at once, so that they fit in a core's cache; less than
# native.PER_THREAD, because each part belongs to one thread and must not wait for another.
PART = 1 << 15
# A piece that keeps the reference's dozen temporaries in a core's cache.
PIECE = 1 << 16
NO_LIMIT = torch.zeros((), dtype=torch.float64, device="cpu")


class _Format(ctypes.Structure):
    _fields_ = [
        ("rule", ctypes.c_int32),
        ("emax", ctypes.c_int32),
        ("mantissa_bits", ctypes.c_int32),
        ("max", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("inverse", ctypes.c_float),
        ("bound", ctypes.c_float),
        ("zero", ctypes.c_float),
        ("lowest", ctypes.c_float * MAX_TIERS),
        ("step", ctypes.c_float * MAX_TIERS),
        ("outer", ctypes.c_float),
        ("squares", ctypes.c_int32),
    ]


class _Bins(ctypes.Structure):
    _fields_ = [("width", ctypes.c_float * 3), ("low", ctypes.c_int32 * 3), ("high", ctypes.c_int32 * 3)]


class _Factors(ctypes.Structure):
    _fields_ = [
        *(("from", ctypes.c_void_p * 4), ("step", ctypes.c_int64 * 4)),
        *((name, ctypes.c_int64) for name in ("rows", "per_axis", "inner")),
    ]

    @classmethod
    def of(cls, factors: Factors, rows: int = 1, per_axis: int = 1, inner: int = 1) -> _Factors:
        """Pointers into the factors of groups, which must stay alive."""
        return cls(
            (ctypes.c_void_p * 4)(*(None if factor is None else address(factor) for factor in factors)),
            (ctypes.c_int64 * 4)(*(int(factor is not None and factor.dim() > 0) for factor in factors)),
            *(rows, per_axis, inner),
        )


def unit_of(spec: Spec, dtype: torch.dtype) -> native.Unit | None:
    """The build of cpu.cpp for a spec; None for a scale scheme without a kernel. float16 goes through float32."""
    return _unit(spec.format.element, spec.rounding, dtype) if has_kernel(spec) else None


def _unit(element: Element, rounding: RoundingMode, dtype: torch.dtype) -> native.Unit | None:
    if len(element.tiers) > MAX_TIERS:
        return None
    return native.Unit(
        "cpu.cpp",
        (
            f"VALUE={VALUES.get(dtype, 'float')}",
            f"TIERS={len(element.tiers)}",
            f"ROUNDING={ROUNDINGS[rounding]}",
            f"WIDE={int(element.emax > 64)}",
        ),
    )


def kernel(unit: native.Unit, values: int | None = None) -> ctypes.CDLL | None:
    """The compiled functions of a unit, built if `values` more values are worth a build (None: always); else None."""
    library = native.built(unit, values)
    return None if library is None else _declare(library)


@cache
def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, its functions' arguments declared."""
    pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    layout, items = (size, size, size), (size, size)
    rounding = (pointer, size, ctypes.c_uint32)
    library.quantize.argtypes = [pointer, pointer, pointer, pointer, pointer, *layout, *rounding, *items]
    library.largest.argtypes = [pointer, pointer, *layout, *items]
    library.moments.argtypes = [pointer, pointer, pointer, *layout, *items]
    library.run_errors.argtypes = [pointer, pointer, size, pointer, pointer, size, *layout, ctypes.c_int32, *items]
    sums = (real, pointer, size, pointer, *items, pointer)
    library.measure.argtypes = [pointer, pointer, pointer, *layout, *sums]
    library.score.argtypes = [pointer, pointer, pointer, pointer, *layout, *rounding, *sums]
    functions = library.quantize, library.largest, library.moments, library.run_errors, library.measure, library.score
    for function in functions:
        function.restype = None
    return library


@lru_cache(maxsize=64)
def _describe(element: Element, overflow: Overflow, rule: int, outer: float = 0.0, squares: bool = False) -> _Format:
    lowest, step = [0.0] * MAX_TIERS, [0.0] * MAX_TIERS
    for i, (exponent, bits) in enumerate(element.tiers):
        lowest[i], step[i] = 2.0**exponent, 2.0**-bits
    return _Format(
        rule,
        element.emax,
        element.mantissa_bits,
        element.max,
        element.max if overflow == Overflow.SATURATE else float("inf"),
        1.0 / element.max,
        element.max if overflow == Overflow.SATURATE else 2.0 ** (element.emax + 1),
        -0.0 if element.signed_zero else 0.0,
        (ctypes.c_float * MAX_TIERS)(*lowest),
        (ctypes.c_float * MAX_TIERS)(*step),
        outer,
        squares,
    )


def _address(tensor: Tensor | None) -> int | None:
    return address(tensor) if tensor is not None and tensor.numel() else None


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor for the kernels, [outer, axis, inner] in blocks along the axis, and the work divided into
    `items`."""

    axis: int
    inner: int
    block: int  # 0 where the whole tensor shares its factors
    rows: int  # of blocks, each `inner` wide
    items: int
    per_item: int

    @classmethod
    def of(cls, x: Tensor, spec: Spec, dim: int) -> Layout:
        dim = dim % x.dim() if x.dim() else 0
        return cls.in_blocks(x, spec.run(x.shape[dim] if x.dim() else 1), dim)

    @classmethod
    def in_blocks(cls, x: Tensor, block: int | None, dim: int) -> Layout:
        axis = x.shape[dim] if x.dim() else 1
        inner = x.shape[dim + 1 :].numel()
        if block is None:
            return cls(axis, inner, 0, 0, x.numel(), 1)
        rows = x.numel() // (axis * inner) * -(-axis // block)
        block = min(block, axis)
        items = rows if inner == 1 else rows * -(-inner // STRIP)
        return cls(axis, inner, block, rows, items, block * min(inner, STRIP))

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.axis, self.inner, self.block


@dataclass(frozen=True)
class CpuRuns(Runs):
    """Runs on a CPU, by the functions of kernel(unit_of(spec, x.dtype))."""

    run: ctypes.CDLL

    PART = PART

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.x, self.spec, self.dim)

    def largest(self) -> Tensor:
        return self._largest(self.layout)

    def _largest(self, layout: Layout) -> Tensor:
        out = torch.empty(layout.rows * layout.inner, dtype=torch.float32, device="cpu")
        pointers = address(self.x), address(out)
        self._share_out(lambda *items: self.run.largest(*pointers, *layout.sizes, *items), layout)
        return out

    def above(self, block: Block) -> Tensor:
        """[runs] float32: for each run, the largest magnitude of the block that shares its outer scale."""
        axis, runs = self.x.shape[self.dim], -(-self.x.shape[self.dim] // self.layout.block)
        columns = block.columns or axis
        largest = self._largest(Layout.in_blocks(self.x, columns, self.dim))
        outer, inner = self.x.shape[: self.dim].numel(), self.layout.inner
        of_each = largest.reshape(outer, -1, 1, inner).expand(-1, -1, -(-columns // self.layout.block), -1)
        return of_each.reshape(outer, -1, inner)[:, :runs].reshape(-1)

    def absmax(self) -> Tensor:
        """float32: the largest magnitude of the tensor, NaN if any is NaN."""
        size, length = self.x.numel(), 1 << 12
        out = torch.empty(-(-size // length), dtype=torch.float32, device="cpu")
        pointers = address(self.x), address(out)
        native.share_out(out.numel(), length, lambda *items: self.run.largest(*pointers, size, 1, length, *items))
        return out.amax()

    def moments(self) -> tuple[Tensor, Tensor]:
        total, squares = torch.empty(2, self.layout.rows * self.layout.inner, dtype=torch.float64, device="cpu")
        pointers = address(self.x), address(total), address(squares)
        self._share_out(lambda *items: self.run.moments(*pointers, *self.layout.sizes, *items))
        return total, squares

    def errors(self, tried: Sequence[Factors], square: bool) -> Tensor:
        runs = self.layout.rows * self.layout.inner
        out = torch.empty(len(tried), runs, dtype=torch.float32, device="cpu")
        described = _describe(self.spec.format.element, Overflow.SATURATE, GIVEN)
        given = (_Factors * len(tried))(*map(self.given, tried))
        pointers = ctypes.addressof(given), len(tried), address(self.x), address(out), runs
        rest = *self.layout.sizes, square
        self._share_out(lambda *items: self.run.run_errors(ctypes.addressof(described), *pointers, *rest, *items))
        return out

    def _of_runs(self, factors: Factors) -> Factors:
        # The kernels find a run's group themselves: a copy for each line of a tile would cost as much as rounding.
        return Factors(*(factor if factor is None else factor.contiguous() for factor in factors))

    def given(self, factors: Factors) -> _Factors:
        """The factors of groups in the form that the kernels take."""
        blocks = self.spec.has_blocks
        return _Factors.of(factors, *(self._rows, self._shape[self.dim], self.layout.inner) if blocks else ())

    def stored(self, scale: Tensor, element: Element) -> Tensor:
        unit = _unit(element, RoundingMode.NEAREST, torch.float32)
        run = kernel(unit, self.x.numel()) if unit else None
        if run is None:
            return round_to_element(scale, element, RoundingMode.NEAREST, Overflow.SATURATE)
        scale, out = scale.contiguous(), torch.empty(scale.shape, dtype=torch.float32, device="cpu")
        described, given = _describe(element, Overflow.SATURATE, GIVEN), _Factors.of(Factors())
        pointers = ctypes.addressof(described), ctypes.addressof(given), address(scale), address(out)
        native.share_out(out.numel(), 1, lambda *items: run.quantize(*pointers, None, 1, 1, 0, None, 0, 0, *items))
        return out

    def each(self, part: Callable[[slice], None], cuts: list[slice]) -> None:
        def some(first: int, last: int) -> None:
            for cut in cuts[first:last]:
                part(cut)

        native.share_out(len(cuts), self.PART, some)

    def _share_out(self, part: Callable[[int, int], None], layout: Layout | None = None) -> None:
        layout = layout or self.layout
        native.share_out(layout.items, layout.per_item, part)


@dataclass(frozen=True)
class _Call:
    """The arguments of quantize and score: the spec in the kernels' terms, the factors, and memory for the scales."""

    layout: Layout
    described: _Format
    given: _Factors | None
    factors: Factors | None  # what `given` points into
    scales: Tensor | None
    absmax: Tensor | None  # the largest magnitude of the tensor, or of what is above each run, where a kernel needs it
    seed: int

    @classmethod
    def of(
        cls, x: Tensor, spec: Spec, dim: int, absmax: Tensor | None, want_scales: bool, seed: int, run: ctypes.CDLL
    ) -> _Call:
        layout, rule, scaling = Layout.of(x, spec, dim), kernel_of(spec), spec.scaling
        element, overflow = spec.format.element, spec.overflow
        lines = x if x.dim() else x.reshape(1)
        runs = CpuRuns(lines, spec, dim % lines.dim(), run)
        if scaling.outer not in (None, TENSOR):
            absmax = runs.above(scaling.outer) if absmax is None else runs.outer(runs.largest(), absmax)
            absmax = absmax.contiguous()
        shared = spec.block == TENSOR or (rule is not None and scaling.outer == TENSOR)
        if absmax is None and shared and not spec.history:
            absmax = runs.absmax()
        if rule is not None:
            absmax = outer_absmax(x, spec, dim) if absmax is None else absmax
            scales = torch.empty(layout.rows * layout.inner, dtype=torch.float32, device="cpu") if want_scales else None
            described = _describe(element, overflow, rule, scaling.kernel_constant(spec), spec.error == "mse")
            return cls(layout, described, None, None, scales, absmax, seed)
        factors, scales = runs.factors(absmax, want_scales)
        described = _describe(element, overflow, GIVEN)
        return cls(layout, described, runs.given(factors), factors, scales, None, seed)

    @property
    def head(self) -> tuple[int, int | None]:
        return ctypes.addressof(self.described), ctypes.addressof(self.given) if self.given else None

    @property
    def tail(self) -> tuple[int, int, int, int | None, int, int]:
        step = int(self.absmax is not None and self.absmax.dim() > 0)
        return *self.layout.sizes, _address(self.absmax), step, self.seed & 0xFFFFFFFF


def compiled(
    x: Tensor, spec: Spec, dim: int, absmax: Tensor | None, want_scales: bool, run: ctypes.CDLL, seed: int = 0
) -> tuple[Tensor, Tensor | None]:
    """As `quantize_dequantize`, by kernel(unit_of(spec, x.dtype))."""
    dtype = x.dtype
    x = x.contiguous() if dtype in VALUES else x.float().contiguous()
    call = _Call.of(x, spec, dim, absmax, want_scales, seed, run)
    y = native.empty_like(x)
    pointers = *call.head, address(x), address(y), _address(call.scales)
    native.share_out(
        call.layout.items, call.layout.per_item, lambda *items: run.quantize(*pointers, *call.tail, *items)
    )
    return y.to(dtype), call.scales


def measure(
    x: Tensor,
    y: Tensor,
    spec: Spec | None = None,
    dim: int = -1,
    scales: Tensor | None = None,
    blocks: bool = False,
) -> np.ndarray | None:
    """The error of y against x in one pass: float64, the numbers of ScoreNumber. Returns None if no kernel supports
    this spec and these tensors, a build is not worth it, or saturation depends on more than a block's scale.

    x and y of one shape; scales as `quantize_dequantize` returns them. Without a spec nothing saturates.

    With `blocks`, which needs a spec whose blocks are vectors, the counts of all bins of BLOCK_MEASURES follow.
    """
    run = _summing(spec or ANY, blocks, x, y)
    if run is None:
        return None
    x, y = x.contiguous(), y.contiguous()
    layout = Layout.of(x, spec, dim) if spec else Layout(x.numel(), 1, 0, 0, x.numel(), 1)
    scales = scales.contiguous() if scales is not None and layout.rows else None
    pointers = address(x), address(y), _address(scales)
    left, right = _limits(spec, outer_absmax(x, spec, dim), scales) if spec else (0.0, NO_LIMIT)
    limits = left, address(right), right.dim()
    return _added_up(layout, blocks, lambda *rest: run.measure(*pointers, *layout.sizes, *limits, *rest))


def score(x: Tensor, spec: Spec, dim: int, seed: int = 0, blocks: bool = False) -> np.ndarray | None:
    """As `measure` for y = x rounded by the spec, without keeping y."""
    run = _summing(spec, blocks, x)
    if run is None:
        return None
    x = x.contiguous()
    absmax = outer_absmax(x, spec, dim)
    call = _Call.of(x, spec, dim, absmax, True, seed, run)
    left, right = _limits(spec, absmax, call.scales)
    limits = left, address(right), right.dim()
    pointers = *call.head, address(x), _address(call.scales)
    return _added_up(call.layout, blocks, lambda *rest: run.score(*pointers, *call.tail, *limits, *rest))


def _worth_building(x: Tensor, spec: Spec) -> ctypes.CDLL | None:
    """The kernel for a spec and a tensor; None if there is none, or a build is not worth it."""
    unit = unit_of(spec, x.dtype)
    return kernel(unit, x.numel()) if unit else None


def _summing(spec: Spec, blocks: bool, x: Tensor, *others: Tensor) -> ctypes.CDLL | None:
    """The kernel for `measure` and `score`; None if they cannot do it, or a build is not worth it."""
    lines = not blocks or (spec.block is not None and (spec.block.rows or 1) == 1)
    alike = all((t.dtype, t.device, t.shape) == (x.dtype, x.device, x.shape) for t in others)
    fits = lines and alike and x.device.type == "cpu" and x.dtype in VALUES and x.numel() and _one_limit(spec)
    return _worth_building(x, spec) if fits else None


def _one_limit(spec: Spec) -> bool:
    """Whether values saturate beyond one number times their block's scale, or not at all."""
    scaling = spec.scaling
    return scaling.outer in (None, TENSOR) and not scaling.per_element and not spec.history


def _limits(spec: Spec, absmax: Tensor, scales: Tensor | None) -> tuple[float, Tensor]:
    """`Scaling.saturation`, the second as float64: a scalar, or one number for each run."""
    left, right = spec.scaling.saturation(None if scales is None else scales.reshape(-1), spec, absmax)
    return float(left), torch.as_tensor(right, dtype=torch.float64, device="cpu").contiguous()


def _added_up(layout: Layout, blocks: bool, part: Callable[[int | None, int, int, int], None]) -> np.ndarray:
    """The numbers of ScoreNumber over all items, and the counts of blocks; part(bins, first, last, address) writes
    those of items [first, last)."""
    bins = _bins() if blocks else None
    size = len(ScoreNumber) + (sum(COUNTS) if blocks else 0)
    sums: dict[int, np.ndarray] = {}

    def of_part(first: int, last: int) -> None:
        sums[first] = np.zeros(size)
        part(ctypes.addressof(bins) if bins else None, first, last, sums[first].ctypes.data)

    native.share_out(layout.items, layout.per_item, of_part)
    parts = np.stack([sums[first] for first in sorted(sums)])  # added up in a fixed order, regardless of the threads
    total: np.ndarray = parts.sum(0)
    total[ScoreNumber.LARGEST] = parts[:, ScoreNumber.LARGEST].max()
    return total


@cache
def _bins() -> _Bins:
    """BLOCK_MEASURES in the kernels' terms."""
    measures = BLOCK_MEASURES.values()
    low, high = zip(*(one.bins for one in measures), strict=True)
    widths = (ctypes.c_float * 3)(*(one.width for one in measures))
    return _Bins(widths, (ctypes.c_int32 * 3)(*low), (ctypes.c_int32 * 3)(*high))


def in_pieces(x: Tensor, spec: Spec, dim: int, absmax: Tensor | None, seed: int) -> tuple[Tensor, Tensor | None]:
    """As `reference.quantize_dequantize`, one piece of the tensor after another."""
    absmax = outer_absmax(x, spec, dim) if absmax is None else absmax
    together = spec.noisy or absmax.dim() > 0
    if together or x.numel() <= PIECE:
        return reference.quantize_dequantize(x, spec, dim, absmax, seed)
    shared = not spec.has_blocks
    if shared:
        blocks = x.reshape(-1, 1024) if x.numel() % 1024 == 0 else x.reshape(-1, 1)
    else:
        blocks = reference.to_blocks(x, dim, spec.block)
    y = torch.empty(blocks.shape, dtype=x.dtype, device="cpu")
    scales = torch.empty(blocks.shape[0], 1, dtype=torch.float32, device="cpu")
    rows = max(1, PIECE // blocks.shape[1])
    for start in range(0, blocks.shape[0], rows):
        part = slice(start, start + rows)
        _, block_scales, y[part] = reference.quantize_blocks(blocks[part].float(), spec, absmax)
        scales[part] = block_scales[:, :1]
    if shared or spec.block is None:
        return y.reshape(x.shape), None
    return reference.from_blocks(y, x, dim, spec.block), reference.scales_along(scales, x, dim, spec.block)


def quantize_dequantize(
    x: Tensor, spec: Spec, dim: int, absmax: Tensor | None, want_scales: bool, seed: int
) -> tuple[Tensor, Tensor | None]:
    """x (any shape and strides, on the CPU, not empty) -> (y of x's shape and dtype, contiguous; scales).

    Scales are float32, as many as [outer, blocks along dim, inner]; None or undefined unless wanted. absmax as in
    `reference.outer_absmax`, computed here if None.
    """
    run = _worth_building(x, spec)
    if run is None:
        return in_pieces(x, spec, dim, absmax, seed)
    return compiled(x, spec, dim, absmax, want_scales, run, seed)
