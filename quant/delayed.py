"""Delayed scaling: a tensor's scale is computed from its largest magnitudes in earlier iterations.

NVIDIA Transformer Engine, `delayed_scaling.cu:167-256` and `recipe/__init__.py:173-283`. After each use
S = (target · 2^-margin) / A, A the maximum of the last `history` absmaxes, the newest included, or the newest alone.
The first scale is 1. An S of Inf becomes the largest float32. S stays if A is not finite or 0; the maximum passes over
NaN; an absmax of 0 changes nothing. Values that outgrow the scale saturate. Megatron-LM sets a history of 1 and
most_recent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from binade.quant.reference import absmax_over
from binade.quant.specs import TENSOR, Spec


class ScaleHistory:
    """The state of one operand. `amaxes` float32 [history], the newest first; `scale` a float32 scalar."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.amaxes = torch.zeros(spec.history, dtype=torch.float32, device="cpu")
        self.scale = torch.ones((), dtype=torch.float32, device="cpu")

    def use(self, x: Tensor, trains: bool = True) -> Tensor:
        """The scale for x, whose absmax is added to the history. trains: False in an evaluation, which does not change
        the history. Nothing waits for a GPU."""
        if not trains:
            return self.scale.to(x.device)
        self.amaxes, self.scale = self.amaxes.to(x.device), self.scale.to(x.device)
        used = self.scale
        absmax = absmax_over(x, -1, TENSOR)
        shifted = torch.cat((absmax.reshape(1), self.amaxes[:-1]))
        self.amaxes = torch.where(absmax == 0, self.amaxes, shifted)
        known = torch.where(self.amaxes.isnan(), 0.0, self.amaxes)
        largest = known.amax() if self.spec.algorithm == "max" else self.amaxes[0]
        wanted = self.spec.scaling.of_largest(largest, self.spec, largest)
        self.scale = torch.where(largest.isfinite() & (largest > 0), wanted, self.scale)
        return used

    def state(self) -> dict[str, Tensor]:
        """The state that a run saves and `load` restores."""
        return {"amaxes": self.amaxes, "scale": self.scale}

    def load(self, state: dict[str, Tensor]) -> None:
        self.amaxes, self.scale = state["amaxes"], state["scale"]
