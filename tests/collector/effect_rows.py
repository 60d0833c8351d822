"""Effects made by hand, as `measured_effects` reads them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from binade.data.run.effects import Measured
from binade.data.run.experiment import NONE, EffectGroup, TreatmentKey
from binade.quant.specs import Spec


def effect(text: str, group: EffectGroup, changes: list[float], divergence: float | None = None) -> Measured:
    """divergence: of each sequence; None if it was not measured."""
    divergences = () if divergence is None else (divergence,) * len(changes)
    key = TreatmentKey(text, "", group, base=NONE)
    return Measured(key, tuple(changes), divergences, (2.0,) * len(changes), 1.0)


def random_effects(
    groups: Sequence[EffectGroup], specs: Sequence[str], sequences: int, seed: int = 3
) -> list[Measured]:
    """An effect of random size, smaller in wider formats, for each group and format."""
    random, rows = np.random.default_rng(seed), []
    for group, spec in itertools.product(groups, specs):
        size = 10 ** random.uniform(-3, 0) * 4 ** -(Spec.of(spec).bits_per_value - 4)
        rows.append(effect(spec, group, random.normal(size, size, sequences).tolist(), size))
    return rows
