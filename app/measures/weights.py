"""Weights whose rounded values flip back and forth, or lie at the edge of their bin."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd
import torch

from binade.app.draw.figure import Column, Table
from binade.app.measures.cells import PLACE, by_cell
from binade.app.measures.map_measure import LAYER, CellQuery, MapMeasure, if_any
from binade.data.compare.evidence import SHARE
from binade.data.compare.student import quantile
from binade.data.index.catalog import SAME_IN_ITERATIONS, Catalog
from binade.data.words.fields import MEASURES
from binade.data.words.filter import Filter
from binade.data.words.names import short_names
from binade.quant.specs import Spec
from binade.quant.traces import CHANCE_SAMPLE, EDGE_SAMPLE, edge_by_chance

RATIO = 16  # a weight with at least this ratio is called oscillating: TetraJet-v2's default
WINDOW = 50  # iterations that the ratio is summed over, TetraJet-v2's
LEAST = 3  # recorded iterations, for a ratio
COLUMNS = {
    "place": Column("Weight"),
    "oscillating": Column(),
    "returned": Column(
        "Returned",
        help="weights whose rounded value changed and later changed back",
        text=lambda row: "" if pd.isna(row["returned"]) else SHARE.quantity(row["returned"]),
        align="right",
    ),
    "unchanged": Column("Unchanged", help="the same values in all recorded iterations"),
    "edge_excess": Column(),
    "at_bin_edge": Column(),
    "by_chance": Column("By chance", field=MEASURES["at_bin_edge"], help="of normally distributed values"),
    "iterations": Column("Iterations", "d"),
    "sampled": Column("Sampled", "d", help="values of each tensor that are tracked"),
}


def weights(query: CellQuery) -> pd.DataFrame:
    """Every sampled weight tensor in every recorded iteration: place, iteration, tensor_id, format, sampled (how many
    values), before (recorded iterations of the same weight before this one), at_bin_edge, by_chance (what it is of
    normally distributed values), counted (of how many values), edge_excess (the difference), edge_error (its standard
    error if it is by chance), oscillating (the share of values with a ratio of RATIO or more over the window that ends
    here, NaN before LEAST iterations), and for the last iteration only, constant (1 if the values are the same in all
    recorded iterations, at least LEAST, else 0) and returned (over the window, the share whose rounded value changed
    and later changed back)."""
    table = query.opened.sampled_weights(query.where)
    table = table[table["layer_index"].notna()].reset_index(drop=True)
    keys = [name for name in SAME_IN_ITERATIONS if name != "micro_batch"]
    before, oscillating, returned, constant = (np.full(len(table), np.nan) for _ in range(4))
    for at in table.groupby(keys, dropna=False, sort=False).indices.values():
        before[at] = np.arange(len(at))
        if len(at) < LEAST:
            continue
        values, rounded = (
            np.stack(table[name].iloc[at].tolist()).astype(float) for name in ("sampled", "sampled_rounded")
        )
        known = np.isfinite(values).all(0) & np.isfinite(rounded).all(0)
        values, rounded = values[:, known], rounded[:, known]
        if not known.any():
            continue
        oscillating[at[LEAST - 1 :]] = (ratios(values, rounded)[LEAST - 1 :] >= RATIO).mean(1)
        returned[at[-1]] = came_back(rounded[-WINDOW - 1 :]).mean()
        constant[at[-1]] = (values == values[0]).all()
    table = table.assign(
        before=before, oscillating=oscillating, returned=returned, constant=constant, place=short_names(table)
    )
    table = with_chance(table.assign(sampled=table["sampled"].map(len)))
    columns = ["format", "sampled", "before", "at_bin_edge", "by_chance", "counted", "edge_excess", "edge_error"]
    columns += ["oscillating", "returned", "constant"]
    return table[["place", "iteration", "tensor_id", *columns]]


def with_chance(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `Catalog.sampled_weights` with by_chance, counted, edge_excess and edge_error: see `weights`."""
    names = ["format", "std", "absmax", "dtype", "columns"]
    chance = np.array(
        [
            edge_by_chance(Spec.of(fmt), std, absmax, getattr(torch, dtype), int(columns))
            for fmt, std, absmax, dtype, columns in table[names].itertuples(index=False)
        ],
        float,
    )
    edge, counted = table["at_bin_edge"], table["numel"].clip(upper=EDGE_SAMPLE)
    error = np.sqrt(chance * (1 - chance) * (1 / counted + 1 / CHANCE_SAMPLE))
    return table.assign(by_chance=chance, counted=counted, edge_excess=edge - chance, edge_error=error)


