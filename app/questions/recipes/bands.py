"""The bands in the charts of recipes: the gaps that chance explains, and those that others published."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from binade.app.figure import Column, Table
from binade.data.evidence import GAP
from binade.data.gap_bands import Band
from binade.data.loss_gaps import RecipeRuns
from binade.data.published_gaps import published_for
from binade.data.run_table import references_in

PUBLISHED = "published for another model"
NOTE = (
    "Bands hold 95% of the mean gaps between two of your bf16 runs: with other seeds, or of the same weights and data "
    "in another order of reduction."
)
NONE = pd.DataFrame(columns=["label", "band", "low", "high", "range", "n", "source"])
COLUMNS = {
    "model": Column("Model"),
    "recipe": Column("Recipe"),
    "value": Column("Gap to bf16"),
    "read": Column("Known from", help="Published logs, the source, or an excerpt of it"),
    "training": Column("Training"),
    "source": Column("Source"),
    "how": Column("How", width=800),
}


def rows(
    recipes: Sequence[RecipeRuns], bands: Mapping[str, tuple[Band, Band]], formats: Mapping[str, Collection[str]]
) -> pd.DataFrame:
    """A row for each recipe and known band, and for each published gap in nats of its formats, the mean ± sd. Columns
    label, band, low, high, range, n, source. formats: `Recipe.linear_formats`, by run_id."""
    rows: list[tuple[Any, ...]] = []
    for recipe in recipes:
        for band in bands[recipe.run_id]:
            if not band.missing:
                ends = band.gap.low, band.gap.high
                counted = f"{band.gap.n} {band.gap.of}"
                rows.append((recipe.label, band.kind.value, *ends, _range(*ends), counted, band.source))
        for entry in published_for([formats[recipe.run_id]]):
            if entry.gap is not None and entry.sd is not None:
                ends = entry.gap - entry.sd, entry.gap + entry.sd
                counted, source = f"{entry.n} {entry.of}", f"{entry.title}, {entry.read.value}"
                rows.append((recipe.label, PUBLISHED, *ends, _range(*ends), counted, source))
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


def published(formats: Collection[Collection[str]]) -> list[Table]:
    """What others published for these recipes, nothing without one. formats: `Recipe.linear_formats` of each."""
    entries = published_for(formats)
    frame = pd.DataFrame(asdict(entry) | {"value": entry.value, "read": entry.read.value} for entry in entries)
    title = "Published gaps of other models: context, not a verdict"
    return [Table("published", frame, COLUMNS, title, foldable=True)] * bool(entries)
