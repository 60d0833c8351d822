"""Which channels are hot in which iteration."""

from __future__ import annotations

import pandas as pd

from binade.app import plot, style
from binade.app.figure import Chart

MOST = 60  # iterations that are drawn


def history(table: pd.DataFrame, title: str, subtitle: str) -> Chart:
    """Chart of compute.channel_history: one line per channel, those that are hot most often at the top."""
    iterations = sorted(table["iteration"].unique())
    shown = table[table["iteration"].isin(iterations[:: -(-len(iterations) // MOST)])]
    order = table.sort_values(["of_all", "channel"], ascending=[False, True])["channel"].unique().tolist()
    legend = {"title": "share of tensors", "format": ".0%", "gradientLength": 150}
    ramp = plot.ramp("share", legend, domain=[0, 1]) if (shown["share"] < 1).any() else style.FINE
    tips = plot.tips(
        channel="channel", iteration="iteration", share=("share of tensors", ".0%"),
        of_all=("share over all iterations", ".0%"),
    )  # fmt: skip
    y = plot.y("channel:O", "channel", {"labelOverlap": False}).sort(order)
    x = plot.ordinal("iteration")
    cells = plot.cells(shown, "channel", "iteration", x=x, y=y, color=ramp, stroke="#8884", tips=tips)
    return plot.layers(title, subtitle, cells)
