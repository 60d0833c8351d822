"""The two tensors that `identify` compares, as lines along one axis, and small samples of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from binade.quant.identification.alterations import Alteration, Steps
from binade.quant.identification.candidates import fitted
from binade.quant.identification.fitting import explains, groups_of
from binade.quant.quantizer import apply
from binade.quant.reference import absmax_over, outer_absmax
from binade.quant.specs import ROW, TENSOR, Block, Spec

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
SAMPLE = 1 << 15  # values; a tensor of twice as many is its own sample
LINES, COLUMNS = 64, 512
FEW = 1 << 12
BAND, BAND_LINES = 1 << 19, 128  # values, and the most rows of a block


def differs(y: Tensor, q: Tensor) -> Tensor:
    """Where float32 y, rounded to q's dtype, has other bits than q; one NaN equals another."""
    y, integer = y.to(q.dtype), INTEGERS[q.dtype]
    return (y.view(integer) != q.view(integer)) & ~(y.isnan() & q.isnan())


def is_apart(y: Tensor, q: Tensor, absolute: float = 0.0) -> Tensor:
    """Where y and q differ by more than two units in the last place of q's dtype, and by more than `absolute` times the
    largest |y| of the line: then the codes or the scales differ."""
    wide, other = y.double(), q.double()
    limit = 2 * torch.finfo(q.dtype).eps * torch.maximum(wide.abs(), other.abs())
    if absolute:
        limit = torch.maximum(limit, absolute * wide.abs().amax(-1, keepdim=True))
    near = ((wide - other).abs() <= limit) | (wide == other) | (wide.isnan() & other.isnan())
    return ~near


