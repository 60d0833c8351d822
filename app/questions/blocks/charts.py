"""A tensor block by block."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.questions.shared.heatmap import heatmap
from binade.quant.specs import Spec

BLOCK_TITLES = {
    "sqnr_db": ("SQNR by block", "SQNR (dB)", True),
    "flush_to_zero": ("Flushed to zero by block", "flushed (%)", False),
    "saturated": ("Saturated by block", "saturated (%)", False),
    "scale_exponent": ("Scale exponent by block", "log₂ scale", False),
}


def block_map(grid: np.ndarray, metric: str, lines: int, per_line: int, subtitle: str | list[str]) -> alt.LayerChart:
    """Chart of compute.block_grid: lines of blocks, bright where a block is bad; gray where it is all zero."""
    name, unit, reverse = BLOCK_TITLES[metric]
    values = grid * 100 if metric in ("flush_to_zero", "saturated") else grid
    axes = ("block along the contracted axis", per_line), ("line", lines)
    return heatmap(
        values.astype(float), style.title(name, subtitle), *axes, unit, reverse=reverse, missing="not scored"
    )


def scale_exponents(table: pd.DataFrame, spec: Spec, subtitle: str | list[str]) -> alt.Chart:
    """Chart of compute.scale_histogram."""
    shown = table.assign(low=table["exponent"] - 0.45, high=table["exponent"] + 0.45, floor=0.0)
    result: alt.Chart = (
        alt.Chart(shown)
        .mark_rect(color=style.FORMAT_COLORS[spec.format.name], strokeWidth=0)
        .encode(
            x=alt.X(
                "low:Q",
                axis=style.binades("block scale"),
                scale=alt.Scale(nice=False, padding=8, zero=False),
            ),
            x2="high:Q",
            y=alt.Y("share:Q", title="share of blocks", axis=alt.Axis(format="~%", tickCount=5)),
            y2="floor:Q",
            tooltip=[
                alt.Tooltip("exponent:Q", title="log₂ scale"),
                alt.Tooltip("blocks:Q", title="blocks", format=","),
                alt.Tooltip("share:Q", title="share of blocks", format=".3~p"),
            ],
        )
        .properties(title=style.title("Block scales", subtitle))
    )
    return result


def block_values(
    table: pd.DataFrame, spec: Spec, title: str, subtitle: str | list[str]
) -> alt.LayerChart | alt.FacetChart:
    """Chart of compute.block_values: each value (ring), its rounded value (dot), and the line between them."""
    tooltip = [
        alt.Tooltip("index:Q", title="position in the block"),
        alt.Tooltip("value:Q", title="value", format=".5~g"),
        alt.Tooltip("dequantized:Q", title="rounded to", format=".5~g"),
        alt.Tooltip("error:Q", title="error", format=".3~g"),
        alt.Tooltip("bits:N", title="code"),
    ]
    base = alt.Chart(table).encode(
        x=alt.X(
            "index:Q",
            title="position in the block",
            axis=alt.Axis(tickMinStep=1),
            scale=alt.Scale(nice=False, padding=12),
        ),
        tooltip=tooltip,
    )
    color = style.FORMAT_COLORS[spec.format.name]
    way = base.mark_rule(color=style.BAD, strokeWidth=1.5).encode(y=alt.Y("value:Q", title="value"), y2="dequantized:Q")
    before = base.mark_point(size=46, color=style.GREY, strokeWidth=1.8).encode(y="value:Q")
    after = base.mark_point(size=30, filled=True, opacity=1, color=color).encode(y="dequantized:Q")
    return alt.layer(way, before, after).properties(title=style.title(title, subtitle))
