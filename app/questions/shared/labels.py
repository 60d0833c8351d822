"""Names of groups and runs, and curves with fewer points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd


def group_name(group: Any, names: Mapping[str, str] | None = None) -> str:
    """The label of a group. A tensor without a value of the field is in "none". names: of runs, by run_id."""
    return "none" if pd.isna(group) else (names or {}).get(str(group), str(group))


def thinned(table: pd.DataFrame, most: int) -> tuple[pd.DataFrame, int]:
    """Thin a table of curves (columns group or label, and iteration) to about `most` rows. Returns (every n-th
    iteration and the last of each curve, n)."""
    step = -(-len(table) // most) or 1
    if step == 1:
        return table, 1
    curve = table["group" if "group" in table else "label"]
    last = table.groupby(curve)["iteration"].transform("max")
    keep = ((table["iteration"].max() - table["iteration"]) % step == 0) | (table["iteration"] == last)
    return table[keep].reset_index(drop=True), step


def thinned_note(step: int) -> str:
    return f"One iteration in {step} is drawn." if step > 1 else ""
