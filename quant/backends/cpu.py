"""Quantize-dequantize on a CPU: a compiled kernel where it pays, else `reference` in pieces; the same bits from both.

cpu.cpp is built (see `native`) once for each kind of kernel: input dtype, number of tiers, rounding, float32-wide
exponents. A new format of a known family needs no new source. torch.compile of the reference was rejected: its first
call takes far longer than a build here, and it gives no control over the loops along the first axis.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from binade.quant import reference
from binade.quant.backends import native
from binade.quant.elements import Overflow, Rounding
from binade.quant.reference import Plan

MAX_TIERS = 8
STRIP = 256  # as in cpu.cpp
ROUNDINGS = {Rounding.NEAREST: 0, Rounding.HALF_AWAY: 1}
VALUES = {torch.float32: "float", torch.bfloat16: "uint16_t"}
# A piece that keeps the reference's dozen temporaries in a core's cache.
PIECE = 1 << 16


class _Format(ctypes.Structure):
    _fields_ = [
        ("rule", ctypes.c_int32),
        ("signed_zero", ctypes.c_int32),
        ("emax", ctypes.c_int32),
        ("mantissa_bits", ctypes.c_int32),
        ("max", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("lowest", ctypes.c_float * MAX_TIERS),
        ("step", ctypes.c_float * MAX_TIERS),
    ]


def unit_of(plan: Plan, dtype: torch.dtype) -> native.Unit | None:
    """The build of cpu.cpp for a plan; None for stochastic rounding and for a scale scheme without a kernel. float16
    goes through float32."""
    element = plan.format.element
    if plan.scaling.kernel is None or plan.rounding not in ROUNDINGS or len(element.tiers) > MAX_TIERS:
        return None
    return native.Unit(
        "cpu.cpp",
        (
            f"VALUE={VALUES.get(dtype, 'float')}",
            f"TIERS={len(element.tiers)}",
            f"ROUNDING={ROUNDINGS[plan.rounding]}",
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
    library.quantize.argtypes = [pointer, pointer, pointer, pointer, size, size, size, ctypes.c_float, size, size]
    library.measure.argtypes = [pointer, pointer, pointer, size, size, size, real, real, size, size, pointer]
    library.score.argtypes = [
        *(pointer, pointer, pointer, size, size, size),
        *(ctypes.c_float, real, real, size, size, pointer),
    ]
    library.quantize.restype = library.measure.restype = library.score.restype = None
    return library


@lru_cache(maxsize=64)
def _describe(plan: Plan) -> _Format:
    element = plan.format.element
    lowest, step = [0.0] * MAX_TIERS, [0.0] * MAX_TIERS
    for i, (exponent, bits) in enumerate(element.tiers):
        lowest[i], step[i] = 2.0**exponent, 2.0**-bits
    return _Format(
        plan.scaling.kernel,
        element.signed_zero,
        element.emax,
        element.mantissa_bits,
        element.max,
        element.max if plan.overflow == Overflow.SATURATE else float("inf"),
        (ctypes.c_float * MAX_TIERS)(*lowest),
        (ctypes.c_float * MAX_TIERS)(*step),
    )


@dataclass(frozen=True)
class Layout:
    """A tensor as the kernels see it, [outer, axis, inner] in blocks along the axis, and the work cut into `items`."""

    axis: int
    inner: int
    block: int
    rows: int  # of blocks, each `inner` wide
    items: int
    per_item: int

    @classmethod
    def of(cls, x: Tensor, plan: Plan, dim: int) -> Layout:
        dim = dim % x.dim() if x.dim() else 0
        axis = x.shape[dim] if x.dim() else 1
        inner = x.shape[dim + 1 :].numel()
        if plan.block_size is None:
            return cls(axis, inner, 1, 0, x.numel(), 1)
        block = plan.block_size
        rows = x.numel() // (axis * inner) * -(-axis // block)
        items = rows if inner == 1 else rows * -(-inner // STRIP)
        return cls(axis, inner, block, rows, items, min(block, axis) * min(inner, STRIP))


def compiled(
    x: Tensor, plan: Plan, dim: int, absmax: Tensor, want_scales: bool, run: ctypes.CDLL
) -> tuple[Tensor, Tensor]:
    """As `quantize_dequantize`, by kernel(unit_of(plan, x.dtype))."""
    dtype = x.dtype
    x = x.contiguous() if dtype in VALUES else x.float().contiguous()
    layout = Layout.of(x, plan, dim)
    y = torch.empty_like(x)
    scales = torch.empty(layout.rows * layout.inner if want_scales else 0)
    described = _describe(plan)
    scales_at = scales.data_ptr() if scales.numel() else None
    shape = layout.axis, layout.inner, layout.block
    largest = float(absmax)

    def part(first: int, last: int) -> None:
        run.quantize(ctypes.addressof(described), x.data_ptr(), y.data_ptr(), scales_at, *shape, largest, first, last)

    native.share_out(layout.items, layout.per_item, part)
    return y.to(dtype), scales


def measure(x: Tensor, y: Tensor, plan: Plan, dim: int, scales: Tensor | None, absmax: float) -> list[float] | None:
    """The error of y against x in one pass: sums of x², y², xy and (y-x)² in float64, the largest |y-x|, and how many
    elements of x are finite, not zero, not zero but zero in y, and saturated. None if there is no kernel for this plan
    and dtype, or a build is not worth it.

    x and y on the CPU, not empty, of one shape and dtype; scales as `quantize_dequantize` returns them. absmax is used
    by schemes that saturate and have a tensor scale.
    """
    run = _worth_building(x, plan) if x.dtype == y.dtype and x.dtype in VALUES else None
    if run is None:
        return None
    x, y = x.contiguous(), y.contiguous()
    layout = Layout.of(x, plan, dim)
    scales = scales.contiguous() if scales is not None and plan.block_size is not None else None
    scales_at = None if scales is None else scales.data_ptr()
    shape = layout.axis, layout.inner, layout.block
    limits = plan.scaling.saturation(plan.format.element, absmax)
    return _added_up(
        layout,
        lambda first, last, sums: run.measure(
            x.data_ptr(), y.data_ptr(), scales_at, *shape, *limits, first, last, sums
        ),
    )


def score(x: Tensor, plan: Plan, dim: int, absmax: float) -> list[float] | None:
    """As `measure` for y = x rounded by the plan, without keeping y. absmax is used by formats with a tensor scale."""
    run = _worth_building(x, plan) if x.dtype in VALUES else None
    if run is None:
        return None
    x = x.contiguous()
    layout = Layout.of(x, plan, dim)
    scales = None if plan.block_size is None else torch.empty(layout.rows * layout.inner)
    scales_at = None if scales is None else scales.data_ptr()
    described = _describe(plan)
    shape = layout.axis, layout.inner, layout.block
    limits = plan.scaling.saturation(plan.format.element, absmax)
    return _added_up(
        layout,
        lambda first, last, sums: run.score(
            ctypes.addressof(described), x.data_ptr(), scales_at, *shape, absmax, *limits, first, last, sums
        ),
    )


def _worth_building(x: Tensor, plan: Plan) -> ctypes.CDLL | None:
    """The kernel for a plan and a tensor; None if there is none, or a build is not worth it."""
    unit = unit_of(plan, x.dtype)
    return kernel(unit, x.numel()) if unit else None


def _added_up(layout: Layout, part: Callable[[int, int, int], None]) -> list[float]:
    """Nine sums over all items; part(first, last, address) writes those of items [first, last)."""
    found: dict[int, ctypes.Array[ctypes.c_double]] = {}

    def of_part(first: int, last: int) -> None:
        found[first] = (ctypes.c_double * 9)()
        part(first, last, ctypes.addressof(found[first]))

    native.share_out(layout.items, layout.per_item, of_part)
    parts = [list(found[first]) for first in sorted(found)]  # added up in one order, however the threads ran
    total = [sum(column) for column in zip(*parts, strict=True)]
    total[4] = max(part[4] for part in parts)
    return total


def in_pieces(x: Tensor, plan: Plan, dim: int, absmax: Tensor) -> tuple[Tensor, Tensor | None]:
    """As `reference.quantize_dequantize`, one piece of the tensor after another."""
    if plan.rounding == Rounding.STOCHASTIC or x.numel() <= PIECE:
        return reference.quantize_dequantize(x, plan, dim, absmax)
    if plan.block_size is None:
        blocks = x.reshape(-1, 1024) if x.numel() % 1024 == 0 else x.reshape(-1, 1)
    else:
        blocks = reference.to_blocks(x, dim, plan.block_size)
    y = torch.empty(blocks.shape, dtype=x.dtype)
    scales = torch.empty(blocks.shape[0], 1)
    rows = max(1, PIECE // blocks.shape[1])
    for start in range(0, blocks.shape[0], rows):
        part = slice(start, start + rows)
        _, scales[part], y[part] = reference.quantize_blocks(blocks[part].float(), plan, absmax)
    if plan.block_size is None:
        return y.reshape(x.shape), None
    return reference.from_blocks(y, x, dim), reference.scales_along(scales, x, dim, plan.block_size)


def quantize_dequantize(
    x: Tensor, plan: Plan, dim: int, absmax: Tensor, want_scales: bool
) -> tuple[Tensor, Tensor | None]:
    """x (any shape and strides, on the CPU, not empty) -> (y of x's shape and dtype, contiguous; scales).

    Scales are float32, as many as [outer, blocks along dim, inner]; None or undefined unless wanted.
    """
    run = _worth_building(x, plan)
    if run is None:
        return in_pieces(x, plan, dim, absmax)
    return compiled(x, plan, dim, absmax, want_scales, run)
