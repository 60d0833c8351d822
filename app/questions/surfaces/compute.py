"""A statistic of one kind of tensor by layer and iteration, and how it differs between two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from binade.data.catalog import Catalog
from binade.data.evidence import Measure
from binade.data.filter import Filter
from binade.data.tensor_kinds import tensor_names

CELLS = 12_000  # of a surface, at most
MOST_COLUMNS, FEWEST_COLUMNS = 240, 60


def kinds(opened: Catalog, where: Filter | None = None) -> dict[str, tuple[str, str]]:
    """Kinds of tensors of layers: "fc1 input" to module and tensor name, in the order of TENSOR_KINDS."""
    table = opened.distinct(("module", "tensor_name"), where).dropna()
    order = {name: place for place, name in enumerate(tensor_names())}
    table = table.sort_values(["tensor_name", "module"], key=lambda column: column.map(order).fillna(len(order)))
    return {f"{module} {name}": (module, name) for module, name in table.itertuples(index=False)}


def followed(opened: Catalog, where: Filter | None = None, rounded: bool = False) -> list[str]:
    """Runs, newest first; those with a single iteration after those with several. rounded: only those in which a format
    is active."""
    table = opened.distinct(("run_id", "iteration", *(["format"] if rounded else [])), where).dropna()
    measured = table["run_id"].value_counts()
    found = [run for run in opened.runs()["run_id"] if run in measured]
    return sorted(found, key=lambda run: measured[run] < 2)


def of_kind(where: Filter, kind: tuple[str, str], runs: Sequence[str]) -> Filter:
    return replace(where, module=kind[:1], tensor_name=kind[1:], run_id=tuple(runs))


def surface(opened: Catalog, where: Filter, metric: str, fmt: str = "") -> pd.DataFrame:
    """`Catalog.surface` for the runs of the filter, in the iterations that all of them have, with as many iterations
    per cell as needed for at most CELLS of them. Also last, the last iteration of the cell, and first_measured and
    last_measured, its first and last recorded iterations. Empty for fewer than two iterations.
    """
    counted = opened.distinct(("iteration", "run_id"), where).dropna().groupby("iteration").size()
    iterations = counted.index[counted == max(len(where.run_id), 1)].to_numpy().astype(int)
    if len(iterations) < 2:
        return pd.DataFrame()
    layers = max(len(opened.distinct(("layer_index",), where)), 1)
    columns = min(max(CELLS // layers, FEWEST_COLUMNS), MOST_COLUMNS)
    # Measurements every 100 iterations leave no gaps between cells.
    width = max(-(-int(iterations[-1] - iterations[0] + 1) // columns), int(np.median(np.diff(iterations))))
    table = opened.surface(metric, width, where, fmt)
    measured = pd.Series(iterations).groupby(iterations // width * width)
    return table.assign(
        last=table["iteration"] + width - 1,
        first_measured=table["iteration"].map(measured.min()),
        last_measured=table["iteration"].map(measured.max()),
    )


def difference(table: pd.DataFrame, run: str, against: str, measure: Measure) -> pd.DataFrame:
    """The difference of two runs, from their `surface`: the first run's columns, with other and change. The change is
    the value minus the other or, for a metric with a logarithmic axis, the base-2 logarithm of their ratio."""
    sides = (table[table["run_id"] == each].set_index(["layer_index", "iteration"]) for each in (run, against))
    own, other = sides
    found = own.join(other["value"].rename("other"), how="inner").reset_index()
    values, others = (found[name].to_numpy(float) for name in ("value", "other"))
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.log2(values / others) if measure.log else (values - others) * measure.factor
    return found.assign(change=np.where(np.isfinite(change), change, np.nan))
