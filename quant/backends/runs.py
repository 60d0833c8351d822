"""Computes scales and factors of any scheme from one number for each run of a tensor.

A *run* is `columns` neighbors along the contracted axis: a block, or one line of a tile. A backend's kernels read the
tensor's values; everything that depends only on a run's largest magnitude, sums or error is computed here, in torch on
small tensors, by the same `Scaling` methods as in `reference`. Runs are in the tensor's own order, [outer, runs along
the axis, inner].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from binade.quant.elements import Element
from binade.quant.reference import absmax_over, from_blocks, outer_absmax, to_blocks
from binade.quant.scheme import Factors, Follows, better, pad_end, sum_in_order
from binade.quant.specs import TENSOR, Block, Spec


@dataclass(frozen=True)
class Runs(ABC):
    """A tensor in runs. x has at least one axis and is contiguous, dim is not negative."""

    x: Tensor
    spec: Spec
    dim: int

    PART: ClassVar[int | None] = None
    """How many groups torch computes together; None for all. A dozen temporaries of a part stay in a core's cache."""

    @abstractmethod
    def largest(self) -> Tensor:
        """[runs] float32: the largest magnitude of each run, NaN if any is NaN."""

    @abstractmethod
    def moments(self) -> tuple[Tensor, Tensor]:
        """[runs] float64 each: the sums from left to right of the values and of their squares."""

    @abstractmethod
    def errors(self, tried: Sequence[Factors], square: bool) -> Iterable[Tensor]:
        """[runs] float32 for each of the factors: the sum from left to right of |error|, or of its square, of the
        values rounded to nearest."""

    @abstractmethod
    def stored(self, scale: Tensor, element: Element) -> Tensor:
        """Scales of any shape rounded to nearest on an element's grid."""

    def factors(self, absmax: Tensor | None, want_scales: bool) -> tuple[Factors, Tensor | None]:
        """(factors, scales), contiguous: each factor a scalar, [runs] or None, the scales [runs], or None without
        blocks or unless wanted. absmax as in `reference.outer_absmax`, computed here if None."""
        spec, scaling = self.spec, self.spec.scaling
        if spec.block is None:
            return Factors(), None
        if spec.block == TENSOR:
            absmax = outer_absmax(self.x, spec, self.dim) if absmax is None else absmax
            scale = scaling.block_scale(self.x, spec, absmax).reshape(())
            return scaling.factors(scale, spec, absmax), None
        if scaling.follows is Follows.MOMENTS:
            outer = torch.zeros((), dtype=torch.float32, device=self.x.device)
            total, squares = (self._sums(of_runs) for of_runs in self.moments())
            (scale,) = self._in_parts(lambda a, b: (scaling.of_moments(a, b, spec),), total, squares)
        else:
            largest = self.largest()
            outer = self.outer(largest, absmax)
            scale = self._scale(largest, outer)
        return self._of_runs(self._factors(scale, outer)), self._ungrouped(scale) if want_scales else None

    def _scale(self, largest: Tensor, absmax: Tensor) -> Tensor:
        """[groups, 1]"""
        tried = self._in_parts(self._tried, self._largest_of_groups(largest), absmax)
        best: Tensor = tried[0]
        if len(tried) == 1:
            return best
        factors = [self._of_runs(self._factors(scale, absmax)) for scale in tried]
        error, *others = (self._sums(errors) for errors in self.errors(factors, self.spec.error == "mse"))
        for scale, errors in zip(tried[1:], others, strict=True):
            best, error = self._in_parts(better, best, error, scale, errors)
        return best

    def _tried(self, largest: Tensor, absmax: Tensor) -> tuple[Tensor, ...]:
        """The scales of groups with these largest magnitudes, from which `_scale` chooses."""
        scaling = self.spec.scaling
        wanted, stored = scaling.wanted(largest, self.spec, absmax), scaling.stored
        if not wanted:
            return (scaling.of_largest(largest, self.spec, absmax),)
        return tuple(self.stored(scale, stored) for scale in wanted) if stored else wanted

    def _factors(self, scale: Tensor, absmax: Tensor) -> Factors:
        scaling = self.spec.scaling
        return Factors(*self._in_parts(lambda *of: scaling.factors(of[0], self.spec, of[1]), scale, absmax))

    def _sums(self, of_runs: Tensor) -> Tensor:
        """[runs] -> [groups, 1]"""
        return sum_in_order(self._grouped(of_runs), self._rows)

    def _in_parts(self, of: Callable[..., Sequence[Any]], *given: Tensor) -> list[Any]:
        """of(*given), where given and results are [groups, 1] or the same for all groups."""
        groups = len(given[0])
        if self.PART is None or groups <= self.PART:
            return list(of(*given))
        results: list[Any] = []

        def part(cut: slice) -> None:
            here = of(*(tensor[cut] if tensor.dim() else tensor for tensor in given))
            if not results:
                results.extend(
                    one.new_empty(groups, 1) if isinstance(one, Tensor) and one.dim() else one for one in here
                )
            for whole, one in zip(results, here, strict=True):
                if isinstance(whole, Tensor) and whole.dim():
                    whole[cut] = one

        first, *others = (slice(at, at + self.PART) for at in range(0, groups, self.PART))
        part(first)
        self.each(part, others)
        return results

    def each(self, part: Callable[[slice], None], cuts: list[slice]) -> None:
        """Call part(cut) for each; a backend may run them in parallel."""
        for cut in cuts:
            part(cut)

    def outer(self, largest: Tensor, absmax: Tensor | None) -> Tensor:
        """absmax as `Scaling` methods take it: a scalar or [groups, 1]."""
        outer, run = self.spec.scaling.outer, self.spec.run(self.x.shape[self.dim])
        if outer is None:
            return torch.zeros((), dtype=torch.float32, device=self.x.device)
        if absmax is not None and absmax.dim():
            at = [slice(None)] * self.x.dim()
            at[self.dim] = slice(None, None, run)
            return self._grouped(absmax.expand(self.x.shape)[tuple(at)].reshape(-1))[:, :1]
        if absmax is not None:
            return absmax
        assert run
        if outer == TENSOR:
            return self.spec.scaling.outer_absmax(largest)
        columns = outer.columns and outer.columns // run
        assert not outer.columns or outer.columns % run == 0, "an outer block is cut into whole runs"
        above = absmax_over(largest.reshape(self._shape), self.dim, Block(1, columns))
        return self._grouped(above.reshape(-1))[:, :1]

    @property
    def _rows(self) -> int:
        assert self.spec.block
        return self.spec.block.rows or 1

    @property
    def _shape(self) -> tuple[int, ...]:
        """The shape of x with runs instead of values."""
        shape = self.x.shape
        run = self.spec.run(shape[self.dim])
        assert run
        return (*shape[: self.dim], -(-shape[self.dim] // run), *shape[self.dim + 1 :])

    def _grouped(self, of_runs: Tensor) -> Tensor:
        """[runs] -> [groups, rows], short tiles padded with zeros."""
        if self._rows == 1:
            return of_runs.reshape(-1, 1)
        return to_blocks(of_runs.reshape(self._shape), self.dim, Block(self._rows, 1))

    def _largest_of_groups(self, largest: Tensor) -> Tensor:
        """[runs] -> [groups, 1], without the copy that `_grouped` makes."""
        if self._rows == 1:
            return largest.reshape(-1, 1)
        lines = largest.reshape(self._shape).movedim(self.dim, -1)
        lines = lines.reshape(-1, lines.shape[-1])
        lines = pad_end(lines, 0, -len(lines) % self._rows)
        return lines.reshape(-1, self._rows, lines.shape[-1]).amax(1).reshape(-1, 1)

    def _ungrouped(self, of_groups: Tensor) -> Tensor:
        """[groups, 1] -> [runs]"""
        if self._rows == 1:
            return of_groups.reshape(-1)
        like = torch.empty(self._shape, device="meta")
        return from_blocks(of_groups.expand(-1, self._rows), like, self.dim, Block(self._rows, 1)).reshape(-1)

    def _of_runs(self, factors: Factors) -> Factors:
        of_runs = (self._ungrouped(f).contiguous() if f is not None and f.dim() else f for f in factors)
        return Factors(*of_runs)
