"""Loss gaps and gradients of runs against their bf16 runs."""

from __future__ import annotations

import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.app.questions.shared.loss_chart import MOST_POINTS, marked_points
from binade.data.words.text import number_text


def _gap(base: str) -> str:
    """The title of axes and tooltips, without users' names for runs: Vega-Lite does not escape their backslashes."""
    return "gap to bf16" if base == "bf16" else "gap"


SHADE = 0.22  # opacity of the band


def gaps(
    table: pd.DataFrame,
    subtitle: str | list[str],
    looks: style.Looks | None = None,
    base: str = "bf16",
    band: pd.DataFrame | None = None,
    marks: pd.DataFrame | None = None,
) -> Chart:
    """The gap of each recipe to `base` by iteration, columns label, iteration and gap; the rule is `base`. Under the
    pointer, a rule shows the gap of every recipe at the nearest iteration. looks: by label; band: of bf16, with columns
    iteration, low and high; marks: where recipes leave bf16 or diverge, with columns iteration, gap and text."""
    shown = table.rename(columns={"label": "group"})
    groups = style.groups_of(shown)
    x, y = plot.iterations(nice=False, padding=16), plot.y("gap", f"{_gap(base)} (nats per token)")
    layers: list[Chart] = []
    if band is not None and len(band):
        ends = band.assign(low=band["low"].clip(lower=-_reach(table)), high=band["high"].clip(upper=_reach(table)))
        layers = [plot.mark("area", ends, x=x, y="low", y2="high", opacity=SHADE, color=style.GREY, tooltip=None)]
    lines = plot.mark(
        "line", shown, x=x, y=y, point=36 if len(shown) <= MOST_POINTS else 0,
        color=style.color(groups, "recipe", line=True, own=looks), strokeDash=style.dash(groups, "recipe", own=looks),
    )  # fmt: skip
    layers += [plot.rule(y=0.0), style.labelled(lines, groups), *plot.pointer(lines, groups, "gap")]
    if marks is not None and len(marks):
        layers.append(marked_points(marks, plot.x("iteration"), y))
    return plot.layers(f"Gap to {base} by iteration", subtitle, *layers)


def _reach(table: pd.DataFrame) -> float:
    """How far an axis reaches to show the band: twice the largest gap."""
    return 2 * float(table["gap"].abs().max()) if len(table) else 1.0


def costs(
    table: pd.DataFrame, subtitle: str | list[str], looks: style.Looks | None = None, base: str = "bf16"
) -> Chart:
    """The mean gap of each recipe with the interval over its seeds, the largest at the top, those that diverged below:
    columns label, gap, low, high, seeds, text and outcome. looks: by label."""
    order = table["label"].tolist()
    ends = pd.concat([table["gap"], table["low"], table["high"]]).dropna()
    most = float(table["gap"].abs().max()) if table["gap"].notna().any() else 1.0
    low, high = min([*ends, 0.0]), max([*ends, 0.0])
    end = table["high"].fillna(table["gap"]).fillna(0.0).clip(lower=0.0)
    gap = table["gap"].map(lambda gap: number_text(gap, "+.4f"))
    shown = table.assign(at=end, short=gap.where(table["gap"].notna(), table["outcome"]))
    domain = [low - 0.05 * (most or 1.0), high + 0.5 * (most or 1.0)]
    y, colors = plot.names("label", order, 260), dict(zip(order, style.colors(order, own=looks), strict=True))
    bars = plot.bars(
        shown, y, plot.x("gap", "mean gap (nats per token)", {"tickCount": 5}, domain=domain, nice=False),
        color=plot.named("label", colors, None), text="short", end="at", between=("low", "high"), only=["run_id"],
        tips=plot.tips(label="recipe", text=f"mean {_gap(base)} per token", seeds="seeds"),
    )  # fmt: skip
    return plot.layers(f"Mean gap to {base}", subtitle, *bars)


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
