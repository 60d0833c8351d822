"""Loss gaps and gradients of runs against their bf16 runs."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.questions.recipes.bands import NONE, PUBLISHED
from binade.app.questions.shared.loss_chart import MOST_POINTS, marked_points
from binade.data.gap_bands import Kind
from binade.data.text import number_text


def _gap(base: str) -> str:
    """The title of axes and tooltips, without users' names for runs: Vega-Lite does not escape their backslashes."""
    return "gap to bf16" if base == "bf16" else "gap"


BANDS = {Kind.SEEDS.value: style.GREY, Kind.REORDERING.value: style.PALETTE[2], PUBLISHED: style.PALETTE[6]}
REACH = 2.0  # times the largest gap: as far as an axis reaches to show a band
SHADE, LABEL = 0.25, 200  # opacity of a band, pixels of its name


def _shades(bands: pd.DataFrame) -> alt.Chart:
    """The bands behind a chart without their marks and places: colors, legend, and what the pointer shows."""
    shown = [name for name in BANDS if name in set(bands["band"])]
    scale = alt.Scale(domain=shown, range=[BANDS[name] for name in shown])
    legend = alt.Legend(
        title=None, orient="bottom", symbolType="square", symbolOpacity=2 * SHADE, symbolStrokeWidth=0, labelLimit=LABEL
    )
    names = [name for name in ("label", "band", "range", "n", "source") if name in bands]
    tooltip = [alt.Tooltip(f"{name}:N", title="recipe" if name == "label" else name) for name in names]
    return alt.Chart(bands).encode(fill=alt.Fill("band:N", scale=scale, legend=legend), tooltip=tooltip)


def _ends(gaps: pd.Series, bands: pd.DataFrame) -> tuple[float, float, float]:
    """(the ends of an axis that shows 0, the gaps and, as far as REACH, the bands; the largest gap)."""
    most = float(gaps.abs().max()) or 1.0
    shades = bands[["low", "high"]].clip(-REACH * most, REACH * most)
    ends = np.concatenate([gaps, shades.to_numpy(float).ravel(), [0.0]])
    return float(ends.min()), float(ends.max()), most


def gaps(
    table: pd.DataFrame,
    subtitle: str | list[str],
    looks: style.Looks | None = None,
    base: str = "bf16",
    bands: pd.DataFrame = NONE,
    marks: pd.DataFrame = NONE,
) -> alt.LayerChart:
    """Each run’s loss minus that of `base`, from `loss_gaps`; the rule is `base`. looks: of runs; bands: by
    iteration; marks: where recipes leave bf16's band, with columns iteration, gap and text."""
    shown = table.rename(columns={"label": "group"})
    groups = style.groups_of(shown)
    y = alt.Y("gap:Q", title=f"{_gap(base)} (nats per token)")
    layers = []
    if len(bands):
        y = y.scale(domain=_ends(table["gap"], bands)[:2])
        placed = _shades(bands).encode(x="iteration:Q", y="low:Q", y2="high:Q")
        area = placed.mark_area(opacity=SHADE, clip=True).encode(tooltip=alt.value(None))  # one tooltip for all of it
        layers = [area, placed.mark_rule(strokeWidth=8, opacity=0, clip=True)]
    lines = (
        alt.Chart(shown)
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=36) if len(shown) <= MOST_POINTS else False)
        .encode(
            x=alt.X(
                "iteration:Q",
                title="iteration",
                axis=alt.Axis(tickMinStep=1, format="d"),
                scale=alt.Scale(nice=False, padding=16),
            ),
            y=y,
            color=style.color(groups, "run", line=True, own=looks),
            strokeDash=style.dash(groups, "run", own=looks),
            tooltip=[
                alt.Tooltip("group:N", title="run"),
                alt.Tooltip("iteration:Q", title="iteration"),
                alt.Tooltip("loss:Q", title="loss (nats per token)", format=".4f"),
                alt.Tooltip("gap:Q", title=_gap(base), format="+.4f"),
            ],
        )
        .add_params(style.only("run_id"))
    )
    zero = alt.Chart(pd.DataFrame({"y": [0.0]})).mark_rule(strokeDash=[4, 4], color=style.GREY).encode(y="y:Q")
    left = [marked_points(marks, alt.X("iteration:Q"), y)] * bool(len(marks))
    result = alt.LayerChart(layer=[*layers, zero, style.labelled(lines, groups), *left])
    result.title = style.title(f"Loss gap to {base} by iteration", subtitle)
    return result


