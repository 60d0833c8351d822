"""Compares a run's gradients with those of the bf16 run on the same data."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.data.catalog import Catalog, CatalogError
from binade.data.store import TensorFileError

GRADIENTS = ("grad_weight", "grad_input", "grad_output")
"""The tensors that can be compared; the first is what is shown if none is chosen."""


def gradient_errors(catalog: Catalog, pairs: pd.DataFrame) -> tuple[pd.DataFrame, int]:
    """Each pair of `Catalog.pairs` compared: (its columns with cosine, gradient_bias ‖ĝ−g‖²/‖g‖², projection, and the
    sums they are made of; how many could not be read)."""
    from binade.quant.metrics import errors  # imports torch

    rows, unread = [], 0
    for pair in pairs.to_dict("records"):
        try:
            own, base = catalog.load(pair["tensor_id"]), catalog.load(pair["reference_id"])
            found = errors(base, own)
        except (CatalogError, TensorFileError, ValueError):
            unread += 1
            continue
        rows.append(
            pair
            | {"cosine": found.cosine, "gradient_bias": found.relative_error**2, "projection": found.projection}
            | {"error": found.relative_error**2 * pair["reference_power"]}
        )
    added = ["cosine", "gradient_bias", "projection", "error"]
    return pd.DataFrame(rows, columns=[*pairs.columns, *added]), unread


def gradient_summary(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """`gradient_errors` by columns: tensors, cosine (mean, each tensor alike), gradient_bias (of the summed powers)."""
    found = table.groupby(by, sort=False, dropna=False).agg(
        tensors=("cosine", "size"), cosine=("cosine", "mean"), square=("reference_power", "sum"), error=("error", "sum")
    )
    found = found.assign(gradient_bias=found["error"] / found["square"].replace(0, np.nan))
    return found.drop(columns=["square", "error"]).reset_index()
