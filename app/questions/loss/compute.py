"""The predicted cost in loss of rounding each forward operand, compared with its SQNR, and how reliable it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd
from scipy.stats import spearmanr

from binade.app.questions.shared.boards import DATA, PLACE, mean_changes, place_names
from binade.data.catalog import Catalog
from binade.data.filter import Filter


@dataclass(frozen=True)
class Costs:
    """
    table        of every place, the largest predicted change first: `boards.mean_changes` by PLACE, with place (its
                 name), sqnr_db and flush_to_zero in the format, rank and sqnr_rank, from 1
    agreement    Spearman's ρ between the ranks by predicted change and by SQNR; NaN for fewer than three places
    reliability  Spearman's ρ between the predictions of one half of the micro-batches and of the other; NaN for fewer
                 than two micro-batches or three places
    """

    table: pd.DataFrame
    agreement: float
    reliability: float


def costs(catalog: Catalog, where: Filter, fmt: str) -> Costs:
    """The costs of the filter's forward operands in a format. The table is empty if none has a gradient."""
    changes = catalog.loss_changes(fmt, PLACE, where)
    found = mean_changes(changes, PLACE)
    own = catalog.errors(fmt, PLACE, where)[[*PLACE, "sqnr_db", "flush_to_zero"]]
    table = found.merge(own, on=list(PLACE), how="left")
    table = table.assign(place=place_names(table), sqnr_rank=table["sqnr_db"].rank(method="min"))
    table = table.sort_values(["value", "place"], ascending=[False, True], na_position="last", ignore_index=True)
    table["rank"] = range(1, len(table) + 1)
    agreement = _rho(-table["value"], table["sqnr_db"])
    return Costs(table, agreement, _halves(changes))


def _halves(table: pd.DataFrame) -> float:
    """The agreement of every other micro-batch with the rest. Runs on the same data are in the same half."""
    batch = table.groupby(DATA, dropna=False, sort=True).ngroup()
    if batch.nunique() < 2:
        return math.nan
    change = table["first"] + table["second"]
    halves = [
        change[batch % 2 == half].groupby([table[name] for name in PLACE], dropna=False).mean() for half in (0, 1)
    ]
    both = pd.concat(halves, axis=1).dropna()
    return _rho(both.iloc[:, 0], both.iloc[:, 1])


def _rho(a: pd.Series, b: pd.Series) -> float:
    known = a.notna() & b.notna()
    if known.sum() < 3 or a[known].nunique() < 2 or b[known].nunique() < 2:
        return math.nan
    return float(spearmanr(a[known], b[known]).statistic)
