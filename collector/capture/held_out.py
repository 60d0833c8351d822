"""Held-out evaluations: the loss of the same sequences on the current weights, with the recipe, while a model trains.

Nothing changes for training: there are no gradients, the model is in eval mode, buffers and torch's random numbers are
restored, and the passes draw from seeds of their own and use copies of the scale histories. Nothing is recorded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import ExitStack
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
from binade.data.held_out import HeldOut
from binade.quant.gemm import Rounding


class HeldOutEvaluations:
    """Evaluates an instrumented model."""

    def __init__(self, instrumented: Instrumented, passes: PassCounter) -> None:
        self.models, self.hooks, self.seed = instrumented.models, instrumented.hooks, instrumented.seed
        self.passes = passes

    def __call__(self, loss: Evaluate, batches: Iterable[Any], iteration: int | None, tokens: int | None) -> HeldOut:
        self.passes.advance()
        at = self.passes.clock.iteration if iteration is None else iteration
        losses: list[float] = []
        digest = hashlib.sha256()
        with ExitStack() as undo:
            undo.enter_context(torch.random.fork_rng())
            undo.enter_context(torch.no_grad())
            undo.enter_context(kept(self.models))
            for model in self.models:
                undo.enter_context(evaluating(model))
            undo.callback(setattr, self.passes.clock, "twin", None)
            for number, batch in enumerate(batches):
                digest.update(hash_of(tensors_in(batch)).encode())
                self._round(at, number)
                losses += sequence_losses(loss(self.models[0], batch))
        if not losses:
            raise ConfigError("there are no held-out batches: give at least one")
        return HeldOut(at, tuple(losses), digest.hexdigest(), tokens)

    def _round(self, iteration: int, number: int) -> None:
        """From now on, products are rounded as in this iteration, for the batch of this number."""
        histories = {id(hook): deepcopy(hook.histories) for hook in self.hooks}

        def begin(hook: Hook) -> Call:
            formats = part_at(hook.stages, iteration).formats
            seed = seed_of(self.seed, "held out", number, hook.layer.site.name, hook.product.value)
            return Call(Rounding(formats, hook.backend, seed, histories[id(hook)]))

        self.passes.clock.twin = begin
