"""Groups by their change of the log-probabilities, quantities next to published values, and quantities by step."""

from __future__ import annotations

import altair as alt
import pandas as pd

from binade.app import style
from binade.data.evidence import Measure

GROUPS = 30  # that are drawn
HERE, LIMIT, MEASURED = "here", "limit", "measured"
TITLES = {HERE: "this measurement", LIMIT: "limit of a tool", MEASURED: "measured by others"}
COLORS = {HERE: style.PALETTE[0], LIMIT: style.BAD, MEASURED: style.GREY}
SHAPES = {HERE: "circle", LIMIT: "M-0.12,-1L0.12,-1L0.12,1L-0.12,1Z", MEASURED: "diamond"}


def ranking(table: pd.DataFrame, measure: Measure, subtitle: str) -> alt.LayerChart:
    """The groups of `compute.groups` as dots with their intervals, the largest at the top; the dashed line is the gap
    between the two recipes."""
    whole, shown = table.iloc[:1], table.iloc[1 : GROUPS + 1]
    y = style.names_axis("group", shown["group"])
    tooltip = [
        alt.Tooltip("group:N", title="group"),
        alt.Tooltip("text:N", title=measure.title),
        alt.Tooltip("divergence:Q", title="KL(R‖T) (nats)", format=".3g"),
    ]
    rows = alt.Chart(shown).encode(y=y, tooltip=tooltip)
    x = alt.X("change:Q", title=measure.axis, axis=alt.Axis(tickCount=5))
    line = alt.Chart(whole).mark_rule(strokeDash=[4, 4], color=style.GREY).encode(
        x="change:Q", tooltip=[alt.Tooltip("text:N", title="between the two recipes")]
    )  # fmt: skip
    intervals = (
        alt.Chart(shown.dropna(subset=["low", "high"]))
        .mark_rule(color=style.GREY, strokeWidth=1.5)
        .encode(y=y, x="low:Q", x2="high:Q")
    )
    points = rows.mark_point(filled=True, size=80, opacity=1, color=style.PALETTE[0]).encode(x=x)
    title = style.title("Which group changes the log-probabilities?", subtitle)
    return alt.LayerChart(layer=[line, intervals, points], title=title)


def ranking_height(table: pd.DataFrame) -> int:
    return 130 + 22 * min(len(table) - 1, GROUPS)


def routing(table: pd.DataFrame, several: float, subtitle: str) -> alt.LayerChart:
    """The share of tokens that flip by router, from `compute.routing`; the dashed line: in any layer."""
    shown = table.assign(**{name: 100 * table[name] for name in ("flips", "low", "high", "recall", "reorders")})
    x = alt.X("router:N", title=None, sort=shown["router"].tolist(), axis=alt.Axis(labelAngle=-45, labelOverlap=True))
    y = alt.Y("flips:Q", title="tokens that flip (%)", scale=alt.Scale(zero=True))
    tooltip = [
        alt.Tooltip("router:N", title="router"),
        alt.Tooltip("text:N", title="flips"),
        alt.Tooltip("recall:Q", title="recall (%)", format=".2f"),
        alt.Tooltip("reorders:Q", title="reordered (%)", format=".2f"),
        alt.Tooltip("margin:Q", title="margin", format=".3g"),
    ]
    line = alt.Chart(pd.DataFrame({"flips": [100 * several]})).mark_rule(strokeDash=[4, 4], color=style.GREY)
    known = alt.Chart(shown.dropna(subset=["low", "high"]))
    intervals = known.mark_rule(color=style.GREY, strokeWidth=1.5).encode(x=x, y="low:Q", y2="high:Q")
    points = alt.Chart(shown).mark_point(filled=True, size=80, opacity=1, color=style.PALETTE[0])
    title = style.title("Which routers choose other experts?", subtitle)
    layers = [line.encode(y=y), intervals, points.encode(x=x, y=y, tooltip=tooltip)]
    return alt.LayerChart(layer=layers, title=title)


def published(table: pd.DataFrame, subtitle: str) -> alt.LayerChart:
    """The quantities of `compute.against_published`: a band over the limits of tools, with the values on it."""
    order = list(dict.fromkeys(table["quantity"]))
    kinds = [kind for kind in TITLES if kind in set(table["kind"])]
    shown = table.assign(what=table["kind"].map(TITLES))
    names = [TITLES[kind] for kind in kinds]
    y = style.names_axis("quantity", order)
    x = alt.X("value:Q", title="value, in the unit of its quantity", scale=alt.Scale(type="log"), axis=style.DECADES)
    ends = shown[shown["kind"] == LIMIT].groupby("quantity", sort=False)["value"].agg(low="min", high="max")
    bands = alt.Chart(ends.reset_index()).mark_rule(strokeWidth=12, opacity=style.BAND, color=style.BAD)
    points = (
        alt.Chart(shown)
        .mark_point(filled=True, size=90, opacity=1, strokeWidth=2)
        .encode(
            x=x,
            y=y,
            color=alt.Color(
                "what:N", scale=alt.Scale(domain=names, range=[COLORS[kind] for kind in kinds]),
                legend=alt.Legend(title=None, orient="top"),
            ),
            shape=alt.Shape("what:N", scale=alt.Scale(domain=names, range=[SHAPES[kind] for kind in kinds])),
            tooltip=[
                alt.Tooltip("quantity:N", title="quantity"),
                alt.Tooltip("text:N", title="value"),
                alt.Tooltip("what:N", title="kind"),
                alt.Tooltip("case:N", title="case"),
                alt.Tooltip("source:N", title="source"),
            ],
        )
    )  # fmt: skip
    title = style.title("Next to published values", subtitle)
    return alt.LayerChart(layer=[bands.encode(x="low:Q", x2="high:Q", y=y), points], title=title)


def published_height(table: pd.DataFrame) -> int:
    return 140 + 30 * table["quantity"].nunique()


def steps(table: pd.DataFrame, measure: Measure, subtitle: str) -> alt.LayerChart:
    """A quantity by step, and its median over steps."""
    shown = table.assign(value=table["value"] * measure.factor)
    places = shown["place"].tolist()[:: -(-len(shown) // 10)]
    lines = alt.Chart(shown).mark_line(point=True, strokeWidth=1.8, color=style.PALETTE[0]).encode(
        x=alt.X(
            "place:Q", title="step, in the order of the dumps", scale=alt.Scale(nice=False, padding=16),
            axis=alt.Axis(values=places, format="d"),
        ),
        y=alt.Y("value:Q", title=measure.axis, scale=alt.Scale(zero=False)),
        tooltip=[
            alt.Tooltip("step:N", title="step"),
            alt.Tooltip("text:N", title=measure.axis),
            alt.Tooltip("tokens:Q", title="tokens", format=","),
        ],
    )  # fmt: skip
    middle = pd.DataFrame({"value": [shown["value"].median()]})
    rule = alt.Chart(middle).mark_rule(strokeDash=[4, 4], color=style.GREY).encode(y="value:Q")
    return alt.LayerChart(layer=[rule, lines], title=style.title(f"{measure.title} by step", subtitle))
