"""Two tensors: the one that a tensor is compared with by default, and their difference by element."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from binade.app.questions.shared.runs import every_run
from binade.app.questions.why.compute import cell_of, rows_by_channels
from binade.data.index.catalog import TWIN_FIELDS, Catalog
from binade.data.words.filter import Filter
from binade.quant.statistics import cell_absmax

CHUNK = 1 << 22  # values that are compared at once


def default_other(opened: Catalog, values: Mapping[str, Any]) -> str | None:
    """The same operand in the bf16 run on the same data, else in the newest other run, else at the nearest other
    iteration of its run, else of the next layer; only with values on disk. None if there is none."""
    tensor_id = values["tensor"]
    return opened.kept(("other", tensor_id), lambda: _other(opened, tensor_id)) if tensor_id else None


def _other(opened: Catalog, tensor_id: str) -> str | None:
    row = opened.rows_of([tensor_id]).iloc[0]
    twins = opened.twins(tensor_id)
    twins = twins[(twins["run_id"] != row["run_id"]) & twins["run_id"].isin(opened.runs()["run_id"])]
    references = every_run(opened).set_index("run_id").at[row["run_id"], "references"]
    for rows in (
        twins[twins["run_id"].isin(references)],
        twins,
        _alike(opened, row, "iteration"),
        _alike(opened, row, "layer_index"),
    ):
        if (candidates := rows.loc[rows["path"].notna(), "tensor_id"]).size:
            return str(candidates.iloc[0])
    return None


def _alike(opened: Catalog, row: pd.Series, other: str) -> pd.DataFrame:
    """The tensors of the run that differ in one field: at other iterations, the nearest first, or of the next layer."""
    same = [name for name in ("run_id", *TWIN_FIELDS) if name != other]
    rows = opened.tensors(Filter(**{name: (row[name],) for name in same if not pd.isna(row[name])}))
    rows = rows[rows[[name for name in same if pd.isna(row[name])]].isna().all(axis=1)]
    apart = rows[other] - row[other]
    near: pd.DataFrame = rows[apart == 1 if other == "layer_index" else apart != 0]
    return near.sort_values(other, key=lambda at: (at - row[other]).abs(), kind="stable")


@dataclass(frozen=True)
class Between:
    """The difference of two tensors of one shape. What is not an integer is over the pairs of finite values.

    total, differing  pairs of values, and those that are not equal; two NaN are
    not_finite        pairs in which a value is NaN or infinite
    norm, error       ‖a‖ and ‖a − b‖
    cosine            NaN if one of the two is zero
    largest, at       the largest |a − b|, and its index
    cells             the largest |a − b| of each cell of a grid over [tokens, channels]
    """

    total: int
    differing: int
    not_finite: int
    norm: float
    error: float
    cosine: float
    largest: float
    at: tuple[int, ...]
    cells: np.ndarray


def between(a: Tensor, b: Tensor) -> Between:
    """Compare two tensors of one shape, which may not be empty, in float64 and in pieces."""
    x, y = rows_by_channels(a.detach()), rows_by_channels(b.detach())
    height, width = cell_of(x.shape)
    step = height * max(1, CHUNK // (height * x.shape[1]))
    differing = not_finite = place = 0
    largest, cells = 0.0, []
    sums = torch.zeros(4, dtype=torch.float64)
    for start in range(0, len(x), step):
        p, q = x[start : start + step].double(), y[start : start + step].double()
        finite = p.isfinite() & q.isfinite()
        differing += int(((p != q) & ~(p.isnan() & q.isnan())).sum())
        not_finite += finite.numel() - int(finite.sum())
        p, q = (torch.where(finite, part, 0.0) for part in (p, q))
        apart = (p - q).abs()
        sums += torch.stack([(u * v).sum() for u, v in ((p, p), (q, q), (p, q), (apart, apart))])
        most, where = apart.reshape(-1).max(0)
        if float(most) > largest:
            largest, place = float(most), start * x.shape[1] + int(where)
        cells.append(cell_absmax(apart, height, width).numpy())
    pp, qq, pq, error = sums.tolist()
    at = tuple(map(int, np.unravel_index(place, a.shape)))
    cosine = pq / math.sqrt(pp) / math.sqrt(qq) if pp and qq else math.nan
    return Between(
        a.numel(), differing, not_finite, math.sqrt(pp), math.sqrt(error), cosine, largest, at, np.concatenate(cells)
    )
