"""Whether rounded weights flip back and forth, and whether gradients are larger than their rounding noise."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.app.questions.results import compute as results_compute
from binade.app.questions.shared.boards import PLACE, place_names
from binade.data.catalog import SAME_IN_ITERATIONS, Catalog
from binade.data.filter import Filter

RATIO = 16  # a weight with at least this ratio is called oscillating: TetraJet-v2's default
WINDOW = 50  # iterations that the ratio is summed over, TetraJet-v2's
LEAST = 3  # recorded iterations, for a ratio
NOISE_LINE = 3**0.5  # of gradient to noise: an SQNR of 4.77 dB
MOMENT = ("iteration", "layer_index")


def weights(catalog: Catalog, where: Filter) -> pd.DataFrame:
    """Every sampled weight tensor in every recorded iteration: PLACE, place, iteration, tensor_id, format, sampled (how
    many values), before (recorded iterations of the same weight before this one), at_bin_edge, oscillating (the share
    of values with a ratio of RATIO or more over the window that ends here, NaN before LEAST iterations), and returned
    (over the window, the share whose rounded value changed and later changed back; for the last iteration only)."""
    table = catalog.sampled_weights(where)
    table = table[table["layer_index"].notna()].reset_index(drop=True)
    keys = [name for name in SAME_IN_ITERATIONS if name != "micro_batch"]
    before, oscillating, returned = (np.full(len(table), np.nan) for _ in range(3))
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
    table = table.assign(before=before, oscillating=oscillating, returned=returned, place=place_names(table))
    table = table.assign(sampled=table["sampled"].map(len))
    columns = ["format", "sampled", "before", "at_bin_edge", "oscillating", "returned"]
    return table[[*PLACE, "place", "iteration", "tensor_id", *columns]]


def ratios(values: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    """Σ|Δrounded| / Σ|Δvalues| over the last WINDOW steps, for each weight at each time: arrays [times, weights]; 0 for
    a weight that did not move. TetraJet-v2, `oscillation_reset.py`."""
    paths = []
    for x in (rounded, values):
        path = np.concatenate([np.zeros_like(x[:1]), np.abs(np.diff(x, axis=0)).cumsum(0)])
        paths.append(path - np.concatenate([np.zeros_like(x[:WINDOW]), path])[: len(path)])
    with np.errstate(divide="ignore", invalid="ignore"):
        found: np.ndarray = np.where(paths[1] > 0, paths[0] / paths[1], 0.0)
    return found


def came_back(rounded: np.ndarray) -> np.ndarray:
    """[times, weights] -> [weights] bool: whether a weight had a value, then another, then the first again. This is so
    if it has changed at least as often as it has distinct values."""
    changes, others = ((np.diff(x, axis=0) != 0).sum(0) for x in (rounded, np.sort(rounded, axis=0)))
    result: np.ndarray = changes > others
    return result


def by_moment(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """The mean of a column of `weights` by iteration and layer: MOMENT, value, tensors, and the tensor_id with the
    largest value."""
    table = table.dropna(subset=[column])
    groups = table.groupby(list(MOMENT))
    found = groups.agg(value=(column, "mean"), tensors=(column, "size")).reset_index()
    largest = table.loc[groups[column].idxmax(), [*MOMENT, "tensor_id"]]
    return found.merge(largest, on=list(MOMENT), how="left")


def gradients(catalog: Catalog, where: Filter, fmt: str) -> pd.DataFrame:
    """Gradients with the noise that rounding adds to them, by place and iteration: PLACE, place, iteration, tensors,
    sqnr_db, value (‖g‖ / ‖noise‖) and tensor_id. tensor_name is grad_output, rounded to a format, or grad_weight, the
    result of wgrad, with the noise of the operands that the run rounded. Gradients without noise are left out."""
    by = (*PLACE, "iteration")
    rounded = catalog.errors(fmt, by, where) if fmt else pd.DataFrame(columns=[*by, "tensors", "sqnr_db", "tensor_id"])
    rounded = rounded[rounded["tensor_name"] == "grad_output"]
    results = results_compute.by_product(catalog.results(where), (*results_compute.PRODUCT, "iteration"))
    results = results[(results["gemm"] == "wgrad") & results["part"].isin(("linear", "router"))]
    results = results.rename(columns={"results": "tensors", "result_db": "sqnr_db"})
    results = results.assign(tensor_name="grad_weight", operation="backward")
    columns = [*by, "tensors", "sqnr_db", "tensor_id"]
    found = pd.concat([part[columns] for part in (results, rounded) if len(part)] or [rounded[columns]])
    found = found[np.isfinite(found["sqnr_db"].astype(float)) & found["layer_index"].notna()].reset_index(drop=True)
    return found.assign(value=10 ** (found["sqnr_db"].astype(float) / 20), place=place_names(found))


def lowest(table: pd.DataFrame) -> pd.DataFrame:
    """The lowest of `gradients` in each iteration and layer: rows of the table, with tensors, the number of
    gradients."""
    groups = table.groupby(list(MOMENT))["value"]
    rows = table.loc[groups.idxmin()]
    return rows.drop(columns="tensors").merge(groups.size().rename("tensors").reset_index(), on=list(MOMENT))
