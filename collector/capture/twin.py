"""The twin step: one micro-batch on the same weights, without the recipe and with it, once per rounding seed.

It separates what rounding does to a gradient now from how far two runs have drifted apart. With g the gradient without
the recipe and ĝ the gradients of M passes with it, per parameter and for all of them as one vector:

    bias        ‖mean(ĝ) − g‖ / ‖g‖, and corrected: the square of the plain one is too large by variance / M
    variance    Σ‖ĝ − mean(ĝ)‖² / (M − 1) / ‖g‖², an unbiased estimate; 0 if nothing is drawn, unknown for M = 1
    cosine      of g and ĝ, the mean over the passes

Nothing changes for training: gradients are computed without accumulating them, buffers and torch's random numbers are
restored, and the passes draw from seeds of their own and use copies of the scale histories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.passes import Listener, running_backward, seed_of
from binade.collector.models.parallel import Pass, Quantization
from binade.quant.specs import GemmFormats

STEP = "step"  # the name of all parameters together


@dataclass(frozen=True)
class GradientTwin:
    """What rounding does to the gradient of a parameter; None for what is unknown."""

    name: str
    norm: float
    bias: float | None
    bias_corrected: float | None
    variance: float | None
    cosine: float | None


@dataclass(frozen=True)
class Twin:
    """A twin step: the loss without the recipe, the losses of the passes with it minus that one, and the gradients, all
    together first."""

    iteration: int
    loss: float
    changes: tuple[float, ...]
    gradients: tuple[GradientTwin, ...]


class Twins:
    """Runs twin steps of instrumented models. quantizations: of their products, by a name that is unique."""

    def __init__(self, models: Sequence[nn.Module], quantizations: Mapping[str, Quantization], seed: int) -> None:
        self.models, self.quantizations, self.seed = models, quantizations, seed

    def __call__(self, loss: Callable[[], Tensor], iteration: int, times: int) -> Twin:
        named = [(name, p) for model in self.models for name, p in model.named_parameters() if p.requires_grad]
        parameters = [p for _, p in named]
        formats = {name: _formats(each, iteration) for name, each in self.quantizations.items()}
        passes = times if any(each.varies for each in formats.values()) else 1
        exact, gradients = self._pass(loss, parameters, {}, 0)
        changes: list[float] = []
        means = [torch.zeros_like(g) for g in gradients]
        spread, dots, squares = (torch.zeros(len(named), passes, dtype=torch.float64) for _ in range(3))
        for number in range(passes):
            value, own = self._pass(loss, parameters, formats, seed_of(self.seed, "twin", iteration, number))
            changes.append(value - exact)
            for at, (g, q, mean) in enumerate(zip(gradients, own, means, strict=True)):
                apart = q - mean
                mean += apart / (number + 1)
                spread[at, number] = _sum(apart * (q - mean))
                dots[at, number], squares[at, number] = _sum(q * g), _sum(q * q)
        power = torch.tensor([_sum(g * g) for g in gradients], dtype=torch.float64)
        error = torch.tensor(
            [_sum((m - g).square()) for m, g in zip(means, gradients, strict=True)], dtype=torch.float64
        )
        drawn = any(each.varies for each in formats.values())
        rows = [
            _row(name, power[at], error[at], spread[at].sum(), dots[at], squares[at], passes, drawn)
            for at, (name, _) in enumerate(named)
        ]
        whole = _row(STEP, power.sum(), error.sum(), spread.sum(), dots.sum(0), squares.sum(0), passes, drawn)
        return Twin(iteration, exact, tuple(changes), (whole, *rows))

    def _pass(
        self,
        loss: Callable[[], Tensor],
        parameters: Sequence[nn.Parameter],
        formats: Mapping[str, GemmFormats],
        seed: int,
    ) -> tuple[float, list[Tensor]]:
        """The loss and the gradients, float32, of one pass; without formats, nothing is rounded."""
        with ExitStack() as undo:
            undo.enter_context(torch.random.fork_rng())
            undo.enter_context(_kept([b for model in self.models for b in model.buffers()]))
            for name, quantization in self.quantizations.items():
                undo.enter_context(_running(quantization, formats.get(name) or GemmFormats(), seed_of(seed, name)))
            value = loss()
            found = torch.autograd.grad(value, list(parameters), allow_unused=True)
        zeros = (torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True))
        return value.item(), [g.detach().float() for g in zeros]


def _formats(quantization: Quantization, iteration: int) -> GemmFormats:
    listener = quantization.tap
    if not isinstance(listener, Listener):
        return quantization.formats
    return [part for start, part in listener.stages if start <= iteration or not start][-1].formats


@contextmanager
def _running(quantization: Quantization, formats: GemmFormats, seed: int) -> Iterator[None]:
    before = replace(quantization)
    quantization.formats, quantization.histories = formats, deepcopy(before.histories)
    quantization.tap, quantization.running = lambda: None, lambda: Pass(seed, running_backward())
    try:
        yield
    finally:
        for name, value in vars(before).items():
            setattr(quantization, name, value)


@contextmanager
def _kept(buffers: Sequence[Tensor]) -> Iterator[None]:
    """A context at whose end these tensors have the values that they had before."""
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _sum(x: Tensor) -> float:
    return float(x.sum(dtype=torch.float64))


def _row(
    name: str, power: Any, error: Any, spread: Any, dots: Tensor, squares: Tensor, passes: int, drawn: bool
) -> GradientTwin:
    power, error = float(power), float(error)
    if not power > 0:
        return GradientTwin(name, math.sqrt(power), None, None, None, None)
    variance = float(spread) / (passes - 1) if passes > 1 else None if drawn else 0.0
    corrected = None if variance is None else math.sqrt(max(error - variance / passes, 0.0) / power)
    cosine = float((dots / (power * squares).sqrt()).nan_to_num(0.0).mean())
    variance = None if variance is None else variance / power
    return GradientTwin(name, math.sqrt(power), math.sqrt(error / power), corrected, variance, cosine)
