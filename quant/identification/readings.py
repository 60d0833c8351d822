"""The values that codes and scales stand for, in every layout that they may have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from binade.quant.codes import decode_table, unpack
from binade.quant.elements import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, Element
from binade.quant.formats import FORMATS
from binade.quant.quantizer import DTYPES

FLOAT8 = {
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
    torch.float8_e4m3fnuz: E4M3FNUZ,
    torch.float8_e5m2fnuz: E5M2FNUZ,
}


@dataclass(frozen=True)
class CodeReading:
    """Values of x's shape. element: that of the codes; None if values were given. words: what was assumed."""

    q: Tensor
    element: Element | None = None
    words: tuple[str, ...] = ()

    def fits(self, element: Element) -> bool:
        return self.element is None or element == self.element


def readings(x: Tensor, q: Tensor, scales: Tensor | None, tensor_scale: float | None) -> list[CodeReading]:
    """What q may stand for. Raises TypeError for other dtypes, ValueError for shapes that do not fit."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x has the dtype {_name(x)}: expected float32, bfloat16 or float16")
    if not x.numel():
        raise ValueError("x has no values: give a tensor that a kernel has rounded")
    if q.dtype in DTYPES:
        if scales is not None:
            raise ValueError("q has values and scales were given: give codes with scales, or values without")
        if q.shape != x.shape:
            raise ValueError(f"q has the shape {list(q.shape)} and x {list(x.shape)}: expected the same")
        return [CodeReading(q.contiguous())]
    codes = list(_codes(x, q))
    if not codes:
        raise ValueError(
            f"q of dtype {_name(q)} and shape {list(q.shape)} does not fit x of shape {list(x.shape)}: expected a code "
            "per value, or 4- or 6-bit codes packed along one axis"
        )
    if scales is None:
        return [CodeReading(values * (tensor_scale or 1.0), element) for element, values in codes]
    factors = list(_factors(x, scales))
    if not factors:
        raise ValueError(f"scales of dtype {_name(scales)} and shape {list(scales.shape)} do not fit {list(x.shape)}")
    found = []
    for element, values in codes:
        for factor, words in factors:
            outer = [(tensor_scale, ())] if tensor_scale is not None else _outer(x, element, scales)
            for extra, assumed in outer:
                found.append(CodeReading((values * factor) * extra, element, (*words, *assumed)))
            if scales.dtype == torch.float32 and tensor_scale is None:
                found.append(CodeReading(values / factor, element, (*words, "read as code / scale")))
    return found


def _codes(x: Tensor, q: Tensor) -> Iterator[tuple[Element, Tensor]]:
    """Elements, and the values of the codes."""
    if q.dtype in FLOAT8 and q.shape == x.shape:
        yield FLOAT8[q.dtype], q.float()
        return
    if q.dtype not in (torch.uint8, torch.int8):
        return
    elements = dict.fromkeys(fmt.element for fmt in FORMATS.values())
    for element in elements:
        if q.shape == x.shape and (element.bits == 8 or int(q.view(torch.uint8).max()) < 1 << element.bits):
            yield element, decode_table(element)[q.view(torch.uint8).long() & (1 << element.bits) - 1]
            continue
        packed = [axis for axis, (a, b) in enumerate(zip(x.shape, q.shape, strict=False)) if a != b]
        if q.dim() != x.dim() or len(packed) != 1 or element.bits not in (4, 6):
            continue
        axis = packed[0]
        if q.shape[axis] * 8 == x.shape[axis] * element.bits:
            moved = q.view(torch.uint8).movedim(axis, -1)
            codes = unpack(moved.reshape(-1), element.bits).reshape(*moved.shape[:-1], x.shape[axis])
            yield element, decode_table(element)[codes].movedim(-1, axis).contiguous()


def _factors(x: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, tuple[str, ...]]]:
    """The factor of each value, and what was assumed."""
    if scales.dtype == torch.uint8:
        values = [(decode_table(element)[scales.long()], f"scales read as {element.name.upper()}")
                  for element in (E8M0, E4M3)]  # fmt: skip
    else:
        values = [(scales.float(), "")]
    for factor, words in values:
        assumed = (words,) if words else ()
        if (whole := spread(factor, tuple(x.shape))) is not None:
            yield whole, assumed
        elif factor.dim() == 2 and (whole := spread(factor.T, tuple(x.shape))) is not None:
            yield whole, (*assumed, "the scales are stored transposed")


def spread(factor: Tensor, shape: tuple[int, ...], lengths: tuple[int, ...] | None = None) -> Tensor | None:
    """Scales repeated over their blocks; None if they do not fit. lengths: of a block along the last axes; by default a
    block's length is what divides the axis, else a power of two."""
    if factor.numel() == 1:
        return factor.reshape([1] * len(shape)).expand(shape)
    if factor.dim() != len(shape):
        return None
    known = (1,) * (len(shape) - len(lengths)) + lengths if lengths else None
    for axis, (count, size) in enumerate(zip(factor.shape, shape, strict=True)):
        if known:
            possible = [min(known[axis], size)]
        else:
            possible = [size // count] if count and size % count == 0 else [1 << k for k in range(1, 12)]
        length = next((length for length in possible if length and -(-size // length) == count), None)
        if length is None:
            return None
        factor = factor.repeat_interleave(length, axis).narrow(axis, 0, size)
    return factor


def _outer(x: Tensor, element: Element, scales: Tensor) -> list[tuple[float | Tensor, tuple[str, ...]]]:
    """Factors of the whole tensor that may have been left out."""
    found: list[tuple[float | Tensor, tuple[str, ...]]] = [(1.0, ())]
    if element.bits == 4 and scales.dtype in (torch.uint8, torch.float8_e4m3fn):
        absmax = x.float().abs().amax()
        found.append(
            (absmax / torch.full_like(absmax, 448 * element.max), ("the tensor scale absmax / (448 · max) taken",))
        )
    return found


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
