"""The loss of runs by iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.app.questions.shared.event_marks import marked
from binade.app.questions.shared.labels import thinned
from binade.data.compare.same_data import NATS

MOST_POINTS = 300  # that are marked, in addition to the line through them


def loss_table(
    records: Mapping[str, Sequence[Mapping[str, Any]]], most: int, smooth: int = 1
) -> tuple[pd.DataFrame, int]:
    """(the table for `losses`, with columns group, iteration and loss, thinned to about `most` rows; n), from the
    records of each group's loss.jsonl. Every n-th iteration is in the table. smooth: if over 1, the column mean has the
    mean loss of this many iterations, half of them before and half after, fewer at both ends. Means of training do not
    include warm-up, nor the other way round. A loss that is None is NaN: the line has a gap there."""
    rows = [(group, record["iteration"], record["loss"]) for group, steps in records.items() for record in steps]
    table = pd.DataFrame(rows, columns=["group", "iteration", "loss"]).astype({"loss": float})
    if smooth > 1:
        parts = table.groupby(["group", table["iteration"] < 0], sort=False)["loss"]
        mean = parts.transform(lambda loss: loss.rolling(smooth, min_periods=1, center=True).mean())
        table["mean"] = mean.where(table["loss"].notna())
    return thinned(table, most)


def losses(
    table: pd.DataFrame,
    looks: style.Looks | None = None,
    events: pd.DataFrame | None = None,
    smooth: int = 1,
    seeds: pd.DataFrame | None = None,
    marks: pd.DataFrame | None = None,
    unit: str = NATS,
) -> Chart:
    """Chart of `loss_table`: one line per run, with events as of `event_marks.events_of`; warm-up is to the left of the
    rule at 0. Under the pointer, a rule shows the loss of every run at the nearest iteration. looks: of runs.
    seeds: of groups that are means, with columns group, seed, iteration, loss; then table has low and high.
    marks: points on the lines, with columns group, iteration, loss and text. unit: of the losses."""
    field, what = ("mean", f"centered mean of {smooth} iterations, ") if "mean" in table else ("loss", "")
    last = table.sort_values("iteration").dropna(subset=[field]).groupby("group")[field].last()
    groups = sorted(style.groups_of(table), key=lambda group: -last.get(group, math.inf))  # as the lines end
    below = " (below 0: warm-up in bf16)" if (table["iteration"] < 0).any() else ""
    axis = f"loss ({what}{unit})"
    x = plot.x("iteration", f"iteration{below}", {"tickMinStep": 1}, nice=False)
    y = plot.y(field, axis, {"minExtent": 50}, zero=False)
    lines = plot.mark(
        "line", table, x=x, y=y, point=18 if len(table) <= MOST_POINTS and not what else 0,
        color=style.color(groups, "run", line=True, own=looks), strokeDash=style.dash(groups, "run", own=looks),
        params=[style.zoom("_losses")],
    )  # fmt: skip
    named = style.labelled(lines, groups)
    if named is not lines:
        lines.encoding.color.legend = lines.encoding.strokeDash.legend = None
    behind: plot.Look = {"x": x, "y": plot.y("loss", axis), "color": lines.encoding.color}
    layers: list[Chart] = [plot.rule(x=0)]
    if seeds is not None and not seeds.empty:
        spread = behind | {"y": plot.y("low", axis), "y2": "high"}
        layers.append(plot.mark("area", table, opacity=0.15, tooltip=None, **spread))
        layers.append(plot.mark("line", seeds, strokeWidth=0.8, opacity=0.3, tooltip=None, detail="seed", **behind))
    if what:
        layers.append(plot.mark("line", table, strokeWidth=1, opacity=0.25, **behind))
    layers += [named, *plot.pointer(lines, groups, field)]
    if marks is not None and not marks.empty:
        layers.append(marked_points(marks, x, behind["y"]))
    name = "cross entropy" if unit == NATS else "loss"
    subtitle = f"{name}, {what}each iteration behind it" if what else f"{name} of each iteration"
    result = plot.layers("Training loss", subtitle, *layers)
    return result if events is None else marked(result, events, above=True)  # so that they keep their tooltips


def marked_points(marks: pd.DataFrame, x: plot.X, y: plot.Y) -> Chart:
    """A diamond at each row of a table with a column text, which the pointer shows."""
    look: plot.Look = {"shape": "diamond", "size": 130, "opacity": 1, "color": style.BAD}
    return plot.mark("point", marks, x=x, y=y, tips=plot.tips(text="mark"), **look)
