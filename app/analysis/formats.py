"""What each format would do to a selection, from the index's scores."""

from __future__ import annotations

import math

import pandas as pd


def format_comparison(scores: pd.DataFrame) -> pd.DataFrame:
    """What each format does to a selection of operands: columns format, tensors, sqnr_db, flush_to_zero, saturated.

    SQNR is of the summed powers (infinite where nothing is lost, NaN where there is nothing to lose), flush_to_zero of
    all nonzero elements, saturated of all elements.
    """
    rows = []
    for name, part in scores.groupby("format"):
        part = part[part["mse"].notna() & part["rms"].notna()]
        signal, noise = (part["rms"] ** 2 * part["finite"]).sum(), (part["mse"] * part["finite"]).sum()
        nonzero = (part["finite"] - part["zeros"]).where(part["flush_to_zero"].notna(), 0)
        rows.append(
            {
                "format": name,
                "tensors": len(part),
                "sqnr_db": decibel(signal, noise),
                "flush_to_zero": (part["flush_to_zero"].fillna(0) * nonzero).sum() / max(nonzero.sum(), 1),
                "saturated": (part["saturated"] * part["numel"]).sum() / max(part["numel"].sum(), 1),
            }
        )
    return pd.DataFrame(rows, columns=["format", "tensors", "sqnr_db", "flush_to_zero", "saturated"])


def decibel(signal: float, noise: float) -> float:
    """10·log10(signal / noise): +inf without noise, -inf where it is not finite, NaN without a signal."""
    if not signal > 0:
        return math.nan
    return 10 * math.log10(signal / noise) if 0 < noise < math.inf else math.inf if noise == 0 else -math.inf