def costs(
    table: pd.DataFrame,
    subtitle: str | list[str],
    looks: style.Looks | None = None,
    base: str = "bf16",
    bands: pd.DataFrame = NONE,
) -> alt.LayerChart:
    """The mean gap of each recipe with the interval over its seeds, the largest at the top: columns label, gap, low,
    high, seeds and text. looks: by label; bands: of each recipe, from `bands.rows`."""
    order = table["label"].tolist()
    shown = table.assign(color=style.colors(order, own=looks))
    shown["at"] = shown["high"].fillna(shown["gap"]).clip(lower=0.0)
    shown["short"] = shown["gap"].map(lambda v: number_text(v, "+.4f"))
    y = alt.Y("label:N", title=None, sort=order, axis=alt.Axis(ticks=False, domain=False, labelLimit=260))
    rows = alt.Chart(shown).encode(
        y=y,
        tooltip=[
            alt.Tooltip("label:N", title="recipe"),
            alt.Tooltip("text:N", title=f"mean {_gap(base)} per token"),
            alt.Tooltip("seeds:Q", title="seeds"),
        ],
    )
    low, high, most = _ends(pd.concat([table["gap"], table["low"], table["high"]]).dropna(), bands)
    domain = [low - 0.05 * most, high + 0.5 * most]
    x = alt.X(
        "gap:Q",
        title="mean gap (nats per token)",
        scale=alt.Scale(domain=domain, nice=False),
        axis=alt.Axis(tickCount=5),
    )
    bars = rows.mark_bar(size=18, cornerRadiusEnd=3).encode(x=x, color=alt.Color("color:N", scale=None))
    bars = bars.add_params(style.only("run_id"))
    text = rows.mark_text(align="left", dx=5, color=style.GREY, fontSize=12).encode(x="at:Q", text="short:N")
    several = alt.Chart(shown.dropna(subset=["low"]))
    interval = several.mark_rule(color=style.GREY, strokeWidth=1.5).encode(x="low:Q", x2="high:Q", y=y)
    layers = [bars, interval, text]
    if len(bands):
        placed = _shades(bands).encode(x=alt.X("low:Q"), x2="high:Q", y=y)
        own = placed.transform_filter(alt.datum.band != PUBLISHED).mark_rect(opacity=SHADE, clip=True)
        others = placed.transform_filter(alt.datum.band == PUBLISHED).mark_bar(size=5, yOffset=12, clip=True)
        layers = [own, others, *layers]
    return alt.LayerChart(layer=layers, title=style.title("What each recipe costs", subtitle))


def costs_height(table: pd.DataFrame, bands: pd.DataFrame = NONE) -> int:
    """Height of the costs in pixels."""
    return 130 + 34 * len(table) + legend_height(bands)


def legend_height(bands: pd.DataFrame) -> int:
    """Height of the legend of bands in pixels."""
    return 50 if len(bands) else 0


AGREEMENT = {
    "cosine": ("Cosine to bf16’s gradient", "cosine (1: same direction)"),
    "relative_squared_error": ("Relative squared error", "‖ĝ−g‖² / ‖g‖² (0: identical)"),
}


