"""A tensor block by block."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.app.questions.shared.heatmap import heatmap
from binade.quant.specs import Spec

BLOCK_TITLES = {
    "sqnr_db": ("SQNR by block", "SQNR (dB)", True),
    "flush_to_zero": ("Flushed to zero by block", "flushed (%)", False),
    "saturated": ("Saturated by block", "saturated (%)", False),
    "scale_exponent": ("Scale exponent by block", "log₂ scale", False),
}


def block_map(grid: np.ndarray, metric: str, lines: int, per_line: int, subtitle: str | list[str]) -> Chart:
    """Chart of compute.block_grid: lines of blocks, bright where a block is bad; gray where it is all zero."""
    name, unit, reverse = BLOCK_TITLES[metric]
    values = grid * 100 if metric in ("flush_to_zero", "saturated") else grid
    axes = ("block along the contracted axis", per_line), ("line", lines)
    return heatmap(
        values.astype(float), style.title(name, subtitle), *axes, unit, reverse=reverse, missing="not scored"
    )


def scale_exponents(table: pd.DataFrame, spec: Spec, subtitle: str | list[str]) -> Chart:
    """Chart of compute.scale_histogram."""
    shown = table.assign(low=table["exponent"] - 0.45, high=table["exponent"] + 0.45)
    bars = plot.steps(
        shown, plot.x("low", axis=style.binades("block scale"), nice=False, padding=8, zero=False), "high",
        plot.y("share", "share of blocks", {"format": "~%", "tickCount": 5}),
        color=style.FORMAT_COLORS[spec.format.name],
        tips=plot.tips(exponent="log₂ scale", blocks=("blocks", ","), share=("share of blocks", ".3~p")),
    )  # fmt: skip
    return plot.layers("Block scales", subtitle, bars)


def block_values(table: pd.DataFrame, spec: Spec, title: str, subtitle: str | list[str]) -> Chart:
    """Chart of compute.block_values: each value (ring), its rounded value (dot), and the line between them."""
    x = plot.x("index", "position in the block", {"tickMinStep": 1}, nice=False, padding=12)
    tips = plot.tips(
        index="position in the block", value=("value", ".5~g"), dequantized=("rounded to", ".5~g"),
        error=("error", ".3~g"), bits="code",
    )  # fmt: skip
    y = plot.y("value", "value")
    both: plot.Look = {"x": x, "tips": tips}
    way = plot.mark("rule", table, y=y, y2="dequantized", color=style.BAD, strokeWidth=1.5, **both)
    before = plot.mark("point", table, y="value", size=46, filled=False, color=style.GREY, strokeWidth=1.8, **both)
    color = style.FORMAT_COLORS[spec.format.name]
    after = plot.mark("point", table, y="dequantized", size=30, opacity=1, color=color, **both)
    return plot.layers(title, subtitle, way, before, after)
