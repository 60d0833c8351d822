"""A tensor, or a sample of it, rounded to a format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from binade.app.view.budget import RoundingCost, check
from binade.data.run.columns import RoundedWith
from binade.data.run.tensor_kinds import has_tokens
from binade.data.words.text import number_text
from binade.quant.blocks import GROUP, Blocks, energy, look, sample
from binade.quant.error_causes import ErrorCauses, error_causes
from binade.quant.measurements import Errors
from binade.quant.metrics import errors_from_later, score
from binade.quant.quantizer import apply
from binade.quant.reference import outer_absmax, to_blocks
from binade.quant.specs import ROW, TENSOR, Block, Spec
from binade.quant.transform import residual, transform, untransformed

AFTER = "after"  # the stage of a tensor that is recorded once it is quantized
ROUNDED_ALREADY = (
    "The values on disk are what the quantized weight stands for, and its error is against the original, which is not "
    "recorded: rounding them again would give another error."
)
FLASH = (
    "With softmax=flash, this GEMM takes the probabilities, and the values on disk are P̃, which the "
    "forward GEMM takes: choose the forward GEMM."
)
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


@dataclass(frozen=True)
class Recorded:
    """How a GEMM rounded a tensor when it was recorded.

    format  the text of the spec; None if it was not rounded
    axis    that it was rounded along, if that is not the one that the GEMM contracts
    first   how the forward GEMM had rounded the tensor, if this GEMM rounded the result of that
    other_values  why the values on disk are not those that were rounded, or ""
    """

    format: str | None
    used: RoundedWith
    axis: int | None = None
    first: Recorded | None = None
    other_values: str = ""

    @classmethod
    def of(cls, row: Mapping[Any, Any] | pd.Series, axis: int | None = None, first: Recorded | None = None) -> Recorded:
        """By a tensor's row in the index, or by that of a score that was used."""
        scale, noise, signs = (None if pd.isna(row[f.name]) else row[f.name] for f in fields(RoundedWith))
        seeds = (None if seed is None else int(seed) for seed in (noise, signs))
        fmt = None if pd.isna(row["format"]) else str(row["format"])
        rounded = ROUNDED_ALREADY if fmt and row.get("stage") == AFTER else ""
        return cls(fmt, RoundedWith(scale, *seeds), axis, first, rounded)

    def in_format(self, spec: Spec) -> bool:
        """Whether the tensor was rounded to this spec."""
        return str(spec) == self.format

    def problem(self, spec: Spec) -> str:
        """Why rounding the values to this spec would not give what a GEMM used, or ""."""
        if self.other_values:
            return self.other_values
        if (first := self._first(spec)) and (reason := first.problem(Spec.of(str(first.format)))):
            return f"This GEMM rounded to {spec} what the forward GEMM had rounded. {reason}"
        if first and spec.centered:
            return (
                f"This GEMM rounded to {spec} what the forward GEMM had rounded, which is not repeated here for "
                "center=tokens: choose the forward GEMM, or another format."
            )
        if spec.history and not (self.in_format(spec) and self.used.tensor_scale is not None):
            return (
                f"{spec} takes its scale from earlier iterations, and the scale that it would have for this tensor was "
                "not recorded: choose the format that the tensor was rounded to, or one without a history."
            )
        needed = {"noise_seed": spec.noisy, "sign_seed": spec.signs == "random"}
        unknown = any(getattr(self.used, name) is None for name, random in needed.items() if random)
        if self.in_format(spec) and unknown:
            return f"{spec} draws random numbers, and this run did not record their seed: record the run again."
        return ""

    def along(self, spec: Spec, dim: int) -> int:
        """The axis to round along to a spec, for a GEMM that contracts `dim`."""
        return dim if self.axis is None or not self.in_format(spec) else self.axis

    def source(self, x: Tensor, spec: Spec) -> Tensor | None:
        """x as the forward GEMM rounded it, if rounding to this spec is repeated from that; else None."""
        if (first := self._first(spec)) is None:
            return None
        before, axis = Spec.of(str(first.format)), -1 if first.axis is None else first.axis
        how = first._arguments(before)
        return apply(x, before, axis, seed=how["seed"], sign_seed=how["sign_seed"], absmax=how.get("absmax"))[0]

    def look(
        self, x: Tensor, spec: Spec, dim: int, absmax: Tensor | None = None, source: Tensor | None = None
    ) -> Blocks:
        """x rounded to a spec: if it is the recorded one, in the same way. absmax and source: as in
        `quant.blocks.look`; by default, source is that of x."""
        how = {"source": self.source(x, spec) if source is None else source, "absmax": absmax}
        return look(x, spec, self.along(spec, dim), **(how | self._arguments(spec)))

    def score(self, x: Tensor, spec: Spec, dim: int) -> Errors:
        """The error of all values, rounded as by `look`."""
        how, dim, source = self._arguments(spec), self.along(spec, dim), self.source(x, spec)
        if source is None:
            return score(x, spec, dim, **how)
        values, coded = (transform(y, spec, dim, how["sign_seed"]) for y in (x, source))
        plain, absmax = untransformed(spec), how.get("absmax")
        q, scales = apply(coded, plain, dim, want_scales=True, seed=how["seed"], absmax=absmax)
        return errors_from_later(values, coded, q, plain, scales, dim, absmax)()

    def causes(self, x: Tensor, spec: Spec, dim: int) -> ErrorCauses:
        """The causes of the error of all values, rounded as by `look`."""
        how = {"source": self.source(x, spec)}
        return error_causes(x, spec, self.along(spec, dim), **(how | self._arguments(spec)))

    def before(self, spec: Spec) -> str:
        """A sentence on what was rounded to this spec, if it was not the tensor, or ""."""
        if not self.in_format(spec):
            return ""
        if self.first:
            return f"Rounded first by the forward GEMM, to {self.first.format}: the error is that of both roundings."
        return "" if self.axis is None else "This GEMM multiplies what the forward GEMM rounded."

    def _first(self, spec: Spec) -> Recorded | None:
        return self.first if self.in_format(spec) else None

    def _arguments(self, spec: Spec) -> dict[str, Any]:
        """How `look`, `score` and `error_causes` repeat the rounding."""
        if not self.in_format(spec):
            return {}
        seeds = {"seed": self.used.noise_seed or 0, "sign_seed": self.used.sign_seed or 0}
        if not spec.history or self.used.tensor_scale is None:
            return seeds
        return seeds | {"absmax": torch.tensor(self.used.tensor_scale, dtype=torch.float32)}


