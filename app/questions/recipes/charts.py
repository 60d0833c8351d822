"""Loss gaps and gradients of runs against their bf16 runs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from binade.app import plot, style
from binade.app.figure import Chart
from binade.app.questions.recipes.bands import NONE
from binade.app.questions.shared.loss_chart import MOST_POINTS, marked_points
from binade.data.gap_bands import BandKind
from binade.data.text import number_text


def _gap(base: str) -> str:
    """The title of axes and tooltips, without users' names for runs: Vega-Lite does not escape their backslashes."""
    return "gap to bf16" if base == "bf16" else "gap"


BANDS = {BandKind.SEEDS.value: style.GREY, BandKind.REORDERING.value: style.PALETTE[2]}
REACH = 2.0  # times the largest gap: as far as an axis reaches to show a band
SHADE, LABEL = 0.25, 200  # opacity of a band, pixels of its name


def _shades(bands: pd.DataFrame) -> plot.Look:
    """Color and legend of the bands behind a chart, and what the pointer shows."""
    colors = {name: BANDS[name] for name in BANDS if name in set(bands["band"])}
    look = {"symbolType": "square", "symbolOpacity": 2 * SHADE, "symbolStrokeWidth": 0, "labelLimit": LABEL}
    names = [name for name in ("label", "band", "range", "n", "source") if name in bands]
    fill = plot.named("band", colors, {"title": None, "orient": "bottom"} | look, "fill")
    return {"fill": fill, "clip": True, "tips": {name: "recipe" if name == "label" else name for name in names}}


def _ends(gaps: pd.Series, bands: pd.DataFrame) -> tuple[float, float, float]:
    """(the ends of an axis that shows 0, the gaps and, as far as REACH, the bands; the largest gap)."""
    most = float(gaps.abs().max()) if len(gaps) else 0.0
    most = most or 1.0
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
) -> Chart:
    """Each run’s loss minus that of `base`, from `loss_gaps`; the rule is `base`. looks: of runs; bands: by
    iteration; marks: where recipes leave bf16's band or diverge, with columns iteration, gap and text."""
    shown = table.rename(columns={"label": "group"})
    groups = style.groups_of(shown)
    domain: plot.Look = {"domain": _ends(table["gap"], bands)[:2]} if len(bands) else {}
    x, y = plot.iterations(nice=False, padding=16), plot.y("gap", f"{_gap(base)} (nats per token)", **domain)
    layers: list[Chart] = []
    if len(bands):  # one tooltip for all of an area would be wrong: those of rules are shown
        places: plot.Look = {"x": "iteration", "y": "low", "y2": "high"} | _shades(bands)
        area = plot.mark("area", bands, opacity=SHADE, **{**places, "tips": None}, tooltip=None)
        layers = [area, plot.mark("rule", bands, strokeWidth=8, opacity=0, **places)]
    lines = plot.mark(
        "line", shown, x=x, y=y, point=36 if len(shown) <= MOST_POINTS else 0, only=["run_id"],
        color=style.color(groups, "run", line=True, own=looks), strokeDash=style.dash(groups, "run", own=looks),
        tips=plot.tips(
            group="run", iteration="iteration", loss=("loss (nats per token)", ".4f"), gap=(_gap(base), "+.4f")
        ),
    )  # fmt: skip
    layers += [plot.rule(y=0.0), style.labelled(lines, groups)]
    if len(marks):
        layers.append(marked_points(marks, plot.x("iteration"), y))
    return plot.layers(f"Loss gap to {base} by iteration", subtitle, *layers)


