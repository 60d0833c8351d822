"""How two policies route the tokens of a mixture of experts: flips, recall, order and margins.

For each token and layer, A and B are the k experts that the training policy and the rollout policy choose, each in the
order of the selection scores s, which a router passes to its top-k.

    flip      A ≠ B as sets
    recall    |A ∩ B| / k
    reorder   A = B as sets, but in another order
    margin    s_(k) − s_(k+1) of the training policy, the scores sorted in descending order. Experts cannot flip while
              each score changes by less than half of it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binade.data.compare import evidence
from binade.data.compare.evidence import Estimate, Measure
from binade.data.compare.parity import Policies
from binade.data.run.experiment import (
    BatchResult,
    Place,
    RouterChoices,
    read_logprobs,
    read_results,
    read_routes,
)

FLIPS = Measure("flips", "Flips", "%", "share of tokens whose set of experts differs")
RECALL = Measure("recall", "Recall", "%", "share of the training policy's experts that the rollout policy chooses, too")
REORDERS = Measure("reorders", "Reordered", "%", "share of tokens with the same experts in another order")
ANY_FLIP = Measure("any_flip", "Any flip", "%", "share of tokens whose set of experts differs in any layer")
MARGIN = Measure("margin", "Margin", "", "s_(k) − s_(k+1) of the selection scores, training policy")
LEGEND = (
    "A token flips where the sets of its experts differ; it is reordered where only their order does. Recall: the "
    "share of training’s experts that the rollout chooses, too. Margin: between the k-th and the next selection score "
    "of training, the median over tokens, and over those that flip."
)
Shares = tuple[float, ...]
Routes = dict[Place, list[list[RouterChoices]]]
Chosen = NDArray[np.int64]


def flips(a: Chosen, b: Chosen) -> NDArray[np.bool_]:
    """a, b: experts [..., k] -> [...]"""
    differs: NDArray[np.bool_] = (np.sort(a, -1) != np.sort(b, -1)).any(-1)
    return differs


def recall(a: Chosen, b: Chosen) -> NDArray[np.float64]:
    """a, b: experts [..., k] -> [...]"""
    shares: NDArray[np.float64] = (a[..., :, None] == b[..., None, :]).any(-1).mean(-1)
    return shares


def reorders(a: Chosen, b: Chosen) -> NDArray[np.bool_]:
    """a, b: experts [..., k], by score -> [...]"""
    differs: NDArray[np.bool_] = (a != b).any(-1) & ~flips(a, b)
    return differs


@dataclass(frozen=True)
class RoutedLayer:
    """A router in both policies.

    experts, chosen            how many there are, and k
    flips, recalls, reorders   means over the tokens of each sequence
    margin, flipped_margin     medians over all tokens, and over those that flip; NaN if there are none
    """

    layer_index: int | None
    module: str
    experts: int
    chosen: int
    flips: Shares
    recalls: Shares
    reorders: Shares
    margin: float
    flipped_margin: float

    @property
    def name(self) -> str:
        """ "layer2 router"."""
        return self.module if self.layer_index is None else f"layer{self.layer_index} {self.module}"

    def estimates(self) -> tuple[Estimate, Estimate, Estimate]:
        """Flips, recall and reorders, with Student's interval over sequences."""
        of = ((FLIPS, self.flips), (RECALL, self.recalls), (REORDERS, self.reorders))
        flip, same, order = (evidence.mean(measure, values, "sequences") for measure, values in of)
        return flip, same, order


@dataclass(frozen=True)
class Routing:
    """The routing of two policies on the same tokens.

    any_flip     the share of each sequence's tokens that flip in any layer
    changes      mean |Δ log-probability| of each sequence with the rollout's routes in the training policy, in nats
    divergences  KL(R ‖ T) with them, the mean of each sequence
    left_out     routers whose choice is no top-k of their scores
    """

    layers: tuple[RoutedLayer, ...]
    any_flip: Shares
    changes: Shares
    divergences: Shares
    left_out: tuple[str, ...] = ()

    @property
    def any(self) -> Estimate:
        """The share of tokens that flip in any layer, with Student's interval over sequences."""
        return evidence.mean(ANY_FLIP, self.any_flip, "sequences")


def layer_of(pairs: Sequence[tuple[RouterChoices, RouterChoices]]) -> RoutedLayer:
    """A layer from the choices of the training policy and of the rollout policy, of each sequence with tokens."""
    chosen = [(a.choices, b.choices) for a, b in pairs]
    flipped = [flips(a, b) for a, b in chosen]
    margins = np.concatenate([a.margins for a, _ in pairs])
    at_flips = margins[np.concatenate(flipped)]
    first, _ = pairs[0]
    return RoutedLayer(
        first.layer_index, first.module, first.experts, first.choices.shape[1], _means(flipped),
        _means(recall(a, b) for a, b in chosen), _means(reorders(a, b) for a, b in chosen),
        float(np.median(margins)), float(np.median(at_flips)) if at_flips.size else float("nan"),
    )  # fmt: skip


def _means(sequences: Iterable[NDArray[Any]]) -> Shares:
    return tuple(float(values.mean()) for values in sequences)


def read_routing(directory: Path) -> Routing | None:
    """The routing of the two policies of a run's experiment: those of the treatment that replays the experts of its
    base, the rollout policy. None without one, or if no router chooses by top-k. Raises RunError and OSError."""
    results = read_results(directory)
    replayed = sorted((each for each in results if each.key.replays), key=lambda each: each.batch)
    return routing_of(replayed, read_routes(directory), read_logprobs(directory)) if replayed else None


def routing_of(
    replayed: Sequence[BatchResult], routes: Routes, logprobs: dict[Place, list[NDArray[np.float64]]]
) -> Routing | None:
    """The routing from the results of training with the experts of the rollout, whose base is the rollout. The choices
    of training are those of the other treatment that kept its routes."""
    rollout = replayed[0].key.base
    assert rollout is not None
    (training,) = {treatment for treatment, _ in routes} - {rollout.id}
    a, b = ([own for each in replayed for own in routes[treatment, each.batch]] for treatment in (training, rollout.id))
    names = [(each.layer_index, each.module) for each in a[0]]
    found = [at for at in range(len(names)) if all(own[at].choices.shape[1] for own in (*a, *b))]
    if not found:
        return None
    used = [at for at, own in enumerate(a) if len(own[found[0]].margins)]
    routers = [[(a[sequence][at], b[sequence][at]) for sequence in used] for at in found]
    any_flips = (
        np.logical_or.reduce([flips(own.choices, other.choices) for own, other in layers])
        for layers in zip(*routers, strict=True)
    )
    pairs = [Policies.by_sequence(logprobs[rollout.id, each.batch], logprobs[each.place]) for each in replayed]
    return Routing(
        tuple(map(layer_of, routers)),
        _means(any_flips),
        tuple(x for pair in pairs for x in pair.means(np.abs(pair.d)).tolist()),
        tuple(kl for each in replayed for kl, tokens in zip(each.kl, each.tokens, strict=True) if tokens),
        tuple(f"layer{layer}.{module}" for at, (layer, module) in enumerate(names) if at not in found),
    )
