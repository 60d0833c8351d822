"""A model that is instrumented, as its probes, twin steps and held-out evaluations see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from binade.collector.capture.clock import PassCounter
from binade.collector.capture.observer import Hook
from binade.collector.capture.step import parameter_sites
from binade.collector.capture.survey import Survey
from binade.collector.models.site import Site
from binade.collector.probes.probe import Recording
from binade.collector.recipes.recipe import Recipe


@dataclass(frozen=True, eq=False)
class Instrumented:
    """A model, or its chunks.

    surveys    their layers, by chunk
    hooks      of their products
    passes     counts the forward passes of the first chunk; None if they are neither recorded nor rounded at random
    seed       of the run
    former     the directory of a run whose scales and sums are continued
    recording  the Recorder, or one that has no run and only counts passes
    """

    surveys: Mapping[nn.Module, Survey]
    hooks: Sequence[Hook]
    passes: PassCounter | None
    recipe: Recipe
    seed: int
    former: Path | None
    recording: Recording

    @property
    def models(self) -> Sequence[nn.Module]:
        return list(self.surveys)

    def sites_of(self, model: nn.Module) -> Mapping[str, Site]:
        """Where the parameters of a chunk are, by name, without those that are not recorded."""
        return parameter_sites(model, self.surveys[model])
