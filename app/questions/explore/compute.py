"""The tensors of a selection by how much a format loses of them, and the distributions of their values: raw, divided by
each tensor's standard deviation, or by the scale of their blocks."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from binade.app.questions.shared.distributions import (
    Distribution,
    Pool,
    distribution_of,
    distributions,
    magnitudes,
    merged,
    quantiles,
)
from binade.app.questions.shared.labels import group_name
from binade.app.questions.shared.rounded import LIMIT, Recorded, applied, subject
from binade.app.questions.shared.runs import given_names, labels_of
from binade.app.view.budget import BudgetError
from binade.data.index.catalog import USED, Catalog, CatalogError
from binade.data.run.store import TensorFileError
from binade.data.words.filter import INTEGER_FIELDS, Filter
from binade.data.words.names import distinct_names
from binade.quant.normal import normal_sqnr
from binade.quant.sketch import bin_edges
from binade.quant.specs import Spec, known_specs

MOST_DOTS = 5000  # operands times formats
RAW, SIGMA, SCALE = "raw", "sigma", "scale"
MOST_SKETCHES = 1000  # tensors of a group that are each divided by their own standard deviation
MOST_SCALED = 8  # tensors of a group whose values are divided by their blocks' scales
SCALED_VALUES = 1 << 18  # values of each of these
STEPS = 16  # bins per binade into which values over different standard deviations are merged
TINY, MOST_BINADES = 1e-3, 32  # share of the smallest values that an axis of magnitudes leaves out; its length


@dataclass(frozen=True)
class ByFormat:
    """The operands of a selection in each format. dots: one row per operand and format, or of a sample of them: format,
    operation, gemm, delta, sqnr_db, tensor_id; medians: format, operands, sqnr_db, delta; partly: formats that only
    some of the operands were scored in, which are left out; every: one operand in this many has dots."""

    dots: pd.DataFrame
    medians: pd.DataFrame
    operands: int = 0
    partly: tuple[str, ...] = ()
    every: int = 1


def compared(
    catalog: Catalog, where: Filter, tensor_ids: list[str] | None = None, ticked: Sequence[str] = ()
) -> ByFormat:
    """The errors of each format on the selection's operands: all formats on the same operands. ticked: tensors that
    have dots even if others are sampled."""
    condition, parameters = catalog.condition(where, tensor_ids)
    formats = catalog.scored_formats(where)
    normal = [formats, [normal_sqnr(fmt) for fmt in formats]]
    operand = "score.sqnr_db - map_extract(map(?::VARCHAR[], ?::DOUBLE[]), score.format)[1]"
    medians = catalog.ask(
        f"""
        WITH operand AS (
            SELECT score.format, CASE WHEN isfinite(score.mse) THEN score.sqnr_db END AS sqnr_db,
                   CASE WHEN isfinite(score.mse) THEN {operand} END AS delta
            FROM score JOIN tensor USING (key) WHERE {condition}
        )
        SELECT format, count(*) AS operands, median(sqnr_db) FILTER (NOT isnan(sqnr_db)) AS sqnr_db,
               median(delta) FILTER (NOT isnan(delta)) AS delta,
               quantile_cont(delta, 0.01) FILTER (isfinite(delta)) AS low,
               quantile_cont(delta, 0.99) FILTER (isfinite(delta)) AS high
        FROM operand GROUP BY format ORDER BY format
        """,
        [*normal, *parameters],
    )
    if medians.empty:
        return ByFormat(medians, medians)
    operands = int(medians["operands"].max())
    whole = medians["operands"] == operands
    kept = medians[whole].reset_index(drop=True)
    every = max(1, -(-operands * len(kept) // MOST_DOTS))
    dots = catalog.ask(
        f"""
        WITH operand AS (
            SELECT tensor_id, operation, layer_index, module, tensor_name, expert, score.gemm, score.format,
                   score.sqnr_db,
                   {operand} AS delta,
                   dense_rank() OVER (ORDER BY key, score.gemm) % ? AS place
            FROM score JOIN tensor USING (key) WHERE {condition} AND list_contains(?, score.format)
        )
        SELECT * EXCLUDE (place) FROM operand
        WHERE isfinite(delta) AND (place = 1 % ? OR list_contains(?::VARCHAR[], tensor_id))
        ORDER BY format, tensor_id, gemm
        """,
        [*normal, every, *parameters, kept["format"].tolist(), every, [*ticked]],
    )
    order = {name: index for index, name in enumerate(known_specs(kept["format"]))}
    kept = kept.sort_values("format", key=lambda names: names.map(order), ignore_index=True)
    return ByFormat(dots, kept, operands, tuple(medians["format"][~whole]), every)


# Distributions


@dataclass(frozen=True)
class Groups:
    """distributions: of the groups that are drawn; names: what is grouped by; notes: what was left out or sampled."""

    distributions: list[Distribution]
    exact: int = 0
    notes: tuple[str, ...] = ()
    damaged: tuple[tuple[str, str], ...] = ()


def has_masked_pairs(row: Mapping[Hashable, Any]) -> bool:
    """Whether a tensor's file also has pairs of query and key that the softmax does not see, which its statistics and
    its sketch leave out."""
    return bool(pd.notna(row["pairs_left_out"]) and row["pairs_left_out"])


def of_tensors(catalog: Catalog, chosen: pd.DataFrame, values: str, fmt: str) -> Groups:
    """The chosen tensors' own values; their sketches where values were not kept or cannot be read, and of maps of
    attention, whose files have masked pairs too."""
    labels = distinct_names(chosen, given_names(catalog))
    groups: list[Distribution] = []
    notes: list[str] = []
    damaged: list[tuple[str, str]] = []
    exact = 0
    for row in chosen.to_dict("records"):
        label = labels[row["tensor_id"]]
        if values == SCALE:
            try:
                scaled = _over_scales(catalog, label, [row], fmt, LIMIT)
            except BudgetError as error:
                scaled = f"{label}: {error}"
            groups += [scaled] if isinstance(scaled, Distribution) else []
            notes += [scaled] if isinstance(scaled, str) else []
            continue
        distribution = None
        try:
            if not has_masked_pairs(row):
                distribution = distribution_of(label, catalog.load(row["tensor_id"]), (row["mean"], row["std"]))
                exact += distribution.exact
        except TensorFileError as error:
            damaged.append((label, str(error)))
        except CatalogError:
            notes.append(f"The values of {label} were not kept: drawn from its sketch.")
        if distribution is None:
            sketched = distributions(catalog, Filter(), None, [row["tensor_id"]])
            if not sketched:
                continue
            distribution = replace(sketched[0], group=label)
        groups.append(
            over(distribution, distribution.std) if values == SIGMA and distribution.std > 0 else distribution
        )
    return Groups([d for d in groups if d.total], exact, tuple(notes), tuple(damaged))


def over(d: Distribution, divisor: float) -> Distribution:
    """The distribution of the values divided by a positive number."""
    return replace(d, low=d.low / divisor, high=d.high / divisor, mean=d.mean / divisor, std=d.std / divisor)


def by_fields(
    catalog: Catalog, where: Filter, fields: tuple[str, ...], values: str, fmt: str, ids: list[str] | None = None
) -> tuple[list[tuple[tuple[Any, ...], Distribution]], tuple[str, ...]]:
    """(for each combination of the values of these fields, the distribution of its tensors' values; what was
    sampled). Raw values of different tensors lie side by side as they are; divided by σ or by scales, each tensor is
    divided by its own. ids: only these tensors."""
    if values == RAW:
        return _raw(catalog, where, fields, ids), ()
    rows = _sampled(catalog, where, fields, MOST_SKETCHES if values == SIGMA else MOST_SCALED, values == SCALE, ids)
    if rows.empty:
        return [], ("No values were kept, which dividing by scales takes.",) if values == SCALE else ()
    groups: list[tuple[tuple[Any, ...], Distribution]] = []
    notes: dict[str, None] = {}
    sketches = _sketches(catalog, where, rows) if values == SIGMA else None
    for key, part in rows.groupby(list(fields), dropna=False, sort=False) if fields else [((), rows)]:
        if sketches is not None:
            d = _over_sigmas(part, sketches)
            if d.total:
                groups.append((key, d))
        else:
            scaled = _over_scales(catalog, "", part.to_dict("records"), fmt)
            if isinstance(scaled, str):
                notes[scaled] = None
            else:
                groups.append((key, scaled))
        of = int(part["of"].iloc[0])
        if of > len(part):
            what = "tensors, each up to 262,144 values" if values == SCALE else "tensors"
            notes[f"Where a group has more, {len(part):,} of its {what}, spread evenly, are drawn."] = None
    return groups, tuple(notes)


def _raw(
    catalog: Catalog, where: Filter, fields: tuple[str, ...], ids: list[str] | None
) -> list[tuple[tuple[Any, ...], Distribution]]:
    crossed = catalog.crossed(where, fields, ids) if fields else catalog.distribution(where, None, ids)
    moments = catalog.moments(where, fields or None, ids)
    known = {tuple(str(row[name]) for name in fields): row for row in moments.to_dict("records")}
    groups: list[tuple[tuple[Any, ...], Distribution]] = []
    for key, part in crossed.groupby(list(fields), dropna=False) if fields else [((), crossed)]:
        row: Mapping[Any, Any] = known[tuple(str(value) for value in key)]
        counts = part.groupby("bin")["count"].sum()
        low, high = (edge.clip(row["min"], row["max"]) for edge in bin_edges(counts.index.to_numpy()))
        order = np.lexsort((high, low))
        mean, std = (math.nan if pd.isna(row[name]) else float(row[name]) for name in ("mean", "std"))
        d = Distribution("", low[order], high[order], counts.to_numpy()[order], mean, std, exact=False)
        if d.total:
            groups.append((key, d))
    return groups


def _sampled(
    catalog: Catalog, where: Filter, fields: tuple[str, ...], most: int, kept: bool, ids: list[str] | None
) -> pd.DataFrame:
    """The tensors of each group, at most so many of them, spread evenly over their ids, with `of`, how many there are.
    kept: only tensors with values."""
    condition, parameters = catalog.condition(where, ids)
    columns = "".join(f"tensor.{name}, " for name in fields)
    group = f"PARTITION BY {columns.rstrip(', ')}" if fields else ""
    return catalog.ask(
        f"""
        SELECT {columns}tensor_id, layer_type, tensor_name AS own_name, contracted_axis, format AS own_format, std, min,
               max, row_number() OVER ({group} ORDER BY tensor_id) - 1 AS place, count(*) OVER ({group}) AS of
        FROM tensor WHERE {condition} AND numel > 0{" AND path IS NOT NULL" if kept else ""}
        QUALIFY place % greatest(1, ceil(of / {most})) = 0 ORDER BY ALL
        """,
        parameters,
    )


def _sketches(catalog: Catalog, where: Filter, rows: pd.DataFrame) -> pd.DataFrame:
    """The sketch of each tensor: tensor_id, low, high, count, with its std, min and max."""
    whole = len(rows) == int(catalog.totals(where).tensors)
    bins = catalog.distribution(where, "tensor_id", None if whole else rows["tensor_id"].tolist())
    return bins.rename(columns={"group": "tensor_id"}).merge(rows[["tensor_id", "std", "min", "max"]], on="tensor_id")


def _over_sigmas(part: pd.DataFrame, sketches: pd.DataFrame) -> Distribution:
    """The values of some tensors, each over its own standard deviation, in bins of 1/16 binade. A bin of a sketch that
    lies across several of these is split evenly in the logarithm."""
    bins = sketches[sketches["tensor_id"].isin(part["tensor_id"]) & (sketches["std"] > 0)]
    low = np.clip(bins["low"], bins["min"], bins["max"]).to_numpy(float) / bins["std"].to_numpy(float)
    high = np.clip(bins["high"], bins["min"], bins["max"]).to_numpy(float) / bins["std"].to_numpy(float)
    count = bins["count"].to_numpy(float)
    inner, outer = np.minimum(abs(low), abs(high)), np.maximum(abs(low), abs(high))
    zero = inner * bins["std"].to_numpy(float) < 2.0**-126 / 8  # the sketch's bin of zero
    negative = (low + high) < 0
    pieces = [(np.zeros(1), np.zeros(1), np.array([count[zero].sum()]))]
    for sign, of in ((-1.0, negative & ~zero), (1.0, ~negative & ~zero)):
        edges, counts = merged(np.log2(inner[of]), np.log2(outer[of]), count[of], STEPS)
        smaller, larger = 2.0 ** edges[:-1], 2.0 ** edges[1:]
        pieces.append((-larger, -smaller, counts) if sign < 0 else (smaller, larger, counts))
    lows, highs, counts = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
    used = counts > 0
    order = np.argsort(lows[used] + highs[used], kind="stable")
    lows, highs, counts = lows[used][order], highs[used][order], counts[used][order]
    total, middle = counts.sum(), (lows + highs) / 2
    mean = float(counts @ middle / total) if total else math.nan
    std = math.sqrt(counts @ (middle - mean) ** 2 / total) if total else math.nan
    return Distribution("", lows, highs, counts, mean, std, exact=False, bin_width=1 / STEPS)


def _over_scales(
    catalog: Catalog, group: str, rows: list[dict[Any, Any]], fmt: str, most: int = SCALED_VALUES
) -> Distribution | str:
    """The values of some tensors, each over the scale of its block in a format, or why there are none."""
    pool = Pool(group)
    problem = f"The values of {group or 'these tensors'} were not kept, which dividing by scales takes."
    drawn = False
    for row in rows:
        used = row.get("own_format", row.get("format"))
        if fmt == USED and (used is None or pd.isna(used)):
            problem = f"{group or 'A tensor'} was not rounded, so it has no scales: choose a format."
            continue
        named = {"layer_type": row["layer_type"], "tensor_name": row.get("own_name", row.get("tensor_name"))}
        spec = applied(Spec.of(str(used) if fmt == USED else fmt), named)
        how = catalog.rows_of([row["tensor_id"]]).iloc[0]
        recorded = Recorded.of(how)
        if reason := recorded.problem(spec):
            return reason
        try:
            x = catalog.load(row["tensor_id"])
        except (CatalogError, TensorFileError):
            continue
        axis = how["contracted_axis"]
        blocks = subject(x, spec, -1 if pd.isna(axis) else int(axis), most, recorded).blocks
        scaled = torch.copysign(blocks.magnitudes, blocks.x)[blocks.valid]
        pool.add(scaled[scaled.isfinite()].float())
        drawn = True
    if not drawn:
        return problem
    d = pool.distribution()
    middle = (d.low + d.high) / 2
    mean = float(d.count @ middle / d.total) if d.total else math.nan
    std = math.sqrt(d.count @ (middle - mean) ** 2 / d.total) if d.total else math.nan
    return replace(d, mean=mean, std=std)


def named(catalog: Catalog, keys: list[tuple[Any, ...]], fields: tuple[str, ...], name: str) -> list[str]:
    """The label of a field for each combination of values."""
    if name not in fields:
        return ["all"] * len(keys)
    at = fields.index(name)
    label = partial(group_name, names=labels_of(catalog) if name == "run_id" else None)
    return [str(int(key[at])) if name in INTEGER_FIELDS and not pd.isna(key[at]) else label(key[at]) for key in keys]


def lower_end(groups: list[Distribution]) -> tuple[float, float]:
    """(log2 of the magnitude where an axis begins, the largest share of a group's values below it): a share TINY of the
    nonzero values, but no more than MOST_BINADES are shown."""
    nonzero = [d for d in map(magnitudes, groups) if d.total]
    end = max(float(d.high.max()) for d in nonzero)
    low = math.floor(max(min(float(quantiles(d, np.array(TINY))) for d in nonzero), end - MOST_BINADES))
    return low, max(float(d.count[d.high <= low].sum() / d.count.sum()) for d in nonzero)


def moments(opened: Catalog, where: Filter, chosen: pd.DataFrame, by: str) -> pd.DataFrame:
    """`Catalog.moments` of the groups, or of each chosen tensor; `group` is its name."""
    if chosen.empty:
        frame = opened.moments(where, by)
        names = labels_of(opened) if by == "run_id" else None
        return frame.assign(group=frame["group"].map(partial(group_name, names=names)))
    ids = chosen["tensor_id"].tolist()
    frame = opened.moments(Filter(), "tensor_id", ids).set_index("group").loc[ids].reset_index()
    return frame.assign(group=frame["group"].map(distinct_names(chosen, given_names(opened))))
