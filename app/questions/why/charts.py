"""A tensor over a format's codebook, by channel and by token."""

from __future__ import annotations

from typing import Literal

import altair as alt
import numpy as np
import pandas as pd

from binade.app import style
from binade.app.questions.shared.distribution_charts import explained
from binade.app.questions.shared.heatmap import heatmap
from binade.app.questions.why import compute
from binade.quant.specs import Spec

TAIL = 1e-4  # the share of the smallest values that may lie left of the axis
ZONES = {"flushed": style.BAD, "saturated": style.CLIPPED}


def codebook(
    table: pd.DataFrame, zones: pd.DataFrame, spec: Spec, edges: tuple[float, float], subtitle: str | list[str]
) -> alt.LayerChart | alt.FacetChart:
    """A histogram of the magnitudes over their scale, with the format's codes as ticks below. The ranges that are
    flushed and saturated are shaded and labelled in percent: of the nonzero values, and of all values. The tables:
    compute.codebook_histogram and zones."""
    share, of_nonzero = (zones.set_index("zone")[name] for name in ("share", "of_nonzero"))
    flush, clip = edges
    tail = table["low"][((table["high"] - table["low"]) * table["share"]).cumsum() >= TAIL]
    low = min(float(tail.min()) if len(tail) else flush - 2, flush - 2)
    high = max(float(table["high"].max()), clip + 1.5)
    top = float(table["share"].max()) * 1.22
    bands = pd.DataFrame(
        [
            {
                "zone": "flushed",
                "from": low,
                "to": flush,
                "text": f"flushed {of_nonzero['flushed']:.2%} of nonzero",
                "at": low,
            },
            {
                "zone": "saturated",
                "from": clip,
                "to": high,
                "text": f"saturated {share['saturated']:.2%} of all",
                "at": high,
            },
        ]
    ).assign(top=top, floor=0.0)
    ticks = pd.DataFrame({"log2": compute.code_magnitudes(spec.format.element)})
    x = alt.X(
        "from:Q",
        title=f"log₂ |value / {'scale' if spec.scale != 'none' else '1'}| (binades)",
        scale=alt.Scale(domain=[low, high], nice=False, zero=False),
        axis=style.binades(f"|value / {'scale' if spec.scale != 'none' else '1'}|", 12),
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
    sides: tuple[tuple[str, Literal["left", "right"], int], ...] = (("flushed", "left", 6), ("saturated", "right", -6))
    words = [
        alt.Chart(bands[bands["zone"] == zone])
        .mark_text(align=align, dx=dx, dy=10, baseline="top", fontSize=12, fontWeight=600)
        .encode(x="at:Q", y="top:Q", text="text:N", color=color)
        for zone, align, dx in sides
    ]
    title = style.title(f"Magnitudes over the codebook of {spec.format.title}", explained(subtitle, table))
    return alt.layer(shading, bars, marks, *words).properties(title=title)


def channels(table: pd.DataFrame, subtitle: str | list[str]) -> alt.Chart:
    """The largest magnitude of each channel, from compute.channels."""
    runs = bool((table["last"] > table["channel"]).any())
    tooltip = [alt.Tooltip("channel:Q", title="channel" if not runs else "channels from", format=",")]
    tooltip += [alt.Tooltip("last:Q", title="to", format=",")] if runs else []
    tooltip += [alt.Tooltip("absmax:Q", title="absmax", format=".4~g")]
    high = float(table["last"].max()) + 1
    result: alt.Chart = (
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
    return result


def tokens_by_channels(values: np.ndarray, shape: tuple[int, int], subtitle: str | list[str]) -> alt.LayerChart:
    """A heatmap of log2 of the largest magnitude of each cell of compute.pooled; cells of zeros are gray."""
    with np.errstate(divide="ignore"):
        log2 = np.log2(values)
    log2 = np.where(np.isfinite(log2), log2, np.nan)
    title = style.title("Magnitude by token and channel", subtitle)
    axes = ("channel (last axis)", 0, shape[1]), ("token (the other axes)", 0, shape[0])
    return heatmap(log2, title, *axes, "log₂ |value|")
