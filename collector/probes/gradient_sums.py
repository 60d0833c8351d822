"""Compares the gradient that the optimizer sees of a linear layer's weight with the sum of those that the layer's GEMMs
returned in the step's micro-batches: so that a micro-batch that was lost, or counted twice, is noticed.

Between the two, a training loop may multiply all gradients by a factor (averaging, clipping, unscaling), which the
comparison estimates. Ranks that add their gradients before the step cannot be compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from binade.collector.capture.adapters.layer import Layer
from binade.collector.capture.clock import Moment, gradient_of, parameters_of
from binade.collector.probes.probe import Finding, Observation, Probe, Recording
from binade.data.tensor_kinds import Product
from binade.data.text import number_text
from binade.quant.later import Later, LaterPart

NAME = "accumulation_error"
INPUTS = ("in_features", "input_size", "whole_shape")  # attributes of modules whose weight is [out, in]
UNIT = 2.0**-24  # the largest relative error of rounding to float32
SCALINGS = 4  # roundings of a whole gradient: by averaging, unscaling and clipping, and one to spare


@dataclass(eq=False)
class Sum:
    """Of one weight.

    total     the sum of its gradients, float32
    norms     the sum of the norms of all gradients and partial sums: times the unit roundoff of a dtype, it bounds the
              error of casting and adding them in that dtype
    unit      the unit roundoff of the gradients, if some are of one micro-batch: torch adds these in their own dtype
    moments   of the gradients
    """

    layer: Layer
    total: Tensor
    norms: Tensor
    unit: float = 0.0
    moments: list[Moment] = field(default_factory=list)


class GradientSums(Probe):
    """The sums of this step's gradients. complete: whether each of its micro-batches was recorded in full."""

    observes = frozenset(("grad_b",))

    def __init__(self, recording: Recording) -> None:
        self.recording, ranks = recording, recording.ranks
        self.alone = ranks.size == ranks.tensor.size
        if not self.alone:
            warnings.warn(
                "weight gradients are not compared with those of the optimizer: other ranks add theirs before the step",
                stacklevel=4,
            )
        self.by_weight: dict[nn.Parameter, Sum] = {}
        self.left_out: set[nn.Parameter] = set()  # weights that are multiplied in another shape, too, as if tied
        self.iteration, self.complete = -1, True

    def begin_pass(self, moment: Moment) -> None:
        if moment.iteration != self.iteration:
            self.by_weight.clear()
            self.left_out.clear()
            self.iteration, self.complete = moment.iteration, True
        self.complete &= moment.evaluation or (moment.recording and not moment.basic)

    def observe(self, observed: Observation) -> None:
        """A GEMM has returned a weight's gradient, which torch has not accumulated yet."""
        layer, moment, gradient = observed.layer, observed.moment, observed.seen.tensor
        if observed.product is not Product.LINEAR or moment.basic:
            return
        weight: Any = layer.weight
        usual = type(weight) is nn.Parameter and any(hasattr(layer.module, name) for name in INPUTS)
        summed = layer.part or layer.is_head or layer.shard("grad_b").kind == "partial"
        if not (self.alone and self.complete and usual and not summed):
            return
        if weight.shape != gradient.shape:
            self.left_out.add(weight)
            return
        before = gradient_of(weight)
        weight_sum = self.by_weight.get(weight)
        if weight_sum is None or (
            before is None and not hasattr(weight, "main_grad") and moment not in weight_sum.moments
        ):
            total = torch.zeros_like(gradient, dtype=torch.float32) if before is None else before.float().clone()
            weight_sum = self.by_weight[weight] = Sum(layer, total, total.double().norm())
        weight_sum.total += gradient
        weight_sum.norms += weight_sum.total.double().norm() + gradient.double().norm()
        if moment in weight_sum.moments:
            weight_sum.unit = torch.finfo(gradient.dtype).eps / 2
        weight_sum.moments.append(moment)

    def before_step(self, optimizer: Optimizer) -> None:
        """Compare the sums, if the optimizer holds the weights, or if these have Megatron's main_grad."""
        held = set(map(id, parameters_of(optimizer)))
        ready = [p for p in self.by_weight if id(p) in held or hasattr(p, "main_grad")]
        ready = [p for p in ready if p not in self.left_out]
        sums = [(self.by_weight.pop(p), g) for p in ready if (g := gradient_of(p)) is not None]
        if sums and self.complete:
            self._compare(sums)

    def _compare(self, sums: Sequence[tuple[Sum, Tensor]]) -> None:
        """Record ‖c·s - g‖ / ‖g‖, with s the sum, g the gradient and c the median of ⟨s, g⟩ / ⟨s, s⟩ over the weights;
        warn if it is above the bound of what rounding explains, in float32 for s and in g's dtype for g."""
        pairs = [(weight_sum.total.double(), gradient.double()) for weight_sum, gradient in sums]
        factor = torch.stack([(s * g).sum() / (s * s).sum() for s, g in pairs]).nanquantile(0.5)
        errors, bounds = [], []
        for (weight_sum, gradient), (s, g) in zip(sums, pairs, strict=True):
            unit, norm = max(weight_sum.unit, torch.finfo(gradient.dtype).eps / 2), g.norm()
            errors.append((factor * s - g).norm() / norm)
            bounds.append(factor.abs() * (unit + UNIT) * weight_sum.norms / norm + SCALINGS * unit)
            self.recording.keep(NAME, errors[-1].float().reshape(1), weight_sum.layer.site, "optimizer")
        self.recording.publish_step()
        names = [weight_sum.layer.site.name for weight_sum, _ in sums]
        count = max(len({moment.micro_batch for moment in weight_sum.moments}) for weight_sum, _ in sums)
        results = Later(lambda *arrays: arrays, *map(LaterPart, (torch.stack(errors), torch.stack(bounds), factor)))
        self.recording.report(partial(_lost, self.recording.clock.iteration, names, count, results))


def _lost(iteration: int, names: Sequence[str], count: int, results: Later[Any]) -> Iterator[Finding]:
    """What the errors, their bounds and the factor say of the weights with these names, of so many micro-batches."""
    measured, limits, common = results()
    lost = [number for number in range(len(names)) if measured[number] > limits[number]]
    if lost:
        first = lost[0]
        text = (
            f"{names[first]}: the gradient that the optimizer sees differs from {number_text(float(common))} × the "
            f"sum over {count} micro-batches by {number_text(float(measured[first]))} of its norm; rounding "
            f"explains {number_text(float(limits[first]))}{f', and {len(lost) - 1} more' * (len(lost) > 1)}"
        )
        yield Finding(iteration, text, f"{names[first]} grad_weight")
