"""Evaluations while a model trains: the loss of each sequence on the current weights, with the recipe or without.

Nothing changes for training: there are no gradients, buffers and torch's random numbers are restored, and the passes
draw from seeds of their own and use copies of the scale histories. Nothing is recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch

from binade.collector.capture.adapters.products import tensors_in
from binade.collector.capture.clock import PassCounter, seed_of
from binade.collector.capture.curves import hash_of
from binade.collector.capture.evaluation import Evaluate, evaluating, sequence_losses
from binade.collector.capture.instrumented import Instrumented
from binade.collector.capture.observer import Hook, part_at
from binade.collector.capture.twin import kept
from binade.collector.errors import ConfigError
from binade.collector.models.parallel import Call
from binade.data.run.evaluations import HeldOut
from binade.quant.gemm import Rounding
from binade.quant.specs import GemmFormats


class Evaluations:
    """Evaluates an instrumented model."""

    def __init__(self, instrumented: Instrumented, passes: PassCounter) -> None:
        self.models, self.hooks, self.seed = instrumented.models, instrumented.hooks, instrumented.seed
        self.passes = passes

    def held_out(
        self, loss: Evaluate, batches: Iterable[Any], iteration: int | None, tokens: int | None, compares: bool
    ) -> tuple[HeldOut, list[float]]:
        """(the losses of batches with the recipe, in eval mode; those without it, if `compares`, else none)."""
        self.passes.advance()
        at = self.passes.clock.iteration if iteration is None else iteration
        losses: list[float] = []
        exact: list[float] = []
        digest = hashlib.sha256()
        with self._aside(), ExitStack() as undo:
            for model in self.models:
                undo.enter_context(evaluating(model))
            for number, batch in enumerate(batches):
                digest.update(hash_of(tensors_in(batch)).encode())
                self._round(at, number)
                losses += sequence_losses(loss(self.models[0], batch))
                if compares:
                    self.passes.clock.twin = _unrounded
                    exact += sequence_losses(loss(self.models[0], batch))
        if not losses:
            raise ConfigError("there are no held-out batches: give at least one")
        return HeldOut(at, tuple(losses), digest.hexdigest(), tokens), exact

    def without_recipe(self, loss: Evaluate, batch: Any) -> tuple[float, ...]:
        """The losses of a batch in the model's current mode, with the random numbers that the pass which follows has
        too, such as those of dropout."""
        self.passes.advance()
        with self._aside():
            self.passes.clock.twin = _unrounded
            return sequence_losses(loss(self.models[0], batch))

    def rounds(self, iteration: int) -> bool:
        """Whether a GEMM has a rounded operand in this iteration."""
        return any(part_at(hook.stages, iteration).formats.quantized for hook in self.hooks)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A context whose passes leave no trace in training."""
        with torch.random.fork_rng(), torch.no_grad(), kept(self.models):
            try:
                yield
            finally:
                self.passes.clock.twin = None

    def _round(self, iteration: int, number: int) -> None:
        """From now on, products are rounded as in this iteration, for the batch of this number."""
        histories = {id(hook): deepcopy(hook.histories) for hook in self.hooks}

        def begin(hook: Hook) -> Call:
            formats = part_at(hook.stages, iteration).formats
            seed = seed_of(self.seed, "held out", number, hook.layer.site.name, hook.product.value)
            return Call(Rounding(formats, hook.backend, seed, histories[id(hook)]))

        self.passes.clock.twin = begin


def _unrounded(hook: Hook) -> Call:
    return Call(Rounding(GemmFormats(), hook.backend))
