"""Compares the gradient that the optimizer sees of a linear layer's weight with the sum of those that the layer's GEMMs
returned in the step's micro-batches: so that a micro-batch that was lost, or counted twice, is noticed.

Between the two, a training loop may multiply all gradients by a factor (averaging, clipping, unscaling), which the
comparison estimates. Ranks that add their gradients before the step cannot be compared.

Gradients that are cleared between two micro-batches of a step are missing from what the optimizer sees. They are left
out of the sum only where the loop shows that it meant to drop them: some gradient was not finite, as in a step that a
loss scaler skips, or the weight has changed since, as between the two passes of sharpness-aware minimization.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from binade.collector.capture.adapters.layer import Layer
from binade.collector.capture.clock import Moment, gradient_of, parameters_of
from binade.collector.probes.probe import Finding, Observation, Probe, Recording
from binade.data.run.tensor_kinds import Product
from binade.data.words.text import number_text
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
    values    a number that changes if the weight does
    dropped   how many of the micro-batches are left out of the sum, because the loop dropped them
    lost      after how many micro-batches of the sum the gradient was cleared last, 0 if it was not
    unit      the unit roundoff of the gradients, if some are of one micro-batch: torch adds these in their own dtype
    moments   of the gradients
    """

    layer: Layer
    total: Tensor
    norms: Tensor
    values: Tensor
    dropped: Tensor
    lost: Tensor
    unit: float = 0.0
    moments: list[Moment] = field(default_factory=list)

    def continue_from(self, before: Tensor | None, values: Tensor, finite: Tensor) -> None:
        """Another micro-batch begins. before: the gradient that the weight has now. finite: whether all gradients of
        the step are."""
        cleared = self.total.any() if before is None else self.total.any() & ~before.any()
        drops = cleared & ~(finite.to(cleared.device) & (values == self.values))
        count = len(set(self.moments))
        self.total = torch.where(drops, 0.0, self.total)
        self.norms = torch.where(drops, 0.0, self.norms)
        self.dropped = torch.where(drops, count, self.dropped)
        self.lost = torch.where(drops, 0, torch.where(cleared, count - self.dropped, self.lost))
        self.values = values


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
        self.stepped = WeakIdKeyDictionary()  # what an optimizer has updated: it has seen the gradients from before
        self.iteration, self.complete = -1, True
        self.finite: tuple[Moment, Tensor] | None = None

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
        weight_sum = self.by_weight.get(weight)
        if weight_sum is None:
            weight_sum = self.by_weight[weight] = self._begin(layer, weight, gradient)
        elif moment not in weight_sum.moments:
            weight_sum.continue_from(gradient_of(weight), _values(weight), self._all_finite(moment))
        weight_sum.total = weight_sum.total + gradient
        weight_sum.norms = weight_sum.norms + weight_sum.total.double().norm() + gradient.double().norm()
        if moment in weight_sum.moments:
            weight_sum.unit = torch.finfo(gradient.dtype).eps / 2
        weight_sum.moments.append(moment)

    def _begin(self, layer: Layer, weight: nn.Parameter, gradient: Tensor) -> Sum:
        """The gradient that the weight has already belongs to the step, unless its optimizer has seen it before."""
        before = None if weight in self.stepped else gradient_of(weight)
        total = torch.zeros_like(gradient, dtype=torch.float32) if before is None else before.float()
        none = torch.zeros((), dtype=torch.int64, device=gradient.device)
        return Sum(layer, total, total.double().norm(), _values(weight), none, none)

    def _all_finite(self, moment: Moment) -> Tensor:
        """Whether the gradients of the step before this micro-batch are finite."""
        if self.finite is None or self.finite[0] != moment:
            norms = [weight_sum.norms for weight_sum in self.by_weight.values()]
            self.finite = moment, torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all()
        return self.finite[1]

    def before_step(self, optimizer: Optimizer) -> None:
        """Compare the sums, if the optimizer holds the weights, or if these have Megatron's main_grad."""
        held = set(map(id, parameters_of(optimizer)))
        ready = [p for p in self.by_weight if id(p) in held or getattr(p, "main_grad", None) is not None]
        sums = [(self.by_weight.pop(p), gradient_of(p)) for p in ready if p not in self.left_out]
        if sums and self.complete:
            self._compare(sums)

    def after_step(self, optimizer: Optimizer) -> None:
        """What a closure has computed within the step belongs to it."""
        for parameter in parameters_of(optimizer):
            self.by_weight.pop(parameter, None)
            self.stepped[parameter] = True

    def _compare(self, sums: Sequence[tuple[Sum, Tensor | None]]) -> None:
        """Record ‖c·s - g‖ / ‖g‖, with s the sum, g the gradient and c the median of ⟨s, g⟩ / ⟨s, s⟩ over the weights;
        warn if it is above the bound of what rounding explains, in float32 for s and in g's dtype for g. Infinite
        where g is 0, or not there, and s is not."""
        pairs = [(s.total.double(), torch.zeros_like(s.total) if g is None else g) for s, g in sums]
        factors = torch.stack([(s * g.double()).sum() / (s * s).sum() for s, g in pairs])
        seen = torch.stack([g.any() for _, g in pairs])
        factor = torch.where(seen, factors, torch.nan).nanquantile(0.5)
        errors, bounds = [], []
        for (weight_sum, _), (s, gradient) in zip(sums, pairs, strict=True):
            g = gradient.double()
            unit, norm = max(weight_sum.unit, torch.finfo(gradient.dtype).eps / 2), g.norm()
            nothing = torch.where(s.any(), torch.inf, 0.0)
            errors.append(torch.where(norm == 0, nothing, (factor * s - g).norm() / norm))
            bounds.append(factor.abs() * (unit + UNIT) * weight_sum.norms / norm + SCALINGS * unit)
            self.recording.keep(NAME, errors[-1].float().reshape(1), weight_sum.layer.site, "optimizer")
        self.recording.publish_step()
        names = [weight_sum.layer.site.name for weight_sum, _ in sums]
        counts = torch.stack([len(set(s.moments)) - s.dropped for s, _ in sums])
        lost = torch.stack([weight_sum.lost for weight_sum, _ in sums])
        arrays = torch.stack(errors), torch.stack(bounds), factor, counts, lost
        results = Later(lambda *arrays: arrays, *map(LaterPart, arrays))
        self.recording.report(partial(_lost, self.recording.clock.iteration, names, results))