def ratios(values: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    """Σ|Δrounded| / Σ|Δvalues| over the last WINDOW steps, for each weight at each time: arrays [times, weights]; 0 for
    a weight that did not move. TetraJet-v2, `oscillation_reset.py`."""
    paths = []
    for x in (rounded, values):
        path = np.concatenate([np.zeros_like(x[:1]), np.abs(np.diff(x, axis=0)).cumsum(0)])
        paths.append(path - np.concatenate([np.zeros_like(x[:WINDOW]), path])[: len(path)])
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: np.ndarray = np.where(paths[1] > 0, paths[0] / paths[1], 0.0)
    return ratio


def came_back(rounded: np.ndarray) -> np.ndarray:
    """[times, weights] -> [weights] bool: whether a weight had a value, then another, then the first again. This is so
    if it has changed at least as often as it has distinct values."""
    changes, others = ((np.diff(x, axis=0) != 0).sum(0) for x in (rounded, np.sort(rounded, axis=0)))
    result: np.ndarray = changes > others
    return result


def in_last(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of `weights` of the last iteration of each."""
    last: pd.DataFrame = table[table["iteration"] == table.groupby("place")["iteration"].transform("max")]
    return last


def cells(name: str, query: CellQuery) -> pd.DataFrame:
    """The mean of a column of `weights` over ranks and experts, in the last iteration or in each. Of edge_excess, low
    and high are the interval of values that chance makes, around it."""
    table = weights(query).dropna(subset=[name])
    table = in_last(table) if query.across == LAYER else table
    found = by_cell(query, table[["tensor_id"]].assign(value=table[name]), every_gemm=False, mean=True)
    if name != "edge_excess" or found.empty:
        return found
    squares = table[["tensor_id"]].assign(value=table["edge_error"] ** 2)
    errors = by_cell(query, squares, every_gemm=False, mean=True).set_index([*PLACE, query.across])["value"]
    margin = quantile(np.inf) * np.sqrt(errors.to_numpy() / found["tensors"].to_numpy())
    return found.assign(low=found["value"] - margin, high=found["value"] + margin)


def places(query: CellQuery, cell: pd.Series | None) -> Table | None:
    """One row per weight: its last iteration, with the mean over ranks and experts."""
    last = in_last(weights(query))
    if last.empty:
        return None
    means = {name: (name, "mean") for name in ("oscillating", "returned", "at_bin_edge", "by_chance", "edge_excess")}
    shown = last.groupby("place", sort=False).agg(
        **means,
        constant=("constant", "min"),
        iterations=("before", lambda before: int(before.max()) + 1),
        sampled=("sampled", "sum"),
        tensor_id=("tensor_id", "first"),
    )
    order = "oscillating" if shown["oscillating"].notna().any() else "edge_excess"
    shown = shown.reset_index().sort_values(order, ascending=False, ignore_index=True)
    shown = shown.assign(unchanged=shown.pop("constant").map({1.0: "yes", 0.0: "no"}).fillna("not known"))
    height = min(38 + 35 * len(shown), 420)
    return Table("oscillating_weights", shown, COLUMNS, "Weights", height=height, choose="tensor_id")


def _nothing(opened: Catalog, where: Filter, fmt: str) -> str:
    iterations = opened.sampled_weights(where)["iteration"].nunique()
    if iterations and where.iteration:
        return f"To tell whether weights oscillate takes {LEAST} iterations of a run: clear the iteration."
    if iterations:
        return (
            f"To tell whether weights oscillate, at least {LEAST} recorded iterations of a run are needed, and the "
            f"filter selects {iterations}: record more with --control-iter."
        )
    return (
        "The filter selects no weight that was sampled before and after rounding: choose a quantized run recorded with "
        "“trace” under Also measured (--measures trace)."
    )


_RECORDED = if_any("trace WHERE len(sampled) > 0")
OSCILLATING = MapMeasure(
    measure=MEASURES["oscillating"], cells=partial(cells, "oscillating"), nothing=_nothing, of="weight", history=True,
    several="their mean", recorded=_RECORDED, extra=places,
)  # fmt: skip
EDGE_EXCESS = MapMeasure(
    measure=MEASURES["edge_excess"], cells=partial(cells, "edge_excess"), nothing=_nothing, of="weight", history=True,
    several="their mean", interval="95% interval of what chance makes", neutral=0.0, recorded=_RECORDED, extra=places,
)  # fmt: skip
