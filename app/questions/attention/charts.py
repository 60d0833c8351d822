"""Attention head by head."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.questions.shared.heatmap import heatmap
from binade.quant.specs import Spec

BY_HEAD = alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0, labelOverlap=True))


def entropy(table: pd.DataFrame, subtitle: str | list[str]) -> alt.LayerChart:
    """Chart of attention.entropy: mean over queries, with the range; the dashed line is uniform attention."""
    tooltip = [
        alt.Tooltip("head:O", title="head"),
        alt.Tooltip("entropy:Q", title="mean entropy (bits)", format=".3f"),
        alt.Tooltip("lowest:Q", title="lowest over queries", format=".3f"),
        alt.Tooltip("highest:Q", title="highest over queries", format=".3f"),
    ]
    base = alt.Chart(table.assign(floor=0.0)).encode(x=BY_HEAD, tooltip=tooltip)
    choice = style.choice("head")
    bars = (
        base.mark_bar(color=style.FINE, cursor="pointer")
        .encode(
            y=alt.Y("entropy:Q", title="entropy (bits)"),
            opacity=alt.condition(choice, alt.value(0.85), alt.value(0.35)),
        )
        .add_params(choice)
    )
    span = base.mark_rule(color=style.GREY, strokeWidth=1.2).encode(y="lowest:Q", y2="highest:Q")
    even = alt.Chart(table.head(1)).mark_rule(strokeDash=[5, 4], color=style.GREY).encode(y="uniform:Q")
    result: alt.LayerChart = (span + bars + even).properties(
        title=style.title("Entropy of the probabilities", subtitle)
    )
    return result


def flushed_by_head(table: pd.DataFrame, spec: Spec, subtitle: str | list[str]) -> alt.Chart:
    """Chart of attention.flushed."""
    shown = table.assign(percent=table["flush_to_zero"] * 100, mass_percent=table["mass"] * 100)
    tooltip = [
        alt.Tooltip("head:O", title="head"),
        alt.Tooltip("percent:Q", title="flushed (% of nonzero values)", format=".3~g"),
        alt.Tooltip("mass_percent:Q", title="probability mass lost (%)", format=".3~g"),
    ]
    top = float(shown["mass_percent"].max())
    scale = alt.Scale(domain=[0, 1]) if not top > 0 else alt.Undefined
    y = alt.Y("mass_percent:Q", title="probability mass lost (%)", scale=scale)
    bars = alt.Chart(shown).mark_bar(color=style.FORMAT_COLORS[spec.format.name])
    title = style.title(f"Flushed attention probabilities in {spec}", subtitle)
    result: alt.Chart = bars.encode(x=BY_HEAD, y=y, tooltip=tooltip).properties(title=title)
    return result


def score_ranges(table: pd.DataFrame, subtitle: str | list[str]) -> alt.LayerChart:
    """Chart of attention.ranges: quartile box, whiskers to the smallest and largest score."""
    names = (("low", "lowest"), ("q1", "25%"), ("median", "median"), ("q3", "75%"), ("high", "highest"))
    tooltip = [alt.Tooltip("head:O", title="head")]
    tooltip += [alt.Tooltip(f"{name}:Q", title=title, format=".4~g") for name, title in names]
    base = alt.Chart(table).encode(x=BY_HEAD, tooltip=tooltip)
    line = base.mark_rule(color=style.FINE, strokeWidth=1.5).encode(y=alt.Y("low:Q", title="score"), y2="high:Q")
    box = base.mark_bar(color=style.FINE, opacity=0.4, size=16).encode(y="q1:Q", y2="q3:Q")
    middle = base.mark_tick(color=style.FINE, thickness=2.5, size=20, orient="horizontal").encode(y="median:Q")
    result: alt.LayerChart = (line + box + middle).properties(title=style.title("Range of the scores", subtitle))
    return result


def head_map(
    values: np.ndarray, size: tuple[int, int], name: str, subtitle: str | list[str], probs: bool
) -> alt.LayerChart:
    """Chart of attention.head_map; probabilities by their log2, so that the small ones show."""
    shown = values.astype(float)
    unit = "score"
    if probs:
        with np.errstate(divide="ignore", invalid="ignore"):
            shown = np.log2(shown)
        shown, unit = np.where(np.isfinite(shown), shown, np.nan), "log₂ P"
    axes = ("key", size[1]), ("query", size[0])
    limits = None
    if probs and np.isfinite(shown).any():
        top = float(np.nanmax(shown))
        limits = (max(float(np.nanmin(shown)), top - 24), top)
    return heatmap(shown, style.title(name, subtitle), *axes, unit, limits, missing="zero or masked")
