"""Scales and factors of any scheme, from one number for each run of a tensor.

A *run* is `columns` neighbours along the contracted axis: a block, or one line of a tile. A backend's kernels read the
tensor's values; what follows from a run's largest magnitude, or its error, is computed here in torch on the small
tensors of these, by the same `Scaling` methods as in `reference`. They follow each other in the tensor's own order,
[outer, runs along the axis, inner].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from binade.quant.elements import Element
from binade.quant.reference import absmax_over, from_blocks, outer_absmax, to_blocks
from binade.quant.scaling import SCALINGS, Factors, Scaling, sum_in_order
from binade.quant.specs import TENSOR, Block, Spec


@dataclass(frozen=True)
class Runs(ABC):
    """A tensor in runs. x has at least one axis and is contiguous, dim is not negative."""

    x: Tensor
    spec: Spec
    dim: int

    @abstractmethod
    def largest(self) -> Tensor:
        """[runs] float32: the largest magnitude of each run, NaN if any is NaN."""

    @abstractmethod
    def errors(self, factors: Factors, square: bool) -> Tensor:
        """[runs] float32: the sum from left to right of |error|, or of its square, of the values rounded to nearest."""

    @abstractmethod
    def stored(self, scale: Tensor, element: Element) -> Tensor:
        """Scales of any shape rounded to nearest on an element's grid."""

    def factors(self, absmax: Tensor | None) -> tuple[Factors, Tensor | None]:
        """(factors, scales), contiguous: each factor a scalar, [runs] or None, the scales [runs], or None without
        blocks. absmax as in `reference.outer_absmax`, computed here if None."""
        spec, scaling = self.spec, SCALINGS[self.spec.scale]
        if spec.block is None:
            return Factors(), None
        if spec.block == TENSOR:
            absmax = outer_absmax(self.x, spec, self.dim) if absmax is None else absmax
            scale = scaling.block_scale(self.x, spec, absmax).reshape(())
            return scaling.factors(scale, spec, absmax), None
        follows = scaling.follows_largest or type(scaling).wanted is not Scaling.wanted
        largest = self.largest() if follows else None
        outer = self._outer(largest, absmax)
        scale = self._scale(largest, outer)
        return self._of_runs(scaling.factors(scale, spec, outer)), self._ungrouped(scale)

    def _scale(self, largest: Tensor | None, absmax: Tensor) -> Tensor:
        """[groups, 1]"""
        spec, scaling = self.spec, SCALINGS[self.spec.scale]
        if largest is None:
            scale = scaling.block_scale(to_blocks(self.x, self.dim, spec.block).float(), spec, absmax)
            if self._rows > 1:
                return scale
            like = torch.empty(self._shape, device="meta")  # these follow to_blocks' order, runs the tensor's
            return from_blocks(scale, like, self.dim, Block(1, 1)).reshape(-1, 1)
        of_groups = self._grouped(largest)
        of_groups = of_groups.amax(-1, keepdim=True) if self._rows > 1 else of_groups
        wanted = scaling.wanted(of_groups, spec, absmax)
        if not wanted:
            return scaling.of_largest(of_groups, spec, absmax)
        first, *others = (self.stored(scale, scaling.stored) if scaling.stored else scale for scale in wanted)
        if not others:
            return first
        error = self._error(first, absmax)
        for other in others:
            found = self._error(other, absmax)
            closer = found < error
            first, error = torch.where(closer, other, first), torch.where(closer, found, error)
        return first

    def _error(self, scale: Tensor, absmax: Tensor) -> Tensor:
        factors = self._of_runs(SCALINGS[self.spec.scale].factors(scale, self.spec, absmax))
        return sum_in_order(self._grouped(self.errors(factors, self.spec.error == "mse")), self._rows)

    def _outer(self, largest: Tensor | None, absmax: Tensor | None) -> Tensor:
        """absmax as `Scaling` methods take it: a scalar or [groups, 1]."""
        outer, run = SCALINGS[self.spec.scale].outer, self.spec.run(self.x.shape[self.dim])
        if outer is None:
            return torch.zeros((), device=self.x.device)
        if absmax is not None and absmax.dim():
            at = [slice(None)] * self.x.dim()
            at[self.dim] = slice(None, None, run)
            return self._grouped(absmax.expand(self.x.shape)[tuple(at)].reshape(-1))[:, :1]
        if absmax is not None:
            return absmax
        assert largest is not None and run
        if outer == TENSOR:
            return largest.amax()
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
        """Of x with runs in place of values."""
        shape = self.x.shape
        run = self.spec.run(shape[self.dim])
        assert run
        return (*shape[: self.dim], -(-shape[self.dim] // run), *shape[self.dim + 1 :])

    def _grouped(self, of_runs: Tensor) -> Tensor:
        """[runs] -> [groups, rows], short tiles padded with zeros."""
        if self._rows == 1:
            return of_runs.reshape(-1, 1)
        return to_blocks(of_runs.reshape(self._shape), self.dim, Block(self._rows, 1))

    def _ungrouped(self, of_groups: Tensor) -> Tensor:
        """[groups, 1] -> [runs]"""
        if self._rows == 1:
            return of_groups.reshape(-1)
        like = torch.empty(self._shape, device="meta")
        return from_blocks(of_groups.expand(-1, self._rows), like, self.dim, Block(self._rows, 1)).reshape(-1)

    def _of_runs(self, factors: Factors) -> Factors:
        of_runs = (self._ungrouped(f).contiguous() if f is not None and f.dim() else f for f in factors)
        return Factors(*of_runs)
