"""One tensor: against a codebook, by channel and token, by block, by code, by head."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.analysis import anatomy
from binade.app.charts.image import heatmap
from binade.quant.blocks import DENORMAL, SPECIAL, ZERO
from binade.quant.formats import Format

TIER_COLORS = {
    "7 mantissa bits": "#3730a3",
    "10 mantissa bits": "#3730a3",
    "6 mantissa bits": "#3730a3",
    "3 mantissa bits": "#4f46e5",
    "2 mantissa bits": "#0284c7",
    "1 mantissa bit": "#0d9488",
    "0 mantissa bits": "#0d9488",
    DENORMAL: "#b4633a",
    ZERO: style.GREY,
    SPECIAL: "#db2777",
}
TAIL = 1e-4  # the share of the smallest values that may lie left of the axis
ZONES = {"flushed": style.BAD, "saturated": style.CLIPPED}


def codebook(
    table: pd.DataFrame, zones: pd.DataFrame, fmt: Format, edges: tuple[float, float], subtitle: str | list[str]
) -> alt.LayerChart:
    """Of anatomy.codebook_histogram and zones: magnitudes over their scale, the format's codes as ticks beneath, what
    flushes and what saturates shaded and told in percent."""
    share = zones.set_index("zone")["share"]
    flush, clip = edges
    tail = table["low"][((table["high"] - table["low"]) * table["share"]).cumsum() >= TAIL]
    low = min(float(tail.min()) if len(tail) else flush - 2, flush - 2)
    high = max(float(table["high"].max()), clip + 1.5)
    top = float(table["share"].max()) * 1.22
    bands = pd.DataFrame(
        [
            {"zone": "flushed", "from": low, "to": flush, "text": f"flushed {share['flushed']:.2%}", "at": low},
            {"zone": "saturated", "from": clip, "to": high, "text": f"saturated {share['saturated']:.2%}", "at": high},
        ]
    ).assign(top=top, floor=0.0)
    ticks = pd.DataFrame({"log2": anatomy.code_magnitudes(fmt.element)})
    x = alt.X(
        "from:Q",
        title=f"log₂ |value / {'scale' if fmt.scaling != 'none' else '1'}| (binades)",
        scale=alt.Scale(domain=[low, high], nice=False, zero=False),
        axis=alt.Axis(tickCount=12),
    )
    y = alt.Y(
        "share:Q",
        title="share of values per binade",
        scale=alt.Scale(domain=[-top * 0.045, top], nice=False),
        axis=alt.Axis(format="~%", tickCount=5),
    )
    color = alt.Color("zone:N", scale=alt.Scale(domain=list(ZONES), range=list(ZONES.values())), legend=None)
    shading = (
        alt.Chart(bands).mark_rect(opacity=0.16).encode(x=x, x2="to:Q", y=alt.Y("floor:Q"), y2="top:Q", color=color)
    )
    bars = (
        alt.Chart(table)
        .mark_rect(strokeWidth=0, color=style.FORMAT_COLORS[fmt.name], clip=True)
        .encode(
            x="low:Q",
            x2="high:Q",
            y=y,
            y2=alt.datum(0),
            tooltip=[
                alt.Tooltip("low:Q", title="log₂ from", format=".3~f"),
                alt.Tooltip("high:Q", title="log₂ to", format=".3~f"),
                alt.Tooltip("share:Q", title="share of values per binade", format=".3~p"),
            ],
        )
    )
    marks = alt.Chart(ticks.assign(y=-top * 0.022)).mark_tick(
        thickness=1, size=9, orient="vertical", color=style.GREY, clip=True
    )
    marks = marks.encode(x="log2:Q", y="y:Q", tooltip=[alt.Tooltip("log2:Q", title="a code at log₂", format=".3~f")])
    words = [
        alt.Chart(bands[bands["zone"] == zone])
        .mark_text(align=align, dx=dx, dy=10, baseline="top", fontSize=12, fontWeight=600)
        .encode(x="at:Q", y="top:Q", text="text:N", color=color)
        for zone, align, dx in (("flushed", "left", 6), ("saturated", "right", -6))
    ]
    title = style.title(f"Magnitudes over the codebook of {fmt.title}", subtitle)
    return alt.layer(shading, bars, marks, *words).properties(title=title)


def channels(table: pd.DataFrame, subtitle: str | list[str]) -> alt.Chart:
    """Of anatomy.channels: the largest magnitude of each channel."""
    runs = bool((table["last"] > table["channel"]).any())
    tooltip = [alt.Tooltip("channel:Q", title="channel" if not runs else "channels from", format=",")]
    tooltip += [alt.Tooltip("last:Q", title="to", format=",")] if runs else []
    tooltip += [alt.Tooltip("absmax:Q", title="absmax", format=".4~g")]
    high = float(table["last"].max()) + 1
    return (
        alt.Chart(table.assign(end=table["last"] + 1, floor=0.0))
        .mark_rect(color=style.FINE, strokeWidth=0)
        .encode(
            x=alt.X("channel:Q", title="channel (last axis)", scale=alt.Scale(domain=[0, high], nice=False)),
            x2="end:Q",
            y=alt.Y("absmax:Q", title="absmax"),
            y2="floor:Q",
            tooltip=tooltip,
        )
        .properties(title=style.title("Largest magnitude by channel", subtitle))
    )


def tokens_by_channels(values: np.ndarray, shape: tuple[int, int], subtitle: str | list[str]) -> alt.LayerChart:
    """Of anatomy.pooled: log2 of the largest magnitude of each cell; an all-zero cell is grey."""
    with np.errstate(divide="ignore"):
        log2 = np.log2(values)
    log2 = np.where(np.isfinite(log2), log2, np.nan)
    title = style.title("Magnitude by token and channel", subtitle)
    axes = ("channel (last axis)", 0, shape[1]), ("token (the other axes)", 0, shape[0])
    return heatmap(log2, title, *axes, "log₂ |value|")


BLOCK_TITLES = {
    "sqnr_db": ("SQNR by block", "SQNR (dB)", True),
    "flush_to_zero": ("Flushed to zero by block", "flushed (%)", False),
    "saturated": ("Saturated by block", "saturated (%)", False),
    "scale_exponent": ("Scale exponent by block", "log₂ scale", False),
}


def block_map(grid: np.ndarray, metric: str, lines: int, per_line: int, subtitle: str | list[str]) -> alt.LayerChart:
    """Of anatomy.block_grid: lines of blocks, bright where it is bad; grey where a block is all zero."""
    name, unit, reverse = BLOCK_TITLES[metric]
    values = grid * 100 if metric in ("flush_to_zero", "saturated") else grid
    axes = ("block along the contracted axis", 0, per_line), ("line", 0, lines)
    return heatmap(values.astype(float), style.title(name, subtitle), *axes, unit, reverse=reverse)


def scale_exponents(table: pd.DataFrame, fmt: Format, subtitle: str | list[str]) -> alt.Chart:
    """Of anatomy.scale_histogram."""
    shown = table.assign(low=table["exponent"] - 0.45, high=table["exponent"] + 0.45, floor=0.0)
    return (
        alt.Chart(shown)
        .mark_rect(color=style.FORMAT_COLORS[fmt.name], strokeWidth=0)
        .encode(
            x=alt.X(
                "low:Q",
                title="block scale, log₂",
                axis=alt.Axis(tickMinStep=1),
                scale=alt.Scale(nice=False, padding=8, zero=False),
            ),
            x2="high:Q",
            y=alt.Y("share:Q", title="share of blocks", axis=alt.Axis(format="~%", tickCount=5)),
            y2="floor:Q",
            tooltip=[
                alt.Tooltip("exponent:Q", title="log₂ scale"),
                alt.Tooltip("blocks:Q", title="blocks", format=","),
                alt.Tooltip("share:Q", title="share of blocks", format=".3~p"),
            ],
        )
        .properties(title=style.title("Block scales", subtitle))
    )


def block_values(table: pd.DataFrame, fmt: Format, title: str, subtitle: str | list[str]) -> alt.LayerChart:
    """Of anatomy.block_values: each value as it is (ring) and as it was rounded (dot), and the way between."""
    tooltip = [
        alt.Tooltip("index:Q", title="place in the block"),
        alt.Tooltip("value:Q", title="value", format=".5~g"),
        alt.Tooltip("dequantized:Q", title="rounded to", format=".5~g"),
        alt.Tooltip("error:Q", title="error", format=".3~g"),
        alt.Tooltip("bits:N", title="code"),
    ]
    base = alt.Chart(table).encode(
        x=alt.X(
            "index:Q", title="place in the block", axis=alt.Axis(tickMinStep=1), scale=alt.Scale(nice=False, padding=12)
        ),
        tooltip=tooltip,
    )
    color = style.FORMAT_COLORS[fmt.name]
    way = base.mark_rule(color=style.BAD, strokeWidth=1.5).encode(y=alt.Y("value:Q", title="value"), y2="dequantized:Q")
    before = base.mark_point(size=46, color=style.GREY, strokeWidth=1.8).encode(y="value:Q")
    after = base.mark_point(size=30, filled=True, opacity=1, color=color).encode(y="dequantized:Q")
    return alt.layer(way, before, after).properties(title=style.title(title, subtitle))


def codes(table: pd.DataFrame, fmt: Format, subtitle: str | list[str]) -> alt.Chart:
    """Of anatomy.codes: the share of each code, in order of value, coloured by the width of its mantissa."""
    finite = table[np.isfinite(table["value"])].reset_index(drop=True)
    shown = finite.assign(order=finite.index, end=finite.index + 1, floor=0.0, text=finite["value"].map(style.short))
    names = [name for name in TIER_COLORS if name in set(shown["tier"])]
    color = alt.Color(
        "tier:N",
        scale=alt.Scale(domain=names, range=[TIER_COLORS[name] for name in names]),
        legend=alt.Legend(title=None, orient="top", columns=3),
    )
    width = fmt.element.bits
    few = len(shown) <= 32
    shown["bits"] = [f"{code:0{width}b}" for code in shown["code"]]
    tooltip = [
        alt.Tooltip("text:N", title="value (over the scale)"),
        alt.Tooltip("bits:N", title="code"),
        alt.Tooltip("count:Q", title="values", format=","),
        alt.Tooltip("share:Q", title="share of values", format=".3~p"),
        alt.Tooltip("tier:N", title="precision"),
    ]
    y = alt.Y("share:Q", title="share of values", axis=alt.Axis(format="~%", tickCount=5))
    title = style.title(f"Codes of {fmt.title} that are used", subtitle)
    if few:
        x = alt.X("text:O", title="code’s value, over the scale", sort=None, axis=alt.Axis(labelAngle=0))
        shown["text"] = [
            text if text != "0" or code == 0 else "−0" for text, code in zip(shown["text"], shown["code"], strict=True)
        ]
        return alt.Chart(shown).mark_bar().encode(x=x, y=y, color=color, tooltip=tooltip).properties(title=title)
    x = alt.X(
        "order:Q",
        title="codes, from the most negative value to the largest",
        scale=alt.Scale(domain=[0, len(shown)], nice=False),
        axis=alt.Axis(labels=False, ticks=False, grid=False),
    )
    bars = alt.Chart(shown).mark_rect(strokeWidth=0)
    return bars.encode(x=x, x2="end:Q", y=y, y2="floor:Q", color=color, tooltip=tooltip).properties(title=title)


def tiers(table: pd.DataFrame, subtitle: str | list[str]) -> alt.LayerChart:
    """Of anatomy.tiers: the share of the values that have each precision."""
    rows = list(table.itertuples())
    shown = table.assign(
        label=[f"{row.tier} · {row.used} of {row.codes}" for row in rows], text=[f"{row.share:.1%}" for row in rows]
    )
    base = alt.Chart(shown).encode(
        y=alt.Y(
            "label:N",
            title=None,
            sort=shown["label"].tolist(),
            axis=alt.Axis(ticks=False, domain=False, labelLimit=240),
        ),
        tooltip=[
            alt.Tooltip("tier:N", title="precision"),
            alt.Tooltip("share:Q", title="share of values", format=".3~p"),
            alt.Tooltip("used:Q", title="codes used"),
            alt.Tooltip("codes:Q", title="codes there are"),
        ],
    )
    x = alt.X(
        "share:Q",
        title="share of values",
        axis=alt.Axis(format="~%", tickCount=4),
        scale=alt.Scale(domain=[0, 1.5], nice=False),
    )
    x["axis"]["values"] = [0, 0.25, 0.5, 0.75, 1]
    scale = alt.Scale(domain=list(TIER_COLORS), range=list(TIER_COLORS.values()))
    bars = base.mark_bar(size=18, cornerRadiusEnd=3).encode(x=x, color=alt.Color("tier:N", scale=scale, legend=None))
    text = base.mark_text(align="left", dx=5, color=style.GREY, fontSize=12).encode(x="share:Q", text="text:N")
    return (bars + text).properties(title=style.title("Precision that the values get", subtitle))


# Attention


def _by_head(table: pd.DataFrame) -> alt.X:
    return alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0, labelOverlap=True))


def entropy(table: pd.DataFrame, subtitle: str | list[str]) -> alt.LayerChart:
    """Of attention.entropy: mean over queries, with the range; the dashed line is attention that looks everywhere."""
    tooltip = [
        alt.Tooltip("head:O", title="head"),
        alt.Tooltip("entropy:Q", title="mean entropy (bits)", format=".3f"),
        alt.Tooltip("lowest:Q", title="lowest of a query", format=".3f"),
        alt.Tooltip("highest:Q", title="highest of a query", format=".3f"),
    ]
    base = alt.Chart(table.assign(floor=0.0)).encode(x=_by_head(table), tooltip=tooltip)
    choice = style.choice("head")
    bars = (
        base.mark_bar(color=style.FINE, cursor="pointer")
        .encode(
            y=alt.Y("entropy:Q", title="entropy (bits)"),
            opacity=alt.condition(choice, alt.value(0.85), alt.value(0.35)),
        )
        .add_params(choice)
    )
    span = base.mark_rule(color=style.GREY, strokeWidth=1.2).encode(y="lowest:Q", y2="highest:Q")
    even = alt.Chart(table.head(1)).mark_rule(strokeDash=[5, 4], color=style.GREY).encode(y="uniform:Q")
    return (span + bars + even).properties(title=style.title("Entropy of the probabilities", subtitle))


def flushed_by_head(table: pd.DataFrame, fmt: Format, subtitle: str | list[str]) -> alt.Chart:
    """Of attention.flushed."""
    shown = table.assign(percent=table["flush_to_zero"] * 100, mass_percent=table["mass"] * 100)
    tooltip = [
        alt.Tooltip("head:O", title="head"),
        alt.Tooltip("percent:Q", title="flushed (% of the nonzero)", format=".3~g"),
        alt.Tooltip("mass_percent:Q", title="probability they held (%)", format=".3~g"),
    ]
    top = float(shown["percent"].max())
    scale = alt.Scale(domain=[0, 1]) if not top > 0 else alt.Undefined
    y = alt.Y("percent:Q", title="flushed (% of the nonzero)", scale=scale)
    bars = alt.Chart(shown).mark_bar(color=style.FORMAT_COLORS[fmt.name])
    title = style.title(f"How much of P flushes in {fmt.name}", subtitle)
    return bars.encode(x=_by_head(table), y=y, tooltip=tooltip).properties(title=title)


def score_ranges(table: pd.DataFrame, subtitle: str | list[str]) -> alt.LayerChart:
    """Of attention.ranges: quartile box, whiskers to the smallest and largest score."""
    names = (("low", "lowest"), ("q1", "25 %"), ("median", "median"), ("q3", "75 %"), ("high", "highest"))
    tooltip = [alt.Tooltip("head:O", title="head")]
    tooltip += [alt.Tooltip(f"{name}:Q", title=title, format=".4~g") for name, title in names]
    base = alt.Chart(table).encode(x=_by_head(table), tooltip=tooltip)
    line = base.mark_rule(color=style.FINE, strokeWidth=1.5).encode(y=alt.Y("low:Q", title="score"), y2="high:Q")
    box = base.mark_bar(color=style.FINE, opacity=0.4, size=16).encode(y="q1:Q", y2="q3:Q")
    middle = base.mark_tick(color=style.FINE, thickness=2.5, size=20, orient="horizontal").encode(y="median:Q")
    return (line + box + middle).properties(title=style.title("Range of the scores", subtitle))


def head_map(
    values: np.ndarray, size: tuple[int, int], name: str, subtitle: str | list[str], probs: bool
) -> alt.LayerChart:
    """Of attention.head_map; probabilities by their log2, so that the small ones show."""
    shown = values.astype(float)
    unit = "score"
    if probs:
        with np.errstate(divide="ignore", invalid="ignore"):
            shown = np.log2(shown)
        shown, unit = np.where(np.isfinite(shown), shown, np.nan), "log₂ P"
    axes = ("key", 0, size[1]), ("query", 0, size[0])
    limits = None
    if probs and np.isfinite(shown).any():
        top = float(np.nanmax(shown))
        limits = (max(float(np.nanmin(shown)), top - 24), top)
    return heatmap(shown, style.title(name, subtitle), *axes, unit, limits=limits)