def agreement(
    table: pd.DataFrame, column: str, subtitle: str | list[str], looks: style.Looks | None = None
) -> alt.Chart:
    """A dot for each group (a run) and place of `gradient_summary`. looks: of runs."""
    name, axis = AGREEMENT[column]
    groups = style.groups_of(table)
    result: alt.Chart = (
        alt.Chart(table)
        .mark_point(filled=True, size=80, opacity=0.9)
        .encode(
            x=alt.X(f"{column}:Q", title=axis, scale=alt.Scale(zero=False, padding=12), axis=alt.Axis(tickCount=6)),
            y=alt.Y(
                "place:N",
                title=None,
                sort=list(dict.fromkeys(table["place"])),
                axis=alt.Axis(grid=True, labelLimit=240),
            ),
            color=style.color(groups, "run", own=looks),
            shape=style.shape(groups, "run", own=looks),
            tooltip=[
                alt.Tooltip("group:N", title="run"),
                alt.Tooltip("place:N", title="gradient"),
                alt.Tooltip(f"{column}:Q", title=name, format=".5~g"),
                alt.Tooltip("tensors:Q", title="tensors"),
            ],
        )
        .properties(title=style.title(name, subtitle))
    )
    return result


def agreement_height(table: pd.DataFrame) -> int:
    """Height of the dots in pixels."""
    return 130 + 24 * table["place"].nunique() + style.legend_height(style.groups_of(table))


def ladder(table: pd.DataFrame, seeds: pd.DataFrame, name: str) -> alt.LayerChart:
    """A point for each rung with the interval of its mean, and its seeds (columns rung, seed, gap) as small dots; the
    rule is bf16 itself. The table is that of `rungs` in compute.py."""
    order = table["rung"].tolist()
    shown = table.dropna(subset="gap").assign(
        state=[TOLD if separated else NOT_TOLD for separated in table.dropna(subset="gap")["separated"]]
    )
    shown.loc[shown["rung"] == order[0], "state"] = "bf16"
    y = alt.Y(
        "rung:N",
        title=None,
        sort=order,
        scale=alt.Scale(domain=order, padding=0.7),
        axis=alt.Axis(grid=True, labelLimit=240),
    )
    x = alt.X(
        "gap:Q",
        title="gap to bf16 (nats per token)",
        scale=alt.Scale(nice=False, padding=16),
        axis=alt.Axis(tickCount=8),
    )
    tooltip = [
        alt.Tooltip("rung:N", title="step"),
        alt.Tooltip("recipe:N", title="recipe"),
        alt.Tooltip("gap:Q", title="mean gap (nats per token)", format="+.5f"),
        alt.Tooltip("low:Q", title="95% interval, from", format="+.5f"),
        alt.Tooltip("high:Q", title="to", format="+.5f"),
        alt.Tooltip("seeds:Q", title="seeds"),
        alt.Tooltip("verdict:N", title="verdict"),
    ]
    color = alt.Color(
        "state:N",
        scale=alt.Scale(domain=list(LADDER), range=list(LADDER.values())),
        legend=alt.Legend(title="change", orient="bottom", values=list(LADDER)[1:]),
    )
    zero = alt.Chart(pd.DataFrame({"x": [0.0]})).mark_rule(strokeDash=[4, 4], color=style.GREY).encode(x="x:Q")
    dots = (
        alt.Chart(seeds)
        .mark_point(filled=True, size=26, opacity=0.6, color=style.GREY, yOffset=9)
        .encode(
            x=x,
            y=y,
            tooltip=[
                alt.Tooltip("rung:N", title="step"),
                alt.Tooltip("seed:N", title="seed"),
                alt.Tooltip("gap:Q", title="mean gap (nats per token)", format="+.5f"),
            ],
        )
    )
    base = alt.Chart(shown)
    bars = base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q"), x2="high:Q", y=y, color=color, tooltip=tooltip)
    points = base.mark_point(filled=True, size=90, opacity=1).encode(x=x, y=y, color=color, tooltip=tooltip)
    subtitle = "mean over seeds with its 95% interval; small dots are the seeds"
    result: alt.LayerChart = (zero + dots + bars + points).properties(
        title=style.title(f"Ablation of {name}", subtitle)
    )
    return result


TOLD, NOT_TOLD = "distinguishable", "not distinguishable"
LADDER = {"bf16": style.GREY, TOLD: style.PALETTE[3], NOT_TOLD: style.PALETTE[0]}


def ladder_height(table: pd.DataFrame) -> int:
    """Height of the rungs in pixels."""
    return 180 + 34 * len(table)
