"""The errors of each format on a selection, from the index's scores."""

from __future__ import annotations

import pandas as pd

from binade.quant.metrics import sqnr_db


def format_comparison(scores: pd.DataFrame) -> pd.DataFrame:
    """What each format does to a selection of operands: columns format, tensors, sqnr_db, flush_to_zero, saturated.

    SQNR is of the summed powers (infinite without any error, NaN if all values are zero), flush_to_zero of all nonzero
    elements, saturated of all elements. A format that only some of the operands were tried in is left out: it would be
    compared on a different set of tensors.
    """
    rows = []
    tried = scores.groupby("format")["format"].transform("size")
    scores = scores[tried == tried.max()]
    for name, part in scores.groupby("format"):
        part = part[part["mse"].notna() & part["rms"].notna()]
        signal, noise = (part["rms"] ** 2 * part["finite"]).sum(), (part["mse"] * part["finite"]).sum()
        nonzero = (part["finite"] - part["zeros"]).where(part["flush_to_zero"].notna(), 0)
        rows.append(
            {
                "format": name,
                "tensors": len(part),
                "sqnr_db": sqnr_db(signal, noise),
                "flush_to_zero": (part["flush_to_zero"].fillna(0) * nonzero).sum() / max(nonzero.sum(), 1),
                "saturated": (part["saturated"] * part["numel"]).sum() / max(part["numel"].sum(), 1),
            }
        )
    return pd.DataFrame(rows, columns=["format", "tensors", "sqnr_db", "flush_to_zero", "saturated"])
