"""What the values that differ from a spec have in common."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from binade.quant.identification.fitting import neighbors
from binade.quant.identification.pair import Pair
from binade.quant.reference import from_blocks, per_group, to_blocks
from binade.quant.scheme import scaled
from binade.quant.specs import Spec

LIMIT = 1 << 20  # values of the lines with differences that are looked at
MEMBERS = 0.5
"""A property is said only if at most this share of the other values have it."""


def common(pair: Pair, spec: Spec, different: Tensor) -> tuple[str, ...]:
    """The properties that all values that differ have, and most of the others do not; the most telling first.

    different: bool [lines, axis]. Of many lines with differences, some are looked at.
    """
    found = [(0.0, words) for words in _places(pair, spec, different)]
    lines = different.any(1).nonzero().reshape(-1)
    few = max(1, LIMIT // pair.x.shape[1])
    rows = spec.block.rows or 1 if spec.block else 1
    if rows > 1:  # whole tiles
        lines = torch.unique(lines // rows)[: max(1, few // rows), None] * rows + torch.arange(rows)
        lines = lines.reshape(-1)[lines.reshape(-1) < len(pair.x)]
    lines = lines[:few]
    part = Pair(pair.x[lines], pair.q[lines], 1, (len(lines), pair.x.shape[1]))
    mask = different[lines]
    for words, members in _properties(pair, part, spec):
        if bool(members[mask].all()) and not bool(members[~mask].double().mean() > MEMBERS):
            found.append((float(members[~mask].double().mean()) if (~mask).any() else 0.0, words))
    return tuple(words for _, words in sorted(found, key=lambda one: one[0]))


def _places(pair: Pair, spec: Spec, different: Tensor) -> Iterator[str]:
    """Where all of the values that differ lie."""
    lines, axis = different.shape
    lined, placed = different.any(1).nonzero().reshape(-1), different.any(0).nonzero().reshape(-1)
    if len(lined) == 1 < lines:
        yield f"one line along axis {pair.dim}, at {list(pair.index(int(lined[0]), 0))}"
    elif len(lined) > 2:
        step = int(lined.diff().min())
        if step > 1 and bool((lined.diff() % step == 0).all()):
            yield (
                f"lines {int(lined[0])}, {int(lined[0]) + step}, …: every {step}th" if step > 2 else "every second line"
            )
    size = spec.block.columns if spec.block else None
    if size and axis > size:
        blocks = torch.unique(placed // size)
        if len(blocks) == 1:
            last = int(blocks[0]) == (axis - 1) // size
            where = "the last block of each line" if last else f"block {int(blocks[0])} of each line"
            rows = spec.block.rows or 1 if spec.block else 1
            tiles = torch.unique(lined // rows)
            yield (
                f"one {'tile' if rows > 1 else 'block'}" if len(tiles) == 1 and (rows > 1 or len(lined) == 1) else where
            )


def _properties(pair: Pair, part: Pair, spec: Spec) -> Iterator[tuple[str, Tensor]]:
    """What a value may be, and which values of a part of the pair are, bool [lines, axis]."""
    x, element = part.x, spec.format.element
    absmax = pair.outer(spec, part)
    outer = per_group(absmax, x, -1, spec.block) if absmax.dim() else absmax
    blocks = to_blocks(x, -1, spec.block)
    scale = spec.scaling.block_scale(blocks, spec, outer)
    encoded = scaled(blocks, spec.scaling.factors(scale, spec, outer))
    lower, upper = neighbors(encoded, element)

    def back(mask: Tensor) -> Tensor:
        return from_blocks(mask.expand(blocks.shape), x, -1, spec.block)

    largest = blocks.abs().amax(-1, keepdim=True)
    between = lower != upper
    yield "ties between two codes", back(between & (encoded.double() * 2 == lower.double() + upper.double()))
    yield "x over its scale exceeds the largest code", back(encoded.abs() > element.max)
    yield "subnormals of the element", back((encoded.abs() < 2.0 ** element.tiers[0][0]) & (encoded != 0))
    yield "float32 subnormals", (x != 0) & (x.abs() < 2.0**-126)
    yield "x is 0", x == 0
    yield "x is -0", (x == 0) & x.signbit()
    yield "x is not finite", ~x.isfinite()
    yield "x is negative", x < 0
    yield "x is positive", x > 0
    yield "values that become 0", back((lower == 0) & (encoded != 0))
    if spec.has_blocks:
        yield "blocks that hold NaN or Inf", back(~largest.isfinite())
        yield "blocks of zeros", back(largest == 0)
        yield "blocks that hold a zero", back((blocks == 0).any(-1, keepdim=True))
        yield "the largest value of its block", back(blocks.abs() == largest)
        mantissa = torch.frexp(largest)[0]
        yield "blocks whose absmax is a power of two", back(mantissa == 0.5)
    yield "values that are on the grid", back(~between)
    yield "values between two codes", back(between & ((encoded - lower).abs() > 0))