@dataclass(frozen=True)
class Pair:
    """x float32 and q, both [lines, axis], of tensors of this shape whose axis `dim` is last here. given: the absmax of
    the tensor, if x is a part of it."""

    x: Tensor
    q: Tensor
    dim: int
    shape: tuple[int, ...]
    given: float | None = None

    @classmethod
    def of(cls, x: Tensor, q: Tensor, dim: int, absmax: float | None = None) -> Pair:
        """Of tensors of one shape."""
        moved = [t.movedim(dim, -1).reshape(-1, t.shape[dim]).contiguous() for t in (x.float(), q)]
        return cls(moved[0], moved[1], dim, tuple(x.shape), absmax)

    def index(self, line: int, place: int) -> tuple[int, ...]:
        """The index in the tensors of a value of a line."""
        index: list[int] = []
        for axis in reversed(range(len(self.shape))):
            line, at = divmod(line, self.shape[axis]) if axis != self.dim else (line, place)
            index.insert(0, at)
        return tuple(index)

    @cached_property
    def absmax(self) -> Tensor:
        """The largest magnitude of the tensor, a scalar."""
        return absmax_over(self.x, -1, TENSOR) if self.given is None else self.x.new_tensor(self.given)

    @cached_property
    def _samples(self) -> dict[str, Pair]:
        lines, axis = self.x.shape
        if self.x.numel() <= 2 * SAMPLE:
            return dict.fromkeys(("row", "tile", "vector"), self)
        whole = torch.linspace(0, lines - 1, min(lines, max(2, SAMPLE // axis))).long()
        spread = torch.linspace(0, lines - 1, min(lines, LINES)).long()
        tile = torch.arange(min(lines, 2 * LINES))
        return {
            "row": self._part(whole, axis),
            "tile": self._part(tile, COLUMNS // 2),
            "vector": self._part(spread, COLUMNS),
        }

    @cached_property
    def _answers(self) -> dict[tuple[object, ...], bool]:
        return {}

    @cached_property
    def _kept(self) -> dict[Spec, list[tuple[Pair, Steps]]]:
        return {}

    @cached_property
    def _few(self) -> dict[tuple[int, int], Pair]:
        return {}

    @cached_property
    def _groups(self) -> dict[Block | None, tuple[Tensor, Tensor]]:
        return {}

    def surviving(self, specs: Iterable[Spec], absolute: float = 0.0, near: bool = True) -> list[Spec]:
        """The specs whose element and block explain q in the samples, see `fitting`."""
        return [spec for spec in specs if self._explained(spec, absolute, near)]

    def _explained(self, spec: Spec, absolute: float, near: bool) -> bool:
        element, block = fitted(spec)

        def decide() -> bool:
            part = self.sample(spec)
            if block not in self._groups:
                self._groups[block] = groups_of(part.x, part.q, block)
            return explains(self._groups[block], element, block, self.q.dtype, absolute=absolute, near=near)

        return self.answer((element, block, absolute, near), decide)

    def answer(self, key: tuple[object, ...], decide: Callable[[], bool]) -> bool:
        """What `decide` says, which is asked once for each key."""
        if key not in self._answers:
            self._answers[key] = decide()
        return self._answers[key]

    def few(self, spec: Spec) -> Pair:
        """A smaller part of the sample, of whole blocks."""
        part = self.sample(spec)
        rows = spec.block.rows or 1 if spec.block else 1
        columns = part.x.shape[1]
        lines = min(len(part.x), max(rows, FEW // columns))
        if (lines, columns) not in part._few:
            part._few[lines, columns] = part._part(torch.arange(lines), columns)
        return part._few[lines, columns]

    @property
    def head(self) -> Pair:
        """The first lines."""
        return self._part(torch.arange(min(len(self.x), LINES)), self.x.shape[1])

    @property
    def corner(self) -> Pair:
        """The first lines and columns, of whole blocks; of a small tensor all."""
        return self._samples["tile"]

    @cached_property
    def band(self) -> Pair:
        """Whole lines in the middle, of whole blocks; of a small tensor all."""
        lines, axis = self.x.shape
        start, count = lines // 2 // BAND_LINES * BAND_LINES, max(BAND_LINES, BAND // axis // BAND_LINES * BAND_LINES)
        if lines * axis <= 2 * BAND or start + count > lines:
            return self
        return self._part(torch.arange(start, start + count), axis)

    def parts(self, spec: Spec, values: int) -> Iterator[Pair]:
        """All lines, in parts of about so many values. A tile lies in one part, and does not reach from one matrix of a
        stack of them into the next."""
        rows = spec.block.rows or 1 if spec.block and spec.block != TENSOR else 1
        lines = len(self.x)
        matrix = self.shape[-2] if rows > 1 and self.dim == len(self.shape) - 1 and len(self.shape) > 2 else lines
        step = max(rows, values // max(1, self.x.shape[1]) // rows * rows)
        for start in range(0, lines, max(1, matrix)):
            for first in range(start, start + matrix, step):
                lines_of_part = slice(first, min(first + step, start + matrix))
                x, q = self.x[lines_of_part], self.q[lines_of_part]
                yield Pair(x, q, 1, tuple(x.shape))

    def _part(self, lines: Tensor, columns: int) -> Pair:
        x, q = (t[lines, :columns].contiguous() for t in (self.x, self.q))
        return Pair(x, q, 1, tuple(x.shape))

    def sample(self, spec: Spec) -> Pair:
        """A part that has whole blocks of the spec, and whole lines if its scales need them."""
        block = spec.block
        if ROW in (block, spec.scaling.outer):
            return self._samples["row"]
        return self._samples["tile" if block and (block.rows or 1) > 1 else "vector"]

    def outer(self, spec: Spec, part: Pair) -> Tensor:
        """The absmax of outer blocks that a part of this pair is rounded with."""
        if spec.of_tensor:
            return self.absmax
        return outer_absmax((self if spec.scaling.of_blocks else part).x, spec, -1)

    def rounded(self, spec: Spec, part: Pair, alteration: Alteration | None = None) -> Tensor:
        """A part of this pair, or all of it, as the spec rounds it along the last axis, float32."""
        if alteration is None:
            if spec.transforms:
                return apply(part.x, spec, -1)[0]
            return apply(part.x, spec, -1, absmax=self.outer(spec, part))[0]
        if alteration.before and spec.of_tensor:
            return alteration.apply(Steps(part.x, spec, alteration.before(self.absmax)))
        return alteration.apply(self.steps(spec, part))

    def steps(self, spec: Spec, part: Pair) -> Steps:
        """What the spec computes of a part. Those of the last spec are kept, as many alterations change one of them."""
        if part.x.numel() > 2 * SAMPLE:
            return Steps(part.x, spec, self.outer(spec, part))
        if spec not in self._kept:
            self._kept.clear()
        kept = self._kept.setdefault(spec, [])
        for other, steps in kept:
            if other is part:
                return steps
        kept.append((part, Steps(part.x, spec, self.outer(spec, part))))
        return kept[-1][1]
