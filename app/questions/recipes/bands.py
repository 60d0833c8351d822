"""The bands in the charts of recipes: the gaps that chance explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from binade.data.evidence import GAP
from binade.data.gap_bands import Band
from binade.data.loss_gaps import RecipeRuns
from binade.data.run_table import references_in

NOTE = (
    "Bands hold 95% of the mean gaps between two of your bf16 runs: with other seeds, or of the same weights and data "
    "in another order of reduction."
)
NONE = pd.DataFrame(columns=["label", "band", "low", "high", "range", "n", "source"])


def rows(recipes: Sequence[RecipeRuns], bands: Mapping[str, tuple[Band, Band]]) -> pd.DataFrame:
    """A row for each recipe and known band: label, band, low, high, range, n, source."""
    rows: list[tuple[Any, ...]] = []
    for recipe in recipes:
        for band in bands[recipe.run_id]:
            if not band.missing:
                ends = band.gap.low, band.gap.high
                counted = f"{band.gap.n} {band.gap.of}"
                rows.append((recipe.label, band.kind.value, *ends, _range(*ends), counted, band.source))
    return pd.DataFrame(rows, columns=NONE.columns)


def by_iteration(bands: Mapping[str, tuple[Band, Band]], table: pd.DataFrame) -> pd.DataFrame:
    """The bands of the gaps at each iteration, of the recipe that has most: columns band, iteration, low, high, range,
    n, source. Empty if bf16 runs of several settings are compared with."""
    settings = set(table.set_index("run_id")["settings"][references_in(table)])
    longest = max(bands.values(), key=lambda pair: max(len(band.by_iteration) for band in pair), default=())
    rows = [
        (band.kind.value, iteration, -half, half, _range(-half, half), f"{band.gap.n} {band.gap.of}", band.source)
        for band in longest
        for iteration, half in band.by_iteration
        if len(settings) == 1
    ]
    return pd.DataFrame(rows, columns=["band", "iteration", "low", "high", "range", "n", "source"])


def _range(low: float, high: float) -> str:
    return f"{GAP.text(low)} to {GAP.text(high)} nats"
