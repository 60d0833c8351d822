"""Attention head by head."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.app.questions.shared.heatmap import heatmap
from binade.quant.specs import Spec


def entropy(table: pd.DataFrame, subtitle: str | list[str]) -> Chart:
    """Chart of attention.entropy: mean over queries, with the range; the dashed line is uniform attention."""
    tips = plot.tips(
        head="head", entropy=("mean entropy (bits)", ".3f"), lowest=("lowest over queries", ".3f"),
        highest=("highest over queries", ".3f"),
    )  # fmt: skip
    x, y = plot.ordinal("head"), plot.y("entropy", "entropy (bits)")
    bars = plot.mark("bar", table, x=x, y=y, color=style.FINE, tips=tips, choose="head", fade=(0.85, 0.35))
    span = plot.intervals(table, "lowest", "highest", x=x, tips=tips)
    even = plot.rule(y=float(table["uniform"].iloc[0]))
    return plot.layers("Entropy of the probabilities", subtitle, span, bars, even)


def flushed_by_head(table: pd.DataFrame, spec: Spec, subtitle: str | list[str]) -> Chart:
    """Chart of attention.flushed."""
    shown = table.assign(percent=table["flush_to_zero"] * 100, mass_percent=table["mass"] * 100)
    mass = "probability mass lost (%)"
    tips = plot.tips(head="head", percent=("flushed (% of nonzero values)", ".3~g"), mass_percent=(mass, ".3~g"))
    domain: plot.Look = {} if float(shown["mass_percent"].max()) > 0 else {"domain": [0, 1]}
    y = plot.y("mass_percent", mass, **domain)
    color = style.FORMAT_COLORS[spec.format.name]
    bars = plot.mark("bar", shown, x=plot.ordinal("head"), y=y, color=color, tips=tips)
    return plot.layers(f"Flushed attention probabilities in {spec}", subtitle, bars)


def score_ranges(table: pd.DataFrame, subtitle: str | list[str]) -> Chart:
    """Chart of attention.ranges: quartile box, whiskers to the smallest and largest score."""
    words = {"low": "lowest", "q1": "25%", "median": "median", "q3": "75%", "high": "highest"}
    tips: plot.Tips = {"head": "head"} | {name: (word, ".4~g") for name, word in words.items()}
    both: plot.Look = {"x": plot.ordinal("head"), "tips": tips, "color": style.FINE}
    line = plot.mark("rule", table, y=plot.y("low", "score"), y2="high", strokeWidth=1.5, **both)
    box = plot.mark("bar", table, y="q1", y2="q3", opacity=0.4, size=16, **both)
    middle = plot.mark("tick", table, y="median", thickness=2.5, size=20, orient="horizontal", **both)
    return plot.layers("Range of the scores", subtitle, line, box, middle)


def head_map(values: np.ndarray, size: tuple[int, int], name: str, subtitle: str | list[str], probs: bool) -> Chart:
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
