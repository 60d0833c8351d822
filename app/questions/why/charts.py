"""A tensor over a format's codebook, by channel and by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.params import Interval
from binade.app.questions.shared.distribution_charts import explained
from binade.app.questions.shared.heatmap import heatmap
from binade.app.questions.why import compute
from binade.quant.error_causes import CAUSES
from binade.quant.specs import Spec

TAIL = 1e-4  # the share of the smallest values that may lie left of the axis
ZONES = {"flushed": style.BAD, "saturated": style.CLIPPED}


def codebook(
    table: pd.DataFrame,
    words_of: dict[str, str],
    spec: Spec,
    edges: tuple[float, float],
    subtitle: str | list[str],
    only: str = "",
    behind: pd.DataFrame | None = None,
    marked: Interval | None = None,
) -> alt.LayerChart:
    """A histogram of the magnitudes over their scale, with the format's codes as ticks below. The ranges that are
    flushed and saturated are shaded and labelled with words_of. table: compute.codebook_histogram. only: what part of
    the tensor it is of; behind: the histogram of all, drawn in grey; marked: a range."""
    whole = table if behind is None else behind
    flush, clip = edges
    tail = whole["low"][((whole["high"] - whole["low"]) * whole["share"]).cumsum() >= TAIL]
    low = min(float(tail.min()) if len(tail) else flush - 2, flush - 2)
    high = max(float(whole["high"].max()), clip + 1.5)
    top = float(pd.concat([table["share"], whole["share"]]).max()) * 1.22
    bands = pd.DataFrame(
        [
            {
                "zone": "flushed",
                "from": low,
                "to": flush,
                "text": words_of["flushed"],
                "at": low,
            },
            {
                "zone": "saturated",
                "from": clip,
                "to": high,
                "text": words_of["saturated"],
                "at": high,
            },
        ]
    ).assign(top=top, floor=0.0)
    magnitude = "|value / scale|" if spec.block else "|value|"
    ticks = pd.DataFrame({"log2": compute.code_magnitudes(spec.format.element)})
    x = alt.X(
        "from:Q",
        title=f"log₂ {magnitude} (binades)",
        scale=alt.Scale(domain=[low, high], nice=False, zero=False),
        axis=style.binades(magnitude, 12),
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
        .mark_rect(strokeWidth=0, color=style.FORMAT_COLORS[spec.format.name], clip=True)
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
    sides: tuple[tuple[str, Literal["left", "right"], int, int], ...] = (
        ("flushed", "left", 6, 8),
        ("saturated", "right", -6, 24),
    )
    labels = [
        alt.Chart(bands[bands["zone"] == zone])
        .mark_text(align=align, dx=dx, dy=dy, baseline="top", fontSize=12, fontWeight=600)
        .encode(x="at:Q", y="top:Q", text="text:N", color=color)
        for zone, align, dx, dy in sides
    ]
    layers = [shading, bars, marks, *labels]
    if behind is not None:
        layers.insert(1, bars.properties(data=behind).mark_rect(strokeWidth=0, color=style.GREY, clip=True))
    if marked:
        band = alt.Chart(pd.DataFrame({"from": [marked.low], "to": [marked.high]})).encode(x=x, x2="to:Q")
        band = band.mark_rect(color=style.GREY, opacity=style.BAND, clip=True)
        layers.insert(0, band.add_params(style.clear("from")))
    name = f"Magnitudes over the codebook of {spec.format.title}{f': {only}' if only else ''}"
    return alt.LayerChart(layer=layers, title=style.title(name, explained(subtitle, table)))


def shares_of_error(shares: Sequence[float]) -> dict[str, str]:
    """The labels of the zones of a whole tensor: their shares of its squared error, in the order of CAUSES."""
    named = zip(CAUSES, shares, strict=True)
    return {cause: cause if math.isnan(share) else f"{cause}: {share:.2%} of the error" for cause, share in named}


def shares_of_values(zones: pd.DataFrame) -> dict[str, str]:
    """The labels of the zones of a part of a tensor, from compute.zones."""
    share, of_nonzero = (zones.set_index("zone")[name] for name in ("share", "of_nonzero"))
    flushed, saturated = of_nonzero["flushed"], share["saturated"]
    return {
        "flushed": f"flushed: {flushed:.2%} of its nonzero",
        "saturated": f"saturated: {saturated:.2%} of its values",
    }


def error_by_binade(
    table: pd.DataFrame, spec: Spec, edges: tuple[float, float], subtitle: str | list[str]
) -> alt.LayerChart:
    """Stacked bars of compute.error_by_binade, with rules at the edges of the zones of `codebook`."""
    names = {"flushed": "flushed", "saturated": "saturated", "grid": "within the grid"}
    used = [cause for cause in CAUSES if (table["cause"] == cause).any()]
    colors = ZONES | {"grid": style.FINE}
    magnitude = "|value / scale|" if spec.block else "|value|"
    by_size = table.sort_values("share").groupby(["low"])["share"].sum()
    shown = by_size[by_size >= TAIL].index
    low, high = min(float(shown.min()), edges[0] - 1), max(float(shown.max()) + 1, edges[1] + 1)
    x = alt.X("low:Q", scale=alt.Scale(domain=[low, high], nice=False, zero=False), axis=style.binades(magnitude, 12))
    color = alt.Color(
        "name:N",
        scale=alt.Scale(domain=[names[cause] for cause in used], range=[colors[cause] for cause in used]),
        legend=style.legend([names[cause] for cause in used], "cause"),
    )
    bars = (
        alt.Chart(table.assign(name=table["cause"].map(names)))
        .mark_rect(strokeWidth=0, clip=True)
        .encode(
            x=x,
            x2="high:Q",
            y=alt.Y("from:Q", title="share of the error", axis=alt.Axis(format="~%", tickCount=4)),
            y2="to:Q",
            color=color,
            tooltip=[
                alt.Tooltip("low:Q", title="log₂ from"),
                alt.Tooltip("high:Q", title="log₂ to"),
                alt.Tooltip("name:N", title="cause"),
                alt.Tooltip("share:Q", title="share of the squared error", format=".3~p"),
            ],
        )
    )
    rules = alt.Chart(pd.DataFrame({"low": list(edges)})).mark_rule(strokeDash=[4, 3], color=style.GREY).encode(x=x)
    return alt.LayerChart(layer=[rules, bars], title=style.title("Squared error by magnitude and cause", subtitle))


def channels(
    table: pd.DataFrame, title: str, subtitle: str | list[str], chosen: int | None = None, clickable: bool = True
) -> alt.Chart | alt.LayerChart:
    """A bar for each channel: the largest magnitude, from compute.channels, or the number of values in a range, from
    Held.by_channel. chosen: the first channel of the bar that is marked."""
    runs = bool((table["last"] > table["channel"]).any())
    tooltip = [alt.Tooltip("channel:Q", title="channel" if not runs else "channels from", format=",")]
    tooltip += [alt.Tooltip("last:Q", title="to", format=",")] if runs else []
    if "absmax" in table:
        y = alt.Y("absmax:Q", title="absmax")
        tooltip.append(alt.Tooltip("absmax:Q", title="absmax", format=".4~g"))
    else:
        y = alt.Y("values:Q", title="values in the range", axis=alt.Axis(tickMinStep=1))
        tooltip += [alt.Tooltip("values:Q", title="values in the range", format=","), alt.Tooltip("of:Q", format=",")]
    high = float(table["last"].max()) + 1
    bars: alt.Chart = (
        alt.Chart(table.assign(end=table["last"] + 1, floor=0.0))
        .mark_rect(color=style.FINE, strokeWidth=0, cursor="pointer" if clickable else alt.Undefined)
        .encode(
            x=alt.X("channel:Q", title="channel (last axis)", scale=alt.Scale(domain=[0, high], nice=False)),
            x2="end:Q",
            y=y,
            y2="floor:Q",
            tooltip=tooltip,
        )
    )
    named = style.title(title, subtitle)
    if clickable:
        bars = bars.add_params(style.choice("channel"))
    if chosen is None:
        return bars.properties(title=named)
    bars = bars.encode(opacity=alt.condition(alt.datum.channel == chosen, alt.value(1), alt.value(0.5)))
    last = float(table["last"][table["channel"] == chosen].iloc[0])
    rule = alt.Chart(pd.DataFrame({"channel": [(chosen + last + 1) / 2]}))
    rule = rule.mark_rule(strokeDash=[4, 3], color=style.GREY).encode(x="channel:Q")
    return alt.LayerChart(layer=[rule, bars], title=named)


def tokens_by_channels(
    values: np.ndarray,
    shape: tuple[int, int],
    subtitle: str | list[str],
    title: str = "Magnitude by token and channel",
    of: str = "value",
) -> alt.LayerChart:
    """A heatmap of log2 of the largest magnitude of each cell of compute.pooled; cells of zeros are gray."""
    with np.errstate(divide="ignore"):
        log2 = np.log2(values)
    log2 = np.where(np.isfinite(log2), log2, np.nan)
    missing = "zero or not finite"
    return heatmap(log2, style.title(title, subtitle), *_axes(shape), f"log₂ |{of}|", missing=missing)


def range_by_cell(share: np.ndarray, shape: tuple[int, int], words: str, subtitle: str | list[str]) -> alt.LayerChart:
    """A heatmap of the share of each cell's values that lie in a range, from Held.by_cell: not zero everywhere."""
    title = style.title(f"Share of values in {words} by token and channel", subtitle)
    limits = 0.0, float(np.nanmax(share)) * 100
    return heatmap(share * 100, title, *_axes(shape), "% of values", limits, missing="not in the sample")


def _axes(shape: tuple[int, int]) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("channel (last axis)", shape[1]), ("token (the other axes)", shape[0])
