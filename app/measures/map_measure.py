"""What a measure is: a color of the Map, with the query that gives each cell its value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from binade.app.draw.figure import Figure, Table, Text
from binade.data.compare.evidence import Measure
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter

LAYER, ITERATION = "layer_index", "iteration"  # what the columns of a map are


@dataclass(frozen=True)
class CellQuery:
    """What a map asks a measure for.

    opened, where  the catalog, and the filter with the run and the iterations that are shown
    format         that errors are in, USED for the one of each GEMM; "" if the measure does not depend on one
    across         what the columns are, LAYER or ITERATION
    expanded       the module whose experts have rows of their own, "" for none
    """

    opened: Catalog
    where: Filter
    format: str = ""
    across: str = LAYER
    expanded: str = ""


def always(opened: Catalog) -> bool:
    return True


def if_any(rows: str) -> Callable[[Catalog], bool]:
    """Whether a query, such as "tensor WHERE …", selects a row of the index."""

    def recorded(opened: Catalog) -> bool:
        return bool(opened.ask(f"SELECT EXISTS (SELECT 1 FROM {rows}) AS found")["found"].iloc[0])

    return recorded


@dataclass(frozen=True, kw_only=True)
class MapMeasure:
    """A color of the Map.

    measure    its name, unit and definition, and whether low values are bad
    cells      the query: a table with gemm, product, tensor, expert, the query's `across`, value, low, high, tensors
               (how many), tensor_id (of the worst) and, where NaN or Inf can take the place of a value, broken (how
               many do)
    nothing    why there are no cells, and what to do: (catalog, filter, format) -> a sentence
    recorded   whether a root has data for it
    of         what a cell is of
    of_format  whether it depends on the format; as_used: whether that can be the format of each GEMM
    across     what the columns can be; not_across: why they cannot be the other
    history    whether it compares iterations, so that all of a run are read even if the columns are layers
    several    what a cell shows of several tensors; "" if it is a mean over sequences
    interval   what low and high are, if they are known for a single tensor too; "" for percentiles of several tensors
    neutral    the value that has no color: colors go from better to worse than it. None: from best to worst
    ends       the values of no and of full color; None: those of the cells
    extra      what is drawn below the map: (query, cell) -> an item. cell: a row of the map's table, the one that is
               selected; None if none is
    """

    measure: Measure
    cells: Callable[[CellQuery], pd.DataFrame]
    nothing: Callable[[Catalog, Filter, str], str]
    recorded: Callable[[Catalog], bool] = always
    of: str = "operand"
    of_format: bool = False
    as_used: bool = True
    across: tuple[str, ...] = (LAYER, ITERATION)
    not_across: str = ""
    history: bool = False
    several: str = "their median"
    interval: str = ""
    neutral: float | None = None
    ends: tuple[float, float] | None = None
    extra: Callable[[CellQuery, pd.Series | None], Figure | Table | Text | None] | None = None

    def summary(self, count: int) -> str:
        """What a cell shows of so many tensors or sequences, in words; "" for one."""
        if count < 2:
            return ""
        return f"of {count:,} tensors, {self.several}" if self.several else f"mean of {count:,} sequences"

    @property
    def between(self) -> str:
        """What low and high of a cell are, in words."""
        return self.interval or "10th to 90th percentile"
