"""Two runs compared tensor by tensor, as a table."""

from __future__ import annotations

from dataclasses import asdict, replace

import pandas as pd

from binade.app import style
from binade.data.cache import Done
from binade.data.catalog import Catalog
from binade.data.difference import Difference, TensorDifference, difference
from binade.data.filter import Filter
from binade.data.runs import read_run

WORDS = tuple(TensorDifference.__dataclass_fields__)


def compared(opened: Catalog, where: Filter, run_a: str, run_b: str, done: Done) -> tuple[Difference, pd.DataFrame]:
    """`data.difference` of the tensors of run_a that the filter selects, and its rows with `order`, from 1. Raises
    RunError."""
    chosen = None
    if where.without("run_id") != Filter():
        chosen = set(opened.tensors(replace(where, run_id=(run_a,)))["tensor_id"])
    comparison = difference(read_run(opened.root / run_a), read_run(opened.root / run_b), chosen, done, opened.reads)
    table = pd.DataFrame([asdict(row) for row in comparison.rows], columns=list(WORDS))
    return comparison, table.assign(order=range(1, len(table) + 1))


def drawable(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that a chart has room for: of each group of neighbors the one that differs most."""
    size = -(-len(table) // style.MARKS)
    return table.loc[table["difference"].groupby((table["order"] - 1) // size).idxmax()] if size > 1 else table
