"""Parity of two recipes: how the log-probabilities of the same tokens differ, and which products cause it.

The products that the two recipes round differently are changed one group at a time: in a pass, one group is rounded as
for the rollout and everything else as for training. The tokens are those of a text, so every pass scores the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from binade.collector.capture.effects import BY, EffectMeter, Key, group_of, holds, part_of
from binade.collector.capture.evaluation import IGNORED, Answer
from binade.collector.errors import ConfigError
from binade.collector.recipes.recipe import PARTS, Recipe
from binade.data.effects import EffectGroup
from binade.data.parity import Policies, joined
from binade.data.parity_results import GroupGap
from binade.quant.specs import OPERAND_FIELDS, GemmFormats, SpecError

Done = Callable[[int, int], None]  # how many passes are done, of how many


@dataclass(frozen=True, eq=False)
class Gap:
    """The gap that a group makes alone; the group of all products makes the gap between the two recipes.

    operand      the operand that differs or was changed, such as "weight"; "" for both
    is_whole     whether all that differs in the group was changed
    policies     rollout: with the group rounded as for the rollout; training: all as for training
    divergences  KL(R ‖ T) of the next token over the whole vocabulary, the mean of each sequence in nats
    """

    group: EffectGroup
    operand: str
    is_whole: bool
    policies: Policies
    divergences: tuple[float, ...]

    @property
    def changes(self) -> tuple[float, ...]:
        """The mean of |log-probability − that of training| in each sequence, in nats."""
        return tuple(self.policies.means(np.abs(self.policies.d)).tolist())

    @property
    def record(self) -> GroupGap:
        """What is kept of it."""
        return GroupGap(*self.group, self.operand, self.is_whole, self.changes, self.divergences)


class _Trial(NamedTuple):
    """What a pass changes. operand, is_whole: as in Gap. formats: of all products."""

    group: EffectGroup
    operand: str
    is_whole: bool
    formats: dict[Key, GemmFormats]


class _Scored(NamedTuple):
    """of_all [sequences, tokens, vocabulary]; of_labels and counts [sequences, tokens]."""

    of_all: Tensor
    of_labels: Tensor
    counts: Tensor


def gaps(
    measured: EffectMeter,
    batches: Sequence[object],
    rollout: Recipe,
    training: Recipe,
    by: Iterable[str] = ("part", "site"),
    operands: bool = False,
    done: Done = lambda count, of: None,
) -> list[Gap]:
    """The gap between two recipes, then those of groups at the granularities of BY, the largest change of the
    log-probabilities first. `evaluate` of `measured` returns logits and labels.

    operands  whether the operands of each group are changed one at a time as well, where both differ and a product can
              have one of them rounded as for the rollout and the other as for training

    Raises ConfigError for recipes that round the forward operands alike, or that need earlier passes; RecipeError for
    modules that the model lacks."""
    for recipe in (rollout, training):
        recipe.check_modules(site for site, _ in measured.products)
    of_rollout, of_training = (formats_of(measured, recipe) for recipe in (rollout, training))
    changed = [key for key in measured.products if of_rollout[key] != of_training[key]]
    if not changed:
        raise ConfigError(
            f"{rollout.name} and {training.name} round the forward operands of this model alike: give two recipes that "
            "differ there"
        )
    single = [
        group_of(key, granularity) for granularity in sorted(by, key=lambda name: len(BY[name])) for key in changed
    ]
    trials: list[_Trial] = []
    for group in dict.fromkeys([EffectGroup(), *single]):
        trials += _trials(group, [key for key in changed if holds(group, key)], of_rollout, of_training, operands)
    comparisons: list[list[tuple[Policies, tuple[float, ...]]]] = [[] for _ in trials]
    passes, of = 0, len(batches) * (len(trials) + 1)
    for number, batch in enumerate(batches):
        measured.reference(batch, number, of_training)
        base = scored(measured.evaluated(of_training))
        done(passes := passes + 1, of)
        for trial, parts in zip(trials, comparisons, strict=True):
            parts.append(compared(scored(measured.evaluated(trial.formats)), base))
            done(passes := passes + 1, of)
    whole, *others = (
        Gap(*trial[:3], joined([pair for pair, _ in parts]), tuple(x for _, divergences in parts for x in divergences))
        for trial, parts in zip(trials, comparisons, strict=True)
    )
    return [whole, *sorted(others, key=lambda gap: float(np.mean(gap.changes)), reverse=True)]


def _trials(
    group: EffectGroup,
    keys: Sequence[Key],
    of_rollout: Mapping[Key, GemmFormats],
    of_training: Mapping[Key, GemmFormats],
    operands: bool,
) -> list[_Trial]:
    """The whole group, and its operands one at a time."""
    fields = [
        field
        for field in ("forward_a", "forward_b")
        if any(getattr(of_rollout[key], field) != getattr(of_training[key], field) for key in keys)
    ]
    cached = {_cached(of_rollout[key]) or _cached(of_training[key]) for key in keys}
    same_softmax = all(of_rollout[key].softmax == of_training[key].softmax for key in keys)
    same_cache = all(of_rollout[key].cache == of_training[key].cache for key in keys)
    differ = {*fields, *(() if same_cache else cached)}
    names = {field: _operand(field, keys) for field in differ}
    only = names[differ.pop()] if len(differ) == 1 and same_softmax else ""
    trials = [_Trial(group, only, True, {**of_training, **{key: of_rollout[key] for key in keys}})]
    if operands and len(fields) == 2 and same_softmax and same_cache and all(names.values()):
        for field, name in ((field, names[field]) for field in fields):
            with suppress(SpecError):  # such as one of two operands that are rotated together
                formats = {key: replace(of_training[key], **{field: getattr(of_rollout[key], field)}) for key in keys}
                trials.append(_Trial(group, name, False, {**of_training, **formats}))
    return trials


def _cached(formats: GemmFormats) -> str:
    """The operand that a KV cache holds; "" for none."""
    return formats.cache.operand if formats.cache else ""


def _operand(field: str, keys: Iterable[Key]) -> str:
    """The name of an operand in its products: "weight"; "" if it has several."""
    names = {operand.name for key in keys for operand in PARTS[part_of(key)] if operand.field == field}
    return names.pop() if len(names) == 1 else ""


def formats_of(measured: EffectMeter, recipe: Recipe) -> dict[Key, GemmFormats]:
    """How a recipe rounds the forward operands of all products."""
    rounded = measured.forward_formats(recipe)
    backward: dict[str, Any] = dict.fromkeys(name for name in OPERAND_FIELDS if not name.startswith("forward"))
    return {
        key: replace(formats, **backward, of_rounded=())
        for key in measured.products
        for formats in [rounded.get(key, GemmFormats())]
    }


def scored(answer: Answer) -> _Scored:
    """The log-probabilities of logits and labels. Raises ConfigError for an answer without logits."""
    if not isinstance(answer, tuple):
        raise ConfigError("the loss of the model is known, but not its logits: return logits and labels")
    logits, labels = answer
    of_all = logits.float().log_softmax(-1)
    counts = labels != IGNORED
    of_labels = of_all.gather(-1, labels.where(counts, 0)[..., None])[..., 0]
    return _Scored(of_all, of_labels, counts)


def compared(rollout: _Scored, training: _Scored) -> tuple[Policies, tuple[float, ...]]:
    """Two policies on a batch, and KL(R ‖ T) of each sequence."""
    counts = rollout.counts
    apart = (rollout.of_all.exp() * (rollout.of_all - training.of_all)).sum(-1).double()
    used = counts.sum(1) > 0
    means = (apart.where(counts, 0).sum(1) / counts.sum(1))[used]
    sequence = torch.arange(len(counts))[:, None].expand(counts.shape)
    pair = Policies.of(rollout.of_labels.cpu(), training.of_labels.cpu(), counts.cpu(), sequence)
    return pair, tuple(means.tolist())
