"""A tensor over a format's codebook, by column and by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from binade.app.draw import plot, style
from binade.app.draw.figure import Chart
from binade.app.questions.shared.axes import Axes
from binade.app.questions.shared.distribution_charts import explained
from binade.app.questions.shared.heatmap import heatmap
from binade.app.questions.why import compute
from binade.app.view.params import Interval
from binade.data.compare.evidence import SHARE
from binade.quant.error_causes import CAUSES
from binade.quant.specs import Spec

TAIL = 1e-4  # the share of the smallest values that may lie left of the axis
REACH = 12  # binades below the smallest value that is kept, of which the axis shows no more
ROOM = 1.25  # of the axis for the shares above the areas
COLORS = {"flushed": style.BAD, "saturated": style.CLIPPED, "grid": style.FINE}
WORDS = {"flushed": "flushed", "saturated": "saturated", "grid": "within the grid"}


def codebook(
    table: pd.DataFrame,
    error: pd.DataFrame,
    words_of: dict[str, str],
    spec: Spec,
    edges: tuple[float, float],
    subtitle: str | list[str],
    only: str = "",
    behind: pd.DataFrame | None = None,
    marked: Interval | None = None,
) -> Chart:
    """Where the squared error comes from: areas of compute.error_by_binade by cause, over the magnitudes by their
    scale, with the line of the values (table: compute.codebook_histogram) as high as the areas, the format's codes as
    ticks below, rules at the edges of its range and words_of for the causes. only: what part of the tensor the line is
    of; behind: that of all, in grey, without areas; marked: a range."""
    whole = table if behind is None else behind
    low, high = shown(whole, error, edges)
    most = float(pd.concat([table["share"], whole["share"]]).max())
    top = (float(error["to"].max()) if len(error) else most) * ROOM
    domain: plot.Look = {"domain": [-top * 0.045, top], "nice": False}
    x = plot.x("low", axis=style.binades(_magnitude(spec), 12), domain=[low, high], nice=False, zero=False)
    title = "share of the error per binade" if len(error) else "share of values per binade"
    y = plot.y("height", title, {"format": "~%", "tickCount": 5}, **domain)
    color = plot.named("cause", COLORS, None)
    tips = plot.tips(low=("log₂ from", ".3~f"), high=("log₂ to", ".3~f"), share=("share of values per binade", ".3~p"))
    bars: plot.Look = {"x": x, "high": "high", "y": y, "clip": True, "tips": tips}
    drawn, grey = (part.assign(height=part["share"] * top / ROOM / most) for part in (table, whole))
    marks: list[Chart] = [plot.steps(grey, color=style.GREY, opacity=0.3, **bars)]
    if behind is not None:
        marks.append(plot.steps(drawn, color=style.FORMAT_COLORS[spec.format.name], **bars))
    if len(error):
        named = error.assign(name=error["cause"].map(WORDS), height=error["from"])
        of_error = plot.tips(
            low="log₂ from", high="log₂ to", name="cause", share=("share of the squared error", ".3~p")
        )
        areas: plot.Look = {"x": x, "x2": "high", "y": y, "y2": "to", "clip": True, "tips": of_error}
        marks.append(plot.mark("rect", named, opacity=0.7, color=color, **areas))
    codes = pd.DataFrame({"low": compute.code_magnitudes(spec.format.element), "height": -top * 0.022})
    marks += [
        *(plot.rule(x=edge) for edge in edges),
        plot.mark(
            "tick", codes, x=x, y=y, tips=plot.tips(low=("a code at log₂", ".3~f")), thickness=1, size=9,
            orient="vertical", color=style.GREY, clip=True,
        ),
        *_words(words_of, (low, *edges, high), top, color),
    ]  # fmt: skip
    if marked:
        band = pd.DataFrame({"from": [marked.low], "to": [marked.high]})
        look: plot.Look = {"color": style.GREY, "opacity": style.BAND, "clip": True, "params": [style.clear("from")]}
        marks.insert(0, plot.mark("rect", band, x="from", x2="to", **look))
    name = f"Squared error over the codebook of {spec.format.title}"
    if only:
        name = f"Magnitudes over the codebook of {spec.format.title}: {only}"
    dense = table if only else pd.DataFrame({"share": [top / ROOM]})
    return plot.layers(name, explained(subtitle, dense), *marks)


def shown(whole: pd.DataFrame, error: pd.DataFrame, edges: tuple[float, float]) -> tuple[float, float]:
    """The ends of the axis: all but TAIL of the values, as far as REACH binades below the grid, and the error."""
    flush, clip = edges
    tail = whole["low"][((whole["high"] - whole["low"]) * whole["share"]).cumsum() >= TAIL]
    low = min(float(tail.min()) if len(tail) else flush, flush - 2)
    held = error[error["share"] >= TAIL] if len(error) else error
    low = max(low, min(flush - REACH, float(held["low"].min()) if len(held) else math.inf))
    return low, max(float(whole["high"].max()), clip + 1.5)


def _words(words_of: dict[str, str], ends: Sequence[float], top: float, color: Any) -> list[Chart]:
    """The text of each cause, above its part of the axis."""
    low, flush, clip, high = ends
    places = {
        "flushed": (low, "left", 6, 6),
        "grid": ((flush + clip) / 2, "center", 0, 22),
        "saturated": (high, "right", -6, 38),
    }
    texts: list[Chart] = []
    for cause, (at, align, dx, dy) in places.items():
        if cause not in words_of:
            continue
        row = pd.DataFrame({"cause": [cause], "at": [at], "top": [top], "text": [words_of[cause]]})
        look: plot.Look = {"align": align, "dx": dx, "dy": dy, "baseline": "top", "fontWeight": 600}
        texts.append(plot.mark("text", row, x="at", y="top", text="text", color=color, **look))
    return texts


def _magnitude(spec: Spec) -> str:
    return "|value / scale|" if spec.block else "|value|"


def shares_of_error(shares: Sequence[float]) -> dict[str, str]:
    """The words for the causes of a whole tensor: their shares of its squared error, in the order of CAUSES."""
    named = zip(CAUSES, shares, strict=True)
    return {
        cause: WORDS[cause] if math.isnan(share) else f"{WORDS[cause]}: {SHARE.quantity(share)} of the error"
        for cause, share in named
    }


def shares_of_values(zones: pd.DataFrame) -> dict[str, str]:
    """The labels of the zones of a part of a tensor, from compute.zones."""
    share, of_nonzero = (zones.set_index("zone")[name] for name in ("share", "of_nonzero"))
    flushed, saturated = of_nonzero["flushed"], share["saturated"]
    return {
        "flushed": f"flushed: {SHARE.quantity(flushed)} of its nonzero",
        "saturated": f"saturated: {SHARE.quantity(saturated)} of its values",
    }


def channels(
    table: pd.DataFrame, title: str, subtitle: str | list[str], axes: Axes, chosen: int | None = None,
    clickable: bool = True,
) -> Chart:  # fmt: skip
    """A bar for each channel: the largest magnitude, from compute.channels, or the number of values in a range, from
    Held.by_channel. chosen: the first channel of the bar that is marked."""
    runs = bool((table["last"] > table["channel"]).any())
    tips: dict[str, plot.Tip] = {"channel": (f"{axes.columns} from" if runs else axes.column, ",")}
    tips |= {"last": ("to", ",")} if runs else {}
    if "absmax" in table:
        y = plot.y("absmax", "absmax")
        tips["absmax"] = ("absmax", ".4~g")
    else:
        y = plot.y("values", "values in the range", {"tickMinStep": 1})
        tips |= {"values": ("values in the range", ","), "of": ("of", ",")}
    x = plot.x("channel", axes.titles[0], domain=[0, float(table["last"].max()) + 1], nice=False)
    look: plot.Look = {"color": style.FINE, "choose": "channel" if clickable else ""}
    ends = table.assign(end=table["last"] + 1)
    if chosen is None:
        return plot.layers(title, subtitle, plot.steps(ends, x, "end", y, tips=tips, **look))
    look |= plot.when(f"datum.channel === {chosen}", opacity=(1, 0.5))
    last = float(table["last"][table["channel"] == chosen].iloc[0])
    rule = plot.rule(x=(chosen + last + 1) / 2, strokeDash=[4, 3])
    return plot.layers(title, subtitle, rule, plot.steps(ends, x, "end", y, tips=tips, **look))


def rows_by_columns(
    values: np.ndarray, shape: tuple[int, int], subtitle: str | list[str], axes: Axes, of: str = ""
) -> Chart:
    """A heatmap of log2 of the largest magnitude of each cell of compute.pooled, or of a difference `of` two; cells of
    zeros are gray."""
    with np.errstate(divide="ignore"):
        log2 = np.log2(values)
    log2 = np.where(np.isfinite(log2), log2, np.nan)
    title = style.title(f"{'Difference' if of else 'Magnitude'} by {axes.by}", subtitle)
    return heatmap(log2, title, *_axes(axes, shape), f"log₂ |{of or 'value'}|", missing="zero or not finite")


def range_by_cell(
    share: np.ndarray, shape: tuple[int, int], words: str, subtitle: str | list[str], axes: Axes
) -> Chart:
    """A heatmap of the share of each cell's values that lie in a range, from Held.by_cell: not zero everywhere."""
    title = style.title(f"Share of values in {words} by {axes.by}", subtitle)
    limits = 0.0, float(np.nanmax(share)) * 100
    return heatmap(share * 100, title, *_axes(axes, shape), "% of values", limits, missing="not in the sample")


def _axes(axes: Axes, shape: tuple[int, int]) -> tuple[tuple[str, int], tuple[str, int]]:
    return (axes.titles[0], shape[1]), (axes.titles[1], shape[0])
