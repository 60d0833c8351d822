"""Small tables to Altair charts: one visual language for every page. No Streamlit here.

A format has one colour everywhere. Titles say what is plotted, subtitles from what; axes carry units.
"""

from __future__ import annotations

import altair as alt
import pandas as pd

FORMAT_COLORS = {
    "bf16": "#64748b",
    "fp16": "#a8a29e",
    "fp8_e4m3": "#0e7490",
    "fp8_e5m2": "#22d3ee",
    "hifp8": "#d97706",
    "mxfp8": "#2563eb",
    "mxfp8_e5m2": "#60a5fa",
    "mxfp6_e3m2": "#7c3aed",
    "mxfp6_e2m3": "#a78bfa",
    "mxfp4": "#dc2626",
    "mxint8": "#059669",
    "nvfp4": "#65a30d",
}
# For groups that are no formats.
PALETTE = ["#4f46e5", "#d97706", "#0d9488", "#db2777", "#65a30d", "#7c3aed", "#0284c7", "#b45309", "#be123c", "#475569"]
MAX_GROUPS = len(PALETTE)


def _format_in(group: str) -> str | None:
    """The format that a recipe or quant type names last: "FA_linear_mxfp8_e5m2" is mxfp8_e5m2."""
    fitting = [name for name in FORMAT_COLORS if group == name or group.endswith(f"_{name}")]
    return max(fitting, key=len, default=None)


def colors(groups: list[str]) -> list[str]:
    """One colour a group: the format's where each group names another format, else from the palette."""
    formats = [_format_in(group) for group in groups]
    if None not in formats and len(set(formats)) == len(formats):
        return [FORMAT_COLORS[name] for name in formats]
    return [PALETTE[i % len(PALETTE)] for i in range(len(groups))]


def _color(groups: list[str], title: str) -> alt.Color:
    legend = None
    if len(groups) > 1:
        wide = max(len(group) for group in groups) > 18
        legend = alt.Legend(title=title, orient="bottom", columns=1 if wide else 4, labelLimit=420)
    return alt.Color("group:N", scale=alt.Scale(domain=groups, range=colors(groups)), legend=legend)


def _title(text: str, subtitle: str) -> alt.TitleParams:
    return alt.TitleParams(text, subtitle=subtitle, anchor="start", subtitleColor="#8a91a5", subtitleFontSize=12, offset=12)


def _groups(table: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(table["group"]))


def _histogram(table: pd.DataFrame, x: str, y: str, title: alt.TitleParams, by: str, tooltip: list) -> alt.Chart:
    """Filled bars for one group; outlines for several, which would only muddy each other."""
    groups = _groups(table)
    x_axis = alt.X("low:Q", title=x, scale=alt.Scale(nice=False, zero=False))
    y_axis = alt.Y("share:Q", title=y, axis=alt.Axis(format="~%", tickCount=5), stack=None)
    color = _color(groups, by)
    base = alt.Chart(table, title=title)
    if len(groups) == 1:
        return base.mark_rect(strokeWidth=0).encode(
            x=x_axis, x2="high:Q", y=y_axis, y2=alt.datum(0), color=color, tooltip=tooltip
        )
    return base.mark_line(interpolate="step-after", strokeWidth=1.8).encode(
        x=x_axis, y=y_axis, color=color, tooltip=[alt.Tooltip("group:N", title=by), *tooltip]
    )


def linear_histogram(table: pd.DataFrame, subtitle: str, by: str) -> alt.Chart:
    """Of analysis.linear_histogram."""
    tooltip = [
        alt.Tooltip("low:Q", title="from", format=".4~g"),
        alt.Tooltip("high:Q", title="to", format=".4~g"),
        alt.Tooltip("share:Q", title="share of values", format=".3~%"),
    ]
    return _histogram(table, "value", "share of values in the bin", _title("Distribution of values", subtitle), by, tooltip)


def log2_histogram(table: pd.DataFrame, subtitle: str, by: str) -> alt.Chart:
    """Of analysis.log2_histogram."""
    tooltip = [
        alt.Tooltip("low:Q", title="log₂ from", format=".3~f"),
        alt.Tooltip("high:Q", title="log₂ to", format=".3~f"),
        alt.Tooltip("share:Q", title="share of values per binade", format=".3~%"),
    ]
    title = _title("Distribution of magnitudes", subtitle)
    return _histogram(table, "log₂ |value| (binades)", "share of values per binade", title, by, tooltip)


