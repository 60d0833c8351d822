"""Whether rounded weights flip back and forth, and whether gradients are larger than their rounding noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from binade.app.measures import results as measured_results
from binade.app.measures.cells import deciles
from binade.app.measures.map_measure import CellQuery
from binade.app.questions.shared.boards import PLACE
from binade.app.questions.shared.rounded import Recorded
from binade.app.questions.shared.runs import references_of
from binade.app.questions.shared.scope import rounding, scoped
from binade.app.style import MEASURES
from binade.data import evidence
from binade.data.catalog import SAME_IN_ITERATIONS, Catalog, CatalogError
from binade.data.evidence import Named
from binade.data.filter import Filter
from binade.data.names import short_names
from binade.data.store import TensorFileError
from binade.quant.quantizer import apply
from binade.quant.specs import Spec
from binade.quant.traces import CHANCE_SAMPLE, EDGE_SAMPLE, edge_by_chance, sample_later
from binade.quant.transform import transform, untransformed

RATIO = 16  # a weight with at least this ratio is called oscillating: TetraJet-v2's default
WINDOW = 50  # iterations that the ratio is summed over, TetraJet-v2's
LEAST = 3  # recorded iterations, for a ratio
NOISE_LINE = 3**0.5  # of gradient to noise: an SQNR of 4.77 dB
MOMENT = ("iteration", "layer_index")


def one_run(catalog: Catalog, where: Filter) -> Filter:
    """The filter, restricted to one run, whose operands are rounded if there is one: see `scoped`."""
    rounded = rounding(catalog, where)
    return scoped(catalog, replace(where, run_id=rounded) if rounded else where, ("iteration",))


def weights(catalog: Catalog, where: Filter) -> pd.DataFrame:
    """Every sampled weight tensor in every recorded iteration: PLACE, place, iteration, tensor_id, format, sampled (how
    many values), before (recorded iterations of the same weight before this one), at_bin_edge, by_chance (what it is of
    normally distributed values), counted (of how many values), edge_excess (the difference), edge_error (its standard
    error if it is by chance), oscillating (the share of values with a ratio of RATIO or more over the window that ends
    here, NaN before LEAST iterations), and for the last iteration only, constant (1 if the values are the same in all
    recorded iterations, at least LEAST, else 0) and returned (over the window, the share whose rounded value changed
    and later changed back)."""
    table = catalog.sampled_weights(where)
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
    return table[[*PLACE, "place", "iteration", "tensor_id", *columns]]


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


def places(weights: pd.DataFrame) -> pd.DataFrame:
    """One row per weight: its last iteration, with the mean over ranks and experts."""
    last = weights[weights["iteration"] == weights.groupby("place")["iteration"].transform("max")]
    means = {name: (name, "mean") for name in ("oscillating", "returned", "at_bin_edge", "by_chance", "edge_excess")}
    shown = last.groupby("place", sort=False).agg(
        **means,
        constant=("constant", "min"),
        edge_error=("edge_error", lambda errors: float(np.linalg.norm(errors)) / len(errors)),
        iterations=("before", lambda before: int(before.max()) + 1),
        sampled=("sampled", "sum"),
        counted=("counted", "sum"),
        tensor_id=("tensor_id", "first"),
    )
    order = "oscillating" if shown["oscillating"].notna().any() else "edge_excess"
    return shown.reset_index().sort_values(order, ascending=False, ignore_index=True)


def oscillating(places: pd.DataFrame) -> list[Named]:
    """The share of each of `places` that oscillates."""
    known = places.dropna(subset=["oscillating"]).to_dict("records")
    measure = MEASURES["oscillating"]
    return [(row["place"], evidence.proportion(measure, row["oscillating"], row["sampled"], "values")) for row in known]


def edge_against_bf16(catalog: Catalog, where: Filter, places: pd.DataFrame) -> list[Named] | None:
    """The share of each of `places` at a bin's edge minus that of the same weight of the bf16 run on the same data, in
    its last iteration: the same values of both, on the grid that the GEMM rounded its own to. None if a weight has no
    values or no counterpart with values."""
    measure, excesses = MEASURES["edge_excess"], []
    rows = catalog.rows_of(places["tensor_id"].tolist()).set_index("tensor_id", drop=False)
    for row in places.dropna(subset=["edge_excess"]).to_dict("records"):
        weight = rows.loc[row["tensor_id"]]
        references = references_of(catalog, where, [weight["run_id"]])
        twins = catalog.twins(row["tensor_id"]).dropna(subset=["path"])
        twin_of = dict(zip(twins["run_id"], twins["tensor_id"], strict=True))
        same = next((twin_of[run] for run in references if run in twin_of), None)
        if same is None:
            return None
        try:
            own, other = (_at_edge(catalog.load(name), weight) for name in (str(row["tensor_id"]), same))
        except (CatalogError, TensorFileError):
            return None
        if math.isnan(own) or math.isnan(other):
            return None
        mean, counted = (own + other) / 2, min(int(weight["numel"]), EDGE_SAMPLE)
        error = math.sqrt(2 * mean * (1 - mean) / counted)
        excesses.append((row["place"], evidence.with_error(measure, own - other, error, counted, "values")))
    return excesses


def _at_edge(x: Tensor, weight: pd.Series) -> float:
    """The share of values at a bin's edge, rounded as a weight was by its own GEMM, by the weight's row in the index;
    NaN if it cannot be repeated."""
    spec, recorded = Spec.of(weight["format"]), Recorded.of(weight)
    if recorded.problem(spec):
        return math.nan
    dim = -1 if pd.isna(weight["contracted_axis"]) else int(weight["contracted_axis"])
    scale = recorded.used.tensor_scale if spec.history else None
    absmax = None if scale is None else torch.tensor(scale, dtype=torch.float32)
    coded = transform(x, spec, dim, recorded.used.sign_seed or 0) if spec.transforms else x
    q, scales = apply(coded, untransformed(spec), dim, want_scales=True, absmax=absmax)
    sample = sample_later(coded, q, spec, scales, dim, absmax)
    return sample().at_bin_edge if sample else math.nan


def edge_excess(places: pd.DataFrame) -> list[Named]:
    """The share of each of `places` at a bin's edge, beyond chance."""
    known = places.dropna(subset=["edge_excess"]).to_dict("records")
    measure = MEASURES["edge_excess"]
    return [
        (row["place"], evidence.with_error(measure, row["edge_excess"], row["edge_error"], row["counted"], "values"))
        for row in known
    ]


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


