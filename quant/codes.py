"""Codes of values on an element's grid, and how they are packed into bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from binade.quant.elements import Element
from binade.quant.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@lru_cache(maxsize=32)
def decode_table(element: Element) -> Tensor:
    """The value of each code, float32 [2^bits]."""
    return torch.tensor([element.values[code] for code in range(1 << element.bits)], dtype=torch.float32, device="cpu")


@lru_cache(maxsize=32)
def _encode_table(element: Element) -> tuple[Tensor, Tensor, int]:
    """Distinct values ascending, infinities included, the code of each, and the code of NaN (-1 if none)."""
    code_of: dict[float, int] = {}
    nan = -1
    for code, value in element.values.items():
        if value != value:
            nan = code if nan < 0 else nan
        else:
            code_of.setdefault(value, code)  # +0 comes before -0
    values = sorted(code_of)
    codes = torch.tensor([code_of[v] for v in values], device="cpu")
    return torch.tensor(values, dtype=torch.float32, device="cpu"), codes, nan


def encode(values: Tensor, element: Element) -> Tensor:
    """int64 codes of float32 values that lie on the element's grid. -0 gets its own code where there is one."""
    table, codes, nan = _encode_table(element)
    table, codes = table.to(values.device), codes.to(values.device)
    code = codes[torch.searchsorted(table, values.contiguous()).clamp(max=len(table) - 1)]
    if element.signed_zero:
        code = torch.where((values == 0) & values.signbit(), 1 << (element.bits - 1), code)
    return torch.where(values.isnan(), nan, code)


def pack(codes: Tensor, bits: int) -> Tensor:
    """int64 codes [n] of 4, 6, 8 or 16 bits -> uint16 for 16 bits, else uint8: two 4-bit codes to a byte (low nibble
    first), four 6-bit codes to three bytes (lowest bits first)."""
    if bits == 16:
        return codes.to(torch.uint16)
    if bits == 8:
        return codes.to(torch.uint8)
    per_word = 2 if bits == 4 else 4
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % per_word)).reshape(-1, per_word)
    word = (codes << (bits * torch.arange(per_word, device=codes.device))).sum(-1)
    return torch.stack([word >> (8 * i) & 255 for i in range(bits * per_word // 8)], -1).reshape(-1).to(torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: int64 [n], the last byte's unused codes included."""
    if bits >= 8:
        return packed.long()
    per_word = 2 if bits == 4 else 4
    parts = packed.long().reshape(-1, bits * per_word // 8)
    word = (parts << (8 * torch.arange(parts.shape[1], device=packed.device))).sum(-1)
    return torch.stack([word >> (bits * i) & (1 << bits) - 1 for i in range(per_word)], -1).reshape(-1)
