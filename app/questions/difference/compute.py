"""Two runs compared tensor by tensor, as a table."""

from __future__ import annotations

from dataclasses import asdict, replace

import pandas as pd

from binade.app.draw import style
from binade.data.compare.difference import Difference, TensorDifference, difference
from binade.data.index.cache import Done
from binade.data.index.catalog import Catalog
from binade.data.run.directory import read_run
from binade.data.words.filter import Filter

WORDS = tuple(TensorDifference.__dataclass_fields__)


def compared(opened: Catalog, where: Filter, run_a: str, run_b: str, done: Done) -> tuple[Difference, pd.DataFrame]:
    """`data.compare.difference` of the tensors of run_a that the filter selects, and its rows with `order`, from 1.
    Raises RunError."""
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
