"""A metric by iteration and layer."""

from __future__ import annotations

import pandas as pd

from binade.app.questions.shared.boards import PLACE, place_names, values
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.evidence import Measure, Named
from binade.data.filter import Filter


def training(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """`values` by iteration and layer."""
    table = values(catalog, where, fmt, metric, ("iteration", "layer_index"))
    return table.dropna(subset=["iteration", "layer_index"]).reset_index(drop=True)


def by_place(catalog: Catalog, where: Filter, fmt: str, metric: str) -> pd.DataFrame:
    """`values` by iteration and PLACE, with place (its name)."""
    table = values(catalog, where, fmt, metric, ("iteration", *PLACE)).dropna(subset=["iteration"])
    return table.assign(place=place_names(table)).reset_index(drop=True)


def trends(table: pd.DataFrame, measure: Measure) -> list[Named]:
    """The slope over iterations, per iteration, of each place of `by_place`."""
    return [
        (str(place), evidence.trend(measure, part["iteration"].tolist(), part["value"].tolist(), "iterations"))
        for (place, _), part in table.groupby(["place", "operation"], dropna=False, sort=False)
    ]


def changes(table: pd.DataFrame) -> pd.Series:
    """The change of each place of `by_place` from the first iteration to the last."""
    wide = table.pivot_table(index=["place", "operation"], columns="iteration", values="value", dropna=False)
    change: pd.Series = (wide[wide.columns.max()] - wide[wide.columns.min()]).dropna()
    return change