def _values(weight: Tensor) -> Tensor:
    """The sum of a weight's bits, which changes if its values do, on the weight's device."""
    bits = weight.detach().contiguous().view(getattr(torch, f"int{8 * weight.element_size()}"))
    return bits.sum(dtype=torch.int64)


def _lost(iteration: int, names: Sequence[str], results: Later[Any]) -> Iterator[Finding]:
    """What the errors, their bounds, the factor, and the micro-batches say of the weights with these names."""
    measured, limits, common, counts, cleared = results()
    differing = [n for n in range(len(names)) if measured[n] > limits[n] or math.isinf(measured[n])]
    if not differing:
        return
    first = differing[0]
    count = f"{counts[first]} micro-batches" if counts[first] > 1 else "its micro-batch"
    if math.isinf(measured[first]):
        text = f"the optimizer sees no gradient, or one of zeros, although {count} had one"
    else:
        text = (
            f"the gradient that the optimizer sees differs from {number_text(float(common))} × the sum over {count} by "
            f"{number_text(float(measured[first]))} of its norm; rounding explains {number_text(float(limits[first]))}"
        )
    if cleared[first]:
        text += f"; it was cleared after {cleared[first]} of them, as by zero_grad"
    more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
    yield Finding(iteration, f"{names[first]}: {text}{more}", f"{names[first]} grad_weight")
