"""Formats side by side: SQNR, flush and saturation."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.quant.specs import known_specs

ERROR_PANELS = (
    ("sqnr_db", "SQNR", "dB, higher is better", 1.0),
    ("flush_to_zero", "Flushed to zero", "% of the nonzero values", 100.0),
    ("saturated", "Saturated", "% of the values", 100.0),
)


LEAST = 7  # bars for which a panel has room, so that nothing below it moves when an option adds some
ENDS = (("low", "10th"), ("high", "90th"))


def trial_panels(table: pd.DataFrame) -> list[Chart]:
    """Charts of what_if.compute.try_formats: the medians of SQNR, flush and saturation, one bar per trial in its
    format's color, with the figure next to the bar and a line from the 10th to the 90th percentile."""
    table, order = table.assign(row=table["label"]), table["label"].tolist()
    colors = {name: style.color_of_spec(name) for name in known_specs(table["format"])}
    panels = []
    for column, name, unit, factor in ERROR_PANELS:
        shown = table[["format", "row"]].assign(value=table[column] * factor)
        if "tensors" in table:
            shown["tensors"] = table["tensors"]
        shown["label"] = table[column].map(style.MEASURES[column].text)
        shown["value"] = shown["value"].where(shown["value"].abs() < math.inf)
        several = f"{column}_low" in table and bool((table["tensors"] > 1).any())
        for end in ("low", "high") if several else ():
            drawn = table[f"{column}_{end}"] * factor
            shown[f"value_{end}"] = drawn.where((drawn.abs() < math.inf) & (table["tensors"] > 1))
        shown["end"] = (shown["value_high"].fillna(shown["value"]) if several else shown["value"]).fillna(0.0)
        ends = shown.filter(regex="^value").to_numpy(float).ravel()
        ends = ends[~np.isnan(ends)]
        lowest, largest = (min(float(ends.min()), 0.0), float(ends.max())) if len(ends) else (0.0, 0.0)
        tips: dict[str, plot.Tip] = {"row": "trial", "value": (f"{name} ({unit})", ".4~g")}
        tips |= {f"value_{end}": (f"{nth} percentile", ".4~g") for end, nth in ENDS} if several else {}
        tips |= {"tensors": "operands"} if "tensors" in table else {}
        domain = [lowest * 1.1, largest * 1.35 if largest > 0 else 1.0]
        bars = plot.bars(
            shown, plot.names("row", order, 260), text="label", end="end", tips=tips,
            x=plot.x("value", unit, None, domain=domain, nice=False),  # no axis: the values are next to the bars
            color=plot.named("format", colors, None), between=("value_low", "value_high") if several else None,
        )  # fmt: skip
        panels.append(plot.layers(style.small_title(name, unit), "", *bars))
    return panels


def format_height(table: pd.DataFrame) -> int:
    """Pixels that a panel needs."""
    return 80 + 28 * max(len(table), LEAST)
