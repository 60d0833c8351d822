"""The errors of a tensor in a format, by tensor scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.app.questions.what_if.compute import ERRORS, ScaleSweep
from binade.quant.formats import FORMATS

SHARES = {"flush_to_zero": "flushed", "saturated": "saturated"}
COLORS = {"flushed": style.BAD, "saturated": style.CLIPPED}


def sqnr_by_scale(swept: ScaleSweep) -> Chart:
    """SQNR by tensor scale, with a rule for each present scale, dashed, and for the best one."""
    sqnr, measure, scales = swept.trials["sqnr_db"], style.MEASURES["sqnr_db"], _scales(swept)
    low, high = float(sqnr.min()), float(sqnr.max())
    room = max(0.14 * len(scales) * (high - low), 1)  # for the names of the rules, one below the other
    y = plot.y("value", measure.axis, {"minExtent": 50}, domain=[low, high + room], nice=False)
    lines = _lines(swept, ["sqnr_db"], y=y, color=style.color_of_spec(swept.fmt))
    middle, names = float(swept.trials["k"].median()), []
    for index, (k, label, _) in enumerate(scales):
        named = pd.DataFrame({"k": [k], "name": [f"{label}: {style.power_of_two(round(k, 2))}"]})
        side: plot.Look = {"align": "right", "dx": -5} if k > middle else {"align": "left", "dx": 5}
        names.append(plot.mark("text", named, x=_x(swept), y=2 + 15 * index, text="name", baseline="top", **side))
    title = f"SQNR of {FORMATS[swept.fmt].title} by tensor scale"
    return plot.layers(title, "x · 2ᵏ is rounded to the elements and divided by 2ᵏ", *_rules(swept), lines, *names)


def shares_by_scale(swept: ScaleSweep) -> Chart:
    """The flushed and the saturated share, over the axis of `sqnr_by_scale`."""
    top = max(0.01, float(swept.trials[[*SHARES]].to_numpy().max()))
    axis = {"minExtent": 50, "format": "~%", "tickCount": 4}
    color = plot.named("group", COLORS, style.legend([*COLORS], "", line=True, place="top"))
    y = plot.y("value", "share of values", axis, domain=[0, top], nice=False)
    lines = _lines(swept, [*SHARES], y=y, color=color)
    title = "Flushed and saturated by tensor scale"
    return plot.layers(title, "of the nonzero values, and of all values", *_rules(swept), lines)


def _x(swept: ScaleSweep) -> Any:
    ends = [int(swept.trials["k"].iloc[end]) for end in (0, -1)]
    return plot.x("k", axis=style.binades("tensor scale 2ᵏ", 12), domain=ends, nice=False, zero=False)


def _lines(swept: ScaleSweep, names: Sequence[str], **channels: Any) -> Chart:
    """A line for each of these columns, named in the column group."""
    table = pd.concat(swept.trials.assign(group=SHARES.get(name, ""), value=swept.trials[name]) for name in names)
    tips = {"k": "k"} | {name: style.MEASURES[name] for name in ERRORS}
    return plot.mark("line", table, x=_x(swept), strokeWidth=2, point=30, tips=tips, **channels)


def _scales(swept: ScaleSweep) -> list[tuple[float, str, list[int]]]:
    """(exponent, name, dash) of the scales that are marked."""
    return [*((k, label, [4, 4]) for label, k in swept.present.items()), (swept.best, "best", [1, 0])]


def _rules(swept: ScaleSweep) -> list[Chart]:
    return [plot.rule(x=k, strokeDash=dash) for k, _, dash in _scales(swept)]
