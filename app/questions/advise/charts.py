"""The frontier of bits and measured loss change, and the bits that each operand gets."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.app import plot, style
from binade.app.figure import Chart
from binade.app.questions.shared import layer_chart
from binade.data.evidence import Measure
from binade.data.names import short_names

KINDS = {"advised": "advised under other budgets", "uniform": "one format for all"}
BITS = Measure("bits", "Bits per value", "", "of the advised format", format=".2f")
PER_VALUE = Measure("bits", "Bits per forward value", format=".2f")


def frontier(table: pd.DataFrame, at: float, change: float) -> Chart:
    """Draws Advice.frontier, and the advice itself as a ring. The axis of losses is logarithmic if possible."""
    shown = table.assign(group=table["kind"].map(KINDS))
    log = not (shown["change"] < 0).any() and float(shown["change"].replace(0, np.nan).min()) > 0
    shown = shown[shown["change"] > 0] if log else shown
    x = plot.x("bits", PER_VALUE.axis, zero=False, nice=False, padding=24)
    y = plot.y("change", "measured loss change (nats)", log=log)
    groups = [name for name in KINDS.values() if name in set(shown["group"])]
    tips = plot.tips(name="recipe", bits=("bits per forward value", ".2f"), change=("measured loss change", "+.3g"))
    line = shown[shown["kind"] == "advised"]
    points = plot.mark(
        "point", shown, x=x, y=y, opacity=0.9, color=style.color(groups, "recipe"),
        shape=style.shape(groups, "recipe"), tips=tips,
    )  # fmt: skip
    points_at = shown.assign(place=np.log(shown["change"]) if log else shown["change"])
    others = points_at[points_at["kind"] != "advised"].sort_values(["bits", "change"])
    ends = [(float(points_at[name].min()), float(points_at[name].max())) for name in ("bits", "place")]
    named = style.named_points(others, "bits", "place", *ends)
    names = plot.mark("text", named, x=x, y=y, text="name", **style.NAME)
    marks = [plot.mark("line", line, x=x, y=y, strokeWidth=1.5, color=style.colors(groups)[0]), points, names]
    if change > 0 or not log:
        chosen = pd.DataFrame({"bits": [at], "change": [change]})
        ring: plot.Look = {"filled": False, "size": 260, "strokeWidth": 2.5, "color": style.PALETTE[3]}
        marks.append(plot.mark("point", chosen, x=x, y=y, **ring))
    title = f"{PER_VALUE.label} and measured loss change"
    return plot.layers(title, f"ring: the advice, {PER_VALUE.quantity(at)}", *marks)


def bits(table: pd.DataFrame, title: str, subtitle: str) -> Chart:
    """The bits of each operand by layer; brighter means more bits."""
    row = short_names(table.drop(columns="layer_index"))
    cells = table.assign(value=table["bits"] / table["values"], row=row, operation=table["gemm"], tensors=1)
    return layer_chart.by_layer(cells, BITS, title, subtitle)
