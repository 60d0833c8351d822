"""Compares a run's gradients with those of the bf16 run on the same data."""

from __future__ import annotations

import pandas as pd

from binade.data.index.catalog import Catalog, CatalogError
from binade.data.run.store import TensorFileError

COMPARED = ("cosine", "relative_squared_error")
GRADIENTS = ("grad_weight", "grad_input", "grad_output")
"""The tensors that can be compared; the first is what is shown if none is chosen."""


def gradient_errors(catalog: Catalog, pairs: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Each pair of `Catalog.pairs` compared: (its columns with cosine, relative_squared_error ‖ĝ−g‖²/‖g‖² and
    projection; how many could not be read)."""
    from binade.quant.metrics import errors  # imports torch

    rows, unread = [], 0
    for pair in pairs.to_dict("records"):
        try:
            gradient, base = catalog.load(pair["tensor_id"]), catalog.load(pair["reference_id"])
            metrics = errors(base, gradient)
        except (CatalogError, TensorFileError, ValueError):
            unread += 1
            continue
        squared = metrics.relative_error**2
        rows.append(
            pair | {"cosine": metrics.cosine, "relative_squared_error": squared, "projection": metrics.projection}
        )
    return pd.DataFrame(rows, columns=[*pairs.columns, *COMPARED, "projection"]), unread


def gradient_summary(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """`gradient_errors` by columns: tensors, and the median, 10th and 90th percentile over the tensors of each of
    COMPARED: cosine, cosine_low, cosine_high, …"""
    groups = table.astype(dict.fromkeys(COMPARED, float)).groupby(by, sort=False, dropna=False)
    parts = {
        f"{name}{suffix}": groups[name].quantile(q)
        for name in COMPARED
        for suffix, q in (("", 0.5), ("_low", 0.1), ("_high", 0.9))
    }
    return pd.DataFrame({"tensors": groups.size(), **parts}).reset_index()
