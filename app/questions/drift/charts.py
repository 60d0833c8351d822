"""Bias and variance of gradients by layer."""

from __future__ import annotations

import pandas as pd

from binade.app import plot, style
from binade.app.figure import Chart


def by_layer(table: pd.DataFrame, title: str, subtitle: str) -> Chart:
    """Chart of twin.by_layer: a line for the bias and one for √variance, with 95% intervals."""
    groups = style.groups_of(table)
    x, color = plot.ordinal("layer"), style.color(groups, "", line=True)
    y = plot.y("value", f"{' and '.join(group.lower() for group in groups)}, relative to the norm (%)", zero=True)
    tips = plot.tips(layer="layer", group="measure", text="value")
    rules = plot.intervals(table, "low", "high", x=x, color=color, opacity=0.5)
    lines = plot.mark("line", table, x=x, y=y, color=color, point=45, tips=tips)
    return plot.layers(title, subtitle, rules, lines)
