"""The errors of a tensor in a format, by tensor scale."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import pandas as pd

from binade.app import style
from binade.app.questions.what_if.compute import ERRORS, ScaleSweep
from binade.quant.formats import FORMATS

SHARES = {"flush_to_zero": "flushed", "saturated": "saturated"}
COLORS = alt.Scale(domain=list(SHARES.values()), range=[style.BAD, style.CLIPPED])


def sqnr_by_scale(swept: ScaleSweep) -> alt.LayerChart:
    """SQNR by tensor scale, with a rule for each present scale, dashed, and for the best one."""
    sqnr, measure, rules = swept.trials["sqnr_db"], style.MEASURES["sqnr_db"], _rules(swept)
    low, high = float(sqnr.min()), float(sqnr.max())
    room = max(0.14 * len(rules) * (high - low), 1)  # for the names of the rules, one below the other
    scale = alt.Scale(domain=[low, high + room], nice=False)
    y = alt.Y("value:Q", title=measure.axis, axis=alt.Axis(minExtent=50), scale=scale)
    lines = _lines(swept, ["sqnr_db"]).encode(y=y, color=alt.value(style.color_of_spec(swept.fmt)))
    middle, names = float(swept.trials["k"].median()), []
    for index, rule in enumerate(rules):
        right = rule.data["k"].iloc[0] > middle
        name = rule.mark_text(
            align="right" if right else "left", baseline="top", dx=-5 if right else 5, fontSize=12, color=style.GREY
        )
        names.append(name.encode(y=alt.value(2 + 15 * index), text="name:N"))
    title = style.title(
        f"SQNR of {FORMATS[swept.fmt].title} by tensor scale", "x · 2ᵏ is rounded to the elements and divided by 2ᵏ"
    )
    return alt.LayerChart(layer=[*rules, lines, *names], title=title)


def shares_by_scale(swept: ScaleSweep) -> alt.LayerChart:
    """The flushed and the saturated share, over the axis of `sqnr_by_scale`."""
    top = max(0.01, float(swept.trials[[*SHARES]].to_numpy().max()))
    axis = alt.Axis(minExtent=50, format="~%", tickCount=4)
    y = alt.Y("value:Q", title="share of values", axis=axis, scale=alt.Scale(domain=[0, top], nice=False))
    legend = style.legend(list(SHARES.values()), "", line=True, place="top")
    lines = _lines(swept, [*SHARES]).encode(y=y, color=alt.Color("group:N", scale=COLORS, legend=legend))
    title = style.title("Flushed and saturated by tensor scale", "of the nonzero values, and of all values")
    return alt.LayerChart(layer=[*_rules(swept), lines], title=title)


def _x(swept: ScaleSweep) -> alt.X:
    ends = [int(swept.trials["k"].iloc[end]) for end in (0, -1)]
    axis = style.binades("tensor scale 2ᵏ", 12)
    return alt.X("k:Q", scale=alt.Scale(domain=ends, nice=False, zero=False), axis=axis)


def _lines(swept: ScaleSweep, names: Sequence[str]) -> alt.Chart:
    """A line without a y axis for each of these columns, named in the column group."""
    texts = {name: swept.trials[name].map(style.MEASURES[name].text) for name in ERRORS}
    each = (swept.trials.assign(**texts, group=SHARES.get(name, ""), value=swept.trials[name]) for name in names)
    tooltip = [alt.Tooltip("k:Q", title="k")]
    tooltip += [alt.Tooltip(f"{name}:N", title=style.MEASURES[name].axis) for name in ERRORS]
    lines: alt.Chart = (
        alt.Chart(pd.concat(each))
        .mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=30))
        .encode(x=_x(swept), tooltip=tooltip)
    )
    return lines


def _rules(swept: ScaleSweep) -> list[alt.Chart]:
    places = [*((k, label, [4, 4]) for label, k in swept.present.items()), (swept.best, "best", [1, 0])]
    return [
        alt.Chart(pd.DataFrame({"k": [k], "name": [f"{label}: {style.power_of_two(round(k, 2))}"]}))
        .mark_rule(color=style.GREY, strokeDash=dash)
        .encode(x=_x(swept))
        for k, label, dash in places
    ]
