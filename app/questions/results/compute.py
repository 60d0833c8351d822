"""Errors of GEMM results, and the prediction from the errors of their operands."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.data.tensor_kinds import Gemm

PRODUCT = ("layer_index", "module", "part", "gemm")
GEMMS = tuple(gemm.value for gemm in Gemm)


def by_product(table: pd.DataFrame, by: tuple[str, ...] = PRODUCT) -> pd.DataFrame:
    """Return one row per group of the rows of `Catalog.results`: by's columns, results, and the median, 10th and 90th
    percentile over the results of result_db (SQNR of the result), operands_db (what it would be if the errors of the
    two operands were independent: their noise ratios add) and gain_db (result_db - operands_db): result_db,
    result_db_low, result_db_high, …; and the tensor_id of the worst result.

    operands_db and gain_db are NaN if an operand of the group was not recorded. Results that have no error or that
    overflowed are left out.
    """
    table = table[np.isfinite(table["result_sqnr_db"])]
    with np.errstate(divide="ignore"):  # operands without error
        operands = -10 * np.log10(table["operand_noise"].astype(float))
    table = table.assign(result_db=table["result_sqnr_db"], operands_db=operands)
    table = table.assign(gain_db=table["result_db"] - table["operands_db"])
    groups = table.groupby(list(by), dropna=False)
    products = groups.agg(results=("result_db", "size")).reset_index()
    for name in ("result_db", "operands_db", "gain_db"):
        complete = groups[name].count().to_numpy() == products["results"].to_numpy()
        for suffix, q in (("", 0.5), ("_low", 0.1), ("_high", 0.9)):
            products[f"{name}{suffix}"] = np.where(complete, groups[name].quantile(q).to_numpy(float), np.nan)
    worst = table.loc[groups["result_db"].idxmin()] if len(table) else table
    return products.merge(worst[[*by, "tensor_id"]], on=list(by), how="left")
