"""The loss of runs by iteration."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.shared.event_marks import marked
from binade.app.questions.shared.labels import thinned

MOST_POINTS = 300  # that are marked, in addition to the line through them


def loss_table(
    records: Mapping[str, Sequence[Mapping[str, Any]]], most: int, smooth: int = 1
) -> tuple[pd.DataFrame, int]:
    """(the table for `losses`, with columns group, iteration and loss, thinned to about `most` rows; n), from the
    records of each group's loss.jsonl. Every n-th iteration is in the table. smooth: if over 1, the column mean has the
    mean loss of this many iterations, half of them before and half after, fewer at both ends. Means of training do not
    include warm-up, nor the other way round."""
    rows = [(group, record["iteration"], record["loss"]) for group, found in records.items() for record in found]
    table = pd.DataFrame(rows, columns=["group", "iteration", "loss"])
    if smooth > 1:
        parts = table.groupby(["group", table["iteration"] < 0], sort=False)["loss"]
        table["mean"] = parts.transform(lambda loss: loss.rolling(smooth, min_periods=1, center=True).mean())
    return thinned(table, most)


def losses(
    table: pd.DataFrame,
    looks: style.Looks | None = None,
    events: pd.DataFrame | None = None,
    smooth: int = 1,
    seeds: pd.DataFrame | None = None,
    marks: pd.DataFrame | None = None,
) -> alt.LayerChart:
    """Chart of `loss_table`: one line per run, with events as of `event_marks.events_of`; warm-up is to the left of the
    rule at 0. Under the pointer, a rule shows the loss of every run at the nearest iteration. looks: of runs.
    seeds: of groups that are means, with columns group, seed, iteration, loss; then table has low and high.
    marks: points on the lines, with columns group, iteration, loss and text."""
    field, what = ("mean", f"centered mean of {smooth} iterations, ") if "mean" in table else ("loss", "")
    last = table.sort_values("iteration").dropna(subset=[field]).groupby("group")[field].last()
    groups = sorted(style.groups_of(table), key=lambda group: -last.get(group, math.inf))  # as the lines end
    below = " (below 0: warm-up in bf16)" if (table["iteration"] < 0).any() else ""
    x = alt.X(
        "iteration:Q", title=f"iteration{below}", axis=alt.Axis(tickMinStep=1), scale=alt.Scale(nice=False)
    )  # fmt: skip
    axis = f"loss ({what}nats per token)"
    y = alt.Y(f"{field}:Q", title=axis, axis=alt.Axis(minExtent=50), scale=alt.Scale(zero=False))
    color = style.color(groups, "run", line=True, own=looks)
    points = alt.OverlayMarkDef(size=18) if len(table) <= MOST_POINTS and not what else False
    lines = (
        alt.Chart(table)
        .mark_line(strokeWidth=1.8, point=points)
        .encode(x=x, y=y, color=color, strokeDash=style.dash(groups, "run", own=looks))
        .add_params(style.zoom("_losses"))
    )
    named = style.labelled(lines, groups)
    if isinstance(named, alt.LayerChart):
        lines.encoding.color.legend = lines.encoding.strokeDash.legend = None
    start = alt.Chart(pd.DataFrame({"x": [0]})).mark_rule(strokeDash=[4, 4], color=style.GREY).encode(x="x:Q")
    raw = alt.Chart(table).mark_line(strokeWidth=1, opacity=0.25)
    raw = raw.encode(x=x, y=alt.Y("loss:Q", title=axis), color=lines.encoding.color)
    subtitle = f"cross entropy, {what}each iteration behind it" if what else "cross entropy of each iteration"
    faint = []
    if seeds is not None and not seeds.empty:
        band = alt.Chart(table).mark_area(opacity=0.15, tooltip=None)
        faint.append(band.encode(x=x, y=alt.Y("low:Q", title=axis), y2="high:Q", color=lines.encoding.color))
        line = alt.Chart(seeds).mark_line(strokeWidth=0.8, opacity=0.3, tooltip=None)
        faint.append(line.encode(x=x, y=alt.Y("loss:Q", title=axis), color=lines.encoding.color, detail="seed:N"))
    layers = [start, *faint, *[raw] * bool(what), named, *_crosshair(lines, groups, field)]
    if marks is not None and not marks.empty:
        layers.append(marked_points(marks, x, alt.Y("loss:Q", title=axis)))
    result = alt.LayerChart(layer=layers, title=style.title("Training loss", subtitle))
    return result if events is None else marked(result, events, above=True)  # so that they keep their tooltips


def marked_points(marks: pd.DataFrame, x: alt.X, y: alt.Y) -> alt.Chart:
    """A diamond at each row of a table with a column text, which the pointer shows."""
    points = alt.Chart(marks).mark_point(shape="diamond", size=130, filled=True, opacity=1, color=style.BAD)
    result: alt.Chart = points.encode(x=x, y=y, tooltip=alt.Tooltip("text:N", title="mark"))
    return result


def _crosshair(lines: alt.Chart, groups: list[str], field: str) -> list[alt.Chart]:
    """A rule at the iteration nearest to the pointer, whose tooltip has every group's value there, and a point on each
    line."""
    nearest = alt.selection_point(
        name="nearest", fields=["iteration"], nearest=True, on="pointerover", clear="pointerout", empty=False
    )
    values = {f"v{index}": index for index in range(len(groups))}
    texts = {f"t{index}": f"isValid(datum.v{index}) ? format(datum.v{index}, '.4f') : '–'" for index in values.values()}
    titles = [group.replace("\\", "\\\\") for group in groups]  # Vega-Lite does not escape them in tooltips
    rule = (
        alt.Chart(lines.data)
        .transform_calculate(key=f"'v' + indexof({json.dumps(groups)}, datum.group)")
        .transform_pivot("key", field, groupby=["iteration"])
        .transform_calculate(**texts)
        .mark_rule(color=style.GREY)
        .encode(
            x=lines.encoding.x,
            opacity=alt.condition(nearest, alt.value(0.8), alt.value(0)),
            tooltip=[
                alt.Tooltip("iteration:Q", title=f"{field} at iteration"),
                *(alt.Tooltip(f"t{index}:N", title=title) for index, title in enumerate(titles)),
            ],
        )
        .add_params(nearest)
    )
    points = (
        alt.Chart(lines.data)
        .transform_filter(nearest)
        .mark_point(filled=True, size=45, opacity=1, tooltip=None)
        .encode(x=lines.encoding.x, y=lines.encoding.y, color=lines.encoding.color)
    )
    return [rule, points]
