"""Parity of two recipes: how the log-probabilities of the same tokens differ, and which products cause it.

The products that the two recipes round differently are changed one group at a time: in a pass, one group is rounded as
for the rollout and everything else as for training. The tokens are those of a text, so every pass scores the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from binade.collector.capture.effects import BY, IGNORED, Answer, Key, Measuring, group_of, holds
from binade.collector.errors import ConfigError
from binade.collector.recipes.recipe import Recipe
from binade.data import evidence
from binade.data.effects import Group
from binade.data.evidence import Estimate, Measure
from binade.data.parity import Policies, joined
from binade.quant.specs import GemmFormats

CHANGE = Measure(
    "abs_logprob", "|Δ log-probability|", "nats", "|d| of the text's tokens, mean within each sequence, then over these"
)
DIVERGENCE = Measure(
    "divergence",
    "KL(R‖T)",
    "nats",
    "of the next token over the whole vocabulary, mean within each sequence, then over these",
)
Done = Callable[[int, int], None]  # how many passes are done, of how many


@dataclass(frozen=True, eq=False)
class Gap:
    """The gap that a group makes alone; the group of all products makes the gap between the two recipes.

    policies     rollout: with the group rounded as for the rollout; training: all as for training
    divergences  KL(R ‖ T) of the next token over the whole vocabulary, the mean of each sequence in nats
    """

    group: Group
    policies: Policies
    divergences: tuple[float, ...]

    @property
    def changes(self) -> tuple[float, ...]:
        """The mean of |log-probability − that of training| in each sequence, in nats."""
        return tuple(self.policies.means(np.abs(self.policies.d)).tolist())

    @property
    def change(self) -> Estimate:
        """The mean of `changes`, with Student's interval over sequences."""
        return evidence.mean(CHANGE, self.changes, "sequences")

    @property
    def divergence(self) -> Estimate:
        """The mean of `divergences`, with Student's interval over sequences."""
        return evidence.mean(DIVERGENCE, self.divergences, "sequences")


class _Scored(NamedTuple):
    """of_all [sequences, tokens, vocabulary]; of_labels and counts [sequences, tokens]."""

    of_all: Tensor
    of_labels: Tensor
    counts: Tensor


def gaps(
    measured: Measuring,
    batches: Sequence[object],
    rollout: Recipe,
    training: Recipe,
    by: Iterable[str] = ("part", "site"),
    done: Done = lambda count, of: None,
) -> list[Gap]:
    """The gap between two recipes, then those of groups at the granularities of BY, the largest change of the
    log-probabilities first. `evaluate` of `measured` returns logits and labels.

    Raises ConfigError for recipes that round the forward operands alike, or that need earlier passes; RecipeError for
    modules that the model lacks."""
    for recipe in (rollout, training):
        recipe.check_modules(site for site, _ in measured.products)
    of_rollout, of_training = (_forward(measured.forward_formats(recipe)) for recipe in (rollout, training))
    changed = [key for key in measured.products if of_rollout.get(key) != of_training.get(key)]
    if not changed:
        raise ConfigError(
            f"{rollout.name} and {training.name} round the forward operands of this model alike: give two recipes that "
            "differ there"
        )
    single = [group_of(key, each) for each in sorted(by, key=lambda name: len(BY[name])) for key in changed]
    groups = list(dict.fromkeys([Group(), *single]))
    found: dict[Group, list[tuple[Policies, tuple[float, ...]]]] = {group: [] for group in groups}
    passes, of = 0, len(batches) * (len(groups) + 1)
    for number, batch in enumerate(batches):
        measured.reference(batch, number, of_training)
        base = _scored(measured.evaluated(of_training))
        done(passes := passes + 1, of)
        for group in groups:
            own = {key: of_rollout for key in changed if holds(group, key)}
            formats = {key: own.get(key, of_training).get(key, GemmFormats()) for key in measured.products}
            found[group].append(_compared(_scored(measured.evaluated(formats)), base))
            done(passes := passes + 1, of)
    whole, *others = (
        Gap(group, joined([pair for pair, _ in parts]), tuple(x for _, each in parts for x in each))
        for group, parts in found.items()
    )
    return [whole, *sorted(others, key=lambda gap: gap.change.value, reverse=True)]


def _forward(formats: Mapping[Key, GemmFormats]) -> dict[Key, GemmFormats]:
    """The same, without what is rounded in the backward pass."""
    return {
        key: GemmFormats(forward_a=each.forward_a, forward_b=each.forward_b, softmax=each.softmax)
        for key, each in formats.items()
    }


def _scored(answer: Answer) -> _Scored:
    if not isinstance(answer, tuple):
        raise ConfigError("the loss of the model is known, but not its logits: return logits and labels")
    logits, labels = answer
    of_all = logits.float().log_softmax(-1)
    counts = labels != IGNORED
    of_labels = of_all.gather(-1, labels.where(counts, 0)[..., None])[..., 0]
    return _Scored(of_all, of_labels, counts)


def _compared(rollout: _Scored, training: _Scored) -> tuple[Policies, tuple[float, ...]]:
    """Two policies on a batch, and KL(R ‖ T) of each sequence."""
    counts = rollout.counts
    apart = (rollout.of_all.exp() * (rollout.of_all - training.of_all)).sum(-1).double()
    used = counts.sum(1) > 0
    means = (apart.where(counts, 0).sum(1) / counts.sum(1))[used]
    sequence = torch.arange(len(counts))[:, None].expand(counts.shape)
    pair = Policies.of(rollout.of_labels.cpu(), training.of_labels.cpu(), counts.cpu(), sequence)
    return pair, tuple(means.tolist())
