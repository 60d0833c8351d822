"""`binade parity --rollout`: the parity of two recipes on a model of `binade run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from binade.collector.capture.effects import measuring, recipes_of
from binade.collector.capture.instrument import quantizes_attention
from binade.collector.capture.parity import Done, Gap, gaps
from binade.collector.capture.routing import routing
from binade.collector.training.held_out import logits_of
from binade.collector.training.measure import Measurement, Say, measurable, open_measured
from binade.data.parity_results import ALL, Parity, ParityStep


@dataclass(frozen=True, eq=False)
class MeasuredParity:
    """The gaps of groups with their log-probabilities, what is kept of them, and what run.json says of it."""

    gaps: Sequence[Gap]
    result: Parity
    facts: dict[str, Any]


def measure_parity(
    asked: Measurement, operands: bool = False, *, say: Say, done: Done = lambda count, of: None
) -> MeasuredParity:
    """The gaps between the two recipes of a measurement: its formats are the rollout's and the training's.
    operands: see `gaps`.

    Raises ConfigError and its like, as `measure_effects`."""
    asked.check()
    config, recipes = asked.plan.config, recipes_of(asked.formats)
    rollout, training = (recipes[text] for text in asked.formats)
    attention = any(quantizes_attention(recipe) for recipe in recipes.values())
    with measurable(asked), torch.no_grad():
        opened = open_measured(asked, say)
        backend, seed = config.quantized_by, config.seed
        with measuring(opened.model, logits_of, attention=attention, backend=backend, seed=seed) as measured:
            group_gaps = gaps(measured, opened.batches, rollout, training, asked.by, operands, done)
            routed = routing(measured, opened.batches, rollout, training)
    measures = {"rollout": rollout.lines(), "training": training.lines(), "by": list(asked.by), "operands": operands}
    measures |= opened.facts["measures"] | {"sequences": asked.sequences}
    names = {"rollout": asked.formats[0], "training": asked.formats[1]}
    steps = (ParityStep.of(ALL, group_gaps[0].policies),)
    result = Parity(**names, tool="", steps=steps, gaps=tuple(gap.record for gap in group_gaps), routing=routed)
    return MeasuredParity(group_gaps, result, opened.facts | names | {"measures": measures})
