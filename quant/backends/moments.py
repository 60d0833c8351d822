"""The result of one pass over a tensor, see `summary`, and the pass of the CPU that needs no sketch: moments.cpp, if
`native` finds a build worthwhile."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from binade.quant.backends import native
from binade.quant.memory import address

UNITS = {
    torch.float32: native.Unit("moments.cpp", ("VALUE=float",)),
    torch.bfloat16: native.Unit("moments.cpp", ("VALUE=uint16_t",)),
}
Sums = ctypes.c_double * 11
ARGUMENTS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, Sums)
PART = 1 << 18  # starting another thread costs as much as this many values


@dataclass(frozen=True)
class Pass:
    """The result of one pass over a tensor: counts [BINS] of the finite values, or none, sums of their (x - shift)^k
    for k = 1 to 4, their extremes (infinite without any), and how many values are zero, NaN and infinite."""

    counts: np.ndarray
    sums: np.ndarray
    shift: float
    low: float
    high: float
    absmin: float
    zeros: int
    nans: int
    infs: int


def measured_later(x: Tensor) -> Callable[[], Pass] | None:
    """A function that returns the Pass of x as it is now, without counts; None if x is empty, float16 or not on the
    CPU, or a build is not worth it."""
    unit = UNITS.get(x.dtype)
    size = x.numel()
    library = native.built(unit, size) if unit and size and x.device.type == "cpu" else None
    if library is None:
        return None
    if not x.is_contiguous():  # a transposed tensor is not copied
        x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).contiguous()
    moments, at = _declare(library), address(x)
    parts = [Sums() for _ in range(0, size, PART)]

    def some(first: int, last: int) -> None:
        for number in range(first, last):
            moments(at, size, number * PART, min((number + 1) * PART, size), parts[number])

    if len(parts) > 1:
        native.share_out(len(parts), native.PER_THREAD, some)
    else:
        some(0, 1)
    return lambda: _added_up(np.array(parts))


def _added_up(parts: np.ndarray) -> Pass:
    """parts: float64 [parts, 11], see moments.cpp; added in a fixed order, regardless of the threads."""
    low, high, absmin = parts[:, 4].min(), parts[:, 5].max(), parts[:, 6].min()
    total = parts.sum(0)
    counts = (int(count) for count in total[7:10])
    return Pass(np.zeros(0, np.int64), total[:4], float(parts[0, 10]), float(low), float(high), float(absmin), *counts)


@cache
def _declare(library: ctypes.CDLL) -> Callable[..., None]:
    """The function of the library, its arguments declared."""
    moments: Any = library.moments
    moments.argtypes, moments.restype = ARGUMENTS, None
    function: Callable[..., None] = moments
    return function
