"""The layouts of bitsandbytes: 4 bits by a table, whose absmax may be quantized again, and INT8."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from binade.data.exchange.quantized.stored import Decoded, LayoutError, StoredWeight, by, unfit

OF_127 = 7.874015718698502e-3  # 1 / 127, as bitsandbytes multiplies by it
MOST = 1 << 16  # bytes of a state


def four_bits(stored: StoredWeight) -> Decoded:
    """Codes of a table, the upper half of a byte first, with an absmax for each block of the flattened weight."""
    state, shape = _state(stored), four_bits_shape(stored)
    codes = stored.tensor("codes").reshape(-1)
    count = torch.Size(shape).numel()
    pairs = torch.stack((codes >> 4, codes & 15), -1).reshape(-1).long()[:count]
    absmax = _absmax(stored, state).reshape(-1)
    table, size = stored.tensor("table").float().reshape(-1), _whole(stored, state, "blocksize")
    if len(pairs) < count or len(absmax) * size < count or len(table) != 16:
        raise LayoutError(f"{stored.names['codes']} has fewer codes or scales than {by(shape)} values need")
    return Decoded((table[pairs] * _repeated(absmax, size, count)).reshape(shape), absmax)


def four_bits_shape(stored: StoredWeight) -> tuple[int, ...]:
    shape = _state(stored).get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size > 0 for size in shape):
        raise LayoutError(f"{stored.names['state']} has the shape {shape!r}: expected positive integers")
    return tuple(shape)


def _absmax(stored: StoredWeight, state: dict[str, Any]) -> Tensor:
    absmax = stored.tensor("scale")
    if absmax.dtype != torch.uint8:
        return absmax.float()
    if not {"nested", "nested_table"} <= stored.sizes.keys():
        raise LayoutError(f"{stored.names['scale']} is quantized, but its own scales are missing")
    table, offset = stored.tensor("nested_table").float(), state.get("nested_offset")
    if table.numel() != 256 or not isinstance(offset, (int, float)):
        raise LayoutError(f"{stored.names['nested_table']} or nested_offset of {stored.names['state']} is damaged")
    scales, size = stored.tensor("nested").float(), _whole(stored, state, "nested_blocksize")
    if len(scales) * size < len(absmax):
        raise LayoutError(unfit(stored, scales.shape, [-(-len(absmax) // size)], "nested"))
    return table.reshape(-1)[absmax.long()] * _repeated(scales, size, len(absmax)) + torch.tensor(float(offset))


def _state(stored: StoredWeight) -> dict[str, Any]:
    try:
        state = json.loads(bytes(stored.tensor("state").reshape(-1)[:MOST].tolist()))
    except (ValueError, TypeError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise LayoutError(f"{stored.names['state']} is not a JSON object")
    return state


def _whole(stored: StoredWeight, state: dict[str, Any], name: str) -> int:
    value = state.get(name)
    if type(value) is not int or value < 1:
        raise LayoutError(f"{stored.names['state']} has {name} {value!r}: expected a positive integer")
    return value


def _repeated(factors: Tensor, size: int, count: int) -> Tensor:
    return factors[torch.arange(count) // min(size, count)]


def int8(stored: StoredWeight) -> Decoded:
    """An absmax for each row, and codes of -127 to 127."""
    codes, absmax = stored.tensor("codes"), stored.tensor("scale").float()
    if absmax.shape != codes.shape[:1]:
        raise LayoutError(unfit(stored, absmax.shape, codes.shape[:1]))
    return Decoded(codes * absmax[:, None] * OF_127, absmax)
