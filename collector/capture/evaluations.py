"""Evaluations of an instrumented model while it trains: held-out sequences, and the twin step.

A twin step is one micro-batch on the same weights, without the recipe and with it, once per rounding seed. It separates
what rounding does to a gradient now from how far two runs have drifted apart: see data.run.evaluations.

Nothing changes for training: gradients are computed without accumulating them, buffers and torch's random numbers are
restored, and the passes draw from seeds of their own and use copies of the scale histories. Nothing is recorded.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from binade.collector.capture.adapters.products import tensors_in
from binade.collector.capture.clock import PassCounter, running_backward, seed_of
from binade.collector.capture.curves import hash_of
from binade.collector.capture.evaluation import Evaluate, evaluating, sequence_losses
from binade.collector.capture.instrumented import Instrumented
from binade.collector.capture.observer import Hook, part_at
from binade.collector.errors import ConfigError
from binade.collector.models.parallel import Call
from binade.collector.models.site import Site
from binade.data.run.evaluations import STEP, GradientTwin, HeldOut, Twin
from binade.quant.gemm import Rounding
from binade.quant.specs import GemmFormats

SeedOf = Callable[[str, str], int]  # of a product: its site and its name


class Evaluations:
    """Evaluates an instrumented model."""

    def __init__(self, instrumented: Instrumented, passes: PassCounter) -> None:
        self.models, self.hooks, self.seed = instrumented.models, instrumented.hooks, instrumented.seed
        self.passes, self.sites_of = passes, instrumented.sites_of

    def held_out(
        self, loss: Evaluate, batches: Iterable[Any], iteration: int | None, tokens: int | None, compares: bool
    ) -> tuple[HeldOut, list[float]]:
        """(the losses of batches with the recipe, in eval mode; those without it, if `compares`, else none)."""
        self.passes.advance()
        at = self.passes.clock.iteration if iteration is None else iteration
        losses: list[float] = []
        exact: list[float] = []
        digest = hashlib.sha256()
        with torch.no_grad(), ExitStack() as undo:
            for model in self.models:
                undo.enter_context(evaluating(model))
            for number, batch in enumerate(batches):
                digest.update(hash_of(tensors_in(batch)).encode())
                with self._aside(at, partial(seed_of, self.seed, "held out", number)):
                    losses += sequence_losses(loss(self.models[0], batch))
                if compares:
                    with self._aside(None):
                        exact += sequence_losses(loss(self.models[0], batch))
        if not losses:
            raise ConfigError("there are no held-out batches: give at least one")
        return HeldOut(at, tuple(losses), digest.hexdigest(), tokens), exact

    def without_recipe(self, loss: Evaluate, batch: Any) -> tuple[float, ...]:
        """The losses of a batch in the model's current mode, with the random numbers that the pass which follows has
        too, such as those of dropout."""
        self.passes.advance()
        with torch.no_grad(), self._aside(None):
            return sequence_losses(loss(self.models[0], batch))

    def rounds(self, iteration: int) -> bool:
        """Whether a GEMM has a rounded operand in this iteration."""
        return any(part_at(hook.stages, iteration).formats.quantized for hook in self.hooks)

    def twin(self, loss: Callable[[], Tensor], times: int) -> Twin:
        """A twin step with so many passes, or one if the recipe draws no random numbers."""
        self.passes.advance()
        iteration = self.passes.clock.iteration
        named = [
            (name, sites.get(name), p)
            for model, sites in ((model, self.sites_of(model)) for model in self.models)
            for name, p in model.named_parameters()
            if p.requires_grad
        ]
        parameters = [p for *_, p in named]
        draws = any(part_at(hook.stages, iteration).formats.random for hook in self.hooks)
        passes = times if draws else 1
        exact, gradients = self._pass(loss, parameters, None, 0)
        changes: list[float] = []
        means = [torch.zeros_like(g) for g in gradients]
        spread, dots, squares, pairs = (torch.zeros(len(named), passes, dtype=torch.float64) for _ in range(4))
        before = gradients
        for number in range(passes):
            value, rounded = self._pass(loss, parameters, iteration, seed_of(self.seed, "twin", iteration, number))
            changes.append(value - exact)
            for at, (g, q, mean) in enumerate(zip(gradients, rounded, means, strict=True)):
                apart = q - mean
                mean += apart / (number + 1)
                spread[at, number] = _sum(apart * (q - mean))
                dots[at, number], squares[at, number] = _sum(q * g), _sum(q * q)
                if number % 2:
                    pairs[at, number] = _sum((q - g) * (before[at] - g))
            before = rounded
        power = torch.tensor([_sum(g * g) for g in gradients], dtype=torch.float64)
        error = torch.tensor(
            [_sum((m - g).square()) for m, g in zip(means, gradients, strict=True)], dtype=torch.float64
        )
        parts = torch.stack([spread, dots, squares, pairs])
        layers: dict[int, list[int]] = {}  # the parameters of each
        for at, (_, site, _) in enumerate(named):
            if site and site.layer_index:
                layers.setdefault(site.layer_index, []).append(at)

        def row(name: str, which: list[int], layer: int | None = None, site: Site | None = None) -> GradientTwin:
            module, expert = (site.module, site.expert) if site else (None, None)
            empty = GradientTwin(name, layer, module, expert, float(power[which].sum().sqrt()))
            return _measured(empty, power[which].sum(), error[which].sum(), parts[:, which].sum(1), draws)

        rows = [
            row(STEP, list(range(len(named)))),
            *(row(f"layer{layer}", layers[layer], layer) for layer in sorted(layers)),
            *(row(name, [at], site.layer_index if site else None, site) for at, (name, site, _) in enumerate(named)),
        ]
        return Twin(iteration, exact, tuple(changes), draws, tuple(rows))

    def _pass(
        self, loss: Callable[[], Tensor], parameters: Sequence[nn.Parameter], iteration: int | None, seed: int
    ) -> tuple[float, list[Tensor]]:
        """The loss and the gradients, float32, of one pass, rounded as in this iteration; None for no rounding."""
        with self._aside(iteration, lambda *product: seed_of(seed, ".".join(product))):
            value = loss()
            gradients = torch.autograd.grad(value, list(parameters), allow_unused=True)
        zeros = (torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True))
        return value.item(), [g.detach().float() for g in zeros]

    @contextmanager
    def _aside(self, iteration: int | None, seed: SeedOf = lambda *product: 0) -> Iterator[None]:
        """A context for a pass that leaves no trace in training, rounded as in this iteration; None for no rounding."""
        histories = {id(hook): deepcopy(hook.histories) for hook in self.hooks}
        scales: dict[int, dict[str, Tensor]] = {}  # of the last forward pass, for one that is computed again

        def begin(hook: Hook) -> Call:
            formats = GemmFormats() if iteration is None else part_at(hook.stages, iteration).formats
            if not running_backward():
                scales[id(hook)] = {}
            own_seed = seed(hook.layer.site.name, hook.product.value)
            return Call(Rounding(formats, hook.backend, own_seed, histories[id(hook)], scales[id(hook)]))

        with torch.random.fork_rng(), kept(self.models):
            self.passes.clock.twin = begin
            try:
                yield
            finally:
                self.passes.clock.twin = None


@contextmanager
def kept(models: Sequence[nn.Module]) -> Iterator[None]:
    """A context at whose end these models have the buffers that they had before, with their values."""
    modules = [module for model in models for module in model.modules()]
    before = [(module._buffers, dict(module._buffers)) for module in modules if module._buffers]
    values = [(buffer, buffer.clone()) for _, buffers in before for buffer in buffers.values() if buffer is not None]
    try:
        yield
    finally:
        for current, buffers in before:  # a forward pass may put other tensors in their places
            current.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _sum(x: Tensor) -> float:
    return float(x.sum(dtype=torch.float64))


def _measured(row: GradientTwin, power: Tensor, error: Tensor, parts: Tensor, draws: bool) -> GradientTwin:
    """power: ‖g‖². error: ‖mean(ĝ) − g‖². parts, by pass: the increase of Σ‖ĝ − mean(ĝ)‖² (each after the first has the
    expectation of the variance, and they are uncorrelated); g·ĝ; ‖ĝ‖²; and (ĝ − g)·(ĝ′ − g) for a second pass ĝ and the
    one before, whose expectation is the square of the bias."""
    if not power > 0:
        return row
    spread, dots, squares, pairs = parts
    increases, products = spread[1:] / power, pairs[1::2] / power
    cosine = float(torch.where(squares == 0, 0.0, dots / (power * squares).sqrt()).mean())
    bias = float((error / power).sqrt())
    row = replace(row, bias=bias, cosine=cosine)
    if not draws:
        return replace(row, bias_corrected=bias, bias_error=0.0, variance=0.0, variance_error=0.0)
    if not len(increases):
        return row
    variance = float(increases.mean())
    squared = max(float(error / power) - variance / len(spread), 0.0)
    of_squared = _standard_error(products)
    # The change of the root for one standard error of the square, which stays finite at 0.
    of_bias = None if of_squared is None else math.sqrt(squared + of_squared) - math.sqrt(squared)
    return replace(
        row,
        bias_corrected=math.sqrt(squared),
        bias_error=of_bias,
        variance=variance,
        variance_error=_standard_error(increases),
    )


def _standard_error(values: Tensor) -> float | None:
    return float(values.std() / math.sqrt(len(values))) if len(values) > 1 else None
