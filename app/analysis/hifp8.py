"""HiFloat8's own question: it has no scale, so how much precision a value gets is decided by its size alone.

Read from binade sketches, exactly: every limit between two precisions is a power of two, and so an edge of a bin (arXiv
2409.16626, table 1; the mantissa's width follows from the exponent before rounding).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.app.analysis.distribution import Distribution, log2_histogram
from binade.app.analysis.labels import group_name
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.quant.formats import FORMATS

HIFP8 = FORMATS["hifp8"]
CLIPPED, THREE, TWO, ONE, DENORMAL, FLUSHED, ZERO = PRECISIONS = (
    "clipped", "3 mantissa bits", "2 mantissa bits", "1 mantissa bit", "denormal", "flushed to zero", "zero",
)  # fmt: skip
# Each precision's magnitudes as exponents: from 2**low, below 2**high.
BANDS = (
    (FLUSHED, -200, -23), (DENORMAL, -23, -15), (ONE, -15, -7), (TWO, -7, -3), (THREE, -3, 4), (TWO, 4, 8),
    (ONE, 8, 15), (CLIPPED, 15, 200),
)  # fmt: skip


def precisions(catalog: Catalog, where: Filter, by: str | None = None) -> pd.DataFrame:
    """What HiFloat8 would give the selection's values: columns group (a value of `by`, or "all"), precision (one of
    PRECISIONS, each present), count, share (of the group's finite values).

    clipped holds what is 2**15 or more: the largest finite value too, which loses nothing.
    """
    sketch = catalog.distribution(where, by)
    moments = catalog.moments(where, by)
    zeros = dict(zip(moments["group"].map(group_name), moments["zeros"], strict=True))
    inner = np.minimum(sketch["low"].abs(), sketch["high"].abs()).to_numpy()
    with np.errstate(divide="ignore"):
        exponent = np.log2(inner)
    band = np.full(len(sketch), FLUSHED, object)
    for name, low, high in BANDS:
        band[(exponent >= low) & (exponent < high)] = name
    table = sketch.assign(group=sketch["group"].map(group_name), precision=band)
    counts = table.groupby(["group", "precision"], sort=False)["count"].sum().unstack(fill_value=0)
    counts = counts.reindex(columns=list(PRECISIONS), fill_value=0)
    counts[ZERO] = [int(zeros[group]) for group in counts.index]
    counts[FLUSHED] -= counts[ZERO]
    long = counts.rename_axis(columns="precision").stack().rename("count").reset_index()
    total = long.groupby("group")["count"].transform("sum")
    return long.assign(share=long["count"] / total.clip(lower=1))


def zones(table: pd.DataFrame) -> pd.DataFrame:
    """A `precisions` table of one group as `anatomy.zones`: what becomes of the values."""
    share = table.set_index("precision")["share"]
    rows = {"flushed": share[FLUSHED], "saturated": share[CLIPPED], "zero": share[ZERO], "lost": 0.0}
    rows["kept"] = 1.0 - sum(rows.values())
    return pd.DataFrame({"zone": [*rows], "share": [*rows.values()]})


def magnitudes(found: Distribution) -> pd.DataFrame:
    """The distribution as `anatomy.codebook_histogram`: HiFloat8 has no scale to divide by."""
    return log2_histogram([found])[["low", "high", "share"]]
