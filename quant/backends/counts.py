"""Counts of a tensor's values by their 65,536 codes: all statistics of a bfloat16 or float16 tensor can be computed
from them.

For float32 the upper 16 bits are counted. CPU tensors go through counts.cpp if building it is worthwhile (see
`native`), other tensors through torch.bincount, one chunk at a time; the counts are the same.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from binade.quant.backends import native
from binade.quant.memory import address, ordinary

CODES = 1 << 16
CHUNK = 1 << 18
# Starting another thread costs as much as counting this many values.
PER_THREAD = 1 << 20
UNIT = native.Unit("counts.cpp")


@dataclass(frozen=True)
class Counted:
    """The distinct values of a bfloat16 or float16 tensor, float32 [n] in the order of their codes, NaN, Inf and -0
    included; and how often each occurs, int64 [n]."""

    dtype: torch.dtype
    values: np.ndarray
    counts: np.ndarray


def counted(x: Tensor) -> Counted | None:
    """Counts a tensor's values by their codes; None for a tensor that is neither bfloat16 nor float16."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return None
    used, counts = _distinct(ordinary(x).reshape(-1).contiguous().view(torch.int16))
    return Counted(x.dtype, torch.from_numpy(used.view(np.int16)).view(x.dtype).float().numpy(), counts)


def upper_counts(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The distinct upper 16 bits of a float32 tensor's values (int64, 0 to 65,535), and how often each occurs (int64).

    The intervals of `sketch.bin_edges(upper, 16)` bound every value within 1/128 of itself (2^-133 for subnormals).
    """
    halves = ordinary(x).reshape(-1).contiguous().view(torch.int16)
    used, counts = _distinct(halves[1 if sys.byteorder == "little" else 0 :: 2])
    return used.astype(np.int64), counts


def _distinct(codes: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """int16 [n], evenly strided -> the codes that occur as uint16, ascending, and how often (int64)."""
    if codes.device.type == "cpu" and codes.numel() < 1 << 32:
        library = native.built(UNIT, codes.numel())
        if library is not None:
            return _compiled(codes, library)
    counts = np.zeros(CODES, np.int64)
    for chunk in torch.split(codes, CHUNK):
        counts += torch.bincount(chunk.to(torch.int32) & 0xFFFF, minlength=CODES).cpu().numpy()
    used = counts.nonzero()[0]
    return used.astype(np.uint16), counts[used]


def _compiled(codes: Tensor, library: ctypes.CDLL) -> tuple[np.ndarray, np.ndarray]:
    used, counts = np.empty(CODES, np.uint16), np.empty(CODES, np.int64)
    threads = max(1, min(torch.get_num_threads(), codes.numel() // PER_THREAD))
    library.distinct.restype = ctypes.c_int64
    distinct = library.distinct(
        ctypes.c_void_p(address(codes)),
        ctypes.c_int64(codes.numel()),
        ctypes.c_int64(codes.stride(0) if codes.numel() else 1),
        ctypes.c_int64(threads),
        ctypes.c_void_p(used.ctypes.data),
        ctypes.c_void_p(counts.ctypes.data),
    )
    return used[:distinct].copy(), counts[:distinct].copy()
