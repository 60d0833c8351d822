"""Predicted against measured loss changes."""

from __future__ import annotations

import pandas as pd

from binade.app import plot, style
from binade.app.figure import Chart

GAPS = {"gap": "mean gap to bf16 over the iterations", "first": "gap to bf16 at the first iteration"}


def against(table: pd.DataFrame, column: str, subtitle: str) -> Chart:
    """Chart of compute.measured: one point per recipe; on the line, prediction and measurement agree."""
    low = float(min(table["predicted"].min(), table[column].min(), 0))
    high = float(max(table["predicted"].max(), table[column].max()))
    name = f"{'mean' if column == 'gap' else 'first'} gap"
    x = plot.x("predicted", "predicted loss change (nats)", nice=False, padding=20)
    y = plot.y(column, f"{name} (nats)")
    tips = plot.tips(
        name="recipe", bits=("bits per forward value", ".2f"), predicted=("predicted loss change (nats)", "+.4f"),
        first=("gap, first iteration (nats)", "+.4f"), gap=("mean gap (nats)", "+.4f"), seeds="seeds",
    )  # fmt: skip
    bars = plot.intervals(table, "low", "high", x=x, color=style.PALETTE[0], opacity=0.5)
    points = plot.mark("point", table, x=x, y=y, size=80, color=style.PALETTE[0], tips=tips, only=["recipe"])
    largest = table.dropna(subset=[column]).sort_values(column, key=abs, ascending=False)
    named = style.named_points(largest, "predicted", column, (low, high), (low, high))
    marks = [
        plot.diagonal(low, high),
        *[bars] * (column == "gap"),
        points,
        plot.mark("text", named, x=x, y=y, text="name", **style.NAME),
    ]
    return plot.layers(f"Predicted change and {name}", subtitle, *marks)