def costs(
    table: pd.DataFrame,
    subtitle: str | list[str],
    looks: style.Looks | None = None,
    base: str = "bf16",
    bands: pd.DataFrame = NONE,
) -> Chart:
    """The mean gap of each recipe with the interval over its seeds, the largest at the top, those that diverged below:
    columns label, gap, low, high, seeds, text and outcome. looks: by label; bands: of each recipe, from `bands.rows`.
    """
    order = table["label"].tolist()
    end = table["high"].fillna(table["gap"]).fillna(0.0).clip(lower=0.0)
    gap = table["gap"].map(lambda gap: number_text(gap, "+.4f"))
    shown = table.assign(at=end, short=gap.where(table["gap"].notna(), table["outcome"]))
    low, high, most = _ends(pd.concat([table["gap"], table["low"], table["high"]]).dropna(), bands)
    domain = [low - 0.05 * most, high + 0.5 * most]
    y, colors = plot.names("label", order, 260), dict(zip(order, style.colors(order, own=looks), strict=True))
    bars = plot.bars(
        shown, y, plot.x("gap", "mean gap (nats per token)", {"tickCount": 5}, domain=domain, nice=False),
        color=plot.named("label", colors, None), text="short", end="at", between=("low", "high"), only=["run_id"],
        tips=plot.tips(label="recipe", text=f"mean {_gap(base)} per token", seeds="seeds"),
    )  # fmt: skip
    layers: list[Chart] = []
    if len(bands):
        look: plot.Look = {"x": "low", "x2": "high", "y": y} | _shades(bands)
        layers = [plot.mark("rect", bands, opacity=SHADE, **look)]
    return plot.layers("What each recipe costs", subtitle, *layers, *bars)


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


def agreement(table: pd.DataFrame, column: str, subtitle: str | list[str], looks: style.Looks | None = None) -> Chart:
    """A dot for each group (a run) and place of `gradient_summary`. looks: of runs."""
    name, axis = AGREEMENT[column]
    groups = style.groups_of(table)
    points = plot.mark(
        "point", table, size=80, opacity=0.9, x=plot.x(column, axis, {"tickCount": 6}, zero=False, padding=12),
        y=plot.names("place", dict.fromkeys(table["place"]), 240, {"grid": True}),
        color=style.color(groups, "run", own=looks), shape=style.shape(groups, "run", own=looks),
        tips={"group": "run", "place": "gradient", column: (name, ".5~g"), "tensors": "tensors"},
    )  # fmt: skip
    return plot.layers(name, subtitle, points)


def agreement_height(table: pd.DataFrame) -> int:
    """Height of the dots in pixels."""
    return 130 + 24 * table["place"].nunique() + style.legend_height(style.groups_of(table))


def ladder(table: pd.DataFrame, seeds: pd.DataFrame, name: str) -> Chart:
    """A point for each rung with the interval of its mean, and its seeds (columns rung, seed, gap) as small dots; the
    rule is bf16 itself. The table is that of `rungs` in compute.py."""
    order = table["rung"].tolist()
    shown = table.dropna(subset="gap")
    shown = shown.assign(state=[TOLD if separated else NOT_TOLD for separated in shown["separated"]])
    shown.loc[shown["rung"] == order[0], "state"] = "bf16"
    x = plot.x("gap", "gap to bf16 (nats per token)", {"tickCount": 8}, nice=False, padding=16)
    y = plot.names("rung", order, axis={"grid": True}, domain=order, padding=0.7)
    gap = ("mean gap (nats per token)", "+.5f")
    tips = plot.tips(
        rung="step", recipe="recipe", gap=gap, low=("95% interval, from", "+.5f"), high=("to", "+.5f"), seeds="seeds",
        verdict="verdict",
    )  # fmt: skip
    color = plot.named("state", LADDER, {"title": "change", "orient": "bottom", "values": list(LADDER)[1:]})
    dots = plot.mark(
        "point", seeds, x=x, y=y, size=26, opacity=0.6, color=style.GREY, yOffset=9,
        tips=plot.tips(rung="step", seed="seed", gap=gap),
    )  # fmt: skip
    bars = plot.intervals(shown, "low", "high", y=y, color=color, tips=tips, strokeWidth=2)
    points = plot.mark("point", shown, x=x, y=y, size=90, opacity=1, color=color, tips=tips)
    subtitle = "mean over seeds with its 95% interval; small dots are the seeds"
    return plot.layers(f"Ablation of {name}", subtitle, plot.rule(x=0.0), dots, bars, points)


TOLD, NOT_TOLD = "distinguishable", "not distinguishable"
LADDER = {"bf16": style.GREY, TOLD: style.PALETTE[3], NOT_TOLD: style.PALETTE[0]}


def ladder_height(table: pd.DataFrame) -> int:
    """Height of the rungs in pixels."""
    return 180 + 34 * len(table)