def by_moment(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """The mean of a column of `weights` by iteration and layer: MOMENT, value, tensors, and the tensor_id with the
    largest value."""
    table = table.dropna(subset=[column])
    groups = table.groupby(list(MOMENT))
    means = groups.agg(value=(column, "mean"), tensors=(column, "size")).reset_index()
    largest = table.loc[groups[column].idxmax(), [*MOMENT, "tensor_id"]]
    return means.merge(largest, on=list(MOMENT), how="left")


def gradients(catalog: Catalog, where: Filter, fmt: str) -> pd.DataFrame:
    """Gradients with the noise that rounding adds to them, by place and iteration: PLACE, place, iteration, tensors,
    sqnr_db, value (‖g‖ / ‖noise‖) and tensor_id; of several micro-batches, the median, and low and high, the 10th and
    90th percentile. tensor_name is grad_output, rounded to a format, or grad_weight, the result of wgrad, with the
    noise of the operands that the run rounded. Gradients without noise are left out."""
    by = (*PLACE, "iteration")
    columns = [*by, "tensors", "sqnr_db", "sqnr_db_low", "sqnr_db_high", "tensor_id"]
    rounded = catalog.errors(fmt, by, where) if fmt else pd.DataFrame(columns=columns)
    rounded = rounded[rounded["tensor_name"] == "grad_output"]
    results = measured_results.results(CellQuery(catalog, where)).sort_values("result_db", kind="stable")
    results = results[(results["gemm"] == "wgrad") & results["part"].isin(("linear", "router"))]
    groups = results.groupby([*measured_results.PRODUCT, "iteration"], dropna=False)
    ends = deciles(groups["result_db"]) if len(results) else pd.DataFrame(columns=["low", "value", "high"])
    ends = ends.set_axis(["sqnr_db_low", "sqnr_db", "sqnr_db_high"], axis=1)
    results = ends.assign(tensors=groups.size(), tensor_id=groups["tensor_id"].first()).reset_index()
    results = results.assign(tensor_name="grad_weight", operation="backward")
    table = pd.concat([part[columns] for part in (results, rounded) if len(part)] or [rounded[columns]])
    table = table[np.isfinite(table["sqnr_db"].astype(float)) & table["layer_index"].notna()].reset_index(drop=True)
    ratio = {
        name: 10 ** (table[column].astype(float) / 20)
        for name, column in (("value", "sqnr_db"), ("low", "sqnr_db_low"), ("high", "sqnr_db_high"))
    }
    return table.assign(**ratio, place=short_names(table))


def to_noise(gradients: pd.DataFrame, fmt: str) -> list[Named]:
    """The ratio of each of `gradients`, of one iteration; those of outputs are rounded to fmt."""
    return [
        (
            f"{row['place']}{f' in {fmt}' if row['tensor_name'] == 'grad_output' else ''}",
            evidence.spread(MEASURES["gradient_to_noise"], row),
        )
        for row in gradients.to_dict("records")
    ]


def lowest(table: pd.DataFrame) -> pd.DataFrame:
    """The lowest of `gradients` in each iteration and layer: rows of the table, with tensors, the number of
    gradients."""
    groups = table.groupby(list(MOMENT))["value"]
    rows = table.loc[groups.idxmin()]
    return rows.drop(columns="tensors").merge(groups.size().rename("tensors").reset_index(), on=list(MOMENT))