def qq_normal(table: pd.DataFrame, subtitle: str, by: str) -> alt.LayerChart:
    """Of analysis.qq_normal, with the line on which a normal would lie."""
    groups = _groups(table)
    reach = float(table["theoretical"].abs().max())
    line = alt.Chart(pd.DataFrame({"x": [-reach, reach], "y": [-reach, reach]})).mark_line(
        strokeDash=[5, 4], color="#8a91a5", strokeWidth=1.5
    )
    points = (
        alt.Chart(table)
        .mark_circle(size=18, opacity=0.8)
        .encode(
            x=alt.X("theoretical:Q", title="normal quantile (σ)", scale=alt.Scale(nice=False)),
            y=alt.Y("sample:Q", title="value − mean (σ)"),
            color=_color(groups, by),
            tooltip=([alt.Tooltip("group:N", title=by)] if len(groups) > 1 else [])
            + [
                alt.Tooltip("theoretical:Q", title="normal", format=".3f"),
                alt.Tooltip("sample:Q", title="values", format=".3f"),
            ],
        )
    )
    return (line.encode(x="x:Q", y="y:Q") + points).properties(title=_title("Q–Q against a normal", subtitle))


def boxes(table: pd.DataFrame, subtitle: str, by: str) -> alt.LayerChart:
    """Of analysis.boxes: quartile box, whiskers at 0.1 % and 99.9 %, dots at the extremes."""
    groups = _groups(table)
    tooltip = [alt.Tooltip("group:N", title=by)] + [
        alt.Tooltip(f"{name}:Q", title=title, format=".4~g")
        for name, title in (
            ("min", "minimum"),
            ("p0_1", "0.1 %"),
            ("q1", "25 %"),
            ("median", "median"),
            ("q3", "75 %"),
            ("p99_9", "99.9 %"),
            ("max", "maximum"),
        )
    ]
    y = alt.Y("group:N", title=None, sort=groups, axis=alt.Axis(labelLimit=240, domain=False, ticks=False))
    color = _color(groups, by)
    color.legend = None
    base = alt.Chart(table).encode(y=y, tooltip=tooltip)
    whisker = base.mark_rule(strokeWidth=1.5).encode(
        x=alt.X("p0_1:Q", title="value", scale=alt.Scale(zero=False, padding=12)), x2="p99_9:Q", color=color
    )
    size = 14 if len(groups) > 4 else 22
    box = base.mark_bar(size=size, opacity=0.85).encode(x="q1:Q", x2="q3:Q", color=color)
    middle = base.mark_tick(size=size, thickness=2, color="white").encode(x="median:Q")
    ends = [base.mark_circle(size=26, opacity=0.9).encode(x=f"{end}:Q", color=color) for end in ("min", "max")]
    return alt.layer(whisker, box, middle, *ends).properties(title=_title("Spread of values", subtitle))


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
        largest = shown["value"].max()
        base = alt.Chart(shown).encode(
            y=alt.Y("format:N", title=None, sort=order, axis=alt.Axis(ticks=False, domain=False, labelLimit=120)),
            tooltip=[
                alt.Tooltip("format:N"),
                alt.Tooltip("value:Q", title=f"{name} ({unit})", format=".4~g"),
                alt.Tooltip("tensors:Q", title="operands"),
            ],
        )
        x_axis = alt.X(
            "value:Q",
            title=unit,
            scale=alt.Scale(domain=[0, float(largest) * 1.25 if largest > 0 else 1.0], nice=False),
            axis=alt.Axis(tickCount=4),
        )
        bars = base.mark_bar(size=18, cornerRadiusEnd=3).encode(x=x_axis, color=alt.Color("format:N", scale=colors, legend=None))
        text = base.mark_text(align="left", dx=5, color="#8a91a5", fontSize=12).encode(x="value:Q", text="label:N")
        panels.append((bars + text).properties(title=alt.TitleParams(name, anchor="start", fontSize=13)))
    return panels


def format_height(table: pd.DataFrame) -> int:
    """Pixels that a format panel needs."""
    return 100 + 34 * table["format"].nunique()


def _number(value: float, sqnr: bool) -> str:
    if pd.isna(value):
        return "–"
    return f"{value:.1f}" if sqnr else f"{value:.2g}"


def losses(table: pd.DataFrame) -> alt.LayerChart:
    """Columns group (a run), iteration, loss: a line a run; warm-up lies left of the rule at 0."""
    groups = _groups(table)
    tooltip = [
        alt.Tooltip("group:N", title="run"),
        alt.Tooltip("iteration:Q"),
        alt.Tooltip("loss:Q", format=".4f", title="loss (nats per token)"),
    ]
    lines = (
        alt.Chart(table)
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=18))
        .encode(
            x=alt.X("iteration:Q", title="iteration (below 0: warm-up in bf16)", axis=alt.Axis(tickMinStep=1), scale=alt.Scale(nice=False)),
            y=alt.Y("loss:Q", title="loss (nats per token)", scale=alt.Scale(zero=False)),
            color=_color(groups, "run"),
            tooltip=tooltip,
        )
    )
    start = alt.Chart(pd.DataFrame({"x": [0]})).mark_rule(strokeDash=[4, 4], color="#8a91a5").encode(x="x:Q")
    return (start + lines).properties(title=_title("Training loss", "cross entropy of each iteration"))
