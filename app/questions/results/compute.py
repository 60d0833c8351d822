"""Errors of GEMM results, and the prediction from the errors of their operands."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.data.tensor_kinds import Gemm

PRODUCT = ("layer_index", "module", "part", "gemm")
GEMMS = tuple(gemm.value for gemm in Gemm)


def pooled(table: pd.DataFrame, by: tuple[str, ...] = PRODUCT) -> pd.DataFrame:
    """Return one row per group of the rows of `Catalog.results`: by's columns, results, result_db (SQNR of the
    results), operands_db (what it would be if the errors of the two operands were independent: their noise ratios add),
    gain_db (result_db - operands_db) and the tensor_id of the worst result.

    Noise ratios are averaged over a group's micro-batches and iterations. operands_db is NaN where an operand of the
    group was not recorded; results that have no error or that overflowed are left out.
    """
    table = table[np.isfinite(table["result_sqnr_db"])]
    table = table.assign(noise=10 ** (-table["result_sqnr_db"] / 10))
    groups = table.groupby(list(by), dropna=False)
    found = groups.agg(
        results=("noise", "size"),
        noise=("noise", "mean"),
        operands=("operand_noise", lambda noise: noise.mean(skipna=False)),
    ).reset_index()
    worst = table.loc[groups["noise"].idxmax()] if len(table) else table
    found = found.merge(worst[[*by, "tensor_id"]], on=list(by), how="left")
    with np.errstate(divide="ignore"):  # operands without error
        found["result_db"] = -10 * np.log10(found["noise"].astype(float))
        found["operands_db"] = -10 * np.log10(found["operands"].astype(float))
    found["gain_db"] = found["result_db"] - found["operands_db"]
    return found.drop(columns=["noise", "operands"])
