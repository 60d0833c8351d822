"""The predicted cost in loss of rounding each forward operand, compared with its SQNR, and how reliable it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from binade.app.questions.shared.boards import DATA, LOSS_CHANGE, PLACE, mean_changes, place_names
from binade.app.style import MEASURES
from binade.data import evidence
from binade.data.catalog import Catalog
from binade.data.evidence import Estimate
from binade.data.filter import Filter


@dataclass(frozen=True)
class Costs:
    """
    table        of every place, the largest predicted change first: `boards.mean_changes` by PLACE, with place (its
                 name), sqnr_db and flush_to_zero in the format, rank and sqnr_rank, from 1
    total        of all places together, from the sums of the sequences
    agreement    Spearman's ρ between the predicted changes and SQNR, low SQNR first
    reliability  Spearman's ρ between the predictions of one half of the sequences and of the other
    """

    table: pd.DataFrame
    total: Estimate
    agreement: Estimate
    reliability: Estimate


def costs(catalog: Catalog, where: Filter, fmt: str) -> Costs:
    """The costs of the filter's forward operands in a format. The table is empty if none has a gradient."""
    changes = catalog.loss_changes(fmt, PLACE, where)
    found = mean_changes(changes, PLACE)
    own = catalog.errors(fmt, PLACE, where)[[*PLACE, "sqnr_db", "flush_to_zero"]]
    table = found.merge(own, on=list(PLACE), how="left")
    table = table.assign(place=place_names(table), sqnr_rank=table["sqnr_db"].rank(method="min"))
    table = table.sort_values(["value", "place"], ascending=[False, True], na_position="last", ignore_index=True)
    table["rank"] = range(1, len(table) + 1)
    sums = catalog.loss_changes(fmt, (), where)["by_sequence"]
    total = evidence.mean(MEASURES[LOSS_CHANGE], np.concatenate([*sums]) if len(sums) else (), "sequences")
    agreement = evidence.correlation(-table["value"].astype(float), table["sqnr_db"].astype(float), "operands")
    return Costs(table, total, agreement, _halves(changes))


def _halves(changes: pd.DataFrame) -> Estimate:
    """The agreement of every other sequence with the rest, over the places that all sequences have."""
    changes = changes.sort_values(DATA)
    by_place = [np.concatenate([*lists]) for _, lists in changes.groupby(list(PLACE), dropna=False)["by_sequence"]]
    most = max(map(len, by_place), default=0)
    complete = [each for each in by_place if len(each) == most > 1]
    even, odd = ([float(np.mean(each[half::2])) for each in complete] for half in (0, 1))
    return evidence.correlation(even, odd, "operands")
