"""Distributions of values: histograms, Q-Q plots and box plots."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style


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
    return pd.DataFrame({name: np.insert(each, at, corners.get(name, 0.0)) for name, each in columns.items()})


def histogram(
    table: pd.DataFrame,
    subtitle: str | list[str],
    by: str,
    groups: list[str] | None = None,
    linear: bool = False,
    looks: style.Looks | None = None,
    axis: str = "",
    place: style.Place | None = None,
    low: float | None = None,
) -> alt.LayerChart:
    """Draws distributions.log2_histogram or linear_histogram. groups: those of the charts next to it, so that colors
    agree. looks: of groups that have one already. axis: the title of the x axis. place: of the legend. low: where the
    x axis begins, if not where the values do.

    One group is drawn as filled bars, several as outlines, since overlapping bars are hard to read.
    """
    groups = groups or style.groups_of(table)
    x, y = (
        ("value", "share of values in the bin") if linear else ("log₂ |value| (binades)", "share of values per binade")
    )
    x = axis or x
    ticks = alt.Axis(tickCount=8) if linear else style.binades(axis or "|value|")
    log, number = ("", ".4~g") if linear else ("log₂ ", ".3~f")
    title = style.title(
        "Distribution of values" if linear else "Distribution of magnitudes", explained(subtitle, table)
    )
    tooltip = [
        alt.Tooltip("low:Q", title=f"{log}from", format=number),
        alt.Tooltip("high:Q", title=f"{log}to", format=number),
        alt.Tooltip("share:Q", title="share of values" if linear else y, format=".3~p"),
    ]
    domain = alt.Undefined if low is None else [low, float(table["high"].max())]
    x_axis = alt.X("low:Q", title=x, scale=alt.Scale(nice=False, zero=False, domain=domain), axis=ticks)
    y_axis = alt.Y("share:Q", title=y, axis=alt.Axis(format="~%", tickCount=5), stack=None)
    place = place or style.free_place(table["low"].to_numpy(float), table["share"].to_numpy(float), groups)
    color = style.color(groups, by, line=True, own=looks, place=place)
    if len(groups) == 1:
        bars = alt.Chart(table).mark_rect(strokeWidth=0, clip=True)
        drawn = bars.encode(x=x_axis, x2="high:Q", y=y_axis, y2=alt.datum(0), color=color, tooltip=tooltip)
    else:
        tooltip = [alt.Tooltip("group:N", title=by), *tooltip]
        lines = alt.Chart(_outline(table)).mark_line(interpolate="step-after", strokeWidth=1.8, clip=True)
        drawn = lines.encode(
            x=x_axis, y=y_axis, color=color, strokeDash=style.dash(groups, by, place, looks), tooltip=tooltip
        )
    share = "datum.share" if linear else "datum.share * (datum.high - datum.low)"
    return style.brushed(drawn, groups, "low", IN_BIN, title, place, share)


def explained(subtitle: str | list[str], table: pd.DataFrame) -> str | list[str]:
    """The subtitle, with an explanation of shares per binade above 100% if there are any."""
    if not (table["share"] > 1).any():
        return subtitle
    dense = "shares per binade are densities: they exceed 100% where values crowd into part of a binade"
    return [*([subtitle] if isinstance(subtitle, str) else subtitle), dense]


EQUAL: dict[str, Any] = {"strokeDash": [5, 4], "color": style.GREY, "strokeWidth": 1.5}  # the line of equal quantiles
LAW_TITLES = {"normal": "normal", "laplace": "Laplace", "student_t": "Student’s t", "uniform": "uniform"}
LAW_SCALES = {"normal": "σ", "laplace": "scale b", "student_t": "scale", "uniform": "half width"}


def qq(
    table: pd.DataFrame,
    subtitle: str | list[str],
    by: str,
    groups: list[str] | None = None,
    law: str = "normal",
    looks: style.Looks | None = None,
) -> alt.LayerChart:
    """Chart of laws.qq, with the line on which values that follow the law lie. groups as in the histograms."""
    name, scale = LAW_TITLES[law], LAW_SCALES[law]
    centre = "mean" if law == "normal" else "location"
    titles = (f"{name} quantile ({scale})", f"value − {centre} ({scale})", f"{name} ({scale})", f"values ({scale})")
    chart = _qq(table, by, groups, titles, style.title(f"Q–Q against a {name}", subtitle), looks)
    if len(table["group"].unique()) != 1:
        return chart
    line = alt.Chart(quartile_line(table)).mark_line(strokeDash=[1, 3], color=style.GREY, strokeWidth=1.5)
    result: alt.LayerChart = (line.encode(x="x:Q", y="y:Q") + chart).properties(title=chart.title)
    return result


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


def qq_between(table: pd.DataFrame, subtitle: str | list[str], by: str, other: str) -> alt.LayerChart:
    """Chart of laws.qq_between, with the line for two equal distributions."""
    titles = (f"quantile of {other}", "quantile of the values", "the other", "values")
    return _qq(table, by, None, titles, style.title(f"Q–Q against {other}", subtitle))


def _qq(
    table: pd.DataFrame,
    by: str,
    groups: list[str] | None,
    titles: tuple[str, str, str, str],
    title: alt.TitleParams,
    looks: style.Looks | None = None,
) -> alt.LayerChart:
    groups = groups or style.groups_of(table)
    ends = [float(table["theoretical"].min()), float(table["theoretical"].max())]
    on_line = np.linspace(ends[0], ends[1], 20)
    x, y = (np.append(table[name].to_numpy(float), on_line) for name in ("theoretical", "sample"))
    place = style.free_place(x, y, groups)
    line = alt.Chart(pd.DataFrame({"x": ends, "y": ends})).mark_line(**EQUAL)
    tooltip = [
        alt.Tooltip("theoretical:Q", title=titles[2], format=".4~g"),
        alt.Tooltip("sample:Q", title=titles[3], format=".4~g"),
    ]
    if len(groups) > 1:
        tooltip = [alt.Tooltip("group:N", title=by), *tooltip]
    points = (
        alt.Chart(table)
        .mark_point(filled=True, size=18, opacity=0.8)
        .encode(
            x=alt.X(
                "theoretical:Q", title=titles[0], scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(tickCount=8)
            ),
            y=alt.Y("sample:Q", title=titles[1], scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5)),
            color=style.color(groups, by, own=looks, place=place),
            shape=style.shape(groups, by, place, looks),
            tooltip=tooltip,
        )
    )
    drawn = style.brushed(points, groups, "theoretical", IN_QQ, title, place)
    result: alt.LayerChart = line.encode(x="x:Q", y="y:Q") + drawn
    return result.properties(title=title)


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


def boxes(
    table: pd.DataFrame,
    subtitle: str,
    by: str,
    groups: list[str] | None = None,
    log2: bool = False,
    looks: style.Looks | None = None,
) -> alt.LayerChart | alt.FacetChart:
    """Chart of distributions.boxes: quartile box, whiskers at 0.1% and 99.9%, dots at the extremes. groups: as above.

    log2: the table is of distributions.magnitudes.
    """
    groups, shown = groups or style.groups_of(table), style.groups_of(table)
    tooltip = [alt.Tooltip("group:N", title=by)]
    tooltip += [alt.Tooltip(f"{name}:Q", title=title, format=".4~g") for name, title in BOX_TITLES.items()]
    color = style.color(groups, by, shown=False, own=looks)
    base = alt.Chart(table).encode(y=style.names_axis("group", shown, 320), tooltip=tooltip)
    x = alt.X(
        "p0_1:Q",
        title="log₂ |value| (binades)" if log2 else "value",
        scale=alt.Scale(zero=False, nice=False, padding=16),
        axis=style.binades("|value|") if log2 else alt.Axis(tickCount=8),
    )
    whisker = base.mark_rule(strokeWidth=1.5).encode(x=x, x2="p99_9:Q", color=color)
    size = 14 if len(shown) > 4 else 20
    box = base.mark_bar(size=size, opacity=0.4).encode(x="q1:Q", x2="q3:Q", color=color)
    middle = base.mark_tick(size=size + 6, thickness=2.5).encode(x="median:Q", color=color)
    ends = [base.mark_circle(size=26, opacity=0.9).encode(x=f"{end}:Q", color=color) for end in ("min", "max")]
    title = "Spread of magnitudes" if log2 else "Spread of values"
    return alt.layer(whisker, box, middle, *ends).properties(title=style.title(title, subtitle))


def boxes_height(table: pd.DataFrame) -> int:
    """Pixels that a box chart of these groups needs, title and axis included."""
    return 120 + 34 * len(table)
