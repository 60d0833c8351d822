"""Groups by their change of the log-probabilities, quantities next to published values, and quantities by step."""

from __future__ import annotations

from typing import Any

import pandas as pd

from binade.app import plot, style
from binade.app.figure import Chart
from binade.data.evidence import Measure

GROUPS = 30  # that are drawn
HERE, LIMIT, MEASURED = "here", "limit", "measured"
TITLES = {HERE: "this measurement", LIMIT: "limit of a tool", MEASURED: "measured by others"}
COLORS = {HERE: style.PALETTE[0], LIMIT: style.BAD, MEASURED: style.GREY}
SHAPES = {HERE: "circle", LIMIT: "M-0.12,-1L0.12,-1L0.12,1L-0.12,1Z", MEASURED: "diamond"}
DOT: dict[str, Any] = {"size": 80, "opacity": 1, "color": style.PALETTE[0]}


def ranking(table: pd.DataFrame, measure: Measure, subtitle: str) -> Chart:
    """The groups of `compute.groups` as dots with their intervals, the largest at the top; the dashed line is the gap
    between the two recipes."""
    whole, shown = table.iloc[:1], table.iloc[1 : GROUPS + 1]
    y = plot.names("group", shown["group"])
    x = plot.x("change", measure.axis, {"tickCount": 5})
    tips = plot.tips(group="group", text=measure.title, divergence=("KL(R‖T) (nats)", ".3g"))
    line = plot.mark(
        "rule", whole, x="change", strokeDash=[4, 4], color=style.GREY, tips=plot.tips(text="between the two recipes")
    )
    points = plot.mark("point", shown, x=x, y=y, tips=tips, **DOT)
    title = "Which group changes the log-probabilities?"
    return plot.layers(title, subtitle, line, plot.intervals(shown, "low", "high", y=y), points)


def ranking_height(table: pd.DataFrame) -> int:
    return 130 + 22 * min(len(table) - 1, GROUPS)


def routing(table: pd.DataFrame, several: float, subtitle: str) -> Chart:
    """The share of tokens that flip by router, from `compute.routing`; the dashed line: in any layer."""
    shown = table.assign(**{name: 100 * table[name] for name in ("flips", "low", "high", "recall", "reorders")})
    x = plot.x("router:N", None, {"labelAngle": -45, "labelOverlap": True}).sort(shown["router"].tolist())
    y = plot.y("flips", "tokens that flip (%)", zero=True)
    tips = plot.tips(
        router="router", text="flips", recall=("recall (%)", ".3g"), reorders=("reordered (%)", ".3g"),
        margin=("margin", ".3g"),
    )  # fmt: skip
    points = plot.mark("point", shown, x=x, y=y, tips=tips, **DOT)
    marks = plot.rule(y=100 * several), plot.intervals(shown, "low", "high", x=x), points
    return plot.layers("Which routers choose other experts?", subtitle, *marks)


def published(table: pd.DataFrame, subtitle: str) -> Chart:
    """The quantities of `compute.against_published`: a band over the limits of tools, with the values on it."""
    kinds = [kind for kind in TITLES if kind in set(table["kind"])]
    shown = table.assign(what=table["kind"].map(TITLES))
    y = plot.names("quantity", dict.fromkeys(table["quantity"]))
    x = plot.x("value", "value, in the unit of its quantity", style.DECADES, type="log")
    ends = shown[shown["kind"] == LIMIT].groupby("quantity", sort=False)["value"].agg(low="min", high="max")
    look = {"strokeWidth": 12, "opacity": style.BAND, "color": style.BAD}
    bands = plot.intervals(ends.reset_index(), "low", "high", y=y, **look)
    points = plot.mark(
        "point", shown, x=x, y=y, size=90, opacity=1, strokeWidth=2,
        color=plot.named("what", {TITLES[kind]: COLORS[kind] for kind in kinds}, {"title": None, "orient": "top"}),
        shape=plot.named("what", {TITLES[kind]: SHAPES[kind] for kind in kinds}, channel="shape"),
        tips=plot.tips(quantity="quantity", text="value", what="kind", case="case", source="source"),
    )  # fmt: skip
    return plot.layers("Next to published values", subtitle, bands, points)


def published_height(table: pd.DataFrame) -> int:
    return 140 + 30 * table["quantity"].nunique()


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
