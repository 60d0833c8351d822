"""Which tokens of a micro-batch are not padding, and which rows of its tensors are theirs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from binade.collector.capture.adapters.layer import InstrumentError


@dataclass(frozen=True, eq=False)
class Valid:
    """The valid tokens of a micro-batch.

    mask        bool [b, s], on the host
    batch_axis  of the model's [b, s, hidden] or [s, b, hidden]
    """

    mask: Tensor
    batch_axis: int
    _rows: dict[object, Tensor | None] = field(default_factory=dict)

    @property
    def left_out(self) -> int:
        """The number of tokens that are padding."""
        return int((~self.mask).sum())

    def rows(self, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
        """The indices of the valid rows of a tensor of this shape as [rows, columns]: [b, s, ·], [s, b, ·], [b·s, ·]
        or attention's [b, heads, s, ·] or [b·heads, s, ·]. None for any other shape.
        Raises InstrumentError if the axes are in the other order."""
        key = shape[:-1], device
        if key not in self._rows:
            flat = self._flat(shape[:-1])
            self._rows[key] = None if flat is None else flat.nonzero()[:, 0].to(device)
        return self._rows[key]

    def _flat(self, axes: tuple[int, ...]) -> Tensor | None:
        b, s = self.mask.shape
        heads, rest = divmod(math.prod(axes), b * s)
        layout = (s, b) if self.batch_axis else (b, s)
        if axes == layout[::-1] != layout:
            raise InstrumentError(
                f"a mask with batch_axis={self.batch_axis} is {layout}, and the model's hidden states are {axes}: pass "
                f"mask.t() with batch_axis={1 - self.batch_axis}"
            )
        if axes in (layout, (b * s,)):
            return (self.mask.t() if self.batch_axis else self.mask).reshape(-1)
        if len(axes) > 1 and axes[-1] == s and not rest and not axes[0] % b:
            return self.mask[:, None].expand(b, heads, s).reshape(-1)
        return None
