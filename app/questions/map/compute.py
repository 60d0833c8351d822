"""A metric of each operand of each GEMM, by layer or by iteration, as the cells of a map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from binade.app.measures.cells import HUGE, PLACE, deciles
from binade.app.measures.map_measure import ITERATION, LAYER, CellQuery
from binade.app.measures.registry import MAP_MEASURES
from binade.app.questions.shared.operands import GEMMS, OTHER
from binade.data.compare.evidence import Measure
from binade.data.run.tensor_kinds import TENSOR_KINDS
from binade.data.words.fields import MODULES
from binade.data.words.names import name_of

# The products in the order of the network: modules, and the two products of attention.
PRODUCTS = tuple(name for module in MODULES for name in (("QK", "PV") if module == "core" else (module,)))
# The operands of a GEMM: the gradient first, then the first operand of the forward product, then the second.
_OBSERVED = ("grad", "a", "b")
_OPERANDS = {kind.name: _OBSERVED.index(kind.observed) for kind in TENSOR_KINDS if kind.observed in _OBSERVED}


@dataclass(frozen=True)
class MapRow:
    """An operand of a GEMM in all layers. product: its module, or QK or PV; expert: "" for all together."""

    gemm: str
    product: str
    tensor: str
    expert: str = ""

    @property
    def key(self) -> str:
        return "/".join(filter(None, (self.gemm, self.product, self.tensor, self.expert)))

    @property
    def order(self) -> tuple[int, int, str, int, str, str]:
        known = PRODUCTS.index(self.product) if self.product in PRODUCTS else len(PRODUCTS)
        gemm = (*GEMMS, OTHER).index(self.gemm)
        return gemm, known, self.product, _OPERANDS.get(self.tensor, 3), self.tensor, self.expert.zfill(6)


def cells(metric: str, query: CellQuery) -> pd.DataFrame:
    """The cells of a map, as in `MapMeasure.cells`. Tensors of no layer are left out."""
    table = MAP_MEASURES[metric].cells(query)
    missing = {name: value for name, value in (("broken", 0), ("expert", None)) if name not in table}
    table = table.assign(**missing).dropna(subset=[query.across]).reset_index(drop=True)
    return table.astype({query.across: int, "expert": "Int64"})


def difference(table: pd.DataFrame, other: pd.DataFrame, across: str, measure: Measure) -> pd.DataFrame:
    """The cells of one table minus those of another, where both have a value; of a metric with a logarithmic axis, log₂
    of their ratio. value of the two: own and other."""
    by = [*PLACE, across]
    both = table.merge(other[[*by, "value"]].rename(columns={"value": "other"}), on=by)
    values, others = both["value"].to_numpy(float), both["other"].to_numpy(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.log2(values / others) if measure.log else values - others
    return both.assign(own=values, value=np.where(np.isfinite(change), change, np.nan), low=np.nan, high=np.nan)


def rows_of(table: pd.DataFrame) -> list[MapRow]:
    """The rows of a map in the order of the network."""
    names = table[PLACE].drop_duplicates()
    return sorted(map(row_of, names.to_dict("records")), key=lambda row: row.order)


def row_of(cell: Mapping[Any, Any]) -> MapRow:
    """The row that a cell is in."""
    expert = "" if pd.isna(cell["expert"]) else str(int(cell["expert"]))
    return MapRow(str(cell["gemm"]), str(cell["product"]), str(cell["tensor"]), expert)


def with_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The cells with the column row, the key of their MapRow."""
    return table.assign(row=[row_of(cell).key for cell in table.to_dict("records")])


def kinds(table: pd.DataFrame) -> pd.DataFrame:
    """One row per kind of operand over all cells: kind ("fc1 grad output"), product, tensor, value (the median of the
    cells), low, high (their 10th and 90th percentile), tensors (how many cells), and layers or iterations (how many of
    these have a cell, whatever the number of GEMMs and experts); the GEMMs of an operand together."""
    known = table.dropna(subset=["value"])
    kind = [name_of(None, *operand) for operand in zip(known["product"], known["tensor"], strict=True)]
    known = known.assign(kind=kind, value=known["value"].clip(-HUGE, HUGE))
    groups = known.groupby(["kind", "product", "tensor"])["value"]
    ends = deciles(groups)
    across, of = (LAYER, "layers") if LAYER in known else (ITERATION, "iterations")
    ends[of] = known.groupby(["kind", "product", "tensor"])[across].nunique()
    return ends.assign(tensors=groups.size()).reset_index()
