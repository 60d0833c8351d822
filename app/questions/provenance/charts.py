"""The path of a NaN or Inf through a step, and statistics of the steps before."""

from __future__ import annotations

import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.data.compare.evidence import Measure

MOST_PLACES = 60  # of the chart


def chain(table: pd.DataFrame, title: str, subtitle: str) -> Chart:
    """Chart of compute.chain: each place that is not finite by the order of execution, a line per rank."""
    shown = table.assign(group="rank " + table["rank"].astype(str))
    places = shown.sort_values("order")["place"].drop_duplicates().head(MOST_PLACES).tolist()
    shown = shown[shown["place"].isin(places)]
    both: plot.Look = {
        "x": plot.x("order", "order of execution in the step", zero=False, padding=16),
        "y": plot.names("place", places, 260, {"grid": True}),
        "tips": plot.tips(place="operation", operation="direction", what="NaN or Inf", order="order", group="rank"),
    }
    ranks = style.color(style.groups_of(shown), "rank", line=True)
    lines = plot.mark("line", shown, color=ranks, order="order", strokeWidth=1.4, opacity=0.6, **both)
    color = plot.operations(shown["operation"], {"title": "direction", "orient": "bottom"})
    points = plot.mark("point", shown, color=color, opacity=1, **both)
    rings = shown[shown["what"] == "produced here"]
    made = plot.mark("point", rings, filled=False, size=260, strokeWidth=2.5, color=style.BAD, shape="circle", **both)
    return plot.layers(title, subtitle, lines, points, made, independent="color")


def chain_height(table: pd.DataFrame) -> int:
    """Pixels that the chain needs."""
    return 180 + 22 * min(table["place"].nunique(), MOST_PLACES)


def before(table: pd.DataFrame, measure: Measure, iteration: int, title: str, subtitle: str) -> Chart:
    """Chart of compute.before: a statistic by iteration, a line per tensor; the rule is the iteration of the event."""
    shown = table.rename(columns={"tensor_name": "group"})
    shown = shown.assign(figure=shown[measure.key] * measure.factor).dropna(subset=["figure"])
    shown = shown[shown["figure"].abs() < float("inf")]
    groups = style.groups_of(shown)
    lines = plot.mark(
        "line", shown, point=30,
        color=style.color(groups, "tensor", line=True), strokeDash=style.dash(groups, "tensor"),
        x=plot.iterations(zero=False, nice=False),
        y=plot.y("figure", measure.axis, log=measure.log and bool((shown["figure"] > 0).all()), zero=False),
        tips=plot.tips(group="tensor", iteration="iteration", figure=(measure.axis, ".4g")),
    )  # fmt: skip
    at = plot.rule(x=iteration, strokeDash=[4, 3], color=style.BAD)
    return plot.layers(title, subtitle, at, style.labelled(lines, groups))
