"""`binade parity --rollout`: the parity of two recipes on a model of `binade run`. Nothing is written."""

from __future__ import annotations

import torch

from binade.collector.capture.effects import measuring, recipes_of, rounds_forward
from binade.collector.capture.parity import Done, Gap, gaps
from binade.collector.training.measure import Measurement, Say, logits_of, measurable, open_measured


def measure_parity(
    asked: Measurement, operands: bool = False, *, say: Say, done: Done = lambda count, of: None
) -> list[Gap]:
    """The gaps between the two recipes of a measurement: its formats are the rollout's and the training's.
    operands: see `gaps`.

    Raises ConfigError and its like, as `measure_effects`."""
    asked.check()
    config, recipes = asked.plan.config, recipes_of(asked.formats)
    rollout, training = (recipes[text] for text in asked.formats)
    attention = any(rounds_forward(part.formats) for recipe in recipes.values() for part in (recipe.qk, recipe.pv))
    with measurable(asked), torch.no_grad():
        opened = open_measured(asked, say)
        backend, seed = config.quantized_by, config.seed
        with measuring(opened.model, logits_of, attention=attention, backend=backend, seed=seed) as measured:
            return gaps(measured, opened.batches, rollout, training, asked.by, operands, done)
