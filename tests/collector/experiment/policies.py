"""Treatments of a model in memory, and what `binade parity` reads of two policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from binade.collector.experiment.evaluator import Evaluator
from binade.collector.experiment.experiment import parity_treatments
from binade.collector.experiment.runner import run_treatments
from binade.collector.experiment.treatments import BY, Treatment, base_of, replayed, treatments_of
from binade.collector.recipes.recipe import Recipe
from binade.data.compare.routing import Routing, routing_of
from binade.data.run.experiment import EffectGroup, TreatmentKey
from binade.data.run.parity_results import Gap, gaps_of


def treatment(evaluator: Evaluator, recipe: Recipe, group: EffectGroup) -> Treatment:
    """A recipe in one group, against no rounding."""
    planned = treatments_of(evaluator.products, {recipe.name: recipe}, list(BY))
    return next(each for each in planned if each.key.group == group)


def gaps(
    evaluator: Evaluator,
    batches: Sequence[Any],
    rollout: Recipe,
    training: Recipe,
    by: Sequence[str],
    operands: bool = False,
) -> list[Gap]:
    named = ((rollout.name, rollout), (training.name, training))
    planned = parity_treatments(evaluator.products, *named, by, operands)
    results = list(run_treatments(evaluator, batches, planned))
    return gaps_of(results, {result.place: list(result.logprobs) for result in results})


def routing(evaluator: Evaluator, batches: Sequence[Any], rollout: Recipe, training: Recipe) -> Routing | None:
    keeps = {"keeps_tokens": True, "keeps_routes": True}
    base, other = (
        base_of(text, recipe, evaluator.products, **keeps)
        for text, recipe in (("training", training), ("rollout", rollout))
    )
    whole = Treatment(TreatmentKey("rollout", base=base.key), other.formats, base, keeps_tokens=True)
    results = list(run_treatments(evaluator, batches, [whole, replayed(base, other)]))
    routes = {result.place: [list(own) for own in result.routes] for result in results if result.routes}
    logprobs = {result.place: list(result.logprobs) for result in results}
    return routing_of([result for result in results if result.key.replays], routes, logprobs)
