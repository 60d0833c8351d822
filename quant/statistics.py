"""Statistics of a single tensor: largest magnitudes of channels and cells, outliers, crest factors, the stable rank."""

from __future__ import annotations

import ctypes
import math
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from binade.quant.backends.native import share_out
from binade.quant.memory import address, ordinary
from binade.quant.quantizer import DTYPES
from binade.quant.reference import to_blocks
from binade.quant.specs import Block

CHUNK = 1 << 17  # values that are worked on at once
DEVICE_CHUNK = 1 << 24


def outlier_ratio(x: Tensor, k: float = 6.0) -> float:
    """#(|x - mean| > k·std) / n over the finite elements; NaN without any. std is the population's."""
    values = ordinary(x).reshape(-1)
    values = values[values.isfinite()].double()
    if not values.numel():
        return math.nan
    deviation = (values - values.mean()).abs()
    return float((deviation > k * values.std(correction=0)).sum()) / values.numel()


def channel_absmax(x: Tensor) -> Tensor:
    """max|x| over all axes but the last, which is the channel: [..., channels] -> [channels] float32; NaN for a channel
    with NaN."""
    if not x.dim() or not x.numel():
        raise ValueError(f"expected a tensor with a channel axis and at least one token, not shape {tuple(x.shape)}")
    x = ordinary(x)
    rows = x.reshape(-1, x.shape[-1])
    if x.device.type == "cpu":
        return cell_absmax(rows, len(rows), 1)[0]
    bits = {2: torch.int16, 4: torch.int32}.get(x.element_size())
    if bits is None:
        return rows.abs().amax(0).float()
    step = max(1, DEVICE_CHUNK // rows.shape[1])
    parts = [(part.view(bits) & torch.iinfo(bits).max).amax(0) for part in torch.split(rows, step)]
    return torch.stack(parts).amax(0).view(x.dtype).float()


def cell_absmax(x: Tensor, height: int, width: int) -> Tensor:
    """max|x| of each cell of height × width values of a matrix on the CPU: [rows, columns] -> [cells, cells] float32. A
    cell with NaN gives NaN. The matrix, which may be mapped from a file, is read once, in pieces, on all threads of
    torch."""
    x = ordinary(x)
    if x.dtype not in DTYPES:
        x = x.float()
    # Magnitudes have the order of their bits; NaN comes last. torch takes many times as long for a maximum over rows.
    bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
    values, magnitude = _array(x.view(bits)), torch.iinfo(bits).max
    rows, columns = values.shape
    maxima = np.zeros((-(-rows // height), -(-columns // width)), values.dtype)
    wide = min(width * max(1, CHUNK // width), columns)
    high = min(max(1, CHUNK // wide), height)
    across, down = -(-columns // wide), -(-height // high)
    lock = Lock()

    def part(first: int, last: int) -> None:
        for piece in range(first, last):
            line, place = divmod(piece, across)
            strip, step = divmod(line, down)
            top = strip * height + step * high
            end, left = min(top + high, (strip + 1) * height, rows), place * wide
            if top >= end:  # the last strip is short
                continue
            largest = (values[top:end, left : left + wide] & magnitude).max(0)
            largest = np.maximum.reduceat(largest, np.arange(0, len(largest), width))
            cells = maxima[strip, left // width : left // width + len(largest)]
            with lock:
                np.maximum(cells, largest, out=cells)

    share_out(len(maxima) * down * across, high * wide, part)
    return torch.from_numpy(maxima).view(x.dtype).float()


def _array(x: Tensor) -> np.ndarray:
    """A tensor's memory as an array, for as long as the tensor lives. `Tensor.numpy` would forbid resizing its storage,
    which FSDP does."""
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    memory = (ctypes.c_char * max(0, span * x.element_size())).from_address(address(x))
    strides = [stride * x.element_size() for stride in x.stride()]
    return np.ndarray(tuple(x.shape), str(x.dtype).removeprefix("torch."), memoryview(memory), strides=strides)


def block_crest_factor(x: Tensor, dim: int = -1, block_size: int = 32) -> Tensor:
    """absmax / rms of each block along `dim`, [groups] float64 in the order of `reference.to_blocks`; NaN for an
    all-zero block. The padding of a short block is left out."""
    block, x = Block(1, block_size), ordinary(x)
    blocks = to_blocks(x, dim, block).double()
    count = to_blocks(torch.ones_like(x, dtype=torch.bool), dim, block).sum(-1)
    return blocks.abs().amax(-1) / (blocks.square().sum(-1) / count).sqrt()


def stable_rank(a: Tensor) -> float:
    """‖A‖F² / ‖A‖₂² of a matrix [m, n], in float64; 1 to min(m, n), NaN for a zero matrix.

    Raises ValueError for another number of axes, or for NaN or Inf.
    """
    if a.dim() != 2 or not a.numel():
        raise ValueError(f"expected a matrix, not a tensor of shape {tuple(a.shape)}")
    a = ordinary(a)
    if not bool(a.isfinite().all()):
        raise ValueError("the matrix contains NaN or Inf: its singular values are undefined")
    squares = torch.linalg.svdvals(a.detach().double()).square()
    return float(squares.sum() / squares[0]) if float(squares[0]) else math.nan
