"""Small tables to Altair charts: one visual language for every page. No Streamlit here.

A format has one colour everywhere. Titles say what is plotted, subtitles from what; axes carry units.
"""

from __future__ import annotations

import math
import re

import altair as alt
import pandas as pd

FORMAT_COLORS = {
    "bf16": "#64748b",
    "fp16": "#8b827b",
    "fp8_e4m3": "#0e7490",
    "fp8_e5m2": "#0e9fbf",
    "hifp8": "#d97706",
    "mxfp8": "#2563eb",
    "mxfp8_e5m2": "#5b8def",
    "mxfp6_e3m2": "#7c3aed",
    "mxfp6_e2m3": "#9d7bf0",
    "mxfp4": "#dc2626",
    "mxint8": "#059669",
    "nvfp4": "#65a30d",
}
# For groups that are no formats: none of the colours above. All are readable on light and on dark.
PALETTE = ["#6366f1", "#c2850c", "#0d9488", "#db2777", "#4d8f2a", "#a855c7", "#0284c7", "#b4633a", "#e0455f", "#6b7a90"]
MAX_GROUPS = len(PALETTE)
GREY = "#737b91"  # of what belongs to no group: readable on light and on dark
DASHES = ([1, 0], [6, 3], [2, 2])
SHAPES = ("circle", "triangle-up", "cross")

_FORMAT = "|".join(sorted(FORMAT_COLORS, key=len, reverse=True))
_FORMAT_IN = re.compile(rf"(?<![A-Za-z0-9])({_FORMAT})(?![A-Za-z0-9_])")
_RECIPE = re.compile(rf"(FA_)?(linear_)?({_FORMAT})( at .*)?")  # "mxfp8 at 08:31:18 UTC" is a run


def _format_in(group: str) -> str | None:
    """The format that a quant type, a recipe or a label names: "FA_linear_mxfp8_e5m2" is mxfp8_e5m2."""
    named = _FORMAT_IN.findall(group)
    return named[-1] if named else None


def _styles(groups: list[str]) -> tuple[list[str], list[int]]:
    """(colours, which dash or shape). A group that names a format has the format's colour. Recipes of one format differ
    by dash or shape; where that would not do, and for other groups, colours are from the palette."""
    formats = [_format_in(group) for group in groups]
    most = len(DASHES) if all(_RECIPE.fullmatch(group) for group in groups) else 1
    if None in formats or max((formats.count(name) for name in formats), default=0) > most:
        return [PALETTE[i % len(PALETTE)] for i in range(len(groups))], [0] * len(groups)
    nth = [formats[:index].count(name) for index, name in enumerate(formats)]
    return [FORMAT_COLORS[name] for name in formats if name], nth


def colors(groups: list[str]) -> list[str]:
    """One colour a group."""
    return _styles(groups)[0]


LEGEND_WIDTH = 400  # pixels that every chart has for its legend


