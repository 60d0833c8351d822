"""The losses of groups of runs by iteration."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.app.questions.shared.loss_chart import MOST_POINTS, marked_points

SHADE = 0.16  # opacity of the seeds of a line
MOST_NAMED = 40  # lines with a legend
WIDTH = 720  # pixels of the legend


def losses(table: pd.DataFrame, looks: style.Looks, marks: pd.DataFrame, unit: str, logarithmic: bool) -> Chart:
    """One line for each group: columns group, iteration, loss, and low and high where it is a mean of seeds; warm-up is
    to the left of the rule at 0. Under the pointer, a rule shows the loss of every line at the nearest iteration.
    marks: points on the lines, with columns group, iteration, loss and text."""
    last = table.sort_values("iteration").dropna(subset="loss").groupby("group")["loss"].last()
    groups = sorted(style.groups_of(table), key=lambda group: -last.get(group, math.inf))  # as the lines end
    warm = " (below 0: warm-up in bf16)" if (table["iteration"] < 0).any() else ""
    x = plot.x("iteration", f"iteration{warm}", {"tickMinStep": 1}, nice=False)
    positive = bool((table["loss"].dropna() > 0).all())

    def place(column: str) -> plot.Y:
        if logarithmic and positive:
            ends = table[["loss", "low", "high"]].to_numpy(float)
            domain = [float(np.nanmin(ends)), float(np.nanmax(ends))]
            return plot.y(column, f"loss ({unit})", log=True, domain=domain)
        return plot.y(column, f"loss ({unit})", {"minExtent": 50}, zero=False)

    color = style.color(groups, "run", line=True, own=looks)
    lines = plot.mark(
        "line", table, x=x, y=place("loss"), point=18 if len(table) <= MOST_POINTS else 0, color=color,
        strokeDash=style.dash(groups, "run", own=looks), params=[style.zoom("_losses")],
    )  # fmt: skip
    named = style.labelled(lines, groups)
    if named is lines:
        for channel in (lines.encoding.color, lines.encoding.strokeDash):
            if len(groups) > MOST_NAMED:
                channel.legend = None
            elif hasattr(legend := channel["legend"], "columns") and style.legend_height(groups):
                legend.columns = _columns(groups)
    layers: list[Chart] = [plot.rule(x=0)]
    if table["low"].notna().any():
        spread = table.dropna(subset=["low", "high"])
        look: plot.Look = {"x": x, "y": place("low"), "y2": "high", "color": lines.encoding.color}
        layers.append(plot.mark("area", spread, opacity=SHADE, tooltip=None, **look))
    layers += [named, *plot.pointer(lines, groups, "loss")]
    if len(marks):
        layers.append(marked_points(marks, x, place("loss")))
    subtitle = "mean of each group of runs" if table["low"].notna().any() else ""
    return plot.layers("Training loss", subtitle, *layers)


def height(table: pd.DataFrame) -> int:
    """The height of the chart in pixels, with its legend."""
    groups = list(dict.fromkeys(table["group"]))
    named = 1 < len(groups) <= MOST_NAMED and style.legend_height(groups)
    return 380 + (22 * math.ceil(len(groups) / _columns(groups)) if named else 0)


def _columns(groups: list[str]) -> int:
    """The columns of a legend above a plot that has the page for itself."""
    return max(1, WIDTH // (56 + 7 * max(map(len, groups))))
