"""Distributions of values: histograms, Q-Q plots and box plots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart


def _outline(table: pd.DataFrame) -> pd.DataFrame:
    """The bins of each group as the corners of a line that steps after each: down to 0 in gaps and at both ends."""
    table = table.iloc[pd.factorize(table["group"])[0].argsort(kind="stable")]
    columns = {str(name): column.to_numpy() for name, column in table.items()}
    group, low, high = (columns[name] for name in ("group", "low", "high"))
    first = np.append(True, group[1:] != group[:-1])
    last = np.append(first[1:] | (high[:-1] < low[1:] - 1e-9 * np.abs(high[:-1])), True)
    at = np.append(np.flatnonzero(last) + 1, np.flatnonzero(first))
    place = np.append(high[last], low[first])
    corners: dict[str, Any] = {"group": np.append(group[last], group[first]), "low": place, "high": place}
    return pd.DataFrame({name: np.insert(column, at, corners.get(name, 0.0)) for name, column in columns.items()})


def histogram(
    table: pd.DataFrame, subtitle: str | list[str], by: str, groups: list[str] | None = None,
    place: style.Place | None = None,
) -> Chart:  # fmt: skip
    """Draws distributions.log2_histogram. groups: those of the charts next to it, so that colors agree. place: of the
    legend.

    One group is drawn as filled bars, several as outlines, since overlapping bars are hard to read.
    """
    groups = groups or style.groups_of(table)
    share = "share of values per binade"
    title = style.title("Distribution of magnitudes", explained(subtitle, table))
    tips: dict[str, plot.Tip] = {"low": ("log₂ from", ".3~f"), "high": ("log₂ to", ".3~f"), "share": (share, ".3~p")}
    places: plot.Look = {
        "x": plot.x("low", "log₂ |value| (binades)", style.binades("|value|"), nice=False, zero=False),
        "y": plot.y("share", share, {"format": "~%", "tickCount": 5}).stack(None),
    }
    place = place or style.free_place(table["low"].to_numpy(float), table["share"].to_numpy(float), groups)
    color = style.color(groups, by, line=True, place=place)
    if len(groups) == 1:
        drawn = plot.steps(table, high="high", color=color, clip=True, tips=tips, **places)
    else:
        drawn = plot.mark(
            "line", _outline(table), color=color, strokeDash=style.dash(groups, by, place), clip=True,
            interpolate="step-after", tips={"group": by} | tips, **places,
        )  # fmt: skip
    return style.brushed(drawn, groups, "low", IN_BIN, title, place, "datum.share * (datum.high - datum.low)")


def explained(subtitle: str | list[str], table: pd.DataFrame) -> str | list[str]:
    """The subtitle, with an explanation of shares per binade above 100% if there are any."""
    if not (table["share"] > 1).any():
        return subtitle
    dense = "shares per binade are densities: they exceed 100% where values crowd into part of a binade"
    return [*([subtitle] if isinstance(subtitle, str) else subtitle), dense]


EQUAL: dict[str, Any] = {"strokeDash": [5, 4], "color": style.GREY, "strokeWidth": 1.5}  # the line of equal quantiles
LAW_TITLES = {"normal": "normal", "laplace": "Laplace", "student_t": "Student’s t", "uniform": "uniform"}
LAW_SCALES = {"normal": "σ", "laplace": "scale b", "student_t": "scale", "uniform": "half width"}


def qq(table: pd.DataFrame, subtitle: str | list[str], by: str, law: str = "normal") -> Chart:
    """Chart of laws.qq, with the line on which values that follow the law lie."""
    name, scale = LAW_TITLES[law], LAW_SCALES[law]
    centre = "mean" if law == "normal" else "location"
    titles = (f"{name} quantile ({scale})", f"value − {centre} ({scale})", f"{name} ({scale})", f"values ({scale})")
    title = style.title(f"Q–Q against a {name}", subtitle)
    chart = _qq(table, by, titles, title)
    if len(table["group"].unique()) != 1:
        return chart
    line = plot.mark("line", quartile_line(table), x="x", y="y", **EQUAL | {"strokeDash": [1, 3]})
    return plot.layers(title, "", line, chart)


def quartile_line(table: pd.DataFrame) -> pd.DataFrame:
    """The line through the first and the third quartile of laws.qq of one group: columns x, y, its two ends. It stops
    where the values do."""
    below = table["share"].cumsum() - table["share"] / 2
    (x1, x2), (y1, y2) = (np.interp([0.25, 0.75], below, table[name]) for name in ("theoretical", "sample"))
    if not x2 > x1:
        return pd.DataFrame({"x": [], "y": []})
    slope, ends = (y2 - y1) / (x2 - x1), table["theoretical"].agg(["min", "max"]).to_numpy(float)
    low, high = float(table["sample"].min()), float(table["sample"].max())
    if slope > 0:
        ends = np.clip(ends, x1 + (low - y1) / slope, x1 + (high - y1) / slope)
    return pd.DataFrame({"x": ends, "y": y1 + slope * (ends - x1)})


def qq_between(table: pd.DataFrame, subtitle: str | list[str], by: str, other: str) -> Chart:
    """Chart of laws.qq_between, with the line for two equal distributions."""
    titles = (f"quantile of {other}", "quantile of the values", "the other", "values")
    return _qq(table, by, titles, style.title(f"Q–Q against {other}", subtitle))


def _qq(table: pd.DataFrame, by: str, titles: tuple[str, str, str, str], title: style.Title) -> Chart:
    groups = style.groups_of(table)
    ends = [float(table["theoretical"].min()), float(table["theoretical"].max())]
    on_line = np.linspace(ends[0], ends[1], 20)
    x, y = (np.append(table[name].to_numpy(float), on_line) for name in ("theoretical", "sample"))
    place = style.free_place(x, y, groups)
    tips: dict[str, plot.Tip] = {"group": by} if len(groups) > 1 else {}
    points = plot.mark(
        "point", table, size=18, opacity=0.8,
        x=plot.x("theoretical", titles[0], {"tickCount": 8}, nice=False, zero=False),
        y=plot.y("sample", titles[1], {"tickCount": 5}, zero=False),
        color=style.color(groups, by, place=place), shape=style.shape(groups, by, place),
        tips=tips | {"theoretical": (titles[2], ".4~g"), "sample": (titles[3], ".4~g")},
    )  # fmt: skip
    drawn = style.brushed(points, groups, "theoretical", IN_QQ, title, place)
    return plot.layers(title, "", plot.diagonal(*ends, **EQUAL), drawn)


# The part of a row that lies in the range `at`, see style.brushed.
OVERLAP = "max(0, min(datum.high, at[1]) - max(datum.low, at[0]))"
IN_BIN = f"datum.high > datum.low ? {OVERLAP} / (datum.high - datum.low) : 0"
IN_QQ = "at[0] <= datum.theoretical && datum.theoretical <= at[1] ? 1 : 0"
BOX_TITLES = {
    "min": "minimum",
    "p0_1": "0.1%",
    "q1": "25%",
    "median": "median",
    "q3": "75%",
    "p99_9": "99.9%",
    "max": "maximum",
}


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
