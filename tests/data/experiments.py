"""Experiments made by hand: rows of results for given effects and for a given parity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from binade.data.compare.parity import Policies
from binade.data.compare.routing import Routing
from binade.data.run.continued import continued_run
from binade.data.run.directory import DONE, read_run
from binade.data.run.evaluations import HeldOut, Twin, add_held_out, add_twin, own_recipe
from binade.data.run.experiment import (
    EXPERIMENT,
    NONE,
    SAME,
    BatchResult,
    EffectGroup,
    ExperimentWriter,
    RouterChoices,
    TreatmentKey,
    read_results,
)
from binade.data.run.parity_results import TRAINER, Parity

TOKENS = 50  # of a sequence of which only the mean is given


@dataclass(frozen=True)
class Effect:
    """The losses of one batch's sequences, without rounding and with a group rounded."""

    batch: int
    format: str
    part: str
    layer_index: int | None
    module: str | None
    exact: tuple[float, ...]
    losses: tuple[float, ...]
    divergences: tuple[float, ...] = ()
    seconds: float = 0.0
    recipe_sha256: str = ""

    @property
    def key(self) -> TreatmentKey:
        group = EffectGroup(self.part, self.layer_index, self.module)
        return TreatmentKey(self.format, self.recipe_sha256, group, base=NONE)


def add_evaluations(directory: Path, *evaluations: HeldOut | Twin, exact: Sequence[float] = ()) -> None:
    """Add what a run has evaluated while it trained. exact: the losses of held-out sequences without the recipe."""
    writer, recipe = ExperimentWriter(directory), own_recipe(read_run(directory).config)
    for each in evaluations:
        if isinstance(each, Twin):
            add_twin(writer, recipe, each)
        else:
            add_held_out(writer, recipe, each, exact)


def append_effect(directory: Path, effect: Effect) -> None:
    """Add the result of an effect to a run, and that of its base if it has none."""
    writer, tokens = ExperimentWriter(directory), (None,) * len(effect.exact)
    if (NONE.id, effect.batch) not in {each.place for each in read_results(directory)}:
        writer.add(BatchResult(NONE, effect.batch, effect.exact, tokens))
    divergences, seconds = effect.divergences, effect.seconds
    writer.add(BatchResult(effect.key, effect.batch, effect.losses, tokens, divergences, (), seconds))


def save_parity(
    root: Path, label: str, facts: Mapping[str, Any], result: Parity, steps: Sequence[Policies] = ()
) -> str:
    """A run with this parity; returns its id. steps: the log-probabilities of all products in each batch; without them,
    those of tokens that differ by the mean of their sequence."""
    gap = result.gaps[0]
    steps = steps or [_policies(gap.changes)]
    base = TRAINER if result.tool else NONE if result.training == "bf16" else TreatmentKey(result.training)
    text = result.tool or result.rollout
    described = {**facts, "kind": EXPERIMENT, "compares": result.title, "steps": [s.name for s in result.steps[1:]]}
    with continued_run(root, label, described, SAME, "a parity is being saved") as (run, _):
        writer = ExperimentWriter(run.directory)
        for batch, pair in enumerate(steps):
            key = TreatmentKey(text, base=base)
            routes = _routes(pair, result.routing, 1) if result.routing else ()
            writer.add(_result(base, batch, _split(pair, pair.training), (), routes))
            writer.add(_result(key, batch, _split(pair, pair.rollout), gap.divergences))
        for each in result.gaps[1:]:
            key = TreatmentKey(text, "", each.group, each.key.operand, each.key.is_whole, base=base)
            writer.add(_result(key, 0, _moved(_split(steps[0], steps[0].training), each.changes), each.divergences))
        if result.routing:
            _add_routing(writer, base, text, steps[0], result.routing)
        run.finish(DONE)
    return run.run_id


def _routes(pair: Policies, routing: Routing, other: int) -> tuple[tuple[RouterChoices, ...], ...]:
    """Routes in which the first tokens of a sequence choose another expert."""
    routes = []
    for at, tokens in enumerate(pair.lengths):
        layers = []
        for layer in routing.layers:
            chosen = np.tile(np.array([0, 1]), (tokens, 1))
            chosen[: round(layer.flips[at] * tokens), 1] = other
            margins = np.full(tokens, layer.margin)
            layers.append(RouterChoices(layer.layer_index or 0, layer.module, layer.experts, chosen, margins))
        nothing = (np.zeros((0, 0), np.int64), np.zeros(0))
        names = [name.removeprefix("layer").split(".") for name in routing.left_out]
        routes.append((*layers, *(RouterChoices(int(layer), module, 0, *nothing) for layer, module in names)))
    return tuple(routes)


def _add_routing(writer: ExperimentWriter, base: TreatmentKey, text: str, pair: Policies, routing: Routing) -> None:
    """The rollout as a base with its routes, and training with them."""
    rollout, tokens = TreatmentKey(text), _split(pair, pair.rollout)
    writer.add(_result(rollout, 0, tokens, (), _routes(pair, routing, 2)))
    moved = _moved(tokens, routing.changes)
    key = TreatmentKey(base.text, base.recipe_sha256, replays=True, base=rollout)
    counts = tuple(map(len, tokens))
    writer.add(BatchResult(key, 0, _losses(moved), counts, routing.divergences, (), logprobs=moved))


def _result(
    key: TreatmentKey,
    batch: int,
    logprobs: tuple[np.ndarray, ...],
    divergences: tuple[float, ...],
    routes: tuple[tuple[RouterChoices, ...], ...] = (),
) -> BatchResult:
    counts = tuple(map(len, logprobs))
    return BatchResult(key, batch, _losses(logprobs), counts, divergences, divergences, 0.0, logprobs, routes)


def _losses(logprobs: tuple[np.ndarray, ...]) -> tuple[float, ...]:
    return tuple(-float(x.mean()) for x in logprobs)


def _split(pair: Policies, values: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(values[pair.sequence == number] for number in range(pair.sequences))


def _moved(logprobs: tuple[np.ndarray, ...], changes: Sequence[float]) -> tuple[np.ndarray, ...]:
    return tuple(x - change for x, change in zip(logprobs, changes, strict=True))


def _policies(changes: Sequence[float]) -> Policies:
    training = np.full((len(changes), TOKENS), -1.0)
    sequence = np.arange(len(changes))[:, None] + np.zeros(TOKENS, int)
    return Policies.of(training - np.array(changes)[:, None], training, np.ones(training.shape), sequence)
