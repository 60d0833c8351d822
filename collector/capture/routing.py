"""How two recipes route the tokens of a mixture of experts, and what their routes contribute to the parity gap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from binade.collector.capture.effects import EffectMeter
from binade.collector.capture.parity import compared, formats_of, scored
from binade.collector.capture.routes import Route, Routes
from binade.collector.models.model import GPTModel
from binade.collector.models.site import Site
from binade.collector.recipes.recipe import Recipe
from binade.data.routing import RoutedLayer, Routing, flips, layer_of, means

Array = NDArray[Any]


@dataclass(eq=False)
class _Layer:
    """The choices of a router on all batches: of the training policy, of the rollout policy, and the margins of the
    former, each [sequences, tokens, ...]."""

    experts: list[int] = field(default_factory=list)
    training: list[Array] = field(default_factory=list)
    rollout: list[Array] = field(default_factory=list)
    margins: list[Array] = field(default_factory=list)

    def add(self, training: Route, rollout: Route, shape: tuple[int, ...], sequence_first: bool) -> None:
        """Add the choices of a batch, unless they are not of its tokens."""
        a, b, margins = (
            _by_sequence(x, shape, sequence_first) for x in (training.ranked, rollout.ranked, training.margins)
        )
        if a is not None and b is not None and margins is not None:
            self.experts.append(training.experts)
            self.training.append(a)
            self.rollout.append(b)
            self.margins.append(margins)

    @property
    def flipped(self) -> Array:
        """[sequences, tokens]"""
        return flips(np.concatenate(self.training), np.concatenate(self.rollout))

    def summed(self, site: Site, counts: Array) -> RoutedLayer:
        a, b, margins = (np.concatenate(parts) for parts in (self.training, self.rollout, self.margins))
        return layer_of(site.layer_index, site.module, self.experts[0], a, b, margins, counts)


def routing(
    measured: EffectMeter,
    batches: Sequence[object],
    rollout: Recipe,
    training: Recipe,
    done: Callable[[int, int], None] = lambda count, of: None,
) -> Routing | None:
    """How two recipes route the tokens of these batches, and their gap if the training policy takes the routes of the
    rollout policy; None for a model without routers. `evaluate` of `measured` returns logits and labels."""
    routers = [site for site, _ in measured.products if site.is_router]
    if not routers:
        return None
    of_rollout, of_training = (formats_of(measured, recipe) for recipe in (rollout, training))
    layers = {site: _Layer() for site in routers}
    parts, of_tokens = [], []
    for number, batch in enumerate(batches):
        measured.reference(batch, number, of_training)
        training_routes, rollout_routes = Routes(), Routes()
        measured.evaluated(of_training, training_routes)
        rolled = scored(measured.evaluated(of_rollout, rollout_routes))
        parts.append(compared(rolled, scored(measured.evaluated(of_training, Routes(rollout_routes.found)))))
        of_tokens.append(rolled.counts.cpu().numpy())
        shape, sequence_first = rolled.counts.shape, isinstance(measured.model, GPTModel)
        for site in layers.keys() & training_routes.found.keys() & rollout_routes.found.keys():
            layers[site].add(training_routes.found[site], rollout_routes.found[site], shape, sequence_first)
        done(number + 1, len(batches))
    known = {site: layer for site, layer in layers.items() if len(layer.experts) == len(batches)}
    if not known:
        return None
    counts = np.concatenate(of_tokens)
    routed_layers = [layer.summed(site, counts) for site, layer in known.items()]
    flipped = np.any([layer.flipped for layer in known.values()], axis=0)
    return Routing(
        tuple(routed_layers),
        means(flipped, counts),
        tuple(x for pair, _ in parts for x in pair.means(np.abs(pair.d)).tolist()),
        tuple(x for _, divergences in parts for x in divergences),
        tuple(site.name for site in routers if site not in known),
    )


def _by_sequence(x: Tensor, shape: tuple[int, ...], sequence_first: bool) -> Array | None:
    """Values of tokens as [sequences, tokens, ...]; None if their number is another. shape: (sequences, tokens).
    sequence_first: whether those of two leading axes are [tokens, sequences]. Flattened tokens are those of one
    sequence after the other."""
    rest = x.shape[-1:] if x.dtype == torch.int64 else ()
    leading = x.shape[: x.dim() - len(rest)]
    if math.prod(leading) != math.prod(shape):
        return None
    if sequence_first and len(leading) == 2:
        x = x.transpose(0, 1)
    return x.reshape(*shape, *rest).cpu().numpy()
