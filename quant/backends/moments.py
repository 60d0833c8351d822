"""Sums of powers, extremes and counts of a tensor on the CPU, by moments.cpp if building it is worthwhile (see
`native`)."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from binade.quant.backends import native

UNITS = {
    torch.float32: native.Unit("moments.cpp", ("VALUE=float",)),
    torch.bfloat16: native.Unit("moments.cpp", ("VALUE=uint16_t",)),
}
ARGUMENTS = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
PART = 1 << 18  # another thread costs as much as so many values


def measured(x: Tensor) -> np.ndarray | None:
    """float64 [11], see moments.cpp; None if x is empty, float16 or not on the CPU, or a build is not worth it."""
    unit = UNITS.get(x.dtype)
    size = x.numel()
    library = native.built(unit, size) if unit and size and x.device.type == "cpu" else None
    if library is None:
        return None
    if not x.is_contiguous():  # a transposed tensor is not copied
        x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).contiguous()
    library.moments.argtypes, library.moments.restype = ARGUMENTS, None
    address = x.data_ptr()
    found: dict[int, np.ndarray] = {}

    def part(first: int, last: int) -> None:
        found[first] = sums = np.empty(11)
        library.moments(address, size, first * PART, min(last * PART, size), sums.ctypes.data)

    if size <= PART:
        part(0, 1)
        return found[0]
    native.share_out(-(-size // PART), native.PER_THREAD, part)
    total, *others = (found[first] for first in sorted(found))  # in one order, however the threads ran
    for other in others:
        extremes = np.minimum(total[4], other[4]), np.maximum(total[5], other[5]), np.minimum(total[6], other[6])
        total[:10] += other[:10]
        total[4:7] = extremes
    return total
