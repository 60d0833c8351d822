"""Gradients compared with the noise that rounding adds to them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.app.measures import results, values
from binade.app.measures.map_measure import CellQuery, MapMeasure, if_any
from binade.data.index.catalog import Catalog
from binade.data.words.fields import MEASURES
from binade.data.words.filter import Filter

NOISE_LINE = 3**0.5  # of gradient to noise: an SQNR of 4.77 dB


def cells(query: CellQuery) -> pd.DataFrame:
    """‖g‖ / ‖noise‖ of gradients of outputs, rounded to the format, and of weights, as wgrad computed them from the
    operands that the run rounded: the median of several tensors, and their 10th and 90th percentile. Gradients without
    noise are left out."""
    rounded, computed = values.cells("sqnr_db", query), results.cells(query)
    rounded = rounded[rounded["tensor"] == "grad_output"]
    computed = computed[(computed["gemm"] == "wgrad") & ~computed["product"].isin(("QK", "PV"))]
    table = pd.concat([part for part in (computed, rounded) if len(part)] or [rounded], ignore_index=True)
    ratios = {name: 10 ** (table[name].astype(float) / 20) for name in ("value", "low", "high")}
    return table[np.isfinite(table["value"].astype(float)) | (table["broken"] > 0)].assign(**ratios)


def _nothing(opened: Catalog, where: Filter, fmt: str) -> str:
    return (
        "The filter selects no gradient whose rounding noise is known: record a quantized run with a backward pass, "
        "with “result” under Also measured (--measures result) or with scores."
    )


GRADIENT_TO_NOISE = MapMeasure(
    measure=MEASURES["gradient_to_noise"], cells=cells, nothing=_nothing, of="gradient",
    of_format=True, neutral=NOISE_LINE,
    recorded=if_any("tensor WHERE tensor_name IN ('grad_output', 'grad_weight')"),
)  # fmt: skip