def _columns(groups: list[str]) -> int:
    return max(1, min(len(groups), LEGEND_WIDTH // (44 + 7 * max(len(group) for group in groups))))


def legend_height(groups: list[str]) -> int:
    """Pixels that a chart's legend needs, 0 for a single group: it has none."""
    return 36 + 18 * math.ceil(len(groups) / _columns(groups)) if len(groups) > 1 else 0


def _legend(groups: list[str], title: str, line: bool = False) -> alt.Legend | None:
    if len(groups) < 2:
        return None
    return alt.Legend(
        title=title,
        orient="bottom",
        columns=_columns(groups),
        labelLimit=LEGEND_WIDTH - 20,
        rowPadding=2,
        symbolType="stroke" if line else alt.Undefined,
    )


def _color(groups: list[str], title: str, legend: bool = True, line: bool = False) -> alt.Color:
    scale = alt.Scale(domain=groups, range=colors(groups))
    return alt.Color("group:N", scale=scale, legend=_legend(groups, title, line) if legend else None)


def _dash(groups: list[str], title: str) -> alt.StrokeDash:
    scale = alt.Scale(domain=groups, range=[DASHES[n] for n in _styles(groups)[1]])
    return alt.StrokeDash("group:N", scale=scale, legend=_legend(groups, title, line=True))


def _shape(groups: list[str], title: str) -> alt.Shape:
    scale = alt.Scale(domain=groups, range=[SHAPES[n] for n in _styles(groups)[1]])
    return alt.Shape("group:N", scale=scale, legend=_legend(groups, title))


def _title(text: str, subtitle: str) -> alt.TitleParams:
    return alt.TitleParams(text, subtitle=subtitle, anchor="start", subtitleColor=GREY, subtitleFontSize=12, offset=12)


def _groups(table: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(table["group"]))


def _outline(table: pd.DataFrame) -> pd.DataFrame:
    """The bins of each group as the corners of a line that steps after each: down to 0 in gaps and at both ends."""
    parts = []
    for group, bins in table.groupby("group", sort=False):
        ends = bins["high"][
            (bins["high"] < bins["low"].shift(-1) - 1e-9 * bins["high"].abs()) | bins["low"].shift(-1).isna()
        ]
        corners = pd.concat([bins["low"].iloc[:1], ends])
        flat = pd.DataFrame({"group": group, "low": corners, "high": corners, "share": 0.0})
        parts.append(pd.concat([flat.iloc[:1], bins, flat.iloc[1:]]).sort_values("low", kind="stable"))
    return pd.concat(parts, ignore_index=True)


def _histogram(
    table: pd.DataFrame, x: str, y: str, title: alt.TitleParams, by: str, groups: list[str], tooltip: list
) -> alt.Chart:
    """Filled bars for one group; outlines for several, which would only muddy each other."""
    x_axis = alt.X("low:Q", title=x, scale=alt.Scale(nice=False, zero=False), axis=alt.Axis(tickCount=8))
    y_axis = alt.Y("share:Q", title=y, axis=alt.Axis(format="~%", tickCount=5), stack=None)
    color = _color(groups, by, line=True)
    if len(groups) == 1:
        bars = alt.Chart(table, title=title).mark_rect(strokeWidth=0)
        return bars.encode(x=x_axis, x2="high:Q", y=y_axis, y2=alt.datum(0), color=color, tooltip=tooltip)
    lines = alt.Chart(_outline(table), title=title).mark_line(interpolate="step-after", strokeWidth=1.8)
    return lines.encode(
        x=x_axis,
        y=y_axis,
        color=color,
        strokeDash=_dash(groups, by),
        tooltip=[alt.Tooltip("group:N", title=by), *tooltip],
    )


def linear_histogram(table: pd.DataFrame, subtitle: str, by: str, groups: list[str] | None = None) -> alt.Chart:
    """Of analysis.linear_histogram. groups: all that are shown beside it, so that their colours agree."""
    tooltip = [
        alt.Tooltip("low:Q", title="from", format=".4~g"),
        alt.Tooltip("high:Q", title="to", format=".4~g"),
        alt.Tooltip("share:Q", title="share of values", format=".3~p"),
    ]
    return _histogram(
        table,
        "value",
        "share of values in the bin",
        _title("Distribution of values", subtitle),
        by,
        groups or _groups(table),
        tooltip,
    )


def log2_histogram(table: pd.DataFrame, subtitle: str, by: str, groups: list[str] | None = None) -> alt.Chart:
    """Of analysis.log2_histogram. groups: all that are shown beside it, so that their colours agree."""
    tooltip = [
        alt.Tooltip("low:Q", title="log₂ from", format=".3~f"),
        alt.Tooltip("high:Q", title="log₂ to", format=".3~f"),
        alt.Tooltip("share:Q", title="share of values per binade", format=".3~p"),
    ]
    title = _title("Distribution of magnitudes", subtitle)
    return _histogram(
        table, "log₂ |value| (binades)", "share of values per binade", title, by, groups or _groups(table), tooltip
    )


def qq_normal(table: pd.DataFrame, subtitle: str, by: str, groups: list[str] | None = None) -> alt.LayerChart:
    """Of analysis.qq_normal, with the line on which a normal would lie. groups as in the histograms."""
    groups = groups or _groups(table)
    reach = float(table["theoretical"].abs().max())
    line = alt.Chart(pd.DataFrame({"x": [-reach, reach], "y": [-reach, reach]})).mark_line(
        strokeDash=[5, 4], color=GREY, strokeWidth=1.5
    )
    tooltip = [
        alt.Tooltip("theoretical:Q", title="normal (σ)", format=".3f"),
        alt.Tooltip("sample:Q", title="values (σ)", format=".3f"),
    ]
    if len(groups) > 1:
        tooltip = [alt.Tooltip("group:N", title=by), *tooltip]
    points = (
        alt.Chart(table)
        .mark_point(filled=True, size=18, opacity=0.8)
        .encode(
            x=alt.X(
                "theoretical:Q", title="normal quantile (σ)", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=8)
            ),
            y=alt.Y("sample:Q", title="value − mean (σ)", axis=alt.Axis(tickCount=5)),
            color=_color(groups, by),
            shape=_shape(groups, by),
            tooltip=tooltip,
        )
    )
    return (line.encode(x="x:Q", y="y:Q") + points).properties(title=_title("Q–Q against a normal", subtitle))


BOX_TITLES = {
    "min": "minimum",
    "p0_1": "0.1 %",
    "q1": "25 %",
    "median": "median",
    "q3": "75 %",
    "p99_9": "99.9 %",
    "max": "maximum",
}


def boxes(
    table: pd.DataFrame, subtitle: str, by: str, groups: list[str] | None = None, log2: bool = False
) -> alt.LayerChart:
    """Of analysis.boxes: quartile box, whiskers at 0.1 % and 99.9 %, dots at the extremes. groups as in the histograms.

    log2: the table is of analysis.magnitudes.
    """
    groups, shown = groups or _groups(table), _groups(table)
    tooltip = [alt.Tooltip("group:N", title=by)]
    tooltip += [alt.Tooltip(f"{name}:Q", title=title, format=".4~g") for name, title in BOX_TITLES.items()]
    y = alt.Y("group:N", title=None, sort=shown, axis=alt.Axis(labelLimit=320, domain=False, ticks=False))
    color = _color(groups, by, legend=False)
    base = alt.Chart(table).encode(y=y, tooltip=tooltip)
    x = alt.X(
        "p0_1:Q",
        title="log₂ |value| (binades)" if log2 else "value",
        scale=alt.Scale(zero=False, nice=False, padding=16),
        axis=alt.Axis(tickCount=8),
    )
    whisker = base.mark_rule(strokeWidth=1.5).encode(x=x, x2="p99_9:Q", color=color)
    size = 14 if len(shown) > 4 else 20
    box = base.mark_bar(size=size, opacity=0.4).encode(x="q1:Q", x2="q3:Q", color=color)
    middle = base.mark_tick(size=size + 6, thickness=2.5).encode(x="median:Q", color=color)
    ends = [base.mark_circle(size=26, opacity=0.9).encode(x=f"{end}:Q", color=color) for end in ("min", "max")]
    title = "Spread of magnitudes" if log2 else "Spread of values"
    return alt.layer(whisker, box, middle, *ends).properties(title=_title(title, subtitle))


def boxes_height(table: pd.DataFrame) -> int:
    """Pixels that a box chart of these groups needs, title and axis included."""
    return 120 + 34 * len(table)


ERROR_PANELS = (
    ("sqnr_db", "SQNR", "dB, higher is better", 1.0),
    ("flush_to_zero", "Flushed to zero", "% of the nonzero values", 100.0),
    ("saturated", "Saturated", "% of the values", 100.0),
)


def format_panels(table: pd.DataFrame) -> list[alt.LayerChart]:
    """Of analysis.format_comparison: SQNR, flush and saturation, one bar a format, the figure beside the bar."""
    order = [name for name in FORMAT_COLORS if name in set(table["format"])]
    colors = alt.Scale(domain=order, range=[FORMAT_COLORS[name] for name in order])
    panels = []
    for column, name, unit, factor in ERROR_PANELS:
        shown = table[["format", "tensors"]].assign(value=table[column] * factor)
        shown["label"] = shown["value"].map(lambda v, sqnr=column == "sqnr_db": _number(v, sqnr))
        shown["value"] = shown["value"].where(shown["value"].abs() < math.inf)
        shown["end"] = shown["value"].fillna(0.0)
        lowest = min(float(shown["value"].min()), 0.0) if shown["value"].notna().any() else 0.0
        largest = shown["value"].max()
        base = alt.Chart(shown).encode(
            y=alt.Y("format:N", title=None, sort=order, axis=alt.Axis(ticks=False, domain=False, labelLimit=120)),
            tooltip=[
                alt.Tooltip("format:N", title="format"),
                alt.Tooltip("value:Q", title=f"{name} ({unit})", format=".4~g"),
                alt.Tooltip("tensors:Q", title="operands"),
            ],
        )
        x_axis = alt.X(
            "value:Q",
            title=unit,
            scale=alt.Scale(domain=[lowest * 1.1, float(largest) * 1.25 if largest > 0 else 1.0], nice=False),
            axis=alt.Axis(tickCount=4),
        )
        bars = base.mark_bar(size=18, cornerRadiusEnd=3).encode(
            x=x_axis, color=alt.Color("format:N", scale=colors, legend=None)
        )
        text = base.mark_text(align="left", dx=5, color=GREY, fontSize=12).encode(x="end:Q", text="label:N")
        panels.append((bars + text).properties(title=alt.TitleParams(name, anchor="start", fontSize=13)))
    return panels


def format_height(table: pd.DataFrame) -> int:
    """Pixels that a format panel needs."""
    return 100 + 34 * table["format"].nunique()


def _number(value: float, sqnr: bool) -> str:
    if pd.isna(value):
        return "no value"
    if math.isinf(value):
        return "no error" if value > 0 else "overflows"
    return f"{value:.1f}" if sqnr else f"{value:.2g}"


def losses(table: pd.DataFrame) -> alt.LayerChart:
    """Columns group (a run), iteration, loss: a line a run; warm-up lies left of the rule at 0."""
    groups = _groups(table)
    tooltip = [
        alt.Tooltip("group:N", title="run"),
        alt.Tooltip("iteration:Q", title="iteration"),
        alt.Tooltip("loss:Q", format=".4f", title="loss (nats per token)"),
    ]
    lines = (
        alt.Chart(table)
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=18))
        .encode(
            x=alt.X(
                "iteration:Q",
                title="iteration (below 0: warm-up in bf16)",
                axis=alt.Axis(tickMinStep=1),
                scale=alt.Scale(nice=False),
            ),
            y=alt.Y("loss:Q", title="loss (nats per token)", scale=alt.Scale(zero=False)),
            color=_color(groups, "run", line=True),
            strokeDash=_dash(groups, "run"),
            tooltip=tooltip,
        )
    )
    start = alt.Chart(pd.DataFrame({"x": [0]})).mark_rule(strokeDash=[4, 4], color=GREY).encode(x="x:Q")
    return (start + lines).properties(title=_title("Training loss", "cross entropy of each iteration"))
