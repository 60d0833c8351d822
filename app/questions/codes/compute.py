"""Which codes of a format a tensor uses."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch

from binade.app.questions.shared.rounded import Subject
from binade.quant.blocks import DENORMAL, SPECIAL, ZERO, code_tiers

FLUSHED = "flushed to zero"


def codes(subject: Subject) -> pd.DataFrame:
    """Every code of the format: columns code, value, tier, count, share; in order of value, −0 before 0, Inf and NaN
    last. Blocks with NaN or Inf have none. For a 16-bit format, only the codes that occur."""
    blocks = subject.blocks
    element = blocks.spec.format.element
    used = blocks.valid & blocks.y.isfinite()
    counts = torch.bincount(blocks.codes[used], minlength=1 << element.bits).numpy()
    values = [element.values[code] for code in range(1 << element.bits)]
    table = pd.DataFrame({"code": range(len(values)), "value": values, "tier": code_tiers(element), "count": counts})
    if element.bits > 8:
        table = table[table["count"] > 0]
    table = table.assign(share=table["count"] / max(table["count"].sum(), 1))
    order = np.lexsort((~np.signbit(table["value"]), table["value"]))
    return table.iloc[order].reset_index(drop=True)


def flushed(subject: Subject) -> float:
    """Of the values that `codes` counts, the share that is not zero but has a code of zero."""
    blocks = subject.blocks
    used = blocks.valid & blocks.y.isfinite()
    return int((used & (blocks.x != 0) & (blocks.values == 0)).sum()) / max(int(used.sum()), 1)


def tiers(table: pd.DataFrame, flushed: float = 0.0) -> pd.DataFrame:
    """A `codes` table by tier, widest mantissa first: columns tier, codes (in the format), used, share (of values).
    flushed: that share of the values, in a row of its own; zero is then what was zero already."""
    by_tier = table.groupby("tier", sort=False).agg(
        codes=("code", "size"), used=("count", lambda counts: int((counts > 0).sum())), share=("share", "sum")
    )
    by_tier = by_tier.reset_index()
    if flushed:
        by_tier["share"] -= (by_tier["tier"] == ZERO) * flushed
        row = {"tier": [FLUSHED], "codes": [0], "used": [0], "share": [flushed]}
        by_tier = pd.concat([by_tier, pd.DataFrame(row)], ignore_index=True)
    return by_tier.sort_values("tier", key=lambda names: names.map(tier_rank), ignore_index=True)


def tier_rank(tier: str) -> int:
    """The sort key of a tier: the widest mantissa first, then denormal, zero and special codes."""
    return {DENORMAL: 96, FLUSHED: 97, ZERO: 98, SPECIAL: 99}.get(tier) or -int(tier.split()[0])


def entropy_bits(table: pd.DataFrame) -> float:
    """−Σp·log2 p over the codes of a `codes` table."""
    p = table.loc[table["count"] > 0, "share"].to_numpy()
    return max(0.0, float(-(p * np.log2(p)).sum())) if len(p) else math.nan
