"""The predicted change of the loss."""

from __future__ import annotations

import pandas as pd

from binade.app.measures.cells import PLACE
from binade.app.measures.map_measure import LAYER, CellQuery, MapMeasure, if_any
from binade.data.catalog import Catalog
from binade.data.evidence import Sentence
from binade.data.fields import MEASURES
from binade.data.filter import Filter
from binade.data.reliability import reliability
from binade.data.student import quantile
from binade.data.tensor_kinds import Gemm


def cells(query: CellQuery) -> pd.DataFrame:
    """The sum over experts and ranks, the mean over sequences, with its 95% interval."""
    table = _changes(query.opened, query.where, query.format)
    error = table["change_error"].astype(float) * (table["sequences"] - 1).map(quantile)
    return table.assign(
        product=table["part"].where(table["part"].isin(("QK", "PV")), table["module"]),
        tensor=table["tensor_name"], expert=None, value=table["change"],
        low=table["change"] - error, high=table["change"] + error, tensors=table["micro_batches"],
    )[[*PLACE, LAYER, "value", "low", "high", "tensors", "tensor_id"]]  # fmt: skip


def doubt(catalog: Catalog, where: Filter, fmt: str) -> Sentence:
    """Why the predicted loss changes of the cells do not tell operands apart; empty if they do."""
    return reliability(_changes(catalog, where, fmt)["by_sequence"]).doubt


def _changes(catalog: Catalog, where: Filter, fmt: str) -> pd.DataFrame:
    table = catalog.operand_costs(where)
    return table[(table["format"] == fmt) & (table["gemm"] == Gemm.FORWARD.value) & table["change"].notna()]


def _nothing(opened: Catalog, where: Filter, fmt: str) -> str:
    return (
        f"No gradient was recorded for operands that are scored in {fmt}: record a run with a backward pass and "
        "with “loss” under Also measured (--measures loss)."
    )


LOSS_CHANGE = MapMeasure(
    measure=MEASURES["loss_change"], cells=cells, nothing=_nothing, of_format=True, as_used=False,
    recorded=if_any("score WHERE loss_first_by_sequence IS NOT NULL"), across=(LAYER,),
    not_across="is a sum over a recording",
    several="the mean over sequences of their sum", interval="95% interval",
)  # fmt: skip
