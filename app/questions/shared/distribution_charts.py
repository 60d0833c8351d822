"""Distributions of values: histograms, Q–Q plots and box plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.app.questions.shared.quantile_plots import LIMIT

LOG2, LINEAR = "Distribution of magnitudes", "Distribution of values"
EQUAL: dict[str, Any] = {"strokeDash": [5, 4], "color": style.GREY, "strokeWidth": 1.5}  # the line of equal quantiles
LAW_TITLES = {"normal": "normal", "laplace": "Laplace", "student_t": "Student’s t", "uniform": "uniform"}
LAW_NAMES = {"normal": "a normal", "laplace": "a Laplace", "student_t": "Student’s t", "uniform": "a uniform"}
BOX_TITLES = {
    "min": "minimum",
    "p0_1": "0.1%",
    "q1": "25%",
    "median": "median",
    "q3": "75%",
    "p99_9": "99.9%",
    "max": "maximum",
}


def looks_of(groups: list[str], by: str, own: style.Looks | None = None, line: bool = True) -> plot.Look:
    """The channels of groups, with a legend above the plot, of lines or of points."""
    return {
        "color": style.color(groups, by, line=line, own=own, place="top"),
        "strokeDash": style.dash(groups, by, "top", own),
    }


def histogram(
    table: pd.DataFrame,
    title: str,
    axis: str,
    log: bool,
    low: float | None = None,
    subtitle: str = "",
    **look: Any,
) -> Chart:
    """Shares of values in bins, as lines that step. table: group, low, share, with a last row of each group, at which
    its line ends. title: "" if the page has it, and the title of y. log: `low` is log₂ of a magnitude, and the shares
    are per binade. low: where the axis begins. look: channels of the groups."""
    words = "share of values per binade" if log else "share of values"
    domain: plot.Look = {} if low is None else {"domain": [low, float(table["low"].max())]}
    lines = plot.mark(
        "line", table, interpolate="step-after", strokeWidth=1.7, clip=True,
        x=plot.x("low", axis, style.binades(axis) if log else {"tickCount": 8}, nice=False, zero=False, **domain),
        y=plot.y("share", words if title else None, {"format": "~%", "tickCount": 5}).stack(None),
        tips={"group": "group", "low": (f"{'log₂ ' * log}from", ".3~f" if log else ".4~g"), "share": (words, ".3~p")},
        **look,
    )  # fmt: skip
    return plot.layers(title, explained(subtitle, table) if title and log else subtitle, lines)


def magnitudes(table: pd.DataFrame, by: str, subtitle: str) -> Chart:
    """Chart of distributions.log2_histogram. by: what the groups are."""
    return histogram(table, LOG2, "|value| (binades)", True, subtitle=subtitle, **looks_of(style.groups_of(table), by))


def explained(subtitle: str | list[str], table: pd.DataFrame) -> str | list[str]:
    """The subtitle, with an explanation of shares per binade above 100% if there are any."""
    if not (table["share"] > 1).any():
        return subtitle
    dense = "shares per binade are densities: they exceed 100% where values crowd into part of a binade"
    return [*filter(None, [subtitle] if isinstance(subtitle, str) else subtitle), dense]


def qq(
    table: pd.DataFrame,
    title: str,
    axis: str,
    beyond: Sequence[tuple[str, int, int]] = (),
    subtitle: str = "",
    fitted: bool = False,
    **look: Any,
) -> Chart:
    """A Q–Q plot with its line of equal quantiles, cut off at LIMIT. table: group, theoretical, sample, share; beyond:
    (group, values above, values below). fitted: the axes end where these points do, if that is before LIMIT."""
    y_title = "quantile of the values" if title else None
    ticks: plot.Look = {"values": [*range(-12, 13, 4)], "labelOverlap": False}
    end, top, domain = 5.0, LIMIT, dict[str, Any]()
    if fitted:
        end = min(LIMIT, float(table["theoretical"].abs().max()))
        top = min(LIMIT, 1.05 * max(end, float(table["sample"].abs().max())))
        ticks, domain = {"tickCount": 7}, {"domain": [-end, end]}
    points = plot.mark(
        "point", table, size=16, opacity=0.8, clip=True,
        tips={"group": "group", "theoretical": ("expected", ".4~g"), "sample": ("value", ".4~g"),
              "share": ("values below", ".4~%")},
        x=plot.x("theoretical", axis, {"tickCount": 7}, nice=False, zero=False, **domain),
        y=plot.y("sample", y_title, ticks, domain=[-top, top], nice=False),
        **{name: value for name, value in look.items() if name != "strokeDash"},
    )  # fmt: skip
    line = plot.diagonal(-end, end, **EQUAL, clip=True, y=plot.y("y", y_title, ticks))
    return plot.layers(title, subtitle, line, points, *_beyond(beyond))


def _beyond(counts: Sequence[tuple[str, int, int]]) -> list[Chart]:
    """How many values lie beyond the ends of the axis, in the corners that quantiles, which rise, leave empty."""
    layers: list[Chart] = []
    for sign, mark in ((1, "▲"), (2, "▼")):
        numbers = [count[sign] for count in counts if count[sign]]
        if not numbers:
            continue
        words = (
            f"{numbers[0]:,}"
            if len(numbers) == 1
            else f"{min(numbers):,} to {max(numbers):,} of each of {len(numbers)}"
        )
        look: plot.Look = {
            "align": "left" if sign == 1 else "right", "fontSize": 11, "color": style.GREY,
            "x": 4 if sign == 1 else {"expr": "width - 4"}, "y": 8 if sign == 1 else {"expr": "height - 8"},
        }  # fmt: skip
        text = pd.DataFrame({"text": [f"{mark} {words} beyond {'' if sign == 1 else '−'}{LIMIT:g}"]})
        layers.append(plot.mark("text", text, text="text", **look))
    return layers


def boxes(table: pd.DataFrame, subtitle: str, by: str, log2: bool = False) -> Chart:
    """Chart of distributions.boxes: quartile box, whiskers at 0.1% and 99.9%, dots at the extremes. log2: the table is
    of distributions.magnitudes."""
    groups = style.groups_of(table)
    both: plot.Look = {
        "y": plot.names("group", groups, 320), "color": style.color(groups, by, shown=False),
        "tips": {"group": by} | {name: (title, ".4~g") for name, title in BOX_TITLES.items()},
    }  # fmt: skip
    axis = style.binades("|value|") if log2 else {"tickCount": 8}
    title = "log₂ |value| (binades)" if log2 else "value"
    x = plot.x("p0_1", title, axis, zero=False, nice=False, padding=16)
    size = 14 if len(groups) > 4 else 20
    marks = (
        plot.mark("rule", table, x=x, x2="p99_9", strokeWidth=1.5, **both),
        plot.mark("bar", table, x="q1", x2="q3", size=size, opacity=0.4, **both),
        plot.mark("tick", table, x="median", size=size + 6, thickness=2.5, **both),
        *(plot.mark("circle", table, x=end, size=26, opacity=0.9, **both) for end in ("min", "max")),
    )
    return plot.layers("Spread of magnitudes" if log2 else "Spread of values", subtitle, *marks)


def boxes_height(table: pd.DataFrame) -> int:
    """Pixels that a box chart of these groups needs, title and axis included."""
    return 120 + 34 * len(table)
