"""Inputs on which quantizers go wrong, made for one spec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from binade.quant.specs import Spec

LINE = 128
"""The length of most lines: a multiple of most blocks."""
MOST = 1 << 16
"""Values of a case."""
FLOAT32_TINY = 2.0**-149


@dataclass(frozen=True)
class Case:
    """An input of a kind. dim: the axis that blocks lie along."""

    name: str
    x: Tensor
    dim: int = -1


def cases(spec: Spec, dim: int = -1, seed: int = 0) -> Iterator[Case]:
    """The cases of a spec, float32, the same for the same seed. dim: -1, or the axis of a matrix."""
    for name, values in _values(spec, seed):
        yield Case(name, _oriented(values, dim), dim)
    normal = torch.randn(8 * LINE, LINE, generator=torch.Generator().manual_seed(seed))
    yield Case("short last block", _oriented(normal[:8, : LINE - 3], dim), dim)
    yield Case("short last tile", _oriented(normal[: LINE - 3, : LINE - 1], dim), dim)
    yield Case("one value", normal[:1, :1].clone(), dim)
    yield Case("vector", normal[0].clone(), -1)
    yield Case("three axes", normal[:30].reshape(5, 6, LINE).clone(), -1)
    yield Case("other strides", _oriented(normal[:LINE].T, dim), dim)
    yield Case("every second value", _oriented(normal[:16], dim)[::2], dim)
    yield Case("no values", normal[:0].clone(), -1)
    yield Case("no values along the axis", normal[:4, :0].clone(), -1)
    yield Case("bfloat16", _oriented(normal.bfloat16(), dim), dim)
    yield Case("float16", _oriented(normal.half(), dim), dim)


def _oriented(values: Tensor, dim: int) -> Tensor:
    """[lines, axis] with `axis` at `dim`; a copy of its own memory only if it is needed."""
    return values if dim in (-1, 1) else values.T.contiguous()


def _values(spec: Spec, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Named values, float32 [lines, LINE]."""
    generator = torch.Generator().manual_seed(seed)
    element = spec.format.element
    grid = torch.tensor(element.finite_values, dtype=torch.float64)
    if len(grid) > MOST // 8:
        grid = grid[:: -(-len(grid) // (MOST // 8))]
    middle = ((grid[1:] + grid[:-1]) / 2).float()
    normal = torch.randn(64, LINE, generator=generator)
    yield "normal values", normal
    yield "wide range", normal * torch.exp2(torch.randint(-40, 40, (64, LINE), generator=generator).float())
    yield "lines of other sizes", normal * torch.exp2(torch.randint(-20, 20, (64, 1), generator=generator).float())
    for name, values in (
        ("every code", grid.float()),
        ("midpoints of codes", middle),
        ("midpoints - 1 ulp", torch.nextafter(middle, torch.tensor(-torch.inf))),
        ("midpoints + 1 ulp", torch.nextafter(middle, torch.tensor(torch.inf))),
    ):
        yield name, _anchored(values, spec)
    top = element.max
    yield "beyond the largest code", _anchored(torch.linspace(-1.2, 1.2, 500) * top, spec, anchored=False)
    powers = torch.exp2(torch.arange(-30.0, 31.0))
    for name, anchors in (
        ("absmax a power of two", powers),
        ("absmax below a power of two", torch.nextafter(powers, torch.tensor(0.0))),
        ("absmax above a power of two", torch.nextafter(powers, torch.tensor(torch.inf))),
        ("absmax the largest code times a power of two", powers * top),
        ("absmax above the largest code times a power of two", torch.nextafter(powers * top, torch.tensor(torch.inf))),
    ):
        lines = torch.rand(len(anchors), LINE, generator=generator) * 2 - 1
        lines[:, ::16] = 1.0
        yield name, (lines * anchors[:, None]).clamp(-anchors[:, None], anchors[:, None])
    tiny = FLOAT32_TINY * torch.randint(-(1 << 23), 1 << 23, (16, LINE), generator=generator).double()
    yield "float32 subnormals", tiny.float()
    small = normal[:16].clone()
    small[:, 1::2] *= 2.0**-20
    yield "small values beside large ones", small
    yield "huge values", normal[:16].clamp(-1, 1) * 3e38
    signed = normal[:16].clone()
    signed[:, ::3], signed[::2, ::4] = -0.0, 0.0
    yield "zeros and -0", signed
    zeros = normal[:32].clone()
    zeros[::2] = 0.0
    zeros[1::4, :64] = -0.0
    yield "blocks of zeros", zeros
    yield "only zeros", torch.zeros(4, LINE)
    for name, value in (("NaN", torch.nan), ("Infinity", torch.inf), ("-Infinity", -torch.inf)):
        special = normal[:16].clone()
        special[3, 5] = special[10, 64] = value
        yield name, special


def _anchored(values: Tensor, spec: Spec, anchored: bool = True) -> Tensor:
    """Values times several powers of two, in lines whose every 16th value is the largest code, so that the scale of
    each block is known and no value of the line exceeds it."""
    scales = [1.0] if not spec.scaling.blocks else [2.0**-17, 0.25, 1.0, 2.0**12]
    room = 15 if anchored else 16
    values = torch.nn.functional.pad(values, (0, -values.numel() % (room * (LINE // 16)))).reshape(-1, room)
    if anchored:
        top = torch.full((len(values), 1), spec.format.max)
        values = torch.cat((top, values), 1)
    lines = values.reshape(-1, LINE)
    return torch.cat([lines * scale for scale in scales])[: MOST // LINE * len(scales)]
