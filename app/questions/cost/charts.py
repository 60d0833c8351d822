"""Groups of products by what rounding them changes, and a quantity of parity by step."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.data.compare.evidence import Measure

GROUPS = 30  # that are drawn


def ranking(table: pd.DataFrame, measure: Measure, subtitle: str) -> Chart:
    """Rows of `compute.table` as dots with their intervals, in the order of the table, a color for each treatment."""
    shown = table.rename(columns={"group": "name", "treatment": "group"})
    groups = shown["group"].unique().tolist()
    shown = shown.assign(shift=shown["group"].map(groups.index).astype(float))
    y = plot.names("name", shown["name"].unique())
    below = plot.shift("shift", -0.75, len(groups) - 0.25)
    x = plot.x("change", measure.axis, {"tickCount": 5})
    tips = plot.tips(name="group", group="rounded to", text=measure.title, divergence=("KL divergence (nats)", ".3g"))
    points = plot.mark(
        "point", shown, x=x, y=y, size=60, opacity=1, filled=True,
        color=style.color(groups, "format", shown=len(groups) > 1), tips=tips, yOffset=below,
    )  # fmt: skip
    spans = plot.intervals(shown, "low", "high", y=y, yOffset=below)
    return plot.layers(f"{measure.title} by group", subtitle, plot.rule(x=0), spans, points)


def blocks(table: pd.DataFrame, names: Sequence[str], own: str, subtitle: str) -> Chart:
    """The errors of blocks over depth, as of `compute.block_table`: two lines of a color, the own errors dashed.
    names: what is rounded; own: what the names of own errors end with."""
    colors = zip(names, style.colors(list(names), "format"), strict=True)
    looks = {f"{name}{end}": (color, nth) for name, color in colors for nth, end in enumerate(("", own))}
    x = plot.x("layer", "block", {"tickMinStep": 1, "format": "d"}, zero=False, nice=False, padding=16)
    color = style.color(list(looks), "line", line=True, own=looks)
    lines = plot.mark(
        "line", table, point=30, x=x, y=plot.y("value", "error of the output (%)"), color=color,
        strokeDash=style.dash(list(looks), "line", own=looks),
        tips=plot.tips(group="line", layer="block", text="error"),
    )  # fmt: skip
    return plot.layers("Error of the blocks’ outputs", subtitle, plot.intervals(table, "low", "high", x=x), lines)


def steps(table: pd.DataFrame, measure: Measure, subtitle: str) -> Chart:
    """A quantity by step, and its median over steps."""
    shown = table.assign(value=table["value"] * measure.factor)
    axis = {"values": shown["place"].tolist()[:: -(-len(shown) // 10)], "format": "d"}
    lines = plot.mark(
        "line", shown, point=30, color=style.PALETTE[0], y=plot.y("value", measure.axis, zero=False),
        x=plot.x("place", "step, in the order of the dumps", axis, nice=False, padding=16),
        tips=plot.tips(step="step", text=measure.axis, tokens=("tokens", ",")),
    )  # fmt: skip
    return plot.layers(f"{measure.title} by step", subtitle, plot.rule(y=shown["value"].median()), lines)
