"""The path of a NaN or Inf through a step, and statistics of the steps before."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style
from binade.data.evidence import Measure

MOST_PLACES = 60  # of the chart


def chain(table: pd.DataFrame, title: str, subtitle: str) -> alt.LayerChart:
    """Chart of compute.chain: each place that is not finite by the order of execution, a line per rank."""
    shown = table.assign(group="rank " + table["rank"].astype(str))
    places = shown.sort_values("order")["place"].drop_duplicates().head(MOST_PLACES).tolist()
    shown = shown[shown["place"].isin(places)]
    groups = style.groups_of(shown)
    base = alt.Chart(shown).encode(
        x=alt.X("order:Q", title="order of execution in the step", scale=alt.Scale(zero=False, padding=16)),
        y=alt.Y("place:N", title=None, sort=places, axis=alt.Axis(grid=True, labelLimit=260)),
        tooltip=[
            alt.Tooltip("place:N", title="operation"),
            alt.Tooltip("operation:N", title="direction"),
            alt.Tooltip("what:N", title="NaN or Inf"),
            alt.Tooltip("order:Q", title="order"),
            alt.Tooltip("group:N", title="rank"),
        ],
    )
    lines = base.mark_line(strokeWidth=1.4, opacity=0.6).encode(
        color=style.color(groups, "rank", line=True), order="order:Q"
    )
    scale = style.operation_scale(shown["operation"])
    points = base.mark_point(filled=True, size=70, opacity=1).encode(
        color=alt.Color("operation:N", scale=scale, legend=alt.Legend(title="direction", orient="bottom"))
    )
    made = base.transform_filter(alt.datum.what == "produced here").mark_point(
        size=260, strokeWidth=2.5, color=style.BAD, shape="circle"
    )
    result: alt.LayerChart = (
        alt.layer(lines, points, made).resolve_scale(color="independent").properties(title=style.title(title, subtitle))
    )
    return result


def chain_height(table: pd.DataFrame) -> int:
    """Pixels that the chain needs."""
    return 180 + 22 * min(table["place"].nunique(), MOST_PLACES)


def before(table: pd.DataFrame, measure: Measure, iteration: int, title: str, subtitle: str) -> alt.LayerChart:
    """Chart of compute.before: a statistic by iteration, a line per tensor; the rule is the iteration of the event."""
    shown = table.rename(columns={"tensor_name": "group"})
    shown = shown.assign(figure=shown[measure.key] * measure.factor).dropna(subset=["figure"])
    shown = shown[shown["figure"].abs() < float("inf")]
    groups = style.groups_of(shown)
    log = measure.log and (shown["figure"] > 0).all()
    lines = (
        alt.Chart(shown)
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=30))
        .encode(
            x=alt.X(
                "iteration:Q",
                title="iteration",
                axis=alt.Axis(tickMinStep=1, format="d"),
                scale=alt.Scale(zero=False, nice=False),
            ),
            y=alt.Y(
                "figure:Q",
                title=measure.axis,
                scale=alt.Scale(type="log") if log else alt.Scale(zero=False),
                axis=style.DECADES if log else alt.Undefined,
            ),
            color=style.color(groups, "tensor", line=True),
            strokeDash=style.dash(groups, "tensor"),
            tooltip=[
                alt.Tooltip("group:N", title="tensor"),
                alt.Tooltip("iteration:Q"),
                alt.Tooltip("figure:Q", title=measure.axis, format=".4g"),
            ],
        )
    )
    at = (
        alt.Chart(pd.DataFrame({"at": [iteration]}))
        .mark_rule(strokeDash=[4, 3], color=style.BAD)
        .encode(x=alt.X("at:Q", title="iteration"))
    )
    result: alt.LayerChart = (at + style.labelled(lines, groups)).properties(title=style.title(title, subtitle))
    return result