NOT_RECORDED = Recorded(None, RoundedWith())


def applied(spec: Spec, row: Mapping[Any, Any] | pd.Series) -> Spec:
    """The spec that a recipe with this one rounds a tensor to, by its row in the index: without tokens, no mean over
    them is subtracted."""
    return spec if has_tokens(row["layer_type"], row["tensor_name"]) else Spec.of(spec, center="none")


def subject(
    x: Tensor, fmt: str | Spec, dim: int = -1, limit: int = LIMIT, recorded: Recorded = NOT_RECORDED
) -> Subject:
    """x rounded to a format, blocks along dim; in the recorded format, as it was recorded. Of a tensor of more than
    `limit` values, a sample of lines, with the scale of the whole tensor if the format has one; its stochastic rounding
    draws other numbers. Raises BudgetError."""
    spec = Spec.of(fmt)
    dim = recorded.along(spec, dim)
    check([RoundingCost(spec, tuple(x.shape), dim, limit)])
    part, every = _part(x, spec, dim, limit)
    if every == 1:
        return Subject(recorded.look(x, spec, dim), 1, x.numel())
    if spec.centered:  # the mean is that of all tokens
        centered = subject(residual(x), Spec.of(spec, center="none"), dim, limit)
        return replace(centered, blocks=replace(centered.blocks, signal=energy(part)))
    whole = TENSOR in _shares(spec) and not spec.history and not spec.hadamard
    source = recorded.source(x, spec)
    absmax = outer_absmax(x if source is None else source, spec, dim) if whole else None
    source_part = None if source is None else _part(source, spec, dim, limit)[0]
    along_last = replace(recorded, axis=None)
    return Subject(along_last.look(part, spec, -1, absmax, source_part), every, x.numel())


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
    largest = number_text(fmt.max, "d" if fmt.max in range(10**6) else ".4g")
    ends = f"largest {largest}, smallest {number_text(smallest)}"
    return f"{fmt.title}{options}: {bits} bits, {shared}, {ends}{before}"
