"""A tensor, or a sample of it, rounded to a format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from binade.data.tensor_kinds import has_tokens
from binade.data.text import short
from binade.quant.blocks import GROUP, Blocks, energy, look, sample
from binade.quant.reference import outer_absmax, to_blocks
from binade.quant.specs import ROW, TENSOR, Block, Spec
from binade.quant.transform import residual

MAX_SIDE = 400  # pixels of a heatmap, each way
LIMIT = 1 << 20  # values of a larger tensor are sampled


@dataclass(frozen=True)
class Subject:
    """The examined part of a tensor, rounded to a format. every: one line in this many; 1 for the whole tensor."""

    blocks: Blocks
    every: int
    total: int

    @property
    def note(self) -> str:
        """What was left out, or ""."""
        if self.every == 1:
            return ""
        held = int(self.blocks.valid.sum())
        return f"a sample: {held:,} of {self.total:,} values, one line of blocks in {self.every}"


def applied(spec: Spec, row: Mapping[Any, Any] | pd.Series) -> Spec:
    """The spec that a recipe with this one rounds a tensor to, by its row in the index: without tokens, no mean over
    them is subtracted."""
    return spec if has_tokens(row["layer_type"], row["tensor_name"]) else Spec.of(spec, center="none")


def subject(x: Tensor, fmt: str | Spec, dim: int = -1, limit: int = LIMIT) -> Subject:
    """x rounded to a format, blocks along dim; of a tensor of more than `limit` values, a sample of lines, with the
    scale of the whole tensor if the format has one."""
    spec = Spec.of(fmt)
    part, every = _part(x, spec, dim, limit)
    if every == 1:
        return Subject(look(x, spec, dim), 1, x.numel())
    if spec.centered:  # the mean is that of all tokens
        found = subject(residual(x), Spec.of(spec, center="none"), dim, limit)
        return replace(found, blocks=replace(found.blocks, signal=energy(part)))
    whole = TENSOR in _shares(spec) and not spec.history and not spec.hadamard
    return Subject(look(part, spec, -1, absmax=outer_absmax(x, spec, dim) if whole else None), every, x.numel())


def _shares(spec: Spec) -> set[Block | None]:
    return {spec.block, spec.scaling.outer}


def _part(x: Tensor, spec: Spec, dim: int, limit: int = LIMIT) -> tuple[Tensor, int]:
    return sample(x, dim, limit, cut=ROW not in _shares(spec))


def coordinates(x: Tensor, spec: Spec, dim: int = -1) -> tuple[Tensor, Tensor]:
    """(token, channel) of each value of `subject(x, spec, dim)`, int64 [groups, block], 0 in the padding: the channel
    is the index along the last axis, the token that of all others. Rotated values have none."""
    shape = x.shape if x.dim() else torch.Size((1,))
    block = GROUP if not spec.has_blocks else spec.block

    def placed(index: Tensor) -> Tensor:
        part, every = _part(index.expand(shape), spec, dim)
        return to_blocks(part, dim if every == 1 else -1, block)

    tokens = torch.arange(shape[:-1].numel()).reshape(*shape[:-1], 1)
    return placed(tokens), placed(torch.arange(shape[-1]))


def about_format(spec: Spec) -> str:
    """A spec in one line."""
    fmt, shared = spec.format, spec.scaling.shares
    if spec.block:
        shared = shared.format(block=spec.block.words)
    options = "" if str(spec) == fmt.name else f" as {spec}"
    bits, smallest = fmt.element.bits, fmt.element.smallest
    before = ", without the mean over tokens" * spec.centered + ", rotated" * bool(spec.hadamard)
    return f"{fmt.title}{options}: {bits} bits, {shared}, largest {fmt.max:g}, smallest {short(smallest, 3)}{before}"
