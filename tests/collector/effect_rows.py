"""Rows of `Catalog.effects` made by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from binade.collector.advice.costs import bits_of
from binade.data.effects import EffectGroup


def effect(
    spec: str, group: EffectGroup, changes: list[float], divergence: float | None = None, run: str = "a"
) -> dict[str, Any]:
    """A row. divergence: of each sequence; None if it was not measured."""
    divergences = None if divergence is None else [divergence] * len(changes)
    return {
        "run_id": run, "format": spec,
        "part": group.part or None, "layer_index": group.layer_index, "module": group.module,
        "change": float(np.mean(changes)), "change_error": float(stats.sem(changes)) if len(changes) > 1 else None,
        "divergence": divergence, "change_by_sequence": changes, "divergence_by_sequence": divergences,
    }  # fmt: skip


def random_effects(groups: Sequence[EffectGroup], specs: Sequence[str], sequences: int, seed: int = 3) -> pd.DataFrame:
    """An effect of random size, smaller in wider specs, for each group and spec."""
    random, rows = np.random.default_rng(seed), []
    for group, spec in itertools.product(groups, specs):
        size = 10 ** random.uniform(-3, 0) * 4 ** -(bits_of(spec) - 4)
        rows.append(effect(spec, group, list(random.normal(size, size, sequences)), size))
    return pd.DataFrame(rows)
